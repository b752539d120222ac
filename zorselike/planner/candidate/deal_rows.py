"""Which rows of the batch go to which microbatch: the first rows to what is computed first, and of what is
computed at the same time, spread over nodes.

Two groups that deal their rows device after device send each node's rows to one node of the next group, and
the wires between all other pairs of nodes stay empty. Where one of them takes the nodes in turns, every pair
carries its part. Where two groups share nodes the plain order may be the better one: rows stay inside nodes.

Where all groups can be cut into so many parts that are alike, the batch may be cut into as many blocks, each
for one part of every group. Ranks then exchange rows with few others, and those of one part do what those of
another do at the same time, so that they are simulated as one (`simulator/classes/`). But where microbatches
of two groups do not end together, more of them wait for one more of the other. Which is better a simulation
says (`CandidatePlan.deals_otherwise`); the first choice is what crowds wires least.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

import numpy as np
import numpy.typing as npt

from zorselike.plan.plan import Microbatch
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.groups.replicas import Computer

MOST_WINDOWS = 16
"""Pieces of a batch in each of which wires are to be busy evenly."""
_Order = tuple[int, ...]
"""Positions in a group."""
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Dealt:
    """A group's microbatches in the order of their rows."""

    positions: _Integers
    """Whose each is."""
    ends: _Integers
    """Its last row and one."""
    nodes: _Integers
    """Where that is, as numbers from 0 within the group."""
    names: tuple[int, ...]
    """Names of these nodes."""
    num_blocks: int
    """Blocks of as many rows each, whose first rows are computed at the same time."""

    @property
    def microbatches_per_device(self) -> int:
        return int(np.bincount(self.positions).max())


def deal_candidate(
    candidate: CandidatePlan,
    table: LayerTable,
    node_of: Sequence[int],
    computers: Sequence[Sequence[Computer]],
) -> list[tuple[Microbatch, ...]]:
    """Each group's microbatches, ranks numbered group by group. One group after the other takes the order
    with which least has to go over the busiest pair of nodes, from and to those that have theirs. `node_of`
    is by device, `computers` by group and replica."""
    dealt = _deal(candidate, table, node_of, computers)
    first_ranks = accumulate((len(group.devices) for group in candidate.groups), initial=0)
    return [
        _list_microbatches(own, first, group.degrees)
        for own, first, group in zip(dealt, first_ranks, candidate.groups, strict=False)
    ]


def count_blocks(
    candidate: CandidatePlan,
    table: LayerTable,
    node_of: Sequence[int],
    computers: Sequence[Sequence[Computer]],
) -> tuple[int, int]:
    """In how many blocks a candidate's rows are dealt, and with the other value of `deals_otherwise`; twice 1
    where there is one way only."""
    possible = _count_possible(_list_pieces(candidate, table, node_of, computers))
    if possible == 1:
        return 1, 1
    own = _deal(candidate, table, node_of, computers)[0].num_blocks
    return own, possible + 1 - own


def count_peers(
    candidate: CandidatePlan,
    table: LayerTable,
    node_of: Sequence[int],
    computers: Sequence[Sequence[Computer]],
) -> list[list[int]]:
    """By group and replica: with how many ranks of groups before and after it each of its ranks exchanges
    rows, but for those that follow where the pipeline wraps around."""
    dealt = _deal(candidate, table, node_of, computers)
    degrees = [np.array(list(map(own.degree_of, range(len(own.sizes))))) for own in candidate.groups]
    peers = [np.zeros(len(own), dtype=np.int64) for own in degrees]
    for a, b in {pair for pair in pairwise(candidate.owners) if pair[0] < pair[1]}:
        stops = np.union1d(dealt[a].ends, dealt[b].ends)
        first, second = (own.positions[np.searchsorted(own.ends, stops)] for own in (dealt[a], dealt[b]))
        met = np.unique(first * len(peers[b]) + second)
        first, second = met // len(peers[b]), met % len(peers[b])
        # Each rank of a replica has its positions of a row, and so have those that it meets.
        np.add.at(peers[a], first, -(-degrees[b][second] // degrees[a][first]))
        np.add.at(peers[b], second, -(-degrees[a][first] // degrees[b][second]))
    return [own.tolist() for own in peers]


def describe_dealing(candidate: CandidatePlan) -> object:
    """What decides how a candidate's rows are dealt: neither its layers nor most of its modes."""
    groups = tuple(
        (own.devices, own.degrees, own.sizes, _goes_in_rounds(own) or own.mode.recompute)
        for own in candidate.groups
    )
    return groups, candidate.owners, candidate.deals_otherwise


def _goes_in_rounds(group: CandidateGroup) -> bool:
    """Whether its ranks wait for each other after each microbatch, or go backward before all is forward."""
    return group.mode.reduces_per_microbatch or group.max_in_flight is not None


def _deal(
    candidate: CandidatePlan,
    table: LayerTable,
    node_of: Sequence[int],
    computers: Sequence[Sequence[Computer]],
) -> list[_Dealt]:
    pairs = Counter(tuple(sorted(pair)) for pair in pairwise(candidate.owners) if pair[0] != pair[1])
    pieces = _list_pieces(candidate, table, node_of, computers)
    plain, crowding = _deal_groups(pieces, pairs, 1)
    num_blocks = _count_possible(pieces)
    if num_blocks == 1:
        return plain
    in_blocks, crowding_of_blocks = _deal_groups(pieces, pairs, num_blocks)
    return in_blocks if (crowding_of_blocks < crowding) != candidate.deals_otherwise else plain


def _list_pieces(
    candidate: CandidatePlan,
    table: LayerTable,
    node_of: Sequence[int],
    computers: Sequence[Sequence[Computer]],
) -> list[_Pieces]:
    return [
        _Pieces(group, own, [node_of[device] for device in group.firsts], table)
        for group, own in zip(candidate.groups, computers, strict=True)
    ]


def _count_possible(pieces: Sequence[_Pieces]) -> int:
    """The most parts, all alike, into which every group can be cut; 1 where there is one group."""
    return gcd(*(number for own in pieces for number in own.count_alike())) if len(pieces) > 1 else 1


def _deal_groups(
    pieces: Sequence[_Pieces], pairs: Mapping[tuple[int, ...], int], num_blocks: int
) -> tuple[list[_Dealt], float]:
    """One group after the other, and how crowded the busiest pairs of nodes are; `pairs`: how often a step
    goes from one group to another, either way."""
    dealt: list[_Dealt] = []
    total = 0.0
    for g, own_pieces in enumerate(pieces):
        others = [(number, dealt[h]) for h in range(g) if (number := pairs.get((h, g), 0))]
        orders = list_orders(own_pieces.nodes) if others else [(*range(len(own_pieces.nodes)),)]
        tried = [own_pieces.deal(order, num_blocks) for order in orders]
        crowding = [sum(number * _measure_crowding(other, own) for number, other in others) for own in tried]
        least = min(crowding)
        dealt.append(tried[crowding.index(least)])
        total += least
    return dealt, total


def list_orders(nodes: Sequence[int]) -> list[_Order]:
    """Orders of positions on these nodes, any two of which have each node's share spread over all nodes of
    the other: as they are, nodes in turns, and nodes in turns that begin one further on each time."""
    by_node: defaultdict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(nodes):
        by_node[node].append(position)
    queues = list(by_node.values())
    in_turns: list[int] = []
    rotated: list[int] = []
    for turn in range(max(map(len, queues), default=0)):
        picked = [queue[turn] if turn < len(queue) else None for queue in queues]
        first = turn % len(picked)
        in_turns += [position for position in picked if position is not None]
        rotated += [position for position in (*picked[first:], *picked[:first]) if position is not None]
    return list(dict.fromkeys([(*range(len(nodes)),), (*in_turns,), (*rotated,)]))


class _Pieces:
    """A group's microbatches, and when each is computed. Where the ranks wait for each other after each
    microbatch, or backwards come before all is forward, these are rounds; else each goes through its own at
    its own speed, and what counts is the middle."""

    def __init__(
        self, group: CandidateGroup, computers: Sequence[Computer], nodes: Sequence[int], table: LayerTable
    ) -> None:
        in_rounds = _goes_in_rounds(group)
        times: list[float] = []
        for computer, sizes in zip(computers, group.sizes, strict=True):
            if in_rounds:
                times += map(float, range(len(sizes)))
                continue
            seconds = table.model_s(computer, group.mode.recompute, max(sizes, default=0))
            ends = accumulate((seconds[size - 1] for size in sizes), initial=0.0)
            times += [(start + end) / 2 for start, end in pairwise(ends)]
        self._times = np.array(times)
        self._kinds = [*zip(computers, group.sizes, strict=True)]
        """What tells positions apart."""
        self.nodes = nodes
        self._sizes = np.array([size for sizes in group.sizes for size in sizes], dtype=np.int64)
        self._positions = np.repeat(np.arange(len(group.sizes)), [len(sizes) for sizes in group.sizes])
        self._names = tuple(dict.fromkeys(nodes))
        numbers = {node: number for number, node in enumerate(self._names)}
        self._nodes = np.array([numbers[node] for node in nodes])

    def count_alike(self) -> Iterator[int]:
        """How many replicas that have rows are of each kind."""
        return (number for (_, sizes), number in Counter(self._kinds).items() if sizes)

    def deal(self, order: _Order, num_blocks: int) -> _Dealt:
        """What is computed at the same time goes in this order of positions; those of each kind are dealt to
        the blocks in this order. Blocks have theirs as they are numbered, so that those with devices of the
        same nodes have these in the same order."""
        turns = np.arange(len(order))
        if num_blocks == 1:
            turns[list(order)] = np.arange(len(order))
        blocks = np.empty(len(order), dtype=np.int64)
        seen: Counter[object] = Counter()
        for position in order:
            kind = self._kinds[position]
            blocks[position] = seen[kind] % num_blocks
            seen[kind] += 1
        first_to_last = np.lexsort((turns[self._positions], self._times, blocks[self._positions]))
        positions = self._positions[first_to_last]
        ends = np.cumsum(self._sizes[first_to_last])
        return _Dealt(positions, ends, self._nodes[positions], self._names, num_blocks)


def _measure_crowding(source: _Dealt, target: _Dealt) -> float:
    """Rows that the busiest pair of nodes exchanges in each piece of the batch, in all pieces together."""
    num_windows = min(MOST_WINDOWS, source.microbatches_per_device, target.microbatches_per_device)
    stops = np.union1d(source.ends, target.ends)
    starts = np.concatenate(([0], stops[:-1]))
    a = source.nodes[np.searchsorted(source.ends, stops)]
    b = target.nodes[np.searchsorted(target.ends, stops)]
    is_inside = np.array([[one == other for other in target.names] for one in source.names])
    rows = np.where(is_inside[a, b], 0, stops - starts)
    shape = num_windows, len(source.names), len(target.names)
    in_block = starts % (stops[-1] // source.num_blocks) * source.num_blocks
    pairs = np.ravel_multi_index((in_block * num_windows // stops[-1], a, b), shape)
    crowded = np.bincount(pairs, rows, minlength=num_windows * is_inside.size)
    return float(crowded.reshape(num_windows, -1).max(axis=1).sum())


def _list_microbatches(dealt: _Dealt, first_rank: int, degrees: tuple[int, ...]) -> tuple[Microbatch, ...]:
    """Each booked under the first rank of the replica at its position."""
    positions = dealt.positions
    if degrees:
        positions = np.cumsum((0, *degrees[:-1]))[positions]
    ranks = (positions + first_rank).tolist()
    return tuple(map(Microbatch, ranks, [0, *dealt.ends[:-1].tolist()], dealt.ends.tolist()))
