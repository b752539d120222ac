"""Choices built and estimated, each once; and the best of a grouping changed one decision after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle

from zorselike.errors import ClusterError
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.modes import Mode, list_families
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.groups.replicas import DEGREES, Degrees
from zorselike.planner.layers.split_layers import visit_in_turn
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.builder import CandidateBuilder
from zorselike.planner.search.choice import Choice, Groups, find_nearest, list_microbatch_counts
from zorselike.planner.search.neighbours import (
    LayerMove,
    change_degrees,
    drop_nodes,
    move_groups,
    move_layer,
)
from zorselike.planner.search.score import WORST, Score, score
from zorselike.schedule.orders.in_flight import LowBoundError

EACH_S, EACH_DEVICE_S = 6e-3, 5e-5
"""Nominal seconds of building and estimating a candidate, and for each of its devices."""
ESTIMATING_SHARE = 0.4
"""Of these where memory is not looked at."""
_FEW_LAYERS = 12
"""Up to so many layers every number of ministages is tried."""
WORTH_MOVING = 1e-3
"""Share of a step that moving a layer has to save, by estimates: they do not know that groups wait for each
other where last ministages go forward and backward in turn and begin at different times."""
FIRST_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2)
"""Layers of a group's first ministage, in those of an even part."""
IN_FLIGHT_FACTORS = (1.0, 1.5, 2.0, 3.0)
"""Microbatches in flight, in those that 1F1B needs."""
_MOST_COMPUTATIONS = 4_000
"""Of all groups that return to their ministages; ordering them takes about 5 us each."""
_MISSES = 2
"""Numbers in a row that are no better, after which none further on is tried."""
_MINISTAGES_PER_GROUP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class EstimatedCandidate:
    """A candidate plan, the choice it was made of, and its estimate."""

    choice: Choice
    candidate: CandidatePlan
    score: Score
    grouping: str

    @property
    def waiting(self) -> list[int]:
        """Groups that wait for reductions for want of memory."""
        pairs = enumerate(zip(self.choice.groups, self.candidate.groups, strict=True))
        return [
            g for g, (chosen, own) in pairs if chosen.mode.overlap_grad_reduce > own.mode.overlap_grad_reduce
        ]


_Refining = Generator["EstimatedCandidate", None, "EstimatedCandidate"]
"""Yields the best after everything that is tried, and returns the last."""


class CandidateEvaluator:
    """Estimates candidates of one problem; keeps what it found."""

    def __init__(
        self,
        problem: PlanProblem,
        builder: CandidateBuilder,
        step_time: StepTimeEstimate,
        price: Callable[[Iterable[int]], float],
        check: Callable[[], None],
    ) -> None:
        """`price` of devices by the hour; `check` raises where a search is over."""
        self._problem, self.builder, self._step_time = problem, builder, step_time
        self._price, self._check = price, check
        self.families = list_families(problem.fixed)
        self.modes = tuple(mode for family in self.families for mode in family)
        self._found: dict[Choice, EstimatedCandidate | None] = {}
        self._too_slow: dict[Choice, Score] = {}
        """Choices that were too slow to be built in full, with their estimate."""
        self.host_full: set[Choice] = set()
        """What fits no host, though it does all devices."""
        self._scores: dict[CandidatePlan, Score] = {}
        self.is_doubtful = False
        """Whether nothing fitted the last groups, so that one asks first whether anything may."""
        self.num_estimated = 0
        self.nominal_s = 0.0
        """Nominal seconds of all that was built and estimated (`turns.py`)."""

    def forget(self) -> None:
        """What was found with other memory."""
        self._found.clear()
        self._too_slow.clear()
        self.host_full.clear()

    # -- one choice ------------------------------------------------------------------------

    def try_choice(
        self, choice: Choice, grouping: str, limit: Score | None = None
    ) -> EstimatedCandidate | None:
        """The candidate and its estimate; None where it does not fit, or ranks no better than `limit`."""
        if self._problem.fixed.tensor_parallel is not None:
            choice = self._keep_degrees(choice)
        if choice in self._found:
            return self._found[choice]
        if self._is_idle(choice):
            return None
        if (known := self._find_known(choice)) is not None:
            self._found[choice] = found = self._found[known]
            return found
        if limit is not None and choice in self._too_slow and not self._too_slow[choice] < limit:
            return None
        self._check()
        each_s = self.nominal_of(sum(len(group.devices) for group in choice.groups))
        asked: list[Score] = []

        def is_worth(candidate: CandidatePlan) -> bool:
            assert limit is not None
            guess = self._score(candidate)
            if guess is None or not guess < limit:
                asked.append(WORST if guess is None else guess)
                return False
            return True

        candidate = self.builder.build(choice, None if limit is None else is_worth)
        if asked:
            self.nominal_s += ESTIMATING_SHARE * each_s
            self._too_slow[choice] = asked[0]
            return None
        self.nominal_s += each_s
        if candidate is None and self.builder.host_was_full:
            self.host_full.add(choice)
        self._found[choice] = None if candidate is None else self._estimate(candidate, choice, grouping)
        self._too_slow.pop(choice, None)
        return self._found[choice]

    def _keep_degrees(self, choice: Choice) -> Choice:
        """With the tensor parallelism that is fixed, whatever devices came together."""
        for g, group in enumerate(choice.groups):
            degrees = self._problem.first_degrees(group.devices)
            if degrees != group.degrees:
                choice = choice.change(g, degrees=degrees)
        return choice

    def nominal_of(self, num_devices: int) -> float:
        """Nominal seconds of one candidate."""
        return EACH_S + EACH_DEVICE_S * num_devices

    @cached_property
    def node_kinds(self) -> tuple[tuple[str, str], ...]:
        """By device: of which nodes its node is one of several that are alike."""
        cluster = self._problem.cluster
        return tuple((cluster.nodes[place.node].zone, cluster.device_type(place)) for place in cluster.places)

    def _find_known(self, choice: Choice) -> Choice | None:
        """Where some groups may not wait for reductions: the same where all may, if nothing of that fits, or
        none of its groups waits; None where this is not known."""
        free = replace(choice, groups=tuple(replace(group, may_wait=True) for group in choice.groups))
        if free == choice or free not in self._found:
            return None
        found = self._found[free]
        return None if found is not None and found.waiting else free

    def offloads_in_vain(self, mode: Mode, num_ministages: int) -> bool:
        """Whether it offloads what never leaves: activations where each microbatch goes at once back."""
        return num_ministages == 1 and self._problem.fixed.offload is None and "activations" in mode.offload

    def _is_idle(self, choice: Choice) -> bool:
        """Whether it offloads what never leaves, or bounds microbatches in flight where that cannot be or
        what is fixed says otherwise."""
        if choice.in_flight_factor is not None and not self._may_bound(choice):
            return True
        if self._problem.fixed.bounds_in_flight and choice.in_flight_factor is None:
            return True
        return any(self.offloads_in_vain(group.mode, choice.num_ministages) for group in choice.groups)

    def _may_bound(self, choice: Choice) -> bool:
        """Whether microbatches in flight may be bounded."""
        fixed = self._problem.fixed
        return (
            len(choice.groups) > 1
            and fixed.bounds_in_flight is not False
            and all(group.mode.may_bound_in_flight for group in choice.groups)
            and (not choice.returns or self._may_return(choice))
        )

    def _may_return(self, choice: Choice) -> bool:
        """Whether groups may return to their ministages: in modes that are allowed, and not so often that the
        order of it takes long to find."""
        owners = visit_in_turn(len(choice.groups), choice.num_ministages)
        num_computations = 2 * sum(choice.groups[g].microbatches_per_device for g in owners)
        is_allowed = all(group.mode.may_return and group.mode in self.modes for group in choice.groups)
        return is_allowed and num_computations <= _MOST_COMPUTATIONS

    def estimate(self, candidate: CandidatePlan, choice: Choice, grouping: str) -> EstimatedCandidate | None:
        """A candidate that fits, with its estimate; None where nothing joins its groups."""
        self._check()
        self.nominal_s += ESTIMATING_SHARE * self.nominal_of(candidate.num_devices)
        return self._estimate(candidate, choice, grouping)

    def _estimate(self, candidate: CandidatePlan, choice: Choice, grouping: str) -> EstimatedCandidate | None:
        found = self._score(candidate)
        return None if found is None else EstimatedCandidate(choice, candidate, found, grouping)

    def _score(self, candidate: CandidatePlan) -> Score | None:
        """By its estimate; None where nothing joins its groups."""
        if candidate not in self._scores:
            self.num_estimated += 1
            try:
                iteration_s = self._step_time.estimate_s(candidate)
            except (ClusterError, LowBoundError):
                return None
            devices = [device for group in candidate.groups for device in group.devices]
            cost = self._price(devices) * iteration_s / 3600
            self._scores[candidate] = score(self._problem, iteration_s, cost, candidate)
        return self._scores[candidate]

    def is_too_slow(self, choice: Choice) -> bool:
        """Whether it would not have been better than its limit, if it fitted."""
        return self._too_slow.get(choice, WORST) < WORST

    def move_layers(self, best: EstimatedCandidate, moves: Sequence[LayerMove]) -> EstimatedCandidate:
        """With layers moved from ministage to ministage for as long as estimates get better. They are shared
        out so that the slowest group is fastest, and evenly among the ministages of a group; but others wait
        for the first of these to pass a first microbatch on."""
        num_vain = 0
        for move in cycle(moves):
            if num_vain == len(moves):
                break
            num_vain += 1
            moved = move_layer(best.candidate, move)
            guess = None if moved is None else self.estimate(moved, best.choice, best.grouping)
            if guess is None or guess.score.wanted > (1 - WORTH_MOVING) * best.score.wanted:
                continue
            fitted = self.builder.fit(guess.candidate, best.choice)
            found = None if fitted is None else self.estimate(fitted, best.choice, best.grouping)
            if found is not None and found.score < best.score:
                best, num_vain = found, 0
        return best

    def first_found(self) -> EstimatedCandidate:
        """That fits; there is one."""
        return next(found for found in self._found.values() if found is not None)

    @property
    def has_few_layers(self) -> bool:
        return len(self._problem.workload.layers) <= _FEW_LAYERS

    def list_num_ministages(self, num_groups: int) -> list[int]:
        """Numbers of ministages in all worth trying, rising."""
        fixed, num_layers = self._problem.fixed.ministages, len(self._problem.workload.layers)
        if fixed is not None:
            return [fixed]
        if self.has_few_layers:
            return [*range(num_groups, num_layers + 1)]
        counts = [per_group * num_groups for per_group in _MINISTAGES_PER_GROUP]
        if num_groups > 1 and self._problem.workload.ties:
            # The last is the first group's as well, so that what is tied need not go from one to another.
            counts = sorted([*counts, *(number + 1 for number in counts)])
        return [number for number in counts if number <= num_layers] or [num_layers]

    def limit_degrees(self, devices: tuple[int, ...], degree: int) -> Degrees:
        """As `ReplicaCuts.limit`."""
        return self._problem.replicas.limit(devices, degree) if degree > 1 else ()

    def list_first_degrees(self, groups: Groups) -> tuple[int, ...]:
        """Tensor-parallel degrees that are tried in turn until something fits."""
        fixed = self._problem.fixed.tensor_parallel
        if fixed is not None:
            return (fixed,)
        found = (self._problem.replicas.most_by_type(devices).values() for devices in groups)
        most = max((degree for degrees in found for degree in degrees), default=1)
        return tuple(degree for degree in DEGREES if degree <= most)

    def count_replicas(self, devices: tuple[int, ...], degrees: Degrees) -> int:
        """Of a group of these devices."""
        return len(self._problem.replicas.cut(devices, degrees)) if degrees else len(devices)

    def list_microbatch_counts(self, num_replicas: int) -> tuple[int, ...]:
        """Numbers of microbatches of a replica worth trying, rising, in a group of so many."""
        return list_microbatch_counts(-(-self._problem.global_batch // num_replicas))

    # -- the best of a grouping ------------------------------------------------------------

    def refine(self, estimated: EstimatedCandidate) -> Iterator[EstimatedCandidate]:
        """One decision after the other, while each is better: the best after everything that is tried. What
        gains most for its time comes first, until it gains nothing more (variable neighbourhood descent;
        Mladenovic, Hansen 1997)."""
        most_gain = (
            self._change_microbatches,
            self._change_ministages,
            self._change_microbatches_of_kinds,
            self._change_modes_of_kinds,
        )
        others = (
            self._move_groups,
            self._change_first_ministages,
            self._change_in_flight,
            self._change_group_microbatches,
            self._change_modes,
            self._drop_nodes,
            self._change_degrees,
        )
        best = estimated
        while True:
            before = best
            for steps in (most_gain, others):
                for step in steps:
                    best = yield from step(best)
                if best.score < before.score:
                    break
            else:
                return

    def _improve(self, best: EstimatedCandidate, choices: Iterable[Choice]) -> _Refining:
        for choice in choices:
            found = self.try_choice(choice, best.grouping, best.score)
            if found is not None and found.score < best.score:
                best = found
            yield best
        return best

    def _change_microbatches(self, best: EstimatedCandidate) -> _Refining:
        """Microbatches of all groups together, up and down from where they are while that helps."""
        groups = best.choice.groups
        fewest = min(self.count_replicas(group.devices, group.degrees) for group in groups)
        counts = self.list_microbatch_counts(fewest)
        choices = [
            replace(
                best.choice, groups=tuple(replace(group, microbatches_per_device=number) for group in groups)
            )
            for number in counts
        ]
        return (
            yield from self._walk(
                best, choices, find_nearest(counts, max(g.microbatches_per_device for g in groups))
            )
        )

    def _walk(self, best: EstimatedCandidate, choices: Sequence[Choice], position: int) -> _Refining:
        """Up and down from a position, until so many in a row are no better."""
        for way in (1, -1):
            at, missed = position + way, 0
            while 0 <= at < len(choices) and missed < _MISSES:
                found = yield from self._improve(best, [choices[at]])
                missed = missed + 1 if found is best else 0
                best, at = found, at + way
        return best

    def _change_ministages(self, best: EstimatedCandidate) -> _Refining:
        counts = self.list_num_ministages(len(best.choice.groups))
        choices = [Choice(best.choice.groups, number) for number in counts]
        return (yield from self._walk(best, choices, find_nearest(counts, best.choice.num_ministages)))

    def _change_first_ministages(self, best: EstimatedCandidate) -> _Refining:
        """Shorter first ministages of single groups, which others wait for less."""
        num_groups = len(best.choice.groups)
        for g in range(min(num_groups - 1, best.choice.num_ministages - num_groups)):
            now = find_nearest(FIRST_SHARES, best.choice.groups[g].first_share)
            choices = [best.choice.change(g, first_share=share) for share in FIRST_SHARES]
            best = yield from self._walk(best, choices, now)
        return best

    def _change_in_flight(self, best: EstimatedCandidate) -> _Refining:
        """More or fewer microbatches in flight, with the fewest ministages; where that is worth while, with
        more ministages and the factor that was best."""
        num_groups = len(best.choice.groups)
        if num_groups == 1:
            return best
        counts = self.list_num_ministages(num_groups)
        now = best.choice
        choices = [now.bound(factor, counts[0]) for factor in (None, *IN_FLIGHT_FACTORS)]
        if now.returns:
            choices += [now.bound(factor, now.num_ministages) for factor in IN_FLIGHT_FACTORS]
        best = yield from self._improve(best, choices)
        now = best.choice
        if now.in_flight_factor is None:
            return best
        more = [now.bound(now.in_flight_factor, number) for number in counts]
        return (yield from self._walk(best, more, find_nearest(counts, now.num_ministages)))

    def _change_degrees(self, best: EstimatedCandidate) -> _Refining:
        """Other tensor-parallel degrees of all groups, and of those that are alike."""
        if self._problem.fixed.tensor_parallel is not None:
            return best
        kinds = self._list_alike(best.choice)
        for own in ([g for kind in kinds for g in kind], *(kinds if len(kinds) > 1 else ())):
            best = yield from self._improve(best, self.list_degrees(best.choice, own))
        return best

    def list_degrees(self, choice: Choice, own: Sequence[int]) -> Iterator[Choice]:
        """As `change_degrees`."""
        return change_degrees(choice, own, self._problem.replicas, self._problem.global_batch)

    def _list_alike(self, choice: Choice) -> list[list[int]]:
        """Groups with as many devices of the same kinds, together: what is better for one of them mostly is
        so for the others, and a pipeline is as slow as its slowest group."""
        alike: dict[object, list[int]] = {}
        for g, group in enumerate(choice.groups):
            kinds = tuple(self.node_kinds[device] for device in group.devices)
            alike.setdefault((kinds, group.degrees), []).append(g)
        return [*alike.values()]

    def _change_modes_of_kinds(self, best: EstimatedCandidate) -> _Refining:
        """The mode of all groups that are alike, to one that comes before the present one or soon after."""
        for own in self._list_alike(best.choice):
            best = yield from self._improve_mode(best, own)
        return best

    def _change_modes(self, best: EstimatedCandidate) -> _Refining:
        """The same of each of several groups that are alike by itself; and without waiting for reductions."""
        for g in [g for own in self._list_alike(best.choice) if len(own) > 1 for g in own]:
            best = yield from self._improve_mode(best, [g])
        return (yield from self._improve(best, list_without_waiting(best)))

    def _improve_mode(self, best: EstimatedCandidate, own: Sequence[int]) -> _Refining:
        """Modes of some groups: the first few of each family up to the next, and all of the present one; of
        each until so many in a row would be no better if they fitted."""
        now = best.choice.groups[own[0]].mode
        at = next(i for i, family in enumerate(self.families) if now in family)
        for i, family in enumerate(self.families[: at + 2]):
            missed = 0
            for mode in family if i == at else family[:4]:
                if mode == now:
                    continue
                choice = best.choice.change_all(own, mode=mode)
                found = yield from self._improve(best, [choice])
                is_slow = self.is_too_slow(choice) or self._found.get(choice) is not None
                missed = 0 if found is not best else missed + is_slow
                best = found
                if missed == _MISSES:
                    break
        return best

    def _change_microbatches_of_kinds(self, best: EstimatedCandidate) -> _Refining:
        """A few more or fewer microbatches of all groups that are alike."""
        for own in self._list_alike(best.choice):
            best = yield from self._improve_microbatches(best, own)
        return best

    def _change_group_microbatches(self, best: EstimatedCandidate) -> _Refining:
        """The same of each of several groups that are alike by itself."""
        for g in [g for own in self._list_alike(best.choice) if len(own) > 1 for g in own]:
            best = yield from self._improve_microbatches(best, [g])
        return best

    def _improve_microbatches(self, best: EstimatedCandidate, own: Sequence[int]) -> _Refining:
        group = best.choice.groups[own[0]]
        counts = self.list_microbatch_counts(self.count_replicas(group.devices, group.degrees))
        position = find_nearest(counts, group.microbatches_per_device)
        near = [counts[i] for i in (position - 1, position + 1) if 0 <= i < len(counts)]
        choices = (best.choice.change_all(own, microbatches_per_device=number) for number in near)
        return (yield from self._improve(best, choices))

    def _move_groups(self, best: EstimatedCandidate) -> _Refining:
        """One group earlier or later: what holds most microbatches, or waits for large ones, makes more of a
        difference than the bandwidth that the paper's order goes by."""
        if self._problem.fixed.groups is not None:
            return best
        return (yield from self._improve(best, move_groups(best.choice, self.node_kinds)))

    def _drop_nodes(self, best: EstimatedCandidate) -> _Refining:
        """Without some nodes, or groups, that cost more than they add."""
        if self._problem.fixed.groups is not None:
            return best
        num_layers = len(self._problem.workload.layers)
        choices = drop_nodes(best.choice, self._problem.nodes, self.node_kinds, num_layers)
        fixed = self._problem.fixed.ministages
        return (
            yield from self._improve(best, (own for own in choices if fixed in (None, own.num_ministages)))
        )


def list_without_waiting(estimated: EstimatedCandidate) -> list[Choice]:
    """Choices in which one of the groups that wait for reductions has them beside what follows, whatever rows
    or layers others have to take for it."""
    return [estimated.choice.change(g, may_wait=False) for g in estimated.waiting]
