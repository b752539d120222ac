"""The planner's problem for devices whose memory did not suffice: they are planned for with less of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.planner.problem import PlanProblem

SHARE = 0.9
"""Of what a device was planned for with before, each time that it did not suffice."""


def with_less_memory(problem: PlanProblem, exhausted: Mapping[int, int]) -> PlanProblem:
    """The same question, with less memory of some devices. What is not known of a node stays so.

    Args:
        exhausted: by index into `Cluster.places`: how often that device was out of memory.
    """
    cluster = problem.cluster
    nodes = list(cluster.nodes)
    for number, node in enumerate(nodes):
        own = [i for i, place in enumerate(cluster.places) if place.node == number]
        sizes = [find_memory_bytes(cluster, cluster.places[i]) for i in own]
        known = [size for size in sizes if size is not None]
        if len(known) == len(own) and exhausted.keys() & {*own}:
            left = (round(size * SHARE ** exhausted.get(i, 0)) for i, size in zip(own, known, strict=True))
            nodes[number] = replace(node, memory_bytes=tuple(left))
    return replace(problem, cluster=replace(cluster, nodes=tuple(nodes)))
