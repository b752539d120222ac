"""Who is not heard: stopped, lost, or healthy with Python's lock held."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RunRanks

from zorselike.errors import ConfigError
from zorselike.runtime.alarm import heartbeat as lifeline
from zorselike.runtime.alarm import kernel, watch
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.schedule.actions import parse_action

FORWARD = parse_action("1F0")


def _store(folder: str, world_size: int) -> dist.Store:
    return dist.FileStore(str(Path(folder) / "alarm"), world_size)


def _hold_lock_before_first_action(rank: int, world_size: int, folder: str) -> str:
    alarm = Alarm(rank, world_size, _store(folder, world_size), silence_s=0.5, interval_s=0.1)
    if rank == 1:
        _keep_interpreter_lock(1.5)
    dist.barrier()
    alarm.close()
    return "trained"


def _keep_interpreter_lock(seconds: float) -> None:
    """One call into C that neither releases Python's lock nor lets another thread have it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_start_up_may_be_silent_for_longer(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(_hold_lock_before_first_action, 2, str(tmp_path)) == ["trained"] * 2


def _hold_lock(rank: int, world_size: int, folder: str, place: str, held_s: float) -> str:
    """Rank 1 holds the lock for longer than it may be silent; `place`: where it seems to be."""
    if rank == 1 and place == "another node":
        lifeline.name_process = lambda: ""
    alarm = Alarm(rank, world_size, _store(folder, world_size), silence_s=0.3, held_s=held_s, interval_s=0.1)
    alarm.enter(FORWARD)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)  # All know that it is at work.
        _keep_interpreter_lock(1.5)
    dist.barrier()
    alarm.idle()
    alarm.close()
    return "trained"


@pytest.mark.parametrize("place", ["this node", "another node"])
def test_who_holds_the_lock_is_not_stopped(run_ranks: RunRanks, tmp_path: Path, place: str) -> None:
    assert run_ranks(_hold_lock, 2, str(tmp_path), place, 60.0) == ["trained"] * 2


@pytest.mark.parametrize("place", ["this node", "another node"])
def test_nobody_may_hold_the_lock_forever(run_ranks: RunRanks, tmp_path: Path, place: str) -> None:
    exits = run_ranks(_hold_lock, 2, str(tmp_path), place, 0.7, allow_exit=True)
    assert "rank 1 failed first, in 1F0" in exits[0].last_line
    assert "one call has kept Python's lock" in exits[0].last_line
    assert ("its process is stopped" in exits[0].last_line) is (place == "another node")


def _lose_network(rank: int, world_size: int, folder: str) -> None:
    """Rank 1's node takes nothing any more, as far as the kernel of rank 0 knows."""
    lifeline.name_process = lambda: ""
    if rank == 0:
        lifeline.has_arrived = lambda connection: False
    alarm = Alarm(rank, world_size, _store(folder, world_size), silence_s=0.3, interval_s=0.1)
    alarm.enter(FORWARD)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def test_a_lost_node_is_no_held_lock(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, _ = run_ranks(_lose_network, 2, str(tmp_path), allow_exit=True)
    assert re.search(r"silent for 0\.\d s \(its node or network is lost\)", first.last_line), first.last_line


def test_a_kernel_says_what_has_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        with sender, listener.accept()[0]:
            link = lifeline.Link(sender)
            link.send({"kind": "beat"})
            until_s = time.monotonic() + 10
            while not link.is_acknowledged:
                assert time.monotonic() < until_s
            while not link.is_congested:  # Nobody reads.
                link.send_line(bytes(65536))
            assert not link.is_acknowledged
    assert not link.is_acknowledged


def _stop_with_silence_off(rank: int, world_size: int, folder: str) -> str:
    os.environ["ZORSELIKE_SILENCE_S"] = "off"
    alarm = Alarm(rank, world_size, _store(folder, world_size), silence_s=0.5, interval_s=0.1)
    alarm.enter(FORWARD)
    if rank == 1 and os.fork() == 0:
        time.sleep(1.2)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    alarm.idle()
    alarm.close()
    return "trained"


def test_silence_can_be_allowed_for_a_debugger(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(_stop_with_silence_off, 2, str(tmp_path)) == ["trained"] * 2


def _stop_all(rank: int, world_size: int, folder: str) -> str:
    """As a scheduler suspends a job, for longer than one may be silent or one call may take."""
    alarm = Alarm(rank, world_size, _store(folder, world_size), silence_s=0.3, held_s=0.7, interval_s=0.1)
    alarm.enter(FORWARD)
    everyone = [0] * world_size
    dist.all_gather_object(everyone, os.getpid())
    if rank == 0 and os.fork() == 0:
        time.sleep(0.5)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in everyone:
                os.kill(process, number)
            time.sleep(1.5)
        os._exit(0)
    time.sleep(2.0)  # This rank is not heard before the others run again.
    dist.barrier()
    alarm.idle()
    alarm.close()
    return "trained"


def test_a_job_that_is_stopped_as_a_whole_goes_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(_stop_all, 3, str(tmp_path)) == ["trained"] * 3


def _stop_first(rank: int, world_size: int, folder: str) -> None:
    """Rank 0, as far as the others know, for long enough that they have ended."""
    if rank > 0:
        watch.is_stopped = lambda process: True
    alarm = Alarm(rank, world_size, _store(folder, world_size), silence_s=0.5, interval_s=0.1)
    alarm.enter(FORWARD)
    dist.barrier()
    if rank == 0:
        time.sleep(0.3)  # All know that it is at work.
        _keep_interpreter_lock(4.0)
    time.sleep(3600)


def test_a_stopped_rank_0_hears_that_it_was_given_up(run_ranks: RunRanks, tmp_path: Path) -> None:
    for ended in run_ranks(_stop_first, 3, str(tmp_path), allow_exit=True):
        assert "rank 0 failed first, in 1F0" in ended.last_line, ended
        assert "its process is stopped" in ended.last_line, ended


def test_a_wrong_silence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZORSELIKE_SILENCE_S", "never")
    with pytest.raises(ConfigError, match="ZORSELIKE_SILENCE_S is 'never'; give a number of seconds"):
        Alarm(0, 1, dist.HashStore())


@pytest.mark.parametrize(("kind", "is_found"), [("", True), ("pid", False), ("net", False)])
def test_a_process_is_known_by_its_number_only_where_it_is_also_within_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_found: bool
) -> None:
    """Of containers of one machine: one that runs may be cut off all the same."""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("one boot\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    for each in ("pid", "net"):
        (tmp_path / "self/ns" / each).symlink_to(f"{each}:[1]")
    monkeypatch.setattr(kernel, "_PROCESSES", tmp_path)
    name = kernel.name_process()
    if kind:
        (tmp_path / "self/ns" / kind).unlink()
        (tmp_path / "self/ns" / kind).symlink_to(f"{kind}:[2]")
    assert kernel.find_process(name) == (os.getpid() if is_found else None)
