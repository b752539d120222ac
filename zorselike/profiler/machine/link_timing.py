"""Seconds of a message between two ranks, by its size; which links are measured, and which at the same time.

Nodes with the same devices are alike, so one pair of nodes stands for all pairs of their types, and one
node of a type for the inside of all. What shares no node shares no wire, and is measured at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations_with_replacement

import torch
import torch.distributed as dist

from zorselike.cost.profile import LinkTimes, Source
from zorselike.profiler.clock import Clock, make_rising, trimmed_mean
from zorselike.profiler.machine.collective_timing import MORE_OF_SMALL, SMALL
from zorselike.profiler.machine.group_clock import ComputeBurst
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.processes.processes import Processes

SIZES = tuple(2**exponent for exponent in range(10, 27, 2))
"""Bytes of a message: 1 KiB to 64 MiB."""

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


def measure_links(
    pairs: Iterable[Pair], processes: Processes, *, repeats: int, source: Source, sizes: Sequence[int] = SIZES
) -> list[LinkTimes]:
    """The times of those pairs in which this rank begins, round by round; collective.

    The first rank of each node speaks for it, inside a node the first two.
    """
    found = []
    group, device, nodes = processes.everyone, processes.device, processes.nodes
    for pairs_of_round in make_rounds(pairs):
        for first, second in pairs_of_round:
            ranks = begins, answers = nodes[first][0], nodes[second][1 if first == second else 0]
            if processes.rank not in ranks:
                continue
            is_first = processes.rank == begins
            other = answers if is_first else begins
            seconds = [
                time_messages(size, other, begins=is_first, group=group, device=device, repeats=repeats)
                for size in sizes
            ]
            if is_first:
                found.append(
                    LinkTimes(
                        between=(min(first, second), max(first, second)),
                        num_bytes=tuple(sizes),
                        seconds=make_rising(seconds),
                        source=source,
                    )
                )
        # Nobody begins a round while others still use its wires.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return found


def time_messages(
    num_bytes: int, other: int, *, begins: bool, group: ProcessGroup, device: torch.device, repeats: int
) -> float:
    """Mean seconds of a message one way: half of there and back. Both ranks call it at once."""
    clock, burst = Clock(device), ComputeBurst(device)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(1 + repeats * (MORE_OF_SMALL if num_bytes <= SMALL else 1)):
        burst()
        begin = clock.mark()
        if begins:
            dist.send(message, other, group=group)
            dist.recv(message, other, group=group)
        else:
            dist.recv(message, other, group=group)
            dist.send(message, other, group=group)
        seconds.append(clock.seconds(begin, clock.mark()) / 2)
    return trimmed_mean(seconds[1:])  # In the first one connections are made.
