"""A job of forked CPU ranks whose processes are killed, stopped, made to fail, and perhaps replaced.

The parent never computes: a child forked after a multithreaded backward hangs in its own.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zorselike.elastic.meeting.environment import listen
from zorselike.runtime.model.tracing import make_fake_mode

from .injection import LINK, Fault
from .partition import enter_namespace
from .ranks import HOST, Job, Report, node_of, train, train_alone

__all__ = ["Fault", "Job", "JobFailedError", "Outcome", "Report", "run", "run_alone"]
ENDS = "this side ends, so that never two go on"
"""What the smaller side of a partition says."""
_SLEEP_S, _PAUSE_S = 3.0, 0.3
"""How long a process stands still: the first beside the silence limit."""


@dataclass(frozen=True)
class Outcome:
    """A job, as it went."""

    reports: tuple[Report, ...]
    """Of processes that were there at the end."""
    happened: tuple[tuple[float, int, str, int], ...]
    """When, to which process, what, and which of the job's faults."""
    lines: str
    """What all have printed."""
    sums: tuple[tuple[int, int, int, int, int], ...]
    """Of the states that ranks have copied: see `ranks.note_sums`."""
    cpu_s: float = 0.0
    num_ended: int = 0
    """Processes of the smaller side of a partition."""

    def recoveries(self) -> list[float | None]:
        """Seconds from each fault to the first step that all survivors have done after it, in a later
        generation; None where another fault came before that, or there was no such step."""
        found: list[float | None] = []
        times = [at for at, *_ in self.happened]
        for i, at in enumerate(times):
            first = []
            for report in self.reports:
                before = max((g for _, when, g in report.finished if when < at), default=0)
                later = [when for _, when, g in report.finished if when > at and g > before]
                if before and later:
                    first.append(min(later))
            is_last = i + 1 == len(times) or (bool(first) and times[i + 1] > max(first))
            found.append(max(first) - at if first and is_last else None)
        return found

    def check_states(self) -> int:
        """How many generations have begun with a state that was there before.

        Raises:
            JobFailedError: One differs from what it was, in any bit.
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
        by_step: dict[int, dict[int, int]] = {}
        for (generation, step), total in whole.items():
            by_step.setdefault(step, {})[generation] = total
        for step, found in by_step.items():
            if len(set(found.values())) > 1:
                raise JobFailedError(f"the state after step {step} differs between generations: {found}")
        return sum(len(found) - 1 for found in by_step.values())

    @property
    def losses(self) -> dict[int, float]:
        """By step, of all that any process has done."""
        return {step: loss for report in self.reports for step, loss in report.losses.items()}


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
            _attend(job, members, folder)
            reports = [_read_report(path) for path in sorted(folder.glob("report*"))]
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
                and (report.finished or report.member < founders)
                and members[report.member] not in struck
                and not (job.hosts and ENDS in report.error)
            ]
            if failed:
                raise JobFailedError(f"member {failed[0].member}: {failed[0].error}\n{lines[-6000:]}")
            whole = [report for report in reports if report.error is None]
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            ended = sum(ENDS in (report.error or "") for report in reports)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return Outcome(tuple(whole), tuple(happened), lines, tuple(sums), cpu_s, ended)  # type: ignore[arg-type]
        finally:
            for process in members.values():
                _kill(process)


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
        if job.hosts:
            enter_namespace(node_of(job, member))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LINK if job.hosts else "lo")
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
        written.write_text(json.dumps(asdict(report)))
        written.rename(folder / f"report{member}")
    finally:
        os._exit(code)


def _attend(job: Job, members: dict[int, int], folder: Path) -> None:
    """Until all have ended, or only those that were stopped are left; replaces who is lost."""
    until, moved = time.monotonic() + job.patience_s, -1
    there = dict(members)
    stopped: dict[int, float] = {}
    """When each that stands still is to go on."""
    asleep: set[int] = set()
    """Who was replaced while it stood still: it hears so when it wakes, and ends."""
    next_member = len(members)
    while any(_counts(job, folder, member) for member in set(there) - asleep):
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
                os.kill(there[member], signal.SIGCONT)
        if (size := sum(path.stat().st_size for path in folder.glob("[sf]*[0-9]"))) != moved:
            until, moved = time.monotonic() + job.patience_s, size  # States were copied, or something done.
        if time.monotonic() > until:
            (folder / "describe").touch()
            for process in there.values():
                os.kill(process, signal.SIGUSR1)
            time.sleep(2.5)  # Until they have written where they stand.
            lines = "".join(
                f"--- {path.name}\n" + path.read_text(errors="replace")[-9000:]
                for path in sorted(folder.glob("out*"))
            )
            raise JobFailedError(f"members {sorted(there)} had not moved for {job.patience_s:.0f} s\n{lines}")
        time.sleep(0.01)


def _counts(job: Job, folder: Path, member: int) -> bool:
    """Whether a process that is there is to be waited for: not one that came later and never got
    to train, once others have done all steps; it would look for them for minutes."""
    if (folder / f"sums{member}").exists() or member < job.plan.num_ranks + job.num_spares:
        return True
    reports = (_read_report(path) for path in folder.glob("report*"))
    return not any(job.num_steps - 1 in report.losses for report in reports)


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


def _read_report(path: Path) -> Report:
    table = json.loads(path.read_text())
    losses = {int(step): loss for step, loss in table.pop("losses").items()}
    return Report(**{**table, "losses": losses, "finished": [tuple(entry) for entry in table["finished"]]})


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
