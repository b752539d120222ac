"""Processes that torchrun has started again find each other, though its store still knows the former ones."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks, free_port

from zorselike.errors import ClusterError
from zorselike.runtime._compat import Store
from zorselike.runtime.processes.attempt import open_attempt
from zorselike.runtime.processes.identity import Identity
from zorselike.runtime.processes.processes import connect

LIMIT = timedelta(seconds=20)


def join_twice(rank: int, size: int, port: int) -> int:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    agent = None
    if rank == 0:
        agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for _ in range(2):
        connect(torch.device("cpu"), timeout=LIMIT)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        time.sleep(rank)  # Who is first reads what it finds.
    del agent
    return int(total)


def test_a_second_attempt_reads_nothing_of_the_first(run_ranks: RunRanks) -> None:
    assert run_ranks(join_twice, 3, free_port(), init=False) == [3, 3, 3]


def open_on(store: Store, size: int, ranks: tuple[int, ...], timeout: timedelta = LIMIT) -> list[Store]:
    who = [Identity(rank, size, rank, size, "node", "torchrun") for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda identity: open_attempt(store, identity, timeout=timeout), who))


def test_an_attempt_that_nobody_finished_hinders_none() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for missing in ((0,), (1, 2)):
        with pytest.raises(ClusterError, match=r"of 3 ranks, .* did not come within 0\.3 s"):
            open_on(store, 3, tuple({0, 1, 2} - {*missing}), timedelta(seconds=0.3))
    first = open_on(store, 3, (0, 1, 2))
    first[0].set("key", "")
    assert all(each.check(["key"]) for each in first)
    later = open_on(store, 2, (0, 1))  # Of other nodes, one fewer.
    assert not any(each.check(["key"]) for each in later)
