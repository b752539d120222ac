"""How the ranks of a tensor-parallel replica share positions of the sequence and pieces of weights.

Degrees may differ inside a group. A weight that tensor parallelism cuts has as many pieces as the group's
largest degree T, and a rank of a replica of degree t holds T / t of them, so that every piece has one holder
a replica; positions of the sequence are cut into t slices.
"""

from __future__ import annotations

from dataclasses import dataclass

from zorselike.plan.parts import Group, Replica


def cut_evenly(total: int, num_parts: int) -> tuple[int, ...]:
    """The edges of parts that differ by one at most, the first one 0: one more than there are parts."""
    return tuple(total * part // num_parts for part in range(num_parts + 1))


def positions_of(replica: Replica, rank: int, sequence_length: int) -> tuple[int, int]:
    """Positions `[first, last)` of the sequence that a rank has between layers; all if it is alone."""
    edges = cut_evenly(sequence_length, replica.degree)
    place = replica.ranks.index(rank)
    return edges[place], edges[place + 1]


def pieces_of(group: Group, rank: int) -> range:
    """Of `group.degree` pieces of a cut weight, those that a rank of the group holds."""
    replica = group.replica_of(rank)
    num_pieces = group.degree // replica.degree
    first = replica.ranks.index(rank) * num_pieces
    return range(first, first + num_pieces)


def holders_of(group: Group, piece: int) -> tuple[int, ...]:
    """The ranks that hold a piece, one of each replica, in the group's order."""
    return tuple(replica.ranks[piece * replica.degree // group.degree] for replica in group.replicas)


def count_communicators(group: Group, rank: int) -> int:
    """In how many sets of several ranks a rank of the group exchanges parameters and sums: all of its group,
    its replica, and the holders of each piece that it holds."""
    if len(group.flat_ranks) == 1:
        return 0
    if group.degree == 1:
        return 1
    shared = [piece for piece in pieces_of(group, rank) if len(holders_of(group, piece)) > 1]
    return 1 + (group.replica_of(rank).degree > 1) + len(shared)


@dataclass(frozen=True)
class Cut:
    """How a weight is cut into pieces: along `dim`, piece `p` being `[edges[p], edges[p + 1])` of it."""

    dim: int
    edges: tuple[int, ...]
    """Rising from 0 to the weight's size, one more than the group's degree."""
