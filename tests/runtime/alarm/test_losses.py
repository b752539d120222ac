"""An alarm that reports: all lost ranks, and what is known of each; no process is ended."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RunRanks

from zorselike.errors import ClusterError
from zorselike.runtime.alarm.alarm import MOST_REPORTED, Alarm
from zorselike.runtime.alarm.failure import Failure
from zorselike.schedule.actions import parse_action

BACKWARD = parse_action("3B1")
Known = dict[int, tuple[str, str]]


def lose(rank: int, size: int, folder: Path, how: dict[int, str]) -> Known:
    """What this rank hears of each loss: kind, and where that rank was."""
    store = dist.FileStore(str(folder / "alarm"), size)
    found: Known = {}
    heard = threading.Event()

    def note(losses: tuple[Failure, ...]) -> None:
        found.update({loss.rank: (loss.kind, loss.place) for loss in losses})
        if len(found) == len(how) or (0 in how and rank and 0 in found):
            heard.set()

    alarm = Alarm(rank, size, store, interval_s=0.1, silence_s=1.0, start_silence_s=1.0, on_loss=note)
    alarm.enter(BACKWARD)
    store.add("acting", 1)
    while int(store.add("acting", 0)) < size:
        time.sleep(0.01)
    match how.get(rank):
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises":
            alarm.fail(ValueError("out of everything"))
    assert heard.wait(20)
    alarm.abandon()
    until_s = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert threading.active_count() == 1
    return found


def test_no_rank_of_a_large_elastic_job_is_connected_with_all_others() -> None:
    """Rank 0 would hold a connection for each."""
    before = threading.active_count()
    with Alarm(0, MOST_REPORTED + 1, dist.HashStore(), join_timeout_s=1, on_loss=lambda _: None) as alarm:
        alarm.enter(BACKWARD)
        alarm.idle()
        assert threading.active_count() == before
    with pytest.raises(ClusterError, match="did not connect"):  # With fewer it waits for them.
        Alarm(0, MOST_REPORTED, dist.HashStore(), join_timeout_s=1, on_loss=lambda _: None)


@pytest.mark.parametrize(
    "how",
    [
        {1: "killed"},
        {1: "killed", 3: "killed"},
        {1: "killed", 2: "stopped"},
        {2: "raises", 3: "killed"},
        {0: "killed"},
        {0: "raises"},
    ],
    ids=str,
)
def test_all_losses_are_told(run_ranks: RunRanks, tmp_path: Path, how: dict[int, str]) -> None:
    exits = run_ranks(lose, 4, tmp_path, how, init=False, allow_exit=True, timeout=60)
    kinds = {"killed": "dead", "stopped": "silent", "raises": "error"}
    for ended in exits:
        if how.get(ended.rank, "raises") == "raises":
            assert ended.value == {rank: (kinds[fate], "3B1") for rank, fate in how.items()}, ended


def test_what_only_ends_by_mistake_is_no_loss(run_ranks: RunRanks, tmp_path: Path) -> None:
    exits = run_ranks(call_others, 3, tmp_path, init=False, allow_exit=True, timeout=60)
    for ended in exits:
        # Rank 1 or one of the others is the first to see that they differ.
        assert ended.code == 1 and re.search(r"it called (step|evaluate)\(\) where rank", ended.last_line)


def call_others(rank: int, size: int, folder: Path) -> None:
    alarm = Alarm(rank, size, dist.FileStore(str(folder / "alarm"), size), interval_s=0.1, on_loss=print)
    alarm.begin("evaluate" if rank == 1 else "step")
    alarm.enter(BACKWARD)
    time.sleep(3600)
