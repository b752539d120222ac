"""Runs a function on N ranks: forked processes that share a Gloo process group.

Fork takes 0.1 s where spawn takes 10 s, so a multi-rank test costs little. It demands that the
parent never computes in threads (see also `gpus`): a child forked after that hangs in its own. The
store is a file, because a parent that hosts a TCP store is multithreaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import io
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import frames
import gpus
import known_shapes
import pytest
import torch
import volume

RunRanks = Callable[..., list[Any]]

_POLL_S = 0.005
_POLL_SHARE = 0.02
"""Of what was waited already: to look costs the ranks time."""
_GRACE_S = 0.1
"""After the first failure seen, how long an earlier one may still take to be reported."""
_STACKS_S = 0.5
"""How long ranks may take to write their stacks, on a busy machine too."""
_TAIL_BYTES = 6000


class RankError(RuntimeError):
    """A rank ended without a result, or with an error that cannot be pickled."""


class RankTraceback(Exception):
    """The cause of an error raised from a rank: the traceback as that rank printed it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class RankExit:
    """How one rank ended (`allow_exit=True`)."""

    rank: int
    code: int
    """The exit code; minus the signal's number where a signal ended it."""
    stdout: str
    stderr: str
    ended_s: float
    """`time.monotonic()` when the parent saw it end."""
    was_stopped: bool
    """Whether it was stopped (SIGSTOP) and then killed here, all others having ended."""
    value: Any = None
    """What the function returned, if it did."""

    @property
    def last_line(self) -> str:
        """The last line on standard error that is not empty, `""` if there is none."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else ""


@contextmanager
def take_slot(folder: Path, number: int) -> Iterator[int]:
    """Inside, this process has one of so many slots of this user's; waits until one is free."""
    with ExitStack() as stack:
        files = [
            stack.enter_context((folder / f"zorselike-tests-{os.getuid()}-{slot}.lock").open("w"))
            for slot in range(number)
        ]
        while (slot := next(filter(lambda slot: _lock(files[slot]), range(number)), None)) is None:
            time.sleep(0.05)
        try:
            yield slot
        finally:  # A process forked meanwhile has the file open too.
            fcntl.flock(files[slot], fcntl.LOCK_UN)


def _lock(file: IO[str]) -> bool:
    """Whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass
class Child:
    rank: int
    pid: int
    folder: Path
    code: int | None = None
    ended_s: float = 0.0
    stopped: bool = False
    killed_here: bool = False
    _report: dict[str, Any] | None = None

    def read(self, name: str) -> str:
        path = self.folder / f"{name}{self.rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def report(self) -> dict[str, Any] | None:
        """What the child wrote at its end: its value or its error; None if it wrote nothing."""
        path = f"{self.folder}/report{self.rank}"
        if self._report is None and os.path.exists(path):  # noqa: PTH110  Asked often: a third of the time.
            self._report = pickle.loads(Path(path).read_bytes())
        return self._report

    def kill(self) -> None:
        self.killed_here = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    init: bool = True,
    allow_exit: bool = False,
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` in `world_size` forked processes; one thread each.

    Returns the (picklable) return values by rank. If ranks fail, kills the rest and raises the
    error of the one that failed first, with that rank's traceback as its cause; `RankError` if
    a signal ended it, it exited by itself, or `timeout` seconds went by (with every rank's stack).
    A `pytest.skip` on a rank skips the test.

    `init=False` leaves `torch.distributed` alone. `allow_exit=True` raises nothing but the
    timeout and returns a `RankExit` per rank; a stopped rank is killed once all others ended.
    """
    warm_up()
    known_shapes.folder()  # Ranks share it.
    with tempfile.TemporaryDirectory(prefix="ranks") as name:
        folder = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        wait_fd, release_fd = os.pipe()
        children: list[Child] = []
        try:
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    os.close(release_fd)
                    _run_child(fn, rank, world_size, args, folder, init, None if allow_exit else wait_fd)
                children.append(Child(rank, pid, folder))
            os.close(wait_fd)
            wait_fd = -1
            deadline = time.monotonic() + timeout
            if allow_exit:
                return _await_exits(children, deadline, timeout)
            values = await_values(children, deadline, timeout)
            os.close(release_fd)
            release_fd = -1
            _reap(children, time.monotonic() + 10)
            return values
        finally:
            for fd in (wait_fd, release_fd):
                if fd >= 0:
                    os.close(fd)
            for child in children:
                if child.code is None:
                    child.kill()
            _reap(children, time.monotonic() + 10)
            for child in children:
                sys.stdout.write(child.read("stdout"))
                sys.stderr.write(child.read("stderr"))


class Apart:
    """A fork of this process as it is now, which calls what it is told to, each in a fork of its own."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
        self._process.submit(os.getpid).result()  # It is started by the first that it is told.

    def call(self, fn: Callable[..., object], arguments: dict[str, Any]) -> None:
        """Errors and skips become those of this process. The function must have been there at the fork."""
        skip = self._process.submit(_call_in_fork, fn, arguments).result()
        if skip is not None:
            pytest.skip(skip)

    def close(self) -> None:
        self._process.shutdown()


def _call_in_fork(fn: Callable[..., object], arguments: dict[str, Any]) -> str | None:
    """Why it was skipped; raises its error."""
    with tempfile.TemporaryDirectory(prefix="apart") as name:
        folder = Path(name)
        if (pid := os.fork()) == 0:
            die_with_parent()
            try:
                call(lambda rank, world_size: fn(**arguments), 0, 1, (), folder, init=False)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(0)
        child = Child(0, pid, folder)
        _, status = os.waitpid(pid, 0)
        child.code = os.waitstatus_to_exitcode(status)
        if (report := child.report()) is None or not report["ok"]:
            try:
                _raise_first([child])
            except pytest.skip.Exception as skip:  # It cannot be pickled.
                return str(skip.msg)
        return None


def free_port() -> int:
    """One to meet at, outside of those that connections get: none of other tests takes it meanwhile."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


@functools.cache
def warm_up() -> None:
    """Once, in the parent: every rank would need 0.15 s of its own for it. Not where ranks may use a GPU: an
    optimizer's step asks CUDA something even on a CPU, and no rank could use it after that."""
    import encodings.idna  # noqa: F401  Of host names.

    import torch.distributed.pipelining
    import torch.export._trace  # noqa: F401

    if gpus.count_gpus():
        return

    import tiny

    tiny.warm_up()


def _run_child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    init: bool,
    wait_fd: int | None,
) -> None:
    """The child's whole life; never returns."""
    code = 1
    try:
        begin_life()
        redirect_output(rank, folder)
        os.environ.update(environment(rank, world_size))
        code = call(fn, rank, world_size, args, folder, init)
        if wait_fd is not None:
            os.read(wait_fd, 1)  # a rank that leaves early would break the connections of the others
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def begin_life() -> None:
    """First in every process that is to be a rank."""
    os.setsid()
    die_with_parent()
    if not volume.is_full():
        known_shapes.share(known_shapes.folder())


def environment(rank: int, world_size: int) -> dict[str, str]:
    """What a launcher would tell it."""
    told = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    loopback = os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    return {"GLOO_SOCKET_IFNAME": loopback, **{name: str(value) for name, value in told.items()}}


def call(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], folder: Path, init: bool
) -> int:
    """Runs the function, writes the report, returns the exit code."""
    report: dict[str, Any] = {"ok": False}
    code = 1
    try:
        torch.set_num_threads(1)
        if init:
            _init_process_group(rank, world_size, folder)
        report = {"ok": True, "value": frames.in_one_chunk(fn, rank, world_size, *args)}
        code = 0
    except pytest.skip.Exception as error:
        report["skip"] = str(error.msg)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        report["traceback"] = traceback.format_exc()
    except BaseException as error:
        traceback.print_exc()
        report |= {"traceback": traceback.format_exc(), "error": _picklable(error)}
    report["time_s"] = time.monotonic()
    unfinished = folder / f"unfinished{rank}"
    try:
        unfinished.write_bytes(pickle.dumps(report))
    except Exception as error:
        report = {"ok": False, "traceback": f"rank {rank} returned what cannot be pickled: {error!r}\n"}
        unfinished.write_bytes(pickle.dumps(report | {"time_s": time.monotonic()}))
        code = 1
    unfinished.rename(folder / f"report{rank}")
    return code


def _init_process_group(rank: int, world_size: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _picklable(error: BaseException) -> BaseException | None:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error if type(copy) is type(error) else None


def redirect_output(rank: int, folder: Path) -> None:
    for fd, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, fd)
        os.close(target)
        stream = io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True)
        setattr(sys, name, stream)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _poll(children: list[Child]) -> None:
    """Notes which children ended or were stopped."""
    for child in children:
        if child.code is None:
            pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                continue
            if os.WIFSTOPPED(status):
                child.stopped = True
            elif os.WIFCONTINUED(status):
                child.stopped = False
            else:
                child.code = os.waitstatus_to_exitcode(status)
                child.ended_s = time.monotonic()


def _pause(begun_s: float) -> None:
    time.sleep(max(_POLL_S, _POLL_SHARE * (time.monotonic() - begun_s)))


def _reap(children: list[Child], deadline: float) -> None:
    while any(child.code is None for child in children):
        _poll(children)
        if time.monotonic() > deadline:
            for child in children:
                if child.code is None:
                    child.kill()
            deadline += 10
        time.sleep(_POLL_S)


def await_values(children: list[Child], deadline: float, timeout: float) -> list[Any]:
    while True:
        _poll(children)
        reports = [child.report() for child in children]
        if all(report is not None and report["ok"] for report in reports):
            return [report["value"] for report in reports if report is not None]
        if any(
            child.code is not None or (report is not None and not report["ok"])
            for child, report in zip(children, reports, strict=True)
        ):
            _reap_for(children, _GRACE_S)
            _raise_first(children)
        if time.monotonic() > deadline:
            raise _timeout_error(children, timeout)
        _pause(deadline - timeout)


def _reap_for(children: list[Child], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _poll(children)
        time.sleep(_POLL_S)


def _raise_first(children: list[Child]) -> None:
    """Raises the first failure. A signal goes before errors: those are mostly its echo."""
    failures: list[tuple[bool, float, Child, dict[str, Any] | None]] = []
    for child in children:
        report = child.report()
        if report is not None and not report["ok"]:
            failures.append((True, report["time_s"], child, report))
        elif child.code is not None and (report is None or child.code != 0):
            failures.append((child.code >= 0, child.ended_s, child, None))
    _, _, child, report = min(failures, key=lambda failure: failure[:2])
    if report is None:
        assert child.code is not None
        tail = child.read("stderr")[-_TAIL_BYTES:]
        raise RankError(f"rank {child.rank} {_describe_code(child.code)}; its standard error ends:\n{tail}")
    if "skip" in report:
        pytest.skip(report["skip"])
    cause = RankTraceback(f"rank {child.rank}:\n{report['traceback']}")
    if report.get("error") is not None:
        raise report["error"] from cause
    last = report["traceback"].strip().splitlines()[-1]
    raise RankError(f"rank {child.rank}: {last}") from cause


def _describe_code(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _timeout_error(children: list[Child], timeout: float) -> RankError:
    waiting = [child for child in children if child.code is None and child.report() is None]
    for child in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
    _reap_for(children, _STACKS_S)
    stacks = "".join(f"--- rank {child.rank}:\n{child.read('stderr')[-_TAIL_BYTES:]}\n" for child in waiting)
    names = ", ".join(str(child.rank) for child in waiting)
    return RankError(f"rank(s) {names} of {len(children)} did not end in {timeout} s\n{stacks}")


def _await_exits(children: list[Child], deadline: float, timeout: float) -> list[RankExit]:
    while any(child.code is None for child in children):
        _poll(children)
        alive = [child for child in children if child.code is None]
        if alive and all(child.stopped for child in alive):
            for child in alive:
                child.kill()
            _reap(children, time.monotonic() + 10)
        elif time.monotonic() > deadline:
            raise _timeout_error(children, timeout)
        _pause(deadline - timeout)
    exits = []
    for child in children:
        assert child.code is not None
        report = child.report() or {}
        exits.append(
            RankExit(
                rank=child.rank,
                code=child.code,
                stdout=child.read("stdout"),
                stderr=child.read("stderr"),
                ended_s=child.ended_s,
                was_stopped=child.stopped and child.killed_here,
                value=report.get("value"),
            )
        )
    return exits
