"""Which links are measured, and which at the same time. Pure.

Nodes with the same devices are alike, so one pair of nodes stands for all pairs of their types, and one
node of a type for the inside of all. What shares no node shares no wire, and is measured at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations_with_replacement

Pair = tuple[str, str]
"""Node names, sorted; the same twice: inside the node."""


def all_pairs(nodes: Mapping[str, Sequence[object]]) -> list[Pair]:
    """Every two nodes, and every node with several ranks with itself; `nodes`: an entry for each rank."""
    pairs = combinations_with_replacement(sorted(nodes), 2)
    return [(first, second) for first, second in pairs if first != second or len(nodes[first]) > 1]


def choose_pairs(devices: Mapping[str, Sequence[str]]) -> dict[Pair, tuple[Pair, ...]]:
    """The pairs to measure, each with all the pairs that it stands for, itself included.

    `devices`: by node the types of those that take part, one a rank. Different pairs are spread over the
    nodes of a type, so that more of them can be measured at once.
    """
    alike: dict[Hashable, list[Pair]] = {}
    for pair in all_pairs(devices):
        types = tuple(sorted(tuple(sorted(devices[node])) for node in pair))
        alike.setdefault((pair[0] == pair[1], types), []).append(pair)
    chosen: dict[Pair, tuple[Pair, ...]] = {}
    used = Counter[str]()
    for pairs in alike.values():
        best = min(pairs, key=lambda pair: used[pair[0]] + used[pair[1]])
        used.update(set(best))
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
