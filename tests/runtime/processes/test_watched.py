"""Processes that have joined, and one that ends before there is a pipeline."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ranks import RunRanks, free_port

from zorselike.errors import ConfigError
from zorselike.runtime.processes import processes as joining
from zorselike.runtime.processes.processes import Processes
from zorselike.runtime.watched import join_watched

CPU, LIMIT = torch.device("cpu"), timedelta(seconds=60)


def end(how: str, rank: int, processes: Processes) -> None:
    """Rank 1 ends, while 0 builds and 2 waits for it."""
    if how == "wrong":
        raise ConfigError("wrong, on all alike")
    if how == "done":
        time.sleep(0.2 * rank)
        return
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise RuntimeError("cannot build")
    if rank == 0:
        time.sleep(3600)
    processes.gather(rank)


def start(rank: int, world_size: int, port: int, how: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if how == "early" and rank == 1:
        joining.make_processes = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        with join_watched(CPU, timeout=LIMIT) as processes:
            end(how, rank, processes)
    except ConfigError as error:
        Path(folder, f"{rank}").write_text(str(error))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("early", "ended without a word"),
        ("killed", "ended without a word"),
        ("raises", "cannot build"),
    ],
)
def test_one_that_ends_at_the_start_ends_all(
    run_ranks: RunRanks, tmp_path: Path, how: str, reason: str
) -> None:
    exits = run_ranks(start, 3, free_port(), how, str(tmp_path), allow_exit=True, init=False)
    for ended in exits:
        if ended.rank != 1 or how == "raises":
            assert ended.code == 1 and reason in ended.last_line, ended
            assert ended.last_line.startswith("zorselike: rank 1 failed first, in start-up: "), ended


@pytest.mark.parametrize("how", ["wrong", "done"])
def test_who_ends_as_all_do_or_leaves_first_has_not_failed(
    run_ranks: RunRanks, tmp_path: Path, how: str
) -> None:
    run_ranks(start, 3, free_port(), how, str(tmp_path), init=False)
    assert len(list(tmp_path.iterdir())) == (3 if how == "wrong" else 0)
