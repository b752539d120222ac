"""Processes of one launcher: some of an elastic job and others not, some that never come, or that end before
they join, or that are started again."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks, free_port

from zorselike.elastic.meeting.environment import from_environment
from zorselike.errors import ClusterError, ConfigError
from zorselike.runtime._compat import Store
from zorselike.runtime.processes import launcher_store
from zorselike.runtime.processes.arrival import Arrival
from zorselike.runtime.processes.identity import Identity, find_identity
from zorselike.runtime.processes.launcher_store import tell_others
from zorselike.runtime.processes.processes import connect

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=20)


def set_environment(rank: int, size: int, port: int, prefix: str) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ZORSELIKE_NODE=f"node{rank}",
    )
    if prefix:  # As under torchrun, whose agent keeps the store.
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=prefix)


def keep_agent_store(rank: int, port: int, prefix: str) -> Any:
    if not prefix or rank > 0:
        return None
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def meet(rank: int, size: int, port: int, elastic: tuple[int, ...], prefix: str) -> str:
    set_environment(rank, size, port, prefix)
    agent = keep_agent_store(rank, port, prefix)
    try:
        if rank in elastic:
            from_environment(None, device_type="cpu", memory_bytes=1)  # type: ignore[arg-type]
        else:
            connect(torch.device("cpu"), timeout=LIMIT)
    except (ClusterError, ConfigError) as error:
        return str(error)
    finally:
        del agent
    return ""


@pytest.mark.parametrize(("elastic", "prefix"), [((0,), ""), ((1, 2), "0")])
def test_some_with_and_some_without_elastic_are_refused_at_once(
    run_ranks: RunRanks, elastic: tuple[int, ...], prefix: str
) -> None:
    said = run_ranks(meet, 3, free_port(), elastic, prefix, init=False, timeout=30)
    first, other = ("true", "false") if 0 in elastic else ("false", "true")
    text = f"[elastic] enable is {other} in process 1 (node node1) and {first} in process 0 (node node0)"
    assert [text in own for own in said] == [True] * 3, said


def join_plainly(rank: int, size: int, port: int) -> int:
    assert meet(rank, size, port, (), "") == ""
    return dist.get_world_size()


def test_those_alike_join(run_ranks: RunRanks) -> None:
    assert run_ranks(join_plainly, 2, free_port(), init=False) == [2, 2]


def come_or_end(rank: int, size: int, port: int, prefix: str, ended: int) -> tuple[str, float]:
    began = time.monotonic()
    if rank != ended:
        if ended == 0:  # The keeper of the store is there first: torch looks again after up to 40 s.
            time.sleep(2)
        return meet(rank, size, port, (1,), prefix), time.monotonic() - began
    set_environment(rank, size, port, prefix)
    agent = keep_agent_store(rank, port, prefix)
    tell_others(ConfigError("no such plan"))
    del agent
    return "", time.monotonic() - began


@pytest.mark.parametrize(("prefix", "ended"), [("", 0), ("", 2), ("1", 0), ("1", 1)])
def test_who_ends_before_it_joins_tells_the_others_why(run_ranks: RunRanks, prefix: str, ended: int) -> None:
    said = run_ranks(come_or_end, 3, free_port(), prefix, ended, init=False, timeout=40)
    text = f"rank {ended} on node node{ended} ended before it joined: no such plan"
    assert [own for own, _ in said] == ["" if rank == ended else text for rank in range(3)]
    assert max(seconds for _, seconds in said) < LIMIT.total_seconds() / 2


def test_who_ends_where_nobody_is_adds_nothing_to_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher_store, "_REACHED_WITHIN", timedelta(seconds=1))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    with suppress(ClusterError, RuntimeError):
        tell_others(ConfigError("no such plan"))
    assert capfd.readouterr().err == ""


def wait(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    Arrival(store, find_identity(), timedelta(seconds=1)).arrive(is_elastic=True)


def test_who_has_not_come_is_named(run_ranks: RunRanks) -> None:
    with pytest.raises(Exception, match=r"of 4 ranks, ranks 2 and 3 did not come within 1 s"):
        run_ranks(wait, 2, free_port(), init=False)


def join_twice(rank: int, size: int, port: int) -> int:
    set_environment(rank, size, port, "0")
    agent = keep_agent_store(rank, port, "0")
    for _ in range(2):
        connect(torch.device("cpu"), timeout=SHORT)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        time.sleep(rank)  # Who is first reads what it finds.
    del agent
    return int(total)


def test_a_second_attempt_reads_nothing_of_the_first(run_ranks: RunRanks) -> None:
    assert run_ranks(join_twice, 3, free_port(), init=False) == [3, 3, 3]


def open_on(store: Store, size: int, ranks: tuple[int, ...], timeout: timedelta = SHORT) -> list[Store]:
    def come(rank: int) -> Store:
        arrival = Arrival(store, Identity(rank, size, rank, size, "node", "torchrun"), timeout)
        arrival.arrive(is_elastic=False)
        return arrival.store

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(come, ranks))


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


def test_who_waits_follows_rank_0_that_is_started_again() -> None:
    """As torchrun does without a dynamic rendezvous: on the one node alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(open_on, store, 3, (1,))
        with pytest.raises(ClusterError, match=r"rank 2 did not come"):
            open_on(store, 3, (0,), timedelta(seconds=0.5))
        again = open_on(store, 3, (0, 2))
        again[0].set("key", "")
        assert waits.result()[0].check(["key"]) and again[1].check(["key"])
