"""Ranks fail together: real processes that block each other in Gloo, and one that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankExit, RunRanks

from zorselike.errors import ClusterError, DataError
from zorselike.runtime.alarm import heartbeat as lifeline
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.alarm.failure import (
    Failure,
    State,
    describe_place,
    find_absent,
    first_of,
    is_echo,
    last_line,
)
from zorselike.runtime.alarm.heartbeat import Page, local_addresses
from zorselike.schedule.actions import parse_action

FORWARD = parse_action("1F0")
BACKWARD = parse_action("3B1")
REDUCE = parse_action("2REDUCE_GRAD")


class FakeOutOfMemoryError(RuntimeError):
    pass


def _store(folder: str, world_size: int) -> dist.Store:
    return dist.FileStore(str(Path(folder) / "alarm"), world_size)


def _train_until_failure(
    rank: int, world_size: int, folder: str, failing: int, fail: Callable[[], None], **options: Any
) -> None:
    """All work in step; then one fails while the others wait, in Gloo, for ranks that live."""
    others = [r for r in range(world_size) if r != failing]
    group = dist.new_group(others)
    alarm = Alarm(rank, world_size, _store(folder, world_size), **options)
    for _ in range(2):
        alarm.enter(FORWARD)
        dist.all_reduce(torch.ones(1))
        alarm.idle()
    alarm.enter(BACKWARD if rank == failing else REDUCE)
    try:
        if rank == failing:
            time.sleep(0.2)
            Path(folder, "failed_s").write_text(str(time.monotonic()))
            fail()
        elif rank == others[0]:
            time.sleep(3600)  # Lives, and lets the others wait.
        else:
            dist.all_reduce(torch.ones(1), group=group)
    except BaseException as error:
        alarm.fail(error)
        raise


def _raise() -> None:
    raise FakeOutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines follow.")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit() -> None:
    sys.exit(3)


def _leave_process() -> None:
    os._exit(0)


def _check_last_lines(exits: list[RankExit], failing: int, reason: str, folder: Path) -> None:
    failed_s = float((folder / "failed_s").read_text())
    expected = f"zorselike: rank {failing} failed first, in 3B1 (ministage 3, microbatch 1, backward): "
    for ended in exits:
        assert ended.ended_s - failed_s < 10, ended
        if ended.rank == failing and ended.code <= 0:
            continue
        assert ended.code == 1, ended
        assert ended.last_line.startswith(expected), ended
        assert reason in ended.last_line, ended
        if ended.rank != failing:
            assert ended.last_line.endswith(f"; this rank ({ended.rank}) was in 2REDUCE_GRAD and stops.")


@pytest.mark.parametrize("failing", range(4))
def test_an_exception_on_any_rank_ends_all(run_ranks: RunRanks, tmp_path: Path, failing: int) -> None:
    exits = run_ranks(_train_until_failure, 4, str(tmp_path), failing, _raise, allow_exit=True)
    _check_last_lines(exits, failing, "FakeOutOfMemoryError: CUDA out of memory.", tmp_path)
    assert "in _raise" in exits[failing].stderr
    assert exits[failing].last_line.endswith("; this is that rank.")


@pytest.mark.parametrize("failing", range(4))
def test_a_killed_rank_ends_all(run_ranks: RunRanks, tmp_path: Path, failing: int) -> None:
    exits = run_ranks(_train_until_failure, 4, str(tmp_path), failing, _kill, allow_exit=True)
    _check_last_lines(exits, failing, "its process ended without a word", tmp_path)
    assert exits[failing].code == -signal.SIGKILL


@pytest.mark.parametrize(("failing", "silence_s"), [(0, 1.5), (2, 3.0)])
def test_a_stopped_rank_ends_all(run_ranks: RunRanks, tmp_path: Path, failing: int, silence_s: float) -> None:
    train = partial(_train_until_failure, silence_s=silence_s)
    exits = run_ranks(train, 4, str(tmp_path), failing, _stop, allow_exit=True)
    _check_last_lines(exits, failing, "silent for ", tmp_path)
    assert exits[failing].was_stopped


def _train_on_nodes(rank: int, world_size: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    lifeline.node_identity = lambda: f"node {rank}"
    alarm = Alarm(rank, world_size, _store(folder, world_size), interval_s=0.1)
    alarm.enter(BACKWARD if rank == 1 else REDUCE)
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def test_ranks_of_other_nodes_tell_where_they_are(run_ranks: RunRanks, tmp_path: Path) -> None:
    exits = run_ranks(_train_on_nodes, 3, str(tmp_path), allow_exit=True)
    for rank in (0, 2):
        assert exits[rank].last_line.startswith("zorselike: rank 1 failed first, in 3B1 ("), exits[rank]


@pytest.mark.parametrize("failing", [0, 3])
def test_sys_exit_within_a_step_ends_all(run_ranks: RunRanks, tmp_path: Path, failing: int) -> None:
    exits = run_ranks(_train_until_failure, 4, str(tmp_path), failing, _exit, allow_exit=True)
    _check_last_lines(exits, failing, "SystemExit: 3", tmp_path)


def test_a_process_that_just_goes_ends_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    exits = run_ranks(_train_until_failure, 4, str(tmp_path), 1, _leave_process, allow_exit=True)
    _check_last_lines(exits, 1, "its process ended without a word", tmp_path)


def _fail_with_echoes(rank: int, world_size: int, folder: str) -> None:
    alarm = Alarm(rank, world_size, _store(folder, world_size))
    alarm.enter(BACKWARD if rank == 2 else REDUCE)
    dist.all_reduce(torch.ones(1))
    try:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.recv(torch.ones(1), src=2)
    except BaseException as error:
        alarm.fail(error)
        raise


def test_an_echo_is_not_taken_for_its_cause(run_ranks: RunRanks, tmp_path: Path) -> None:
    exits = run_ranks(_fail_with_echoes, 4, str(tmp_path), allow_exit=True)
    for rank in (0, 1, 3):
        assert exits[rank].last_line.startswith("zorselike: rank 2 failed first, in 3B1"), exits[rank]
        assert "Traceback" not in exits[rank].stderr


def _read_wrong_data(rank: int, world_size: int, folder: str) -> None:
    with Alarm(rank, world_size, _store(folder, world_size)):
        if rank == 1:
            raise DataError("x.bin: token 300 at 5 is not in the vocabulary")
        time.sleep(3600)


def test_wrong_data_end_all_with_one_line_as_where_they_are_refused_before(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """It was a traceback, and exit code 1."""
    for end in run_ranks(_read_wrong_data, 3, str(tmp_path), allow_exit=True):
        (line,) = end.stderr.strip().splitlines()
        assert "rank 1 failed first, in start-up: DataError: x.bin: token 300 at 5 is not" in line
        assert end.code == 2


def _leave_at_different_times(rank: int, world_size: int, folder: str) -> float:
    with Alarm(rank, world_size, _store(folder, world_size)) as alarm:
        alarm.enter(FORWARD)
        time.sleep(0.4 * ((rank + 1) % world_size))
        alarm.idle()
        before = time.monotonic()
    alarm.close()
    return time.monotonic() - before


def test_ranks_leave_in_order_at_different_times(run_ranks: RunRanks, tmp_path: Path) -> None:
    seconds = run_ranks(_leave_at_different_times, 4, str(tmp_path))
    assert max(seconds) < 4  # Nobody waits for someone who has gone.


def _leave_before_the_others_are_done(rank: int, world_size: int, folder: str) -> None:
    alarm = Alarm(rank, world_size, _store(folder, world_size))
    alarm.enter(FORWARD)
    alarm.idle()
    dist.barrier()
    if rank == 1:
        alarm.close()
        return
    alarm.enter(REDUCE)
    time.sleep(3600)


def test_leaving_a_step_that_others_begin_is_a_failure(run_ranks: RunRanks, tmp_path: Path) -> None:
    exits = run_ranks(_leave_before_the_others_are_done, 3, str(tmp_path), allow_exit=True)
    for rank in (0, 2):
        assert "rank 1 failed first, between steps: it ended while" in exits[rank].last_line


def _count_files_and_threads() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def _make_and_close(rank: int, world_size: int, folder: str) -> list[tuple[int, int]]:
    store = _store(folder, world_size)
    counts = []
    for _ in range(20):
        alarm = Alarm(rank, world_size, store)
        assert alarm._whereabouts.page is not None
        page = alarm._whereabouts.page.path
        alarm.enter(FORWARD)
        dist.all_reduce(torch.ones(1))
        alarm.idle()
        alarm.close()
        counts.append(_count_files_and_threads())
        assert not page.exists()
    return counts


def test_twenty_alarms_leave_nothing(run_ranks: RunRanks, tmp_path: Path) -> None:
    before = time.monotonic()
    for counts in run_ranks(_make_and_close, 3, str(tmp_path)):
        assert counts[0] == counts[-1]
    assert time.monotonic() - before < 20


def test_entering_an_action_costs_less_than_a_microsecond(run_ranks: RunRanks, tmp_path: Path) -> None:
    # Loosely: other processes may be running.
    assert min(run_ranks(_time_entering, 2, str(tmp_path))) < 3e-6


def _time_entering(rank: int, world_size: int, folder: str) -> float:
    with Alarm(rank, world_size, _store(folder, world_size)) as alarm:
        fastest = float("inf")
        for _ in range(20):
            before = time.perf_counter()
            for _ in range(1000):
                alarm.enter(BACKWARD)
            fastest = min(fastest, (time.perf_counter() - before) / 1000)
        alarm.idle()
    return fastest


def _fail_alone(rank: int, world_size: int) -> str:
    alarm = Alarm(rank, world_size, dist.HashStore())
    alarm.enter(BACKWARD)
    error = FakeOutOfMemoryError("no memory")
    alarm.fail(error)
    alarm.idle()
    alarm.close()
    return error.__notes__[0]


def test_one_rank_gets_the_place_as_a_note(run_ranks: RunRanks) -> None:
    (note,) = run_ranks(_fail_alone, 1, init=False)
    assert note == (
        "zorselike: rank 0 failed first, in 3B1 (ministage 3, microbatch 1, backward): "
        "FakeOutOfMemoryError: no memory"
    )


def _join_alone(rank: int, world_size: int, folder: str) -> None:
    Alarm(rank, 3, _store(folder, world_size), join_timeout_s=0.3)


def test_a_rank_that_never_comes_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"ranks \[1, 2\] did not connect to rank 0 within 0.3 s"):
        run_ranks(_join_alone, 1, str(tmp_path), init=False)


SCRIPT = """
    import os, pathlib, sys, time
    from zorselike.runtime.alarm.alarm import Alarm
    from zorselike.schedule.actions import parse_action

    folder = pathlib.Path(sys.argv[1])

    class Store:
        def __init__(self, path):
            self.path = path

        def add(self, key, amount):
            return amount

        def set(self, key, value):
            self.path.with_suffix(".unfinished").write_text(value)
            self.path.with_suffix(".unfinished").rename(self.path)

        def get(self, key):
            while not self.path.exists():
                time.sleep(0.01)
            return self.path.read_bytes()

    # One interpreter imports torch, and each of its forks ends as an interpreter ends.
    children = {}
    for how in sys.argv[2:]:
        for rank in range(2):
            children[how, rank] = os.fork()
            if not children[how, rank]:
                break
        else:
            continue
        break
    else:
        for (how, rank), child in children.items():
            print(how, rank, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        sys.exit()
    os.dup2(os.open(folder / f"{how}{rank}", os.O_WRONLY | os.O_CREAT), 2)
    alarm = Alarm(rank, 2, Store(folder / how))
    alarm.enter(parse_action("1F0"))
    alarm.idle()
    if rank == 1:
        if how == "raises":
            raise KeyError("a sample")
        sys.exit(3 if how == "exits" else 0)
    if how == "ends":
        time.sleep(1.0)  # Writes a checkpoint, say.
    else:
        alarm.enter(parse_action("2REDUCE_GRAD"))
        time.sleep(60)
"""


def test_an_interpreter_that_ends_without_close(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "LOCAL_WORLD_SIZE": "2"}
    finished = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "raises", "exits", "ends"],
        capture_output=True,
        env=environment,
        text=True,
        timeout=90,
    )
    codes = dict(line.rsplit(" ", 1) for line in finished.stdout.splitlines())
    assert codes == {
        "raises 0": "1",
        "raises 1": "1",
        "exits 0": "1",
        "exits 1": "3",
        "ends 0": "0",
        "ends 1": "0",
    }
    errors = {path.name: path.read_text() for path in tmp_path.glob("*[01]")}
    reason = "rank 1 failed first, between steps: KeyError: 'a sample'"
    assert reason in errors["raises0"].splitlines()[-1] and reason in errors["raises1"].splitlines()[-1]
    assert errors["raises1"].count("Traceback") == 1
    reason = "rank 1 failed first, between steps: it ended while other ranks went on"
    assert reason in errors["exits0"].splitlines()[-1]
    assert errors["ends0"] == errors["ends1"] == ""


def test_places_are_described() -> None:
    assert describe_place("") == "between steps"
    assert describe_place("start-up") == "in start-up"
    assert describe_place("NORM") == "in NORM (gradient norm)"
    assert describe_place("0SEND_F2@4[3:5]") == (
        "in 0SEND_F2@4[3:5] (ministage 0, microbatch 2, sending activations)"
    )


def test_the_last_line_names_both_ranks() -> None:
    failure = Failure(2, "3B1", "ValueError: no")
    assert last_line(failure, 0, "1B0") == (
        "zorselike: rank 2 failed first, in 3B1 (ministage 3, microbatch 1, backward): ValueError: no; "
        "this rank (0) was in 1B0 and stops."
    )


@pytest.mark.parametrize(
    "reason",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:39128",
        "RuntimeError: [..] Read error [10.0.0.1]:1: Connection reset by peer",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "DistBackendError: NCCL error ... ncclRemoteError: A call failed possibly due to a network error",
    ],
)
def test_echoes_come_after_causes(reason: str) -> None:
    assert is_echo(reason)
    echo, cause = Failure(1, "2B0", reason, is_echo(reason)), Failure(2, "2B0", "killed")
    assert first_of([echo, cause]) is cause
    assert first_of([echo]) is echo


def test_an_absent_rank_is_found_only_when_it_is_needed() -> None:
    left = {1: State("", rounds=3)}
    assert find_absent({0: State("", 3), 2: State("1B0", 2)}, left) is None
    found = find_absent({0: State("", 3), 2: State("1F0", 3)}, left)
    assert found is not None
    assert found.rank == 1


def test_a_page_holds_a_line_and_is_private() -> None:
    page = Page.create()
    assert page.path.stat().st_mode & 0o077 == 0
    page.write("x" * 500)
    assert page.read() == "x" * 120
    page.write("3B1")
    assert page.read() == "3B1"
    page.unlink()
    page.close()


def test_addresses_end_with_loopback() -> None:
    addresses = local_addresses()
    assert addresses[-1] == "127.0.0.1"
    assert len(set(addresses)) == len(addresses)
