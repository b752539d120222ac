"""What a rank says that has been at one thing for minutes."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks

from zorselike.runtime._compat import nccl_record
from zorselike.runtime.alarm import stall
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.alarm.failure import State
from zorselike.runtime.alarm.stall import LIMIT_S, Stall
from zorselike.schedule.actions import parse_action


def test_a_rank_speaks_after_ten_minutes_at_one_place_and_then_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AtOnce:
        def __init__(self, *, target: Any, args: Any, daemon: bool) -> None:
            self.start = lambda: target(*args)

    monkeypatch.setattr(stall.threading, "Thread", AtOnce)
    said: list[str] = []
    waits: list[str] = []
    seen = Stall(1, said.append, waits=lambda: waits)
    now = 5.0
    for place, rounds in (("1F0", 3), ("1F0", 4), ("1F1", 4), ("", 5)):  # The next round is another place.
        for _ in range(3):
            seen.look(State(place, rounds), now)
            now += LIMIT_S / 4
    assert not said
    for _ in range(40):
        seen.look(State("", 5), now)  # Between steps a caller may take any time,
        now += LIMIT_S / 4
    assert not said
    waits += [f"recv {i}" for i in range(10)]
    now += 16 * LIMIT_S
    seen.look(State("", 5), now)  # but not if its GPU waits.
    assert len(said) == 1 and "of rank 1 waits in NCCL, first of all for: recv 0; recv 1;" in said[0]
    assert "and 2 more; in a step, who waits for a whole GPU" in said.pop()
    waits.clear()
    for _ in range(30):
        seen.look(State("2B1", 5), now)
        now += LIMIT_S / 4
    told = [
        re.search(r"rank 1 has been in 2B1 \(ministage 2, microbatch 1, backward\) for (\d+) m", text)
        for text in said
    ]
    assert [match and match[1] for match in told] == ["10", "20", "40"]
    assert f"py-spy dump --pid {os.getpid()}" in said[0]


def test_what_waits_in_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl_record()() == []
    used: list[int] = []

    def record(*, includeCollectives: bool, onlyActive: bool) -> bytes:
        assert includeCollectives and onlyActive and used == [3]
        entry = {"profiling_name": "nccl:recv 0<-1", "output_sizes": [[2, 4, 8]]}
        return json.dumps({"entries": [entry | {"process_group": ["11", "gradients 1 -> 0"]}]}).encode()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", record, raising=False)
    assert nccl_record()() == ["recv 0<-1 of [[2, 4, 8]] (gradients 1 -> 0)"]
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda **_: b'{"version": "2.11"}', raising=False
    )
    assert nccl_record()() == []


def wait_long(rank: int, world_size: int, folder: str) -> None:
    stall.LIMIT_S, told, tell = 0.1, threading.Event(), Stall._tell

    def tell_and_note(self: Stall, place: str, seconds: float) -> None:
        tell(self, place, seconds)
        told.set()

    mock.patch.object(Stall, "_tell", tell_and_note).start()
    alarm = Alarm(rank, world_size, dist.FileStore(str(Path(folder) / "alarm"), world_size), interval_s=0.05)
    alarm.enter(parse_action("1F0"))
    assert told.wait(60.0)
    dist.barrier()
    alarm.idle()
    alarm.close()


def test_all_ranks_of_a_job_that_stands_say_where(run_ranks: RunRanks, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(wait_long, 2, str(tmp_path), allow_exit=True)):
        assert f"zorselike: rank {rank} has been in 1F0 (ministage 1, microbatch 0, forward)" in found.stderr
