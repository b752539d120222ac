"""Processes of one launcher, some of an elastic job and others not, or of which some never come."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks, free_port

from zorselike.elastic.meeting.environment import from_environment
from zorselike.errors import ConfigError
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.processes import connect
from zorselike.runtime.processes.same_kind import check_same_kind

LIMIT = timedelta(seconds=60)


def meet(rank: int, size: int, port: int, elastic: tuple[int, ...], prefix: str) -> str:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ZORSELIKE_NODE=f"node{rank}",
    )
    if prefix:  # As under torchrun, whose agent keeps the store.
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=prefix)
    agent = None
    if prefix and rank == 0:
        agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    try:
        if rank in elastic:
            from_environment(None, device_type="cpu", memory_bytes=1)  # type: ignore[arg-type]
        else:
            connect(torch.device("cpu"), timeout=LIMIT)
    except ConfigError as error:
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


def wait(rank: int, size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    check_same_kind(store, find_identity(), is_elastic=True, timeout=timedelta(seconds=1))


def test_who_has_not_come_is_named(run_ranks: RunRanks) -> None:
    with pytest.raises(Exception, match=r"of 4 ranks, ranks 2 and 3 did not come within 1 s"):
        run_ranks(wait, 2, free_port(), init=False)
