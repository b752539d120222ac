"""A job of forked CPU ranks whose processes are killed, stopped, made to fail, and perhaps replaced.

The parent never computes: a child forked after a multithreaded backward hangs in its own.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from zorselike.elastic.contract import Reason
from zorselike.elastic.meeting.environment import listen
from zorselike.runtime.model.tracing import make_fake_mode

from .diary import Diary
from .injection import RECOVERY_PHASES, Fault, FaultKind
from .ranks import HOST, Job, Report, train, train_alone

__all__ = ["Fault", "Job", "JobFailedError", "Outcome", "Report", "run", "run_alone"]
_ENDS = ("this side ends, so that never two go on", "the job has gone on without it")
"""What the smaller side of a partition says: by itself, or once it hears of the others again."""
_SLEEP_S, _PAUSE_S = 3.0, 0.3
"""How long a process stands still: the first beside the silence limit."""
_WAKING_S = 90.0
"""Within which one that was gone on without must have ended, once it can go on itself."""
_RECENT_S = 10.0
"""Before a generation was handed over: what happens in a recovery may come to light in the next."""
_TELLS_TO_LEAVE: tuple[FaultKind, ...] = ("term", "leave")
_MAKES_GONE: tuple[FaultKind, ...] = ("kill", "stop", "exit", *_TELLS_TO_LEAVE)


@dataclass(frozen=True)
class Outcome:
    """A job, as it went."""

    reports: tuple[Report, ...]
    """Of processes that were there at the end."""
    diaries: tuple[Diary, ...]
    """Of all."""
    happened: tuple[tuple[float, int, FaultKind, int], ...]
    """When, to which process, what, and which of the job's faults."""
    sums: tuple[tuple[int, int, int, int, int], ...]
    """Of the states that ranks have copied: see `ranks.note_sums`."""
    cpu_s: float = 0.0
    num_ended: int = 0
    """Processes of the smaller side of a partition."""
    woken: Mapping[int, float] = field(default_factory=dict)
    """Who was gone on without while it stood still, by its process, and when it could go on itself. All have
    ended since."""

    def recoveries(self) -> list[float | None]:
        """Seconds from each fault to the first step that all survivors have done after it, in a later
        generation; None where another fault came before that, or there was no such step."""
        found: list[float | None] = []
        times = [at for at, *_ in self.happened]
        for i, at in enumerate(times):
            first = [when for diary in self.diaries if (when := diary.goes_on_after(at)) is not None]
            is_last = i + 1 == len(times) or (bool(first) and times[i + 1] > max(first))
            found.append(max(first) - at if first and is_last else None)
        return found

    def pauses(self) -> list[tuple[Reason, float]]:
        """Of each planned change: why, and how much longer the step that it was in took than others; of who
        took longest."""
        usual_s = median([seconds for diary in self.diaries for seconds in diary.steps_s()] or [0.0])
        longest: dict[int, tuple[Reason, float]] = {}
        for diary in self.diaries:
            for entered, seconds in diary.pauses():
                _, known_s = longest.get(entered.number, (entered.reason, 0.0))
                longest[entered.number] = entered.reason, max(known_s, seconds)
        return [(reason, seconds - usual_s) for reason, seconds in longest.values()]

    def formed_s(self) -> list[float]:
        """How long each generation took to make its groups and pipelines; of who took longest."""
        longest: dict[int, float] = {}
        for diary in self.diaries:
            for number, seconds in diary.formed_s.items():
                longest[number] = max(longest.get(number, 0.0), seconds)
        return list(longest.values())

    def retries(self, faults: Sequence[Fault]) -> list[int]:
        """Generations in whose place others had to be made, though nothing had happened that was not known
        when they were planned: to any of their ranks, or of those whose state a planned one was to take over.
        `faults`: the job's."""
        entered = {each.number: each for diary in self.diaries for each in diary.entered}
        began_s = {number: self._began_s(number) for number in entered}
        ran = {number for diary in self.diaries for number in diary.ran}
        pids = {diary.id: diary.pid for diary in self.diaries}
        found = []
        for number in sorted(number for number in entered.keys() - ran if number < max(ran)):
            new = entered[number]
            ranks = {pids[id] for id in new.ids if id in pids}
            old = entered.get(new.source[0]) if new.is_planned and new.source is not None else None
            givers = {pids[id] for id in old.ids if id in pids} - ranks if old else set()
            leads_in_s = (
                _RECENT_S if faults[i].phase in RECOVERY_PHASES else 0.0 for _, _, _, i in self.happened
            )
            struck = [
                (pid in ranks and (kind in _MAKES_GONE or at > began_s[number] - lead_s))
                or (pid in givers and kind in _MAKES_GONE and kind not in _TELLS_TO_LEAVE)
                for (at, pid, kind, _), lead_s in zip(self.happened, leads_in_s, strict=True)
            ]
            if not any(struck):
                found.append(number)
        return found

    def _began_s(self, number: int) -> float:
        return min(each.at_s for diary in self.diaries for each in diary.entered if each.number == number)

    def check_states(self) -> int:
        """How many generations have begun with the state of another one, in every bit. (A step that was lost
        with its mirrors is done again by another plan, and may round otherwise.)

        Raises:
            JobFailedError: One differs from what it was.
        """
        totals: dict[tuple[int, int], dict[int, int]] = {}
        sizes = {}
        for generation, step, rank, size, total in self.sums:
            totals.setdefault((generation, step), {})[rank] = total
            sizes[generation] = size
        whole = {
            key: sum(parts.values()) % (1 << 64)
            for key, parts in totals.items()
            if len(parts) == sizes[key[0]]
        }
        sources = {each.number: each.source for diary in self.diaries for each in diary.entered}
        num_same = 0
        for number, source in sources.items():
            if source is None or source not in whole or (number, source[1]) not in whole:
                continue
            if whole[source] != whole[number, source[1]]:
                raise JobFailedError(
                    f"generation {number} does not begin with the state that generation {source[0]} had "
                    f"after step {source[1]}"
                )
            num_same += 1
        return num_same

    @property
    def losses(self) -> dict[int, list[float]]:
        """By step, of all processes that have done it."""
        found: dict[int, list[float]] = {}
        for diary in self.diaries:
            for step, _, loss in diary.losses:
                found.setdefault(step, []).append(loss)
        return found

    def find_error(self, expected: Sequence[float]) -> float:
        """How far any process's loss is from that of the run to which nothing happens.

        Raises:
            JobFailedError: Nobody has done some step.
        """
        losses = self.losses
        missing = [step for step in range(len(expected)) if step not in losses]
        if missing:
            raise JobFailedError(f"nobody has seen the losses of steps {missing}")
        return max(abs(own - loss) for step, loss in enumerate(expected) for own in losses[step])


class JobFailedError(RuntimeError):
    """A job did not come to its end."""


def run(job: Job) -> Outcome:
    """The job in processes of its own; raises `JobFailedError` where it hangs or a survivor fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="elastic") as name:
        folder = Path(name)
        _prepare_to_fork()
        with listen(HOST, 0) as probe:
            port = probe.getsockname()[1]
        members: dict[int, int] = {}
        """Processes, by member."""
        try:
            for member in range(job.plan.num_ranks + job.num_spares):
                members[member] = _fork(job, member, folder, port, [port] if member else [])
            woken = _attend(job, members, folder)
            diaries = {diary.member: diary for diary in map(Diary.read, sorted(folder.glob("diary*")))}
            reports = [_read_report(path, diaries) for path in sorted(folder.glob("report*"))]
            _check_woken(woken, diaries.values())
            happened = sorted(tuple(json.loads(p.read_text())) for p in folder.glob("fault*"))
            lines = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("out*")))
            sums = [
                tuple(json.loads(line))
                for path in folder.glob("sums*")
                for line in path.read_text().splitlines()
            ]
            founders = job.plan.num_ranks + job.num_spares  # Who comes as all are done finds nobody.
            struck = {pid for _, pid, kind, _ in happened if kind in ("stop", "raise")}
            failed = [
                report
                for report in reports
                if report.error is not None
                and (report.diary.finished or report.member < founders)
                and members[report.member] not in struck
                and not (job.hosts and _is_of_smaller_side(report))
            ]
            if failed:
                raise JobFailedError(f"member {failed[0].member}: {failed[0].error}\n{lines[-6000:]}")
            whole = [report for report in reports if report.error is None]
            if not whole:
                raise JobFailedError(f"no process has come to its end\n{lines[-6000:]}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            ended = sum(map(_is_of_smaller_side, reports))
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            every = tuple(diaries.values())
            return Outcome(tuple(whole), every, tuple(happened), tuple(sums), cpu_s, ended, woken)  # type: ignore[arg-type]
        finally:
            for process in members.values():
                _kill(process)


def _is_of_smaller_side(report: Report) -> bool:
    return any(ends in (report.error or "") for ends in _ENDS)


def _prepare_to_fork() -> None:
    """Does what must not be done first in a child."""
    gc.collect()  # What its parent threw away may have threads, which a child has not.
    with make_fake_mode():  # Where torch is built for CUDA and there is no GPU, a child's first one crashes.
        pass
    sys.stdout.flush()
    sys.stderr.flush()


def _fork(job: Job, member: int, folder: Path, port: int, contact: Sequence[int]) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        job.enter_node(member)
        out = os.open(folder / f"out{member}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        import faulthandler

        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        torch.set_num_threads(1)
        try:
            report = train(job, member, folder, port, contact)
            code = 0
        except Exception as error:
            traceback.print_exc()
            report = Report(member, error=f"{type(error).__name__}: {error}")
        written = folder / f"new-report{member}"
        told = {name: value for name, value in vars(report).items() if name != "diary"}
        written.write_text(json.dumps(told))
        written.rename(folder / f"report{member}")
    finally:
        os._exit(code)


def _attend(job: Job, members: dict[int, int], folder: Path) -> dict[int, float]:
    """Until all have ended; replaces who is lost. Gives who was gone on without while it stood still, by its
    process, and when it could go on itself."""
    until, moved = time.monotonic() + job.patience_s, -1
    there = dict(members)
    stopped: dict[int, float] = {}
    """When each that stands still is to go on."""
    asleep: set[int] = set()
    """Who was replaced while it stood still: it hears so when it wakes, and ends."""
    next_member = len(members)
    woken: dict[int, float] = {}
    must_end = math.inf
    """When those who were replaced while they stood still must have ended, since all others have."""
    while True:
        if not any(_counts(job, folder, member) for member in set(there) - asleep):
            must_end = min(must_end, time.monotonic() + job.silence_s + _SLEEP_S + _WAKING_S)
            if not asleep & there.keys():
                return woken
        for member, process in list(there.items()):
            pid, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                continue
            is_lost = False
            if os.WIFSTOPPED(status):
                is_lost = _last_fault(folder, process) != "pause"
                stopped[member] = time.monotonic() + (job.silence_s + _SLEEP_S if is_lost else _PAUSE_S)
                asleep |= {member} if is_lost else set()
            elif not os.WIFCONTINUED(status):
                del there[member]
                is_lost = not (folder / f"report{member}").exists() and member not in asleep
                is_lost |= _was_told_to_leave(folder, process)
                stopped.pop(member, None)
            if is_lost and job.replaces:
                ports = (folder / f"port{other}" for other in there if other not in asleep)
                contact = [int(path.read_text()) for path in ports if path.exists()]
                members[next_member] = there[next_member] = _fork(job, next_member, folder, 0, contact)
                next_member += 1
        for member, at in list(stopped.items()):
            if time.monotonic() > at:
                del stopped[member]
                woken |= {there[member]: time.monotonic()} if member in asleep else {}
                os.kill(there[member], signal.SIGCONT)
        if time.monotonic() > must_end:
            left = {member: there[member] for member in asleep & there.keys()}
            raise JobFailedError(
                f"members {sorted(left)}, which had slept, do not end\n{_describe(left, folder)}"
            )
        if (size := sum(path.stat().st_size for path in folder.glob("[sf]*[0-9]"))) != moved:
            until, moved = time.monotonic() + job.patience_s, size  # States were copied, or something done.
        if time.monotonic() > until:
            lines = _describe(there, folder)
            raise JobFailedError(f"members {sorted(there)} had not moved for {job.patience_s:.0f} s\n{lines}")
        time.sleep(0.01)


def _describe(members: Mapping[int, int], folder: Path) -> str:
    """Where these processes are, and what all have written."""
    (folder / "describe").touch()
    for process in members.values():
        os.kill(process, signal.SIGUSR1)
    time.sleep(2.5)  # Until they have written where they stand.
    return "".join(
        f"--- {path.name}\n" + path.read_text(errors="replace")[-9000:]
        for path in sorted(folder.glob("out*"))
    )


def _check_woken(woken: Mapping[int, float], diaries: Collection[Diary]) -> None:
    """Raises `JobFailedError` where a process has trained on though others had gone on without it. (If it
    woke before they could, it goes on with them.)"""
    for diary in diaries:
        slept_until = woken.get(diary.pid, math.inf)
        others = [
            each.at_s
            for other in diaries
            for each in other.entered
            if each.number in other.ran and diary.id not in each.ids and each.at_s < slept_until
        ]
        began = max((each.at_s for each in diary.entered if each.at_s < slept_until), default=math.inf)
        late = [step for step, at_s, _ in diary.losses if at_s > slept_until]
        if late and any(at_s > began for at_s in others):
            raise JobFailedError(
                f"member {diary.member} was gone on without, and has done steps {late} itself afterwards"
            )


def _counts(job: Job, folder: Path, member: int) -> bool:
    """Whether a process that is there is to be waited for: not one that came later and never got
    to train, once others have done all steps; it would look for them for minutes."""
    if (folder / f"sums{member}").exists() or member < job.plan.num_ranks + job.num_spares:
        return True
    reports = (_read_report(path, {}) for path in folder.glob("report*"))
    return not any(report.num_steps == job.num_steps for report in reports)


def _was_told_to_leave(folder: Path, process: int) -> bool:
    return _last_fault(folder, process) in ("term", "leave")


def _last_fault(folder: Path, process: int) -> str | None:
    happened = [json.loads(path.read_text()) for path in folder.glob("fault*")]
    return max(((at, kind) for at, pid, kind, _ in happened if pid == process), default=(0, None))[1]


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _read_report(path: Path, diaries: Mapping[int, Diary]) -> Report:
    table = json.loads(path.read_text())
    return Report(**table, diary=diaries.get(table["member"], Diary()))


def run_alone(job: Job) -> list[float]:
    """`train_alone`, in a process of its own."""
    return _in_child(lambda: train_alone(job))


def _in_child(work: Callable[[], Sequence[float]]) -> list[float]:
    reading, writing = os.pipe()
    _prepare_to_fork()
    process = os.fork()
    if not process:
        code = 1
        try:
            torch.set_num_threads(1)
            os.write(writing, json.dumps(list(work())).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(process, 0)
    return [float(number) for number in json.loads(text)]
