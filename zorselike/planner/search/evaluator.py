"""From groups to promising candidates: modes, microbatches and ministages, one after the other, by
estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zorselike.errors import ClusterError
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.modes import Family, Mode, list_families
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.builder import CandidateBuilder, Choice, GroupChoice, list_microbatch_counts
from zorselike.planner.search.score import WORST, Score, score
from zorselike.schedule.orders.in_flight import LowBoundError

_FIRST_MICROBATCHES = (8, 24)
_FEW_MICROBATCHES = (1, 2, 4)
_FEW_GROUPS = 3
_FIRST_MINISTAGES_PER_GROUP = 2
"""What a grouping is first looked at with: microbatches of a device, more of them where these do not fit, and
ministages of a group."""
_MICROBATCHES_PER_GROUP = 8
"""Microbatches of a device for each group of a pipeline with few in flight, whose fill is then short."""
_FITTING_MODES = 2
"""Of a family's modes that fit, how many of the fastest are compared."""
_FITTING_FAMILIES = 2
"""Families that are compared where the first, which does nothing twice, does not fit."""
_MISSES = 2
"""Numbers in a row that are no better, after which none further on is tried."""
_FEW_LAYERS = 12
"""Up to so many layers every number of ministages is tried."""
_IN_FLIGHT_FACTORS = (1.0, 1.5, 2.0, 3.0)
"""Microbatches in flight, in those that 1F1B needs."""
_MINISTAGES_PER_GROUP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class EstimatedCandidate:
    """A candidate plan, the choice it was made of, and its estimate."""

    choice: Choice
    candidate: CandidatePlan
    score: Score
    grouping: str


class CandidateEvaluator:
    """Looks at groupings of one problem."""

    def __init__(
        self,
        problem: PlanProblem,
        table: LayerTable,
        builder: CandidateBuilder,
        step_time: StepTimeEstimate,
        price: Callable[[Iterable[int]], float],
        is_over: Callable[[], bool],
    ) -> None:
        """`price` of devices by the hour; `is_over` says when to stop refining."""
        self._problem, self._table, self._builder, self._step_time = problem, table, builder, step_time
        self._price, self._is_over = price, is_over
        self.families = list_families(problem.fixed)
        self.modes = tuple(mode for family in self.families for mode in family)
        self._found: dict[Choice, EstimatedCandidate | None] = {}
        self._too_slow: dict[Choice, Score] = {}
        """Choices that were too slow to be built in full, with their estimate."""
        self._host_full: set[Choice] = set()
        """What fits no host, though it does all devices."""
        self._scores: dict[CandidatePlan, Score] = {}
        self._is_doubtful = False
        """Whether nothing fitted the last groups, so that one asks first whether anything may."""
        self.num_estimated = 0

    def forget(self) -> None:
        """What was found with other memory."""
        self._found.clear()
        self._too_slow.clear()
        self._host_full.clear()

    # -- one choice ------------------------------------------------------------------------

    def try_choice(
        self, choice: Choice, grouping: str, limit: Score | None = None
    ) -> EstimatedCandidate | None:
        """The candidate and its estimate; None where it does not fit, or ranks no better than `limit`."""
        if choice in self._found:
            return self._found[choice]
        if self._is_idle(choice):
            return None
        if limit is not None and choice in self._too_slow and not self._too_slow[choice] < limit:
            return None
        asked: list[Score] = []

        def is_worth(candidate: CandidatePlan) -> bool:
            assert limit is not None
            guess = self._score(candidate)
            if guess is None or not guess < limit:
                asked.append(WORST if guess is None else guess)
                return False
            return True

        candidate = self._builder.build(choice, None if limit is None else is_worth)
        if asked:
            self._too_slow[choice] = asked[0]
            return None
        if candidate is None and self._builder.host_was_full:
            self._host_full.add(choice)
        self._found[choice] = None if candidate is None else self.estimate(candidate, choice, grouping)
        self._too_slow.pop(choice, None)
        return self._found[choice]

    def _is_idle(self, choice: Choice) -> bool:
        """Whether it offloads what never leaves (activations where each microbatch goes at once back), or
        bounds microbatches in flight where that cannot be or what is fixed says otherwise."""
        if choice.in_flight_factor is not None and not self._may_bound(choice):
            return True
        if self._problem.fixed.bounds_in_flight and choice.in_flight_factor is None:
            return True
        return (
            choice.num_ministages == 1
            and self._problem.fixed.offload is None
            and any("activations" in own.mode.offload for own in choice.groups)
        )

    def _may_bound(self, choice: Choice) -> bool:
        """Whether microbatches in flight may be bounded."""
        return (
            choice.num_ministages == len(choice.groups) > 1
            and self._problem.fixed.bounds_in_flight is not False
            and all(group.mode.may_bound_in_flight for group in choice.groups)
        )

    def estimate(self, candidate: CandidatePlan, choice: Choice, grouping: str) -> EstimatedCandidate | None:
        """A candidate that fits, with its estimate; None where nothing joins its groups."""
        own = self._score(candidate)
        return None if own is None else EstimatedCandidate(choice, candidate, own, grouping)

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
            self._scores[candidate] = score(self._problem, iteration_s, cost, candidate.num_devices)
        return self._scores[candidate]

    # -- one grouping ----------------------------------------------------------------------

    def estimate_coarsely(self, groups: Groups, grouping: str) -> list[EstimatedCandidate]:
        """The best of a few modes, the same for all groups, at usual numbers of ministages and microbatches;
        and with bounds on microbatches in flight, which is another trade of memory for time."""
        once = [family for family in self.families if not family[0].reduces_per_microbatch]
        often = [family for family in self.families if family[0].reduces_per_microbatch]
        found = (
            self._estimate_forward_first(groups, once, often, grouping),
            self._estimate_in_flight(groups, once, grouping)
            or self._estimate_in_flight(groups, often, grouping),
        )
        return [own for own in found if own is not None]

    def _estimate_forward_first(
        self, groups: Groups, once: Sequence[Family], often: Sequence[Family], grouping: str
    ) -> EstimatedCandidate | None:
        best = self._try_in_turn(groups, once, self._first_tries(groups), grouping)
        if len(groups) == 1 and self._list_num_ministages(1)[0] == 1:
            # With one ministage of all layers each microbatch goes at once back, and little is kept.
            tries = [(1, number) for _, number in self._first_tries(groups)]
            alone = self._try_in_turn(groups, once, dict.fromkeys(tries), grouping)
            best = min((own for own in (best, alone) if own), key=lambda own: own.score, default=None)
        if len(groups) <= _FEW_GROUPS or best is None:
            # Collectives of every microbatch: the fewer, the better, and there is no fill to shorten.
            ministage_counts = self._list_num_ministages(len(groups))[0]
            tries = [(ministage_counts, number) for number in _FEW_MICROBATCHES]
            found = self._try_in_turn(groups, often, tries, grouping)
            if best is None:
                other = self._try_in_turn(groups, often, self._first_tries(groups), grouping)
                found = min((own for own in (found, other) if own), key=lambda own: own.score, default=None)
            if found is not None and (best is None or found.score < best.score):
                best = found
        return best

    def _estimate_in_flight(
        self, groups: Groups, families: Sequence[Family], grouping: str
    ) -> EstimatedCandidate | None:
        """With one ministage of each group and few microbatches in flight, the first of these that fits; what
        needs least memory where time is over."""
        if len(groups) == 1 or self._list_num_ministages(len(groups))[0] != len(groups):
            return None
        plain = [tuple(mode for mode in family if mode.may_bound_in_flight) for family in families]
        plain = [own for own in plain if own]
        microbatch_counts = self._list_microbatch_counts(groups)
        most_microbatches = microbatch_counts[-1]
        short_fill = min(
            microbatch_counts, key=lambda number: abs(number - _MICROBATCHES_PER_GROUP * len(groups))
        )
        tries = dict.fromkeys([short_fill, most_microbatches])
        # What needs least memory first: where that does not fit, nothing does.
        if not plain:
            return None
        frugal = self._try_in_flight(
            groups, plain[-1][-1], most_microbatches, _IN_FLIGHT_FACTORS[0], grouping
        )
        if frugal is None:
            return None
        for family in plain:
            if (
                self._try_in_flight(groups, family[-1], most_microbatches, _IN_FLIGHT_FACTORS[0], grouping)
                is None
            ):
                continue
            for microbatches_per_device, in_flight_factor in product(
                tries, (_IN_FLIGHT_FACTORS[-1], _IN_FLIGHT_FACTORS[0])
            ):
                for mode in family:
                    if self._is_over():
                        return frugal
                    found = self._try_in_flight(
                        groups, mode, microbatches_per_device, in_flight_factor, grouping
                    )
                    if found is not None:
                        return found
        return frugal

    def _try_in_flight(
        self,
        groups: Groups,
        mode: Mode,
        microbatches_per_device: int,
        in_flight_factor: float,
        grouping: str,
    ) -> EstimatedCandidate | None:
        own = tuple(GroupChoice(devices, mode, microbatches_per_device) for devices in groups)
        return self.try_choice(Choice(own, len(groups), in_flight_factor), grouping)

    def _try_in_turn(
        self, groups: Groups, families: Sequence[Family], tries: Iterable[tuple[int, int]], grouping: str
    ) -> EstimatedCandidate | None:
        """The best at the first numbers of ministages and microbatches at which something fits."""
        if self._is_doubtful and not self._may_fit(groups, families, grouping):
            return None
        for number, (num_ministages, microbatches_per_device) in enumerate(tries):
            if self._is_over():
                return None
            best = self._try_families(groups, families, num_ministages, microbatches_per_device, grouping)
            if best is not None:
                self._is_doubtful = False
                return best
            if number == 0 and not self._is_doubtful and not self._may_fit(groups, families, grouping):
                self._is_doubtful = True
                return None
        return None

    def _may_fit(self, groups: Groups, families: Sequence[Family], grouping: str) -> bool:
        """Whether the mode that needs least memory fits at the most ministages or microbatches."""
        if not families:
            return False
        ministage_counts, microbatch_counts = (
            self._list_num_ministages(len(groups)),
            self._list_microbatch_counts(groups),
        )
        usual = next(
            (number for number in ministage_counts if number >= _FIRST_MINISTAGES_PER_GROUP * len(groups)),
            ministage_counts[-1],
        )
        is_small = len(self._table.keys) <= _FEW_LAYERS
        wanted = ministage_counts[::-1] if is_small else (ministage_counts[-1], usual)
        return any(
            self._fits_frugally(groups, family, number, microbatch_counts[-1], grouping)
            for number in dict.fromkeys(wanted)
            # Of one microbatch the copy on its way to the host may take more room than staying would.
            for family in (families if is_small or self._host_full else families[-1:])
        )

    def _fits_frugally(
        self,
        groups: Groups,
        family: Sequence[Mode],
        num_ministages: int,
        microbatches_per_device: int,
        grouping: str,
    ) -> bool:
        """Whether a family's mode that needs least memory fits, or where it asks too much of hosts, those
        that offload less. With few layers these are tried in any case: copies may take more room."""
        frugal = {mode.offload: mode for mode in family}
        tries_all = len(self._table.keys) <= _FEW_LAYERS
        for mode in reversed(frugal.values()):
            choice = Choice(
                tuple(GroupChoice(own, mode, microbatches_per_device) for own in groups), num_ministages
            )
            if self.try_choice(choice, grouping) is not None:
                return True
            tries_all = tries_all or choice in self._host_full
            if not tries_all:
                return False
        return False

    def find_any(self, groups: Groups, grouping: str) -> EstimatedCandidate | None:
        """Whatever fits first with what needs least memory; None where that does not either."""
        once = [family for family in self.families if not family[0].reduces_per_microbatch]
        often = [family for family in self.families if family[0].reduces_per_microbatch]
        if self._problem.fixed.bounds_in_flight:
            return self._estimate_in_flight(groups, often, grouping) or self._estimate_in_flight(
                groups, once, grouping
            )
        for families in (often, once):
            if self._may_fit(groups, families, grouping):
                return next(found for found in self._found.values() if found is not None)
        return None

    def _try_families(
        self,
        groups: Groups,
        families: Sequence[Family],
        num_ministages: int,
        microbatches_per_device: int,
        grouping: str,
    ) -> EstimatedCandidate | None:
        """The best of the first that fit; only the first family where that does, which does nothing twice."""
        best: EstimatedCandidate | None = None
        num_fitting = 0
        for number, family in enumerate(families):
            if self._is_over():
                break
            found = self._try_family(groups, family, num_ministages, microbatches_per_device, grouping)
            if found is None:
                continue
            best = found if best is None or found.score < best.score else best
            num_fitting += 1
            if number == 0 or num_fitting == _FITTING_FAMILIES or self._is_over():
                break
        return best

    def _try_family(
        self,
        groups: Groups,
        family: Sequence[Mode],
        num_ministages: int,
        microbatches_per_device: int,
        grouping: str,
    ) -> EstimatedCandidate | None:
        """The best of the first few that fit; none if that which needs least memory does not."""
        best: EstimatedCandidate | None = None
        num_fitting = 0
        if len(family) > 1 and not self._fits_frugally(
            groups, family, num_ministages, microbatches_per_device, grouping
        ):
            return None
        for mode in family:
            choice = Choice(
                tuple(GroupChoice(own, mode, microbatches_per_device) for own in groups), num_ministages
            )
            limit = None if best is None else best.score
            found = self.try_choice(choice, grouping, limit)
            if found is None and not self._too_slow.get(choice, WORST) < WORST:
                continue
            if found is not None and (best is None or found.score < best.score):
                best = found
            num_fitting += 1  # Or it would be slower if it did.
            if num_fitting == _FITTING_MODES:
                break
        return best

    def _first_tries(self, groups: Groups) -> Iterator[tuple[int, int]]:
        """Ministages in all and microbatches of a device: the usual, then what needs least memory."""
        ministage_counts, microbatch_counts = (
            self._list_num_ministages(len(groups)),
            self._list_microbatch_counts(groups),
        )
        few, more = (
            min(microbatch_counts, key=lambda number: abs(number - wanted)) for wanted in _FIRST_MICROBATCHES
        )
        needed = max(_FIRST_MINISTAGES_PER_GROUP, self._builder.count_ministages_per_group(groups)) * len(
            groups
        )
        usual = next((number for number in ministage_counts if number >= needed), ministage_counts[-1])
        twice = next((number for number in ministage_counts if number >= 2 * usual), ministage_counts[-1])
        tries = [
            (usual, few),
            (usual, more),
            (twice, more),
            (twice, microbatch_counts[-1]),
            (ministage_counts[-1], microbatch_counts[-1]),
        ]
        if len(self._table.keys) <= _FEW_LAYERS:
            tries += [(number, microbatch_counts[-1]) for number in ministage_counts]
        yield from dict.fromkeys(tries)

    def _list_num_ministages(self, num_groups: int) -> list[int]:
        """Numbers of ministages in all worth trying, rising."""
        fixed, num_layers = self._problem.fixed.ministages, len(self._table.keys)
        if fixed is not None:
            return [fixed]
        if num_layers <= _FEW_LAYERS:
            return [*range(num_groups, num_layers + 1)]
        return [
            number * num_groups for number in _MINISTAGES_PER_GROUP if number * num_groups <= num_layers
        ] or [num_layers]

    def _list_microbatch_counts(self, groups: Groups) -> Sequence[int]:
        """Numbers of microbatches of a device worth trying, rising."""
        return list_microbatch_counts(-(-self._problem.global_batch // min(map(len, groups))))

    def refine(self, estimated: EstimatedCandidate) -> EstimatedCandidate:
        """One decision after the other, while each is better."""
        best = estimated
        while not self._is_over():
            before = best
            for step in (
                self._change_microbatches,
                self._change_ministages,
                self._change_in_flight,
                self._change_modes,
                self._change_group_microbatches,
            ):
                best = step(best)
                if self._is_over():
                    return best
            if not best.score < before.score:
                return best
        return best

    def _improve(self, best: EstimatedCandidate, choices: Iterable[Choice]) -> EstimatedCandidate:
        for choice in choices:
            found = self.try_choice(choice, best.grouping, best.score)
            if found is not None and found.score < best.score:
                best = found
            if self._is_over():
                break
        return best

    def _change_microbatches(self, best: EstimatedCandidate) -> EstimatedCandidate:
        """Of all groups together, up and down from where they are while that helps."""
        groups = tuple(own.devices for own in best.choice.groups)
        microbatch_counts = self._list_microbatch_counts(groups)
        now = max(own.microbatches_per_device for own in best.choice.groups)
        position = min(range(len(microbatch_counts)), key=lambda i: abs(microbatch_counts[i] - now))
        return self._walk(
            best,
            [
                replace(
                    best.choice,
                    groups=tuple(GroupChoice(own.devices, own.mode, number) for own in best.choice.groups),
                )
                for number in microbatch_counts
            ],
            position,
        )

    def _walk(self, best: EstimatedCandidate, choices: Sequence[Choice], position: int) -> EstimatedCandidate:
        """Up and down from a position, until so many in a row are no better."""
        for way in (1, -1):
            at, missed = position + way, 0
            while 0 <= at < len(choices) and missed < _MISSES and not self._is_over():
                found = self._improve(best, [choices[at]])
                missed = missed + 1 if found is best else 0
                best, at = found, at + way
        return best

    def _change_ministages(self, best: EstimatedCandidate) -> EstimatedCandidate:
        ministage_counts = self._list_num_ministages(len(best.choice.groups))
        now = best.choice.num_ministages
        position = min(range(len(ministage_counts)), key=lambda i: abs(ministage_counts[i] - now))
        return self._walk(best, [Choice(best.choice.groups, number) for number in ministage_counts], position)

    def _change_in_flight(self, best: EstimatedCandidate) -> EstimatedCandidate:
        """More or fewer microbatches in flight, with one ministage of each group."""
        num_groups = len(best.choice.groups)
        if num_groups == 1 or self._list_num_ministages(num_groups)[0] != num_groups:
            return best
        factors = (None, *_IN_FLIGHT_FACTORS)
        return self._improve(
            best,
            (
                replace(best.choice, num_ministages=num_groups, in_flight_factor=in_flight_factor)
                for in_flight_factor in factors
            ),
        )

    def _change_modes(self, best: EstimatedCandidate) -> EstimatedCandidate:
        """Of each group by itself, to those that come before the present one or soon after."""
        for g in range(len(best.choice.groups)):
            best = self._improve(best, (best.choice.change(g, mode=mode) for mode in self._near(best, g)))
        return best

    def _near(self, best: EstimatedCandidate, g: int) -> Iterator[Mode]:
        """Of each family up to the next the first few that may fit, and all of its own."""
        now = best.choice.groups[g].mode
        own = next(i for i, family in enumerate(self.families) if now in family)
        for i, family in enumerate(self.families[: own + 2]):
            yield from (mode for mode in (family if i == own else family[:4]) if mode != now)

    def _change_group_microbatches(self, best: EstimatedCandidate) -> EstimatedCandidate:
        for g, own in enumerate(best.choice.groups):
            microbatch_counts = list_microbatch_counts(-(-self._problem.global_batch // len(own.devices)))
            position = min(
                range(len(microbatch_counts)),
                key=lambda i: abs(microbatch_counts[i] - own.microbatches_per_device),
            )
            near = [
                microbatch_counts[i] for i in (position - 1, position + 1) if 0 <= i < len(microbatch_counts)
            ]
            best = self._improve(
                best, [best.choice.change(g, microbatches_per_device=number) for number in near]
            )
        return best
