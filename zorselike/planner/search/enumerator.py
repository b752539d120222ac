"""Which sets of devices, groupings and orders of groups are looked at, and how closely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, isfinite

from zorselike.planner.candidate.choice import Groups
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.choose import DeviceSet
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.groups.candidates import Grouping, count_useful_groups, find_groupings
from zorselike.planner.groups.order import order_by_bandwidth, order_groups
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import SearchBudget
from zorselike.planner.search.builder import FEW_DEVICES
from zorselike.planner.search.coarse_search import CoarseSearch
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate
from zorselike.planner.search.found import FoundCandidates
from zorselike.planner.search.refiner import Refiner

WORTH_SIMULATING = 1.3
"""Times the best estimate that a set of devices may take at best to be looked at; and times what it came from
that a small change may, to be simulated."""
ASSUMED_MICROBATCHES = 32
"""Microbatches of a step, in the first guess at groupings."""
FEW_ORDERS = 6
"""Up to so many orders are looked at where a grouping does not fit in the paper's."""
MOST_ORDERS = 24
"""Up to so many orders of groups are all tried once a grouping is refined."""
MOST_REFINED = 6
"""Groupings of a set of devices that are refined, and half as many with few microbatches in flight,
whose first estimates say less."""
NAMED_TURN = 4
"""Every so many looks, one is at what people would try first."""
FAR = 5.0
"""Where all first looks are so many times above the bounds of their devices, links say more than these, and
what people would try first is glanced at."""
LOOKED = 0.05
"""By this share more promising must be another grouping of devices that were looked at, for each time."""
FAST_SHARE = 0.5
"""Up to this share of what all devices compute, gradients of the whole model are soon reduced."""
REFINED = 0.02
"""The same of what is refined."""
VAIN = 20
"""Steps of refining that count as much as one refinement where none of them was better."""
ASSUMED_S = 0.05
"""Nominal seconds of one grouping's first look, and of one step of refining, before any was done."""


@dataclass
class SetLook:
    """What is known of one set of devices."""

    devices: DeviceSet
    groupings: Iterator[tuple[Groups, str]]
    """Those not looked at yet, the most promising first."""
    num_looked: int = 0
    is_over: bool = False
    """Whether all groupings were looked at."""
    coarse: list[EstimatedCandidate] = field(default_factory=list)
    """First estimates, the best first."""
    glance: EstimatedCandidate | None = None
    """The best of some with all devices in one group."""
    refined: set[int] = field(default_factory=set)
    """Which of these were refined, by identity."""


class CoarseLooks:
    """First estimates: a grouping at a time, of the set of devices that promises most (`turns.Work`)."""

    def __init__(
        self,
        problem: PlanProblem,
        evaluator: CandidateEvaluator,
        bounds: DeviceBounds,
        found: FoundCandidates,
        budget: SearchBudget,
    ) -> None:
        self._problem, self._evaluator, self._bounds, self._found = problem, evaluator, bounds, found
        self._budget = budget
        self._num_layers = len(problem.workload.layers)
        self.looks: list[SetLook] = []
        self._next: SetLook | None = None
        self._has_glanced = False
        self._spent_s, self._num_done = 0.0, 0

    def begin(self, sets: Iterator[DeviceSet] | tuple[DeviceSet, ...]) -> None:
        """Looks at these sets, the most promising first, from now on."""
        self.looks = [SetLook(devices, self.list_groups(devices)) for devices in sets]

    def peek(self) -> float | None:
        self._next = self._choose()
        if self._next is None:
            return None
        return self._spent_s / self._num_done if self._num_done else ASSUMED_S

    def advance(self) -> float:
        look, begin_s = self._next, self._evaluator.nominal_s
        assert look is not None, "peek found one"
        chosen = next(look.groupings, None)
        if chosen is None:
            look.is_over = True
            return 0.0
        candidates: list[EstimatedCandidate] = []
        for degree in self._evaluator.list_first_degrees(chosen[0]):
            candidates = candidates or self._estimate(*chosen, look.devices, degree)
        for estimated in candidates:
            self._found.keep(estimated)
        self._budget.has_found = self._budget.has_found or bool(candidates)
        look.coarse = sorted([*look.coarse, *candidates], key=lambda estimated: estimated.score)
        look.num_looked += 1
        if not self._has_glanced and self._reached > FAR:
            self._has_glanced = True
            self._glance()
        spent_s = self._evaluator.nominal_s - begin_s
        self._spent_s, self._num_done = self._spent_s + spent_s, self._num_done + 1
        return spent_s

    def _choose(self) -> SetLook | None:
        """What promises most, and now and then a grouping of what people would try first."""
        possible = [look for look in self.looks if not look.is_over and not self._is_hopeless(look.devices)]
        named = (look for look in possible if look.devices.is_share and not look.num_looked)
        if self._num_done % NAMED_TURN == 0 and (first := next(named, None)) is not None:
            return first
        reached = self._reached

        def promise(look: SetLook) -> tuple[float, float]:
            best = look.coarse[0] if look.coarse else None
            if best is None and look.num_looked:
                return inf, float(look.num_looked)  # Nothing fitted yet.
            if best is None:
                glanced = inf if look.glance is None else look.glance.score.wanted
                return 0.0, min(glanced, reached * self._bound(look))
            return best.score.excess, self._found.expect(best) * (1 + LOOKED * look.num_looked)

        return min(possible, key=promise, default=None)

    def _bound(self, look: SetLook) -> float:
        is_money = self._problem.objective == "cost"
        return look.devices.bound_cost if is_money else look.devices.bound_s

    @property
    def _reached(self) -> float:
        """The least that the best of a set takes, in its bound."""
        pairs = ((look, own) for look in self.looks for own in (*look.coarse[:1], look.glance) if own)
        return min((own.score.wanted / max(self._bound(look), 1e-30) for look, own in pairs), default=1.0)

    def _glance(self) -> None:
        """At all devices in one group, of the sets that people would try first and of single nodes: of
        devices that a slow link joins bounds promise what no plan reaches, and a few alone may be faster."""
        problem = self._problem
        if problem.fixed.groups is not None or problem.fixed.bounds_in_flight:
            return
        region_of = [problem.cluster.nodes[node].region for node in problem.nodes]
        for look in self.looks:
            devices = look.devices.devices
            spans = len({region_of[device] for device in devices}) > 1
            is_simple = look.devices.is_share or len({problem.nodes[device] for device in devices}) == 1
            if not is_simple or look.num_looked or (spans and not problem.spans_regions):
                continue
            found = CoarseSearch(self._evaluator, (devices,), "one group").glance()
            for estimated in found:
                self._found.keep(estimated)
            look.glance = min(found, key=lambda own: own.score, default=None)

    def _is_hopeless(self, devices: DeviceSet) -> bool:
        """Whether no plan of these devices would be simulated, beside the best estimate so far. Estimates
        know no egress, and what they allow may break limits when simulated: where money or limits count all
        sets are looked at, and so they are where devices are few."""
        problem = self._problem
        is_limited = problem.min_throughput > 0 or isfinite(problem.max_cost_per_iteration)
        if is_limited or problem.objective == "cost" or len(problem.usable) <= FEW_DEVICES:
            return False
        best_s = inf if self._found.best is None else self._found.best.score.wanted
        return devices.bound_s > WORTH_SIMULATING * best_s

    def _estimate(
        self, groups: Groups, name: str, devices: DeviceSet, degree: int
    ) -> list[EstimatedCandidate]:
        """With replicas of so many devices, in the paper's order, or where that does not fit in others: which
        groups come first and last, and have more ministages, can make the difference."""
        found = CoarseSearch(self._evaluator, groups, name, degree=degree).run()
        if found or self._problem.fixed.groups is not None:
            return found
        orders = order_groups(self._problem.read_bandwidths(devices.devices), groups, max_orders=FEW_ORDERS)
        for order in orders:
            reordered, its_name = tuple(groups[i] for i in order), f"{name}, in another order"
            if found := CoarseSearch(self._evaluator, reordered, its_name, degree=degree).run():
                return found
        return []

    def list_groups(self, devices: DeviceSet) -> Iterator[tuple[Groups, str]]:
        """Groupings, their groups in the paper's order."""
        fixed = self._problem.fixed
        if fixed.groups is not None:
            yield fixed.groups, "fixed"
            return
        bandwidths = self._problem.read_bandwidths(devices.devices)
        most = fixed.ministages or self._num_layers
        groupings = find_groupings(bandwidths, max_groups=min(most, count_useful_groups(bandwidths)))
        ranked = sorted(groupings, key=lambda each: self._guess_s(bandwidths, each))
        # All in one group is soon simulated: where its links are fast it comes second.
        most_s = FAST_SHARE * devices.bound_s

        def waits(grouping: Grouping) -> bool:
            return len(grouping.groups) > 1 or self._guess_s(bandwidths, grouping) > most_s

        for grouping in (*ranked[:1], *sorted(ranked[1:], key=waits)):
            order = order_by_bandwidth(bandwidths, grouping.groups)
            yield tuple(grouping.groups[i] for i in order), grouping.name

    def _guess_s(self, bandwidths: Bandwidths, grouping: Grouping) -> float:
        """What speaks against a grouping before it is looked at, in seconds: all gradients of the slowest
        group over its slowest link, and a microbatch's way through each group."""
        types = self._problem.device_types
        speeds = [sum(1 / self._bounds.model_s(types[d]) for d in group) for group in grouping.groups]
        model_bytes = self._problem.workload.num_parameters * self._problem.parameter_bytes.gradient
        reduced_s = max(
            model_bytes * speed / sum(speeds) / bandwidths.slowest_link(own)
            for speed, own in zip(speeds, grouping.groups, strict=True)
        )
        fill_s = self._problem.global_batch / sum(speeds) * len(grouping.groups) / ASSUMED_MICROBATCHES
        return reduced_s + fill_s


@dataclass(eq=False)
class _Refinement:
    """One first estimate that is refined, or waits to be."""

    look: SetLook
    best: EstimatedCandidate
    """The first estimate, then the best that it led to."""
    number: int
    """Of the same set of devices so many were begun before it."""
    steps: Iterator[EstimatedCandidate] | None = None
    """None: it was not begun."""
    num_vain: int = 0
    """Steps since the last that was better."""


class Refinements:
    """The best first estimates of each set, changed one decision after the other (`turns.Work`). One waits as
    soon as another promises more: what is looked at first is seldom the best, and takes hundreds of steps."""

    def __init__(
        self,
        problem: PlanProblem,
        evaluator: CandidateEvaluator,
        looks: CoarseLooks,
        found: FoundCandidates,
    ) -> None:
        self._problem, self._evaluator, self._looks, self._found = problem, evaluator, looks, found
        self._refiner = Refiner(problem, evaluator)
        self._begun: list[_Refinement] = []
        self._next: _Refinement | None = None
        self._spent_s, self._num_done = 0.0, 0

    def peek(self) -> float | None:
        # Of equals what was begun.
        self._next = min(chain(self._begun, self._list_waiting()), key=self._promise, default=None)
        if self._next is None:
            return None
        return self._spent_s / self._num_done if self._num_done else ASSUMED_S

    def advance(self) -> float:
        going, begin_s = self._next, self._evaluator.nominal_s
        assert going is not None, "peek found one"
        if going.steps is None:
            going.look.refined.add(id(going.best))
            going.steps = self._refine(going.best, going.look.devices)
            self._begun.append(going)
        estimated = next(going.steps, None)
        if estimated is None:
            self._begun.remove(going)
        else:
            self._found.keep(estimated)
            going.num_vain += 1
            if estimated.score < going.best.score:
                going.best, going.num_vain = estimated, 0
        spent_s = self._evaluator.nominal_s - begin_s
        self._spent_s, self._num_done = self._spent_s + spent_s, self._num_done + 1
        return spent_s

    @property
    def num_waiting(self) -> int:
        """First estimates that are still to be refined."""
        return len(self._begun) + sum(1 for _ in self._list_waiting())

    def _list_waiting(self) -> Iterator[_Refinement]:
        has_few = len(self._problem.usable) <= FEW_DEVICES
        for number, look in enumerate(self._looks.looks):
            most = MOST_REFINED if number == 0 or has_few else MOST_REFINED // 3
            for start in _take_best(look.coarse, most):
                if id(start) not in look.refined:
                    yield _Refinement(look, start, len(look.refined))

    def _promise(self, one: _Refinement) -> tuple[float, float]:
        before = one.number + one.num_vain / VAIN
        return one.best.score.excess, self._found.expect(one.best) * (1 + REFINED * before)

    def _refine(self, start: EstimatedCandidate, devices: DeviceSet) -> Iterator[EstimatedCandidate]:
        """One decision after the other, then the groups in other orders, and the best of these again."""
        best = start
        for best in self._refiner.refine(start):
            yield best
        groups = tuple(group.devices for group in best.choice.groups)
        if self._problem.fixed.groups is not None or len(groups) == 1:
            return
        orders = order_groups(self._problem.read_bandwidths(devices.devices), groups, max_orders=MOST_ORDERS)
        reordered = best
        for order in orders:
            choice = replace(best.choice, groups=tuple(best.choice.groups[i] for i in order))
            found = self._evaluator.try_choice(choice, f"{start.grouping}, in another order")
            if found is not None:
                yield found
                reordered = min(reordered, found, key=lambda estimated: estimated.score)
        if reordered is not best:
            yield from self._refiner.refine(reordered)


def _take_best(coarse: list[EstimatedCandidate], number: int) -> list[EstimatedCandidate]:
    """So many of the best, and half as many of those with bounds on microbatches in flight."""
    in_flight = [found for found in coarse if found.choice.in_flight_factor is not None][: number // 2]
    return [*coarse[:number], *(found for found in in_flight if found not in coarse[:number])]
