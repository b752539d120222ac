"""Which rows of the batch go to which microbatch: the first rows to what is computed first, and of what is
computed at the same time, spread over nodes.

Two groups that deal their rows device after device send each node's rows to one node of the next group, and
the wires between all other pairs of nodes stay empty. Where one of them takes the nodes in turns, every pair
carries its part. Where two groups share nodes the plain order may be the better one: rows stay inside nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    pairs = Counter(tuple(sorted(pair)) for pair in pairwise(candidate.owners) if pair[0] != pair[1])
    dealt: list[_Dealt] = []
    for g, group in enumerate(candidate.groups):
        nodes = [node_of[device] for device in group.firsts]
        pieces = _Pieces(group, computers[g], nodes, table)
        others = [(number, dealt[h]) for h in range(g) if (number := pairs[h, g])]
        orders = list_orders(nodes) if others else [(*range(len(nodes)),)]
        tried = [pieces.deal(order) for order in orders]
        crowding = [
            sum(number * _measure_crowding(other, own) for number, other in others) if len(tried) > 1 else 0.0
            for own in tried
        ]
        dealt.append(tried[crowding.index(min(crowding))])
    first_ranks = accumulate((len(group.devices) for group in candidate.groups), initial=0)
    return [
        _list_microbatches(own, first, group.degrees)
        for own, first, group in zip(dealt, first_ranks, candidate.groups, strict=False)
    ]


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
        in_rounds = group.mode.reduces_per_microbatch or group.max_in_flight is not None
        times: list[float] = []
        for computer, sizes in zip(computers, group.sizes, strict=True):
            if in_rounds:
                times += map(float, range(len(sizes)))
                continue
            seconds = table.model_s(computer, group.mode.recompute, max(sizes, default=0))
            ends = accumulate((seconds[size - 1] for size in sizes), initial=0.0)
            times += [(start + end) / 2 for start, end in pairwise(ends)]
        self._times = np.array(times)
        self._sizes = np.array([size for sizes in group.sizes for size in sizes], dtype=np.int64)
        self._positions = np.repeat(np.arange(len(group.sizes)), [len(sizes) for sizes in group.sizes])
        self._names = tuple(dict.fromkeys(nodes))
        numbers = {node: number for number, node in enumerate(self._names)}
        self._nodes = np.array([numbers[node] for node in nodes])

    def deal(self, order: _Order) -> _Dealt:
        """What is computed at the same time goes in this order of positions."""
        turns = np.empty(len(order), dtype=np.int64)
        turns[list(order)] = np.arange(len(order))
        first_to_last = np.lexsort((turns[self._positions], self._times))
        positions = self._positions[first_to_last]
        return _Dealt(positions, np.cumsum(self._sizes[first_to_last]), self._nodes[positions], self._names)


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
    pairs = np.ravel_multi_index((starts * num_windows // stops[-1], a, b), shape)
    crowded = np.bincount(pairs, rows, minlength=num_windows * is_inside.size)
    return float(crowded.reshape(num_windows, -1).max(axis=1).sum())


def _list_microbatches(dealt: _Dealt, first_rank: int, degrees: tuple[int, ...]) -> tuple[Microbatch, ...]:
    """Each booked under the first rank of the replica at its position."""
    positions = dealt.positions
    if degrees:
        positions = np.cumsum((0, *degrees[:-1]))[positions]
    ranks = (positions + first_rank).tolist()
    return tuple(map(Microbatch, ranks, [0, *dealt.ends[:-1].tolist()], dealt.ends.tolist()))
