"""Who shares what inside a group with replicas."""

from __future__ import annotations

import pytest

from zorselike.plan.parts import Group, Microbatch
from zorselike.plan.pieces import count_communicators


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [
        ((0,), [0]),
        ((0, 1, 2), [1, 1, 1]),
        (((0, 1),), [2, 2]),  # All of the group, and the replica, which holds every piece once.
        (((0, 1), 2), [3, 3, 3]),  # Rank 2 holds both pieces, each with another rank.
        (((0, 1, 2, 3), (4, 5)), [3, 3, 3, 3, 4, 4]),
    ],
)
def test_communicators_are_those_of_group_replica_and_shared_pieces(
    ranks: tuple[int | tuple[int, ...], ...], counts: list[int]
) -> None:
    group = Group(ranks, (Microbatch(0, 0, 1),))
    assert [count_communicators(group, rank) for rank in group.flat_ranks] == counts
