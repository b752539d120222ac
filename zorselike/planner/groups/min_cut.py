"""The minimum cut of a graph of devices in two, made fast by what is alike in it, and still exact.

Devices of a class have one bandwidth w between each other and each the same bandwidth to any other device.
A cut that puts s of the n devices of a class on one side has weight s (n - s) w inside the class and a
weight linear in s outside it: together concave in s, so it is least at an end. A minimum cut therefore
keeps every class whole, or takes one device out of its class and nothing else. The same holds of classes
of whole classes, where the one that leaves is the smallest. So classes are contracted as long as there
are any, and the algorithm of Stoer and Wagner (Zorse 4.3.2 cites it) sees only what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zorselike.planner.groups.bandwidths import Rates


@dataclass(frozen=True)
class Cut:
    """Two sides, neither of them empty."""

    weight: float
    """The sum of bandwidths between devices of the one side and of the other."""
    side: tuple[int, ...]
    """How many devices of each block are on the one side."""


@dataclass(frozen=True)
class _Vertex:
    """Blocks that a cut keeps on one side."""

    blocks: tuple[int, ...]
    num_devices: int


def minimum_cut(rates: Rates, sizes: Sequence[int]) -> Cut:
    """The minimum cut of at least two devices.

    `rates` [num_blocks, num_blocks] is the bandwidth between one device of a block and one of another, on
    the diagonal between two of one block, symmetric and not negative; `sizes` is the devices of each block.
    Among equal cuts that which keeps more devices together wins.
    """
    if sum(sizes) < 2:
        raise ValueError("one device cannot be cut in two")
    vertices = [_Vertex((block,), num) for block, num in enumerate(sizes) if num]
    cuts = [_take_one_device(rates, sizes)]
    while len(vertices) > 1:
        between = _rates_between(rates, vertices)
        classes = find_twins(between)
        counts = np.array([vertex.num_devices for vertex in vertices], dtype=float)
        degrees = (between @ counts) * counts
        smallest = [min(alike, key=counts.__getitem__) for alike in classes]
        leaving = min(smallest, key=degrees.__getitem__)
        cuts.append(_take_blocks(float(degrees[leaving]), vertices[leaving].blocks, sizes))
        if len(classes) == len(vertices):
            if _bound_larger_cuts(between, counts) < min(cut.weight for cut in cuts):
                cuts.append(_cut_vertices(between, vertices, sizes))
            break
        vertices = [_contract([vertices[v] for v in alike]) for alike in classes]
    return min(reversed(cuts), key=lambda cut: cut.weight)


def find_twins(rates: Rates) -> list[list[int]]:
    """Classes of vertices with the same rate to each other and to any one vertex outside the class.

    Two vertices are alike if their rates to all others are equal; that is transitive, and makes the rates
    inside a class equal too. Rates are compared exactly, the diagonal not at all.
    """
    classes: list[list[int]] = []
    is_open = np.ones(len(rates), dtype=bool)
    diagonal = np.arange(len(rates))
    for vertex in range(len(rates)):
        if not is_open[vertex]:
            continue
        differs = rates != rates[vertex]
        differs[:, vertex] = False
        differs[diagonal, diagonal] = False
        alike = np.flatnonzero(~differs.any(axis=1) & is_open)
        is_open[alike] = False
        classes.append([int(v) for v in alike])
    return classes


def _take_one_device(rates: Rates, sizes: Sequence[int]) -> Cut:
    """The lightest cut between one device and all others."""
    counts = np.array(sizes, dtype=float)
    degrees = np.where(counts > 0, rates @ counts - rates.diagonal(), np.inf)
    block = int(np.argmin(degrees))
    side = [0] * len(sizes)
    side[block] = 1
    return Cut(float(degrees[block]), tuple(side))


def _take_blocks(weight: float, blocks: Sequence[int], sizes: Sequence[int]) -> Cut:
    side = [0] * len(sizes)
    for block in blocks:
        side[block] = sizes[block]
    return Cut(weight, tuple(side))


def _rates_between(rates: Rates, vertices: Sequence[_Vertex]) -> Rates:
    """One device of a vertex stands for all, since rates inside a vertex are not looked at: 0."""
    first = [vertex.blocks[0] for vertex in vertices]
    between: Rates = rates[np.ix_(first, first)]
    np.fill_diagonal(between, 0.0)
    return between


def _contract(vertices: Sequence[_Vertex]) -> _Vertex:
    blocks = tuple(block for vertex in vertices for block in vertex.blocks)
    return _Vertex(blocks, sum(vertex.num_devices for vertex in vertices))


def _bound_larger_cuts(between: Rates, counts: Rates) -> float:
    """No cut with two or more vertices on each side weighs less: s (N - s) w for the fewest devices s that
    two vertices have and the least bandwidth w. Where links differ little it spares the search."""
    if len(counts) < 4:
        return np.inf
    fewest = np.sort(counts)[:2].sum()
    least = between[np.triu_indices(len(counts), 1)].min()
    return float(least * fewest * (counts.sum() - fewest))


def _cut_vertices(between: Rates, vertices: Sequence[_Vertex], sizes: Sequence[int]) -> Cut:
    """The minimum cut that keeps each vertex whole, where no two are alike."""
    import networkx as nx

    counts = np.array([vertex.num_devices for vertex in vertices], dtype=float)
    graph = nx.from_numpy_array(between * np.outer(counts, counts))
    part = nx.node_connected_component(graph, 0)
    if len(part) < len(vertices):
        weight = 0.0
    else:
        weight, sides = nx.stoer_wagner(graph)
        part = next(side for side in sides if 0 in side)
    outside = [v for v in range(len(vertices)) if v not in part]
    return _take_blocks(float(weight), [b for v in outside for b in vertices[v].blocks], sizes)
