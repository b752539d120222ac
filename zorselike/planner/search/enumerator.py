"""Which sets of devices, groupings and orders of groups are looked at, and how closely."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf, isfinite

from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.choose import DeviceSet, propose_devices
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.groups.candidates import Grouping, count_useful_groups, find_groupings
from zorselike.planner.groups.order import order_by_bandwidth, order_groups
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import COARSE_SHARE, SearchBudget
from zorselike.planner.search.builder import Groups
from zorselike.planner.search.coarse_search import CoarseSearch
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate
from zorselike.planner.search.top_k import WORTH_SIMULATING

ASSUMED_MICROBATCHES = 32
"""Microbatches of a step, in the first guess at groupings."""
FEW_ORDERS = 6
"""Up to so many orders are looked at where a grouping does not fit in the paper's."""
MOST_ORDERS = 24
"""Orders of groups, beyond which only the paper's is looked at."""
MOST_REFINED = 6
"""Groupings of a set of devices that are refined, and half as many with few microbatches in flight,
whose first estimates say less."""
FEW_DEVICES = 8
"""Up to so many every set of them is refined."""


class CandidateEnumerator:
    """Finds candidates for one problem."""

    def __init__(
        self,
        problem: PlanProblem,
        evaluator: CandidateEvaluator,
        bounds: DeviceBounds,
        budget: SearchBudget,
        count_actions: Callable[[CandidatePlan], int],
    ) -> None:
        """`count_actions` says how many of a candidate would be simulated."""
        self._problem, self._evaluator, self._bounds, self._budget = problem, evaluator, bounds, budget
        self._count_actions = count_actions
        self._num_layers = len(problem.workload.layers)
        self.found: dict[CandidatePlan, EstimatedCandidate] = {}
        self._best: EstimatedCandidate | None = None
        self.sets_seen: list[DeviceSet] = []

    def enumerate(self) -> None:
        """Finds candidates by estimate: in every set of devices all groupings, the best of these closely."""
        sets = propose_devices(
            self._problem, bounds=self._bounds, time_limit_s=min(0.3, 0.03 * self._budget.budget_s)
        )
        for number, devices in enumerate(sets):
            if self._is_hopeless(devices):
                continue
            if self._budget.is_enumeration_over():
                break
            self.sets_seen.append(devices)
            coarse = self._estimate_coarsely(devices)
            is_first = number == 0 or len(self._problem.usable) <= FEW_DEVICES
            for start in _take_best(coarse, MOST_REFINED if is_first else MOST_REFINED // 4):
                if self._budget.is_enumeration_over():
                    break
                for estimated in self._refine(start, devices):
                    self._keep(estimated)

    def _is_hopeless(self, devices: DeviceSet) -> bool:
        """Whether no plan of these devices would be simulated, beside the best estimate so far. Estimates
        know no egress, and what they allow may break limits when simulated: where money or limits count all
        sets are looked at, and so they are where devices are few."""
        problem = self._problem
        is_limited = problem.min_throughput > 0 or isfinite(problem.max_cost_per_iteration)
        if is_limited or problem.objective == "cost" or len(problem.usable) <= FEW_DEVICES:
            return False
        best_s = inf if self._best is None else self._best.score.wanted
        return devices.bound_s > WORTH_SIMULATING * best_s

    def _estimate_coarsely(self, devices: DeviceSet) -> list[EstimatedCandidate]:
        """Every grouping of a set of devices, the most promising first."""
        found: list[EstimatedCandidate] = []
        for groups, name in self.list_groups(devices):
            if self._budget.is_past(COARSE_SHARE):
                break
            candidates = CoarseSearch(self._evaluator, groups, name).run()
            if not candidates and self._problem.fixed.groups is None:
                candidates = self._estimate_in_other_orders(groups, name, devices)
            for estimated in candidates:
                found.append(estimated)
                self._keep(estimated)
        return sorted(found, key=lambda estimated: estimated.score)

    def _estimate_in_other_orders(
        self, groups: Groups, name: str, devices: DeviceSet
    ) -> list[EstimatedCandidate]:
        """Where a grouping does not fit in the paper's order: which groups come first and last, and have more
        ministages, can make the difference."""
        orders = order_groups(self._problem.read_bandwidths(devices.devices), groups, max_orders=FEW_ORDERS)
        for order in orders:
            reordered = tuple(groups[i] for i in order)
            if found := CoarseSearch(self._evaluator, reordered, f"{name}, in another order").run():
                return found
        return []

    def forget(self) -> None:
        """What was found with other memory."""
        self.found.clear()
        self._best = None
        self._budget.count_expected = lambda: 0
        self._budget.may_stop = False

    def _keep(self, estimated: EstimatedCandidate) -> None:
        self.found.setdefault(estimated.candidate, estimated)
        if self._best is None or estimated.score < self._best.score:
            self._best = estimated
            self._budget.count_expected = partial(self._count_actions, estimated.candidate)
        self._budget.may_stop = self._budget.may_stop or estimated.score.is_allowed

    def list_groups(self, devices: DeviceSet) -> Iterator[tuple[Groups, str]]:
        """Groupings, their groups in the paper's order."""
        fixed = self._problem.fixed
        if fixed.groups is not None:
            yield fixed.groups, "fixed"
            return
        bandwidths = self._problem.read_bandwidths(devices.devices)
        most = fixed.ministages or self._num_layers
        groupings = find_groupings(bandwidths, max_groups=min(most, count_useful_groups(bandwidths)))
        for grouping in sorted(groupings, key=lambda each: self._guess_s(bandwidths, each)):
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

    def _refine(self, start: EstimatedCandidate, devices: DeviceSet) -> Iterator[EstimatedCandidate]:
        """One decision after the other, then the groups in other orders, and the best of these again."""
        best = self._evaluator.refine(start)
        yield best
        groups = tuple(group.devices for group in best.choice.groups)
        if self._problem.fixed.groups is not None or len(groups) == 1:
            return
        orders = order_groups(self._problem.read_bandwidths(devices.devices), groups, max_orders=MOST_ORDERS)
        reordered = best
        for order in orders:
            if self._budget.is_enumeration_over():
                return
            choice = replace(best.choice, groups=tuple(best.choice.groups[i] for i in order))
            found = self._evaluator.try_choice(choice, f"{start.grouping}, in another order")
            if found is not None:
                yield found
                reordered = min(reordered, found, key=lambda estimated: estimated.score)
        if reordered is not best:
            yield self._evaluator.refine(reordered)


def _take_best(coarse: list[EstimatedCandidate], number: int) -> list[EstimatedCandidate]:
    """So many of the best, and half as many of those with bounds on microbatches in flight."""
    in_flight = [found for found in coarse if found.choice.in_flight_factor is not None][: number // 2]
    return [*coarse[:number], *(found for found in in_flight if found not in coarse[:number])]
