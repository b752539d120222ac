"""Choices built and estimated, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle

from zorselike.errors import ClusterError
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.choice import Choice, Groups, list_microbatch_counts
from zorselike.planner.candidate.modes import Mode, list_families
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.groups.replicas import DEGREES, Degrees
from zorselike.planner.layers.split_layers import visit_in_turn
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.builder import CandidateBuilder
from zorselike.planner.search.neighbours import LayerMove, change_degrees, move_layer
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
_MOST_COMPUTATIONS = 4_000
"""Of all groups that return to their ministages; ordering them takes about 5 us each."""
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
        self.builder.forget()

    # -- one choice ------------------------------------------------------------------------

    def try_choice(
        self, choice: Choice, grouping: str, limit: Score | None = None
    ) -> EstimatedCandidate | None:
        """The candidate and its estimate; None where it does not fit, or ranks no better than `limit`."""
        if self._problem.fixed.tensor_parallel is not None:
            choice = self._keep_degrees(choice)
        choice = self.shard_alone(choice)
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

    def shard_alone(self, choice: Choice) -> Choice:
        """With ZeRO 2 in groups of one replica: lower stages take as long there, and more memory."""
        for g, group in enumerate(choice.groups):
            sharded = replace(group.mode, zero=max(2, group.mode.zero))
            is_other = sharded != group.mode and sharded in self.modes and not choice.returns
            if is_other and self.count_replicas(group.devices, group.degrees) == 1:
                choice = choice.change(g, mode=sharded)
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

    def is_beaten(self, choice: Choice) -> bool:
        """Of what was no better than its limit: whether it fits, or would be no better if it did."""
        return self.is_too_slow(choice) or self._found.get(choice) is not None

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

    def list_degrees(self, choice: Choice, own: Sequence[int]) -> Iterator[Choice]:
        """As `change_degrees`."""
        return change_degrees(choice, own, self._problem.replicas, self._problem.global_batch)

    def count_replicas(self, devices: tuple[int, ...], degrees: Degrees) -> int:
        """Of a group of these devices."""
        return len(self._problem.replicas.cut(devices, degrees)) if degrees else len(devices)

    def list_microbatch_counts(self, num_replicas: int) -> tuple[int, ...]:
        """Numbers of microbatches of a replica worth trying, rising, in a group of so many."""
        return list_microbatch_counts(-(-self._problem.global_batch // num_replicas))


def list_without_waiting(estimated: EstimatedCandidate) -> list[Choice]:
    """Choices in which one of the groups that wait for reductions has them beside what follows, whatever rows
    or layers others have to take for it."""
    return [estimated.choice.change(g, may_wait=False) for g in estimated.waiting]
