"""What runtime, memory model and simulator agree on."""

from __future__ import annotations

from collections import Counter

from zorselike.schedule.actions import Edge
from zorselike.schedule.contract import MOST_DIRECT_EDGES, find_crowded

STREAMS = 32
"""That torch deals of a priority (`kStreamsPerPool` in `c10/cuda/CUDAStream.cpp`), one to a communicator."""
OTHERS = 4
"""Of them, at least: updates, FSDP2's sums over replicas, the communicators of a group and of a replica."""


def between(rank: int, others: range) -> list[Edge]:
    """All that one rank and others pass each other forward, and the gradients of it."""
    pairs = [pair for other in others for pair in ((rank, other), (other, rank))]
    return sorted((*pair, direction) for pair in pairs for direction in "FB")


def test_no_communicator_shares_a_stream_with_another() -> None:
    edges = between(0, range(1, 17)) + between(17, range(18, 20))
    crowded = find_crowded(edges)
    direct = Counter(end for edge in edges if edge not in crowded for end in edge[:2])
    assert max(direct.values()) == direct[0] == MOST_DIRECT_EDGES <= STREAMS - OTHERS
    assert crowded == {*edges[MOST_DIRECT_EDGES:64]}  # As all ranks find by themselves.


def test_where_there_are_few_all_are_direct() -> None:
    assert not find_crowded(between(0, range(1, 7)))
