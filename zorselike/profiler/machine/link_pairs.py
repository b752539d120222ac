"""Which links are measured, and which at the same time. Pure.

Nodes with the same devices are alike, so one pair of nodes stands for all pairs of their types, and one
node of a type for the inside of all. What shares no node shares no wire, and is measured at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations_with_replacement

Pair = tuple[str, str]
"""Node names, sorted; the same twice: inside the node."""


def node_types(devices: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Of each node: its devices' types, sorted."""
    return {node: tuple(sorted(types)) for node, types in devices.items()}


def choose_pairs(devices: Mapping[str, Sequence[str]]) -> dict[Pair, tuple[Pair, ...]]:
    """The pairs to measure, each with all the pairs that it stands for, itself included.

    `devices`: by node the types of those that take part, one a rank. Different pairs are spread over the
    nodes of a type, so that more of them can be measured at once.
    """
    type_of = node_types(devices)
    nodes = sorted(devices)
    alike: dict[Hashable, list[Pair]] = {}
    for first, second in combinations_with_replacement(nodes, 2):
        is_inside = first == second
        if is_inside and len(devices[first]) < 2:
            continue
        types = tuple(sorted((type_of[first], type_of[second])))
        alike.setdefault((is_inside, types), []).append((first, second))
    chosen: dict[Pair, tuple[Pair, ...]] = {}
    used: dict[str, int] = dict.fromkeys(nodes, 0)
    for pairs in alike.values():
        best = min(pairs, key=lambda pair: used[pair[0]] + used[pair[1]])
        for node in set(best):
            used[node] += 1
        chosen[best] = tuple(pairs)
    return chosen


def make_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs in rounds, no node twice in one; the insides of nodes first, which are all at once."""
    rounds: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: pair[0] != pair[1]):
        for known in rounds:
            if not {node for other in known for node in other} & set(pair):
                known.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds
