"""Which rows of the batch go to which microbatch: the first rows to what is computed first, and of what is
computed at the same time, spread over nodes.

Two groups that deal their rows device after device send each node's rows to one node of the next group, and
the wires between all other pairs of nodes stay empty. Where one of them takes the nodes in turns, every pair
carries its part. Where two groups share nodes the plain order may be the better one: rows stay inside nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

from zorselike.plan.plan import Microbatch
from zorselike.plan.shares import deal_rows
from zorselike.planner.layer_table import LayerTable
from zorselike.planner.sketch import GroupSketch, Sketch

MOST_WINDOWS = 16
"""Pieces of a batch in each of which wires are to be busy evenly."""
_Order = tuple[int, ...]
"""Positions in a group."""


def deal_sketch(
    sketch: Sketch, table: LayerTable, node_of: Callable[[int], int], type_of: Callable[[int], str]
) -> list[tuple[Microbatch, ...]]:
    """Each group's microbatches, ranks being positions in the group. One group after the other takes the
    order with which least has to go over the busiest pair of nodes, from and to those that have theirs."""
    pairs = Counter(tuple(sorted(pair)) for pair in pairwise(sketch.owners) if pair[0] != pair[1])
    nodes = [tuple(map(node_of, own.devices)) for own in sketch.groups]
    dealt: list[tuple[Microbatch, ...]] = []
    for g, group in enumerate(sketch.groups):
        types = [type_of(device) for device in group.devices]
        best: tuple[float, tuple[Microbatch, ...]] | None = None
        orders = list_orders(nodes[g]) if any(pairs[h, g] for h in range(g)) else [(*range(len(nodes[g])),)]
        for order in orders:
            rows = _deal(group, order, types, table)
            crowding = sum(
                pairs[h, g] * measure_crowding(dealt[h], nodes[h], rows, nodes[g])
                for h in range(g)
                if pairs[h, g] and len(orders) > 1
            )
            if best is None or crowding < best[0]:
                best = crowding, rows
        assert best is not None
        dealt.append(best[1])
    return dealt


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
        own = [queue[turn] if turn < len(queue) else None for queue in queues]
        first = turn % len(own)
        in_turns += [position for position in own if position is not None]
        rotated += [position for position in (*own[first:], *own[:first]) if position is not None]
    return list(dict.fromkeys([(*range(len(nodes)),), (*in_turns,), (*rotated,)]))


def measure_crowding(
    source: Sequence[Microbatch],
    source_nodes: Sequence[int],
    target: Sequence[Microbatch],
    target_nodes: Sequence[int],
) -> int:
    """Rows that the busiest pair of nodes exchanges in each piece of the batch, in all pieces together."""
    num_windows = min(MOST_WINDOWS, _count_rounds(source), _count_rounds(target))
    num_rows = source[-1].stop
    crowded: list[Counter[tuple[int, int]]] = [Counter() for _ in range(num_windows)]
    for start, stop, a, b in _meet(source, target):
        pair = source_nodes[a], target_nodes[b]
        if pair[0] != pair[1]:
            crowded[start * num_windows // num_rows][pair] += stop - start
    return sum(max(own.values(), default=0) for own in crowded)


def _count_rounds(microbatches: Sequence[Microbatch]) -> int:
    return max(Counter(own.rank for own in microbatches).values())


def _meet(source: Sequence[Microbatch], target: Sequence[Microbatch]) -> Iterator[tuple[int, int, int, int]]:
    """Rows that go from one microbatch to one of the next group: start, stop, ranks."""
    i = j = 0
    while i < len(source) and j < len(target):
        a, b = source[i], target[j]
        yield max(a.start, b.start), min(a.stop, b.stop), a.rank, b.rank
        i, j = i + (a.stop <= b.stop), j + (b.stop <= a.stop)


def _deal(
    group: GroupSketch, order: Sequence[int], types: Sequence[str], table: LayerTable
) -> tuple[Microbatch, ...]:
    """The first rows of the batch to what is computed first. Where the ranks wait for each other after each
    microbatch, or backwards come before all is forward, these are rounds; else each goes through its own at
    its own speed."""
    pieces: list[tuple[float, int, int]] = []
    for position in order:
        own = group.sizes[position]
        if group.mode.reduces_per_microbatch or group.max_in_flight is not None:
            pieces += [(float(number), position, size) for number, size in enumerate(own)]
            continue
        seconds = table.model_s(types[position], group.mode.recompute, max(own, default=0))
        ends = list(accumulate((seconds[size - 1] for size in own), initial=0.0))
        pieces += [((ends[n] + ends[n + 1]) / 2, position, size) for n, size in enumerate(own)]
    return deal_rows(pieces)
