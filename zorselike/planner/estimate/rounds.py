"""The order of computations where microbatches in flight are bounded, without ranks: a group's rounds alone.

Microbatch `m` of a group is microbatch `m` of all of its devices, and the rows of a round follow each other
(`candidate/deal_rows.py`): so which rounds of two groups share rows does not depend on who has them. It is
the schedule's order, by the same code (`schedule/orders/regular.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil, lcm
from typing import NamedTuple

import numpy as np

from zorselike.planner.candidate.candidate import CandidateGroup, Sizes
from zorselike.schedule.orders.in_flight import BACKWARD_PASSES, TRANSFER_PASSES
from zorselike.schedule.orders.nominal_time import Needs, StageNeeds, make_stages, run_in_nominal_time
from zorselike.schedule.orders.order import find_first_in_turn
from zorselike.schedule.orders.regular import order_computations

MOST_KEPT = 4096
"""Orders that are remembered."""
_FEW = 64
_ROUND_OFF = 1e-9


@lru_cache(_FEW)
def _find_needs(rows: tuple[tuple[int, ...], ...], owners: tuple[int, ...]) -> StageNeeds:
    """From the rows of the rounds of each group; bounds are found from them and then orders."""
    ends = [np.cumsum(own) for own in rows]

    def between(a: int, b: int) -> Needs:
        return Needs(np.searchsorted(ends[a], ends[b]).tolist(), np.searchsorted(ends[b], ends[a]).tolist())

    return StageNeeds.among(owners, len(ends[owners[-1]]), between)


def _list_owned(owners: Sequence[int]) -> list[list[int]]:
    """The ministages of each group."""
    return [[i for i, owner in enumerate(owners) if owner == g] for g in range(max(owners) + 1)]


@lru_cache(MOST_KEPT)
def _count_rows(all_sizes: tuple[Sizes, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of all replicas in each round, and of the one that has most."""
    rows = np.zeros(max(map(len, all_sizes)), dtype=np.int64)
    most = rows.copy()
    for sizes, number in Counter(all_sizes).items():
        own = np.array(sizes, dtype=np.int64)
        rows[: len(own)] += number * own
        np.maximum(most[: len(own)], own, out=most[: len(own)])
    return tuple(rows.tolist()), tuple(most.tolist())


class Rounds(NamedTuple):
    """Of one group."""

    rows: tuple[int, ...]
    """Of each, all replicas together."""
    most_rows: tuple[int, ...]
    """Likewise of the replica that has most: they compute side by side."""
    max_in_flight: int
    backward_passes: int = BACKWARD_PASSES["none"]
    """What a backward takes, in forwards."""

    @classmethod
    def of(cls, group: CandidateGroup, max_in_flight: int) -> Rounds:
        return cls(*_count_rows(group.sizes), max_in_flight, BACKWARD_PASSES[group.mode.recompute])


class Pipeline(NamedTuple):
    """What an order depends on."""

    rounds: tuple[Rounds, ...]
    """Of each group."""
    owners: tuple[int, ...]
    """The group of each ministage."""
    lowest_backward: int = 0
    """The first ministage that goes backward."""
    transfer_passes: int = 0
    """What a transfer takes, in forwards."""


class Step(NamedTuple):
    """One round of a group through one of its ministages, forward or backward."""

    group: int
    way: int
    """Twice the ministage for forward, one more for backward."""
    awaited: int
    """Position of the step of another ministage whose results it waits for; -1: of none."""


class Order(NamedTuple):
    """What groups compute, everything after what it waits for."""

    steps: tuple[Step, ...]
    num_in_flight: tuple[int, ...]
    """Rounds of each group that are forward and not backward, of all its ministages, at most."""


class RoundOrders:
    """Orders of computations; keeps what it found."""

    def __init__(self) -> None:
        self._found: dict[Pipeline, Order] = {}

    def find(self, pipeline: Pipeline) -> Order:
        """As `find_order`."""
        if pipeline not in self._found:
            if len(self._found) >= MOST_KEPT:
                self._found.clear()
            order = self._found[pipeline] = find_order(pipeline)
            if len(pipeline.owners) == len(pipeline.rounds):
                # With bounds that are met and not exceeded anyway it is the same.
                met = tuple(
                    own._replace(max_in_flight=most)
                    for own, most in zip(pipeline.rounds, order.num_in_flight, strict=True)
                )
                self._found[pipeline._replace(rounds=met)] = order
        return self._found[pipeline]

    def find_bounds(
        self, groups: Sequence[CandidateGroup], owners: tuple[int, ...], factor: float
    ) -> Iterator[int]:
        """For the rounds in flight of each group: what a pipeline of these groups is full with, or `factor`
        times as many where the rows of all match, and at least what their rows need."""
        rows = tuple(_count_rows(group.sizes)[0] for group in groups)
        least, full = find_least(rows, owners), find_full(rows)
        depths = list(accumulate(1 / group.microbatches_per_device for group in reversed(groups)))[::-1]
        rounds = []
        for g, (group, own, depth) in enumerate(zip(groups, full, depths, strict=True)):
            number = group.microbatches_per_device
            # Through all ministages but its last a microbatch passes all groups.
            passes = owners.count(g) - 1
            matching = (passes * depths[0] + depth) * number - _ROUND_OFF
            filled = passes * full[0] / groups[0].microbatches_per_device * number + own - _ROUND_OFF
            more = max(0, ceil(filled) - ceil(matching))
            rounds.append(Rounds.of(group, ceil(factor * matching) + more))
        order = self.find(Pipeline(tuple(rounds), owners))
        # Later groups never come to hold as many: a bound that is never met would only mislead.
        return map(max, least, order.num_in_flight)

    def count_in_flight(self, numbers: Sequence[int], owners: Sequence[int]) -> list[int]:
        """Of how many of its rounds each group has gone forward and not backward through its last ministage,
        at most, where nothing is bounded (`schedule/orders/ours.py`); `numbers`: of all its rounds."""
        in_turn = owners[find_first_in_turn(owners) :]
        whole = lcm(*numbers)
        rows = [(whole // numbers[g],) * numbers[g] for g in in_turn]
        rounds = tuple(Rounds(own, own, len(own)) for own in rows)
        order = self.find(Pipeline(rounds, tuple(range(len(rounds))), transfer_passes=TRANSFER_PASSES))
        found = list(numbers)
        for g, number in zip(in_turn, order.num_in_flight, strict=True):
            found[g] = number
        return found


@lru_cache(MOST_KEPT)
def find_least(rows: tuple[tuple[int, ...], ...], owners: tuple[int, ...]) -> tuple[int, ...]:
    """As `schedule.orders.in_flight.least_in_flight`, of groups with these ministages.

    Args:
        rows: of each group's rounds.
    """
    return _find_needs(rows, owners).find_least(_list_owned(owners), 0)


@lru_cache(MOST_KEPT)
def find_full(rows: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Rounds of each group that are in flight, with one ministage each, all of which take as long as each
    other, so that between two of them none waits for the other. Where rows do not match those are more than
    there are groups from it to the last; over three groups one more may be needed, which the factors of
    `find_bounds` give.

    Args:
        rows: of each group's rounds.
    """
    full = [1]
    for needs in reversed(_find_needs(rows, tuple(range(len(rows)))).between):
        # Before its `m`th backward, which waits for `awaited` of the group behind it, that one goes forward
        # with as many more as it has in flight; the rows of these must not be those that went last.
        last, behind = len(needs.forward) - 1, full[-1]
        ahead = max(
            needs.forward[min(awaited + behind - 1, last)] - m for m, awaited in enumerate(needs.backward)
        )
        # Nor may it be without the rows of its next forward when it has gone backward.
        back = (bisect_left(needs.backward, m) for m in range(last + 1))
        supply = max(needs.forward[min(m + behind, last)] - own for m, own in enumerate(back))
        full.append(min(max(ahead + 2, supply + 1), len(needs.backward)))
    return tuple(reversed(full))


def find_order(pipeline: Pipeline) -> Order:
    """The order of `order_in_flight`, all groups in one list; bounds that no step could keep are raised."""
    rounds, owners, lowest, transfer_passes = pipeline
    needs = _find_needs(tuple(own.rows for own in rounds), owners)
    least = needs.find_least(_list_owned(owners), lowest)
    passes = [rounds[g].backward_passes if i >= lowest else 0 for i, g in enumerate(owners)]
    sizes = [own.most_rows for own in rounds]
    stages = make_stages(owners, sizes, passes, needs, transfer_passes=transfer_passes)
    bounds = [max(own.max_in_flight, fewest) for own, fewest in zip(rounds, least, strict=True)]
    order = run_in_nominal_time if transfer_passes else order_computations
    computations, most_in_flight, _ = order(stages, needs, bounds)
    steps: list[Step] = []
    positions: list[list[int]] = [[] for _ in range(2 * len(owners))]
    for position, (i, is_forward, m) in enumerate(computations):
        way = 2 * i + (not is_forward)
        awaited, sender = stages[i].needs[is_forward], way - 2 if is_forward else way + 2
        steps.append(Step(owners[i], way, -1 if awaited is None else positions[sender][awaited[m]]))
        positions[way].append(position)
    return Order(tuple(steps), most_in_flight)
