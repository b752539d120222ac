"""The order of computations where microbatches in flight are bounded, without ranks: a group's rounds alone.

Microbatch `m` of a group is microbatch `m` of all of its devices, and the rows of a round follow each other
(`candidate/deal_rows.py`): so which rounds of two groups share rows does not depend on who has them. It is
the schedule's order, by the same code (`schedule/orders/regular.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np

from zorselike.planner.candidate.candidate import CandidateGroup, Sizes
from zorselike.schedule.orders.in_flight import BACKWARD_PASSES, TRANSFER_PASSES
from zorselike.schedule.orders.nominal_time import Needs, StageNeeds, make_stages, run_in_nominal_time
from zorselike.schedule.orders.order import find_first_in_turn
from zorselike.schedule.orders.regular import order_computations

MOST_KEPT = 4096
"""Orders that are remembered."""


def _find_needs(rows: Sequence[Sequence[int]], owners: Sequence[int]) -> StageNeeds:
    """From the rows of the rounds of each group."""
    ends = [np.cumsum(own) for own in rows]

    def between(a: int, b: int) -> Needs:
        return Needs(np.searchsorted(ends[a], ends[b]).tolist(), np.searchsorted(ends[b], ends[a]).tolist())

    return StageNeeds.among(owners, len(ends[owners[-1]]), between)


def _list_owned(owners: Sequence[int]) -> list[list[int]]:
    """The ministages of each group."""
    return [[i for i, owner in enumerate(owners) if owner == g] for g in range(max(owners) + 1)]


@lru_cache(MOST_KEPT)
def _count_rows(all_sizes: tuple[Sizes, ...]) -> tuple[int, ...]:
    """Of all replicas in each round."""
    rows = np.zeros(max(map(len, all_sizes)), dtype=np.int64)
    for sizes, number in Counter(all_sizes).items():
        rows[: len(sizes)] += number * np.array(sizes, dtype=np.int64)
    return tuple(rows.tolist())


class Rounds(NamedTuple):
    """Of one group."""

    rows: tuple[int, ...]
    """Of each, all replicas together."""
    max_in_flight: int
    backward_passes: int = BACKWARD_PASSES["none"]
    """What a backward takes, in forwards."""

    @classmethod
    def of(cls, group: CandidateGroup, max_in_flight: int) -> Rounds:
        return cls(_count_rows(group.sizes), max_in_flight, BACKWARD_PASSES[group.mode.recompute])


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
        self._least: dict[object, tuple[int, ...]] = {}

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

    def find_least(self, groups: Sequence[CandidateGroup], owners: Sequence[int]) -> tuple[int, ...]:
        """As `schedule.orders.in_flight.least_in_flight`, of groups with these ministages."""
        rows = tuple(_count_rows(group.sizes) for group in groups)
        wanted = rows, tuple(owners)
        if wanted not in self._least:
            if len(self._least) >= MOST_KEPT:
                self._least.clear()
            self._least[wanted] = _find_needs(rows, owners).find_least(_list_owned(owners), 0)
        return self._least[wanted]

    def count_in_flight(self, numbers: Sequence[int], owners: Sequence[int]) -> list[int]:
        """Of how many of its rounds each group has gone forward and not backward through its last ministage,
        at most, where nothing is bounded (`schedule/orders/ours.py`); `numbers`: of all its rounds."""
        in_turn = owners[find_first_in_turn(owners) :]
        whole = lcm(*numbers)
        rounds = tuple(Rounds((whole // numbers[g],) * numbers[g], numbers[g]) for g in in_turn)
        order = self.find(Pipeline(rounds, tuple(range(len(rounds))), transfer_passes=TRANSFER_PASSES))
        found = list(numbers)
        for g, number in zip(in_turn, order.num_in_flight, strict=True):
            found[g] = number
        return found


def find_order(pipeline: Pipeline) -> Order:
    """The order of `order_in_flight`, all groups in one list; bounds that no step could keep are raised."""
    rounds, owners, lowest, transfer_passes = pipeline
    sizes = [own.rows for own in rounds]
    needs = _find_needs(sizes, owners)
    least = needs.find_least(_list_owned(owners), lowest)
    passes = [rounds[g].backward_passes if i >= lowest else 0 for i, g in enumerate(owners)]
    stages = make_stages(owners, sizes, passes, needs, transfer_passes=transfer_passes)
    bounds = [max(own.max_in_flight, fewest) for own, fewest in zip(rounds, least, strict=True)]
    order = run_in_nominal_time if transfer_passes else order_computations
    computations, most_in_flight = order(stages, needs, bounds)
    steps: list[Step] = []
    positions: list[list[int]] = [[] for _ in range(2 * len(owners))]
    for position, (i, is_forward, m) in enumerate(computations):
        way = 2 * i + (not is_forward)
        awaited, sender = stages[i].needs[is_forward], way - 2 if is_forward else way + 2
        steps.append(Step(owners[i], way, -1 if awaited is None else positions[sender][awaited[m]]))
        positions[way].append(position)
    return Order(tuple(steps), most_in_flight)
