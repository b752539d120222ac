"""A first look at a grouping: few modes, alike in all groups, usual numbers of ministages and rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product

from zorselike.planner.candidate.choice import IN_FLIGHT_FACTORS, Choice, Groups
from zorselike.planner.candidate.modes import Family, Mode
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate

_FIRST_MICROBATCHES = (8, 24)
_FEW_MICROBATCHES = (1, 2, 4)
_FIRST_MINISTAGES_PER_GROUP = 2
"""What a grouping is first looked at with: microbatches of a device, more of them where these do not fit, and
ministages of a group."""
_FEW_GROUPS = 3
_MICROBATCHES_PER_GROUP = 8
"""Microbatches of a device for each group of a pipeline with few in flight, whose fill is then short."""
_FITTING_MODES = 2
"""How many of a family's modes that fit are compared, the fastest first."""
_FITTING_FAMILIES = 2
"""Families that are compared where the first, which does nothing twice, does not fit."""


class CoarseSearch:
    """Tries one grouping, its groups in one order."""

    def __init__(
        self,
        evaluator: CandidateEvaluator,
        groups: Groups,
        grouping: str,
        *,
        may_wait: bool = True,
        degree: int = 1,
    ) -> None:
        """`may_wait`: whether reductions are waited for where memory has no room for them beside what
        follows; `degree`: devices of a tensor-parallel replica, where there are as many that are alike."""
        self._may_wait, self._degree = may_wait, degree
        self._degrees = [evaluator.limit_degrees(devices, degree) for devices in groups]
        self._has_waited = False
        """Whether something that was found waits for reductions."""
        self._best_of: dict[tuple[bool, bool], EstimatedCandidate] = {}
        """By `_find_trade`."""
        self._evaluator, self._groups, self._grouping = evaluator, groups, grouping
        self._ministage_counts = evaluator.list_num_ministages(len(groups))
        self._microbatch_counts = evaluator.list_microbatch_counts(
            min(map(evaluator.count_replicas, groups, self._degrees))
        )
        self._goes_back_at_once = len(groups) == 1 and self._ministage_counts[0] == 1
        """Whether there may be one ministage of all layers, of which little is kept: each microbatch goes
        back before the next begins."""
        self._has_few_layers = evaluator.has_few_layers
        most = self._ministage_counts[-1]
        families = [own for own in evaluator.families if not evaluator.offloads_in_vain(own[0], most)]
        self._once = [family for family in families if not family[0].reduces_per_microbatch]
        self._often = [family for family in families if family[0].reduces_per_microbatch]

    def run(self) -> list[EstimatedCandidate]:
        """The best with all forward first; and with bounds on microbatches in flight, which is another trade
        of memory for time. Where these wait for reductions, also the best that do not; of one group also the
        best of others that recompute or offload activations: what these gain shows once layers are moved.
        """
        found = (
            self._try_forward_first(),
            self._try_all_in_flight(self._once) or self._try_all_in_flight(self._often),
        )
        some = [estimated for estimated in found if estimated is not None]
        if not some and (partly := self._try_partly()) is not None:
            some.append(partly)
        if self._may_wait and (self._has_waited or any(estimated.waiting for estimated in some)):
            strict = CoarseSearch(
                self._evaluator, self._groups, self._grouping, may_wait=False, degree=self._degree
            )
            beside = strict._try_once(), strict._try_all_in_flight(self._once)
            some += [estimated for estimated in beside if estimated is not None and estimated not in some]
        if len(self._groups) == 1:
            some += [estimated for estimated in self._best_of.values() if estimated not in some]
        return some

    def glance(self) -> list[EstimatedCandidate]:
        """With the fewest ministages the first modes that fit, of those that offload nothing."""
        few = min(self._microbatch_counts, key=lambda number: abs(number - _FIRST_MICROBATCHES[0]))
        numbers = dict.fromkeys((few, self._microbatch_counts[0], self._microbatch_counts[-1]))
        found: list[EstimatedCandidate] = []
        for families in (self._once[:_FITTING_FAMILIES], self._often[:_FITTING_FAMILIES]):
            modes = [mode for family in families for mode in family if mode.offload == family[0].offload]
            for per_device in numbers:
                choices = (self._choose(mode, per_device, self._ministage_counts[0]) for mode in modes)
                tried = (self._evaluator.try_choice(choice, self._grouping) for choice in choices)
                found += islice(filter(None, tried), 1)
        return found

    def find_any(self, *, in_flight: bool) -> EstimatedCandidate | None:
        """Whatever fits first with what needs least memory; None where that does not either."""
        if in_flight:
            return self._try_all_in_flight(self._often) or self._try_all_in_flight(self._once)
        may_fit = any(self._may_fit(families) for families in (self._often, self._once))
        return self._evaluator.first_found() if may_fit else self._try_partly()

    # -- all forward first -----------------------------------------------------------------

    def _try_once(self) -> EstimatedCandidate | None:
        """With collectives once for all microbatches."""
        best = self._try_in_turn(self._once, self._first_tries())
        if self._goes_back_at_once:
            best = _take_better(best, self._try_in_turn(self._once, self._tries_of_one()))
        return best

    def _try_forward_first(self) -> EstimatedCandidate | None:
        best = self._try_once()
        if len(self._groups) <= _FEW_GROUPS or best is None:
            # Collectives of every microbatch: the fewer, the better, and there is no fill to shorten.
            fewest = [(self._ministage_counts[0], number) for number in _FEW_MICROBATCHES]
            found = self._try_in_turn(self._often, fewest)
            if best is None:
                found = _take_better(found, self._try_in_turn(self._often, self._first_tries()))
            if self._goes_back_at_once:  # Of small microbatches nothing need be done twice.
                found = _take_better(found, self._try_in_turn(self._often[:1], self._tries_of_one()))
            best = _take_better(best, found)
        return best

    def _tries_of_one(self) -> Iterable[tuple[int, int]]:
        """The usual microbatches of one ministage of all layers."""
        return dict.fromkeys((1, number) for _, number in self._first_tries())

    def _first_tries(self) -> Iterator[tuple[int, int]]:
        """Ministages in all and microbatches of a device: the usual, then what needs least memory."""
        counts = self._microbatch_counts
        few, more = (min(counts, key=lambda number: abs(number - wanted)) for wanted in _FIRST_MICROBATCHES)
        per_group = self._evaluator.builder.count_ministages_per_group(self._groups, self._degree)
        usual = self._at_least(max(_FIRST_MINISTAGES_PER_GROUP, per_group) * len(self._groups))
        twice, most = self._at_least(2 * usual), self._ministage_counts[-1]
        tries = [(usual, few), (usual, more), (twice, more), (twice, counts[-1]), (most, counts[-1])]
        if self._has_few_layers or len(self._groups) == 1:
            tries += [(number, counts[-1]) for number in self._ministage_counts]
        yield from dict.fromkeys(tries)

    def _at_least(self, wanted: int) -> int:
        """The least number of ministages from there on, or the most there is."""
        return next((n for n in self._ministage_counts if n >= wanted), self._ministage_counts[-1])

    def _try_in_turn(
        self, families: Sequence[Family], tries: Iterable[tuple[int, int]]
    ) -> EstimatedCandidate | None:
        """The best at the first numbers of ministages and microbatches at which something fits; of one group
        at any of them where it recomputes or offloads, as they decide on what to do for want of memory."""
        evaluator = self._evaluator
        best: EstimatedCandidate | None = None
        if evaluator.is_doubtful and not self._may_fit(families):
            return None
        for number, (num_ministages, per_device) in enumerate(tries):
            found = self._try_families(families, num_ministages, per_device)
            if found is not None:
                evaluator.is_doubtful = False
                self._has_waited = self._has_waited or bool(found.waiting)
                best = _take_better(best, found)
                if len(self._groups) > 1 or not any(_find_trade(found)):
                    break
            elif number == 0 and not evaluator.is_doubtful and not self._may_fit(families):
                evaluator.is_doubtful = True
                break
        return best

    def _may_fit(self, families: Sequence[Family]) -> bool:
        """Whether the mode that needs least memory fits at the most ministages or microbatches."""
        if not families:
            return False
        usual = self._at_least(_FIRST_MINISTAGES_PER_GROUP * len(self._groups))
        wanted = self._ministage_counts[::-1] if self._has_few_layers else (self._ministage_counts[-1], usual)
        if self._goes_back_at_once:
            wanted = (*wanted, 1)
        return any(
            self._fits_at_least(family, number, self._microbatch_counts[-1])
            for number in dict.fromkeys(wanted)
            # Of one microbatch the copy on its way to the host may take more room than staying would.
            for family in (families if self._has_few_layers or self._evaluator.host_full else families[-1:])
        )

    def _try_partly(self) -> EstimatedCandidate | None:
        """What fits first where hosts have no room for what all groups offload, and devices none for all of
        it: with as little as may be offloaded by the first or the last groups."""
        evaluator, num_groups = self._evaluator, len(self._groups)
        if num_groups == 1 or not evaluator.host_full:
            return None
        tries = dict.fromkeys((number, self._microbatch_counts[-1]) for number, _ in self._first_tries())
        for family, (num_ministages, per_device) in product(self._once, tries):
            least_memory = [*{mode.offload: mode for mode in family}.values()]
            for mode in least_memory[1:]:
                choice = self._choose(mode, per_device, num_ministages)
                if (found := evaluator.try_choice(choice, self._grouping)) is not None:
                    return found
                for number in range(1, num_groups) if choice in evaluator.host_full else ():
                    for stays in (range(number), range(num_groups - number, num_groups)):
                        partly = choice.change_all(stays, mode=least_memory[0])
                        if (found := evaluator.try_choice(partly, self._grouping)) is not None:
                            return found
        return None

    def _fits_at_least(self, family: Family, num_ministages: int, per_device: int) -> bool:
        """Whether a family's mode that needs least memory fits, or where it asks too much of hosts, those
        that offload less. With few layers these are tried in any case: copies may take more room."""
        least_memory = {mode.offload: mode for mode in family}
        tries_all = self._has_few_layers
        for mode in reversed(least_memory.values()):
            choice = self._choose(mode, per_device, num_ministages)
            found = self._evaluator.try_choice(choice, self._grouping)
            if found is not None:
                return True
            tries_all = tries_all or choice in self._evaluator.host_full
            if not tries_all:
                return False
        return False

    def _try_families(
        self, families: Sequence[Family], num_ministages: int, per_device: int
    ) -> EstimatedCandidate | None:
        """The best of the first that fit; only the first family where that does, which does nothing twice,
        and is no slower than what needs least memory: it may fit only with layers where they take long."""
        best: EstimatedCandidate | None = None
        num_fitting = 0
        for number, family in enumerate(families):
            found = self._try_family(family, num_ministages, per_device)
            if found is None:
                if number == 0 and not self._fits_last(families, num_ministages, per_device):
                    return None
                continue
            trade = _find_trade(found)
            self._best_of[trade] = _take_better(self._best_of.get(trade), found) or found
            best = _take_better(best, found)
            num_fitting += 1
            if num_fitting == _FITTING_FAMILIES:
                break
            if number == 0:
                choice = self._choose(families[-1][-1], per_device, num_ministages)
                roomy = self._evaluator.try_choice(choice, self._grouping, found.score)
                if _take_better(found, roomy) is found:
                    break
        return best

    def _fits_last(self, families: Sequence[Family], num_ministages: int, per_device: int) -> bool:
        """Whether the last family fits, which needs least memory, or others are to be tried in any case."""
        if self._has_few_layers or self._evaluator.host_full:
            return True
        return self._fits_at_least(families[-1], num_ministages, per_device)

    def _try_family(self, family: Family, num_ministages: int, per_device: int) -> EstimatedCandidate | None:
        """The best of the first few that fit, and of what needs least memory; none if that does not fit."""
        best: EstimatedCandidate | None = None
        num_fitting = 0
        if len(family) > 1:
            if not self._fits_at_least(family, num_ministages, per_device):
                return None
            choice = self._choose(family[-1], per_device, num_ministages)
            least = self._evaluator.try_choice(choice, self._grouping)
            if least is not None and least.waiting and not self._has_few_layers:
                return least  # Where even this has no room to overlap reductions, others hardly fit.
            # Others may fit only with layers where they take long.
            best = least
        for mode in family:
            choice = self._choose(mode, per_device, num_ministages)
            found = self._evaluator.try_choice(choice, self._grouping, None if best is None else best.score)
            if found is None and not self._evaluator.is_too_slow(choice):
                continue
            best = _take_better(best, found)
            num_fitting += 1  # Or it would be slower if it did.
            if num_fitting == _FITTING_MODES:
                break
        return best

    def _choose(
        self, mode: Mode, per_device: int, num_ministages: int, factor: float | None = None
    ) -> Choice:
        return Choice.alike(
            self._groups,
            mode,
            per_device,
            num_ministages,
            factor,
            may_wait=self._may_wait,
            degrees=self._degrees,
        )

    # -- few microbatches in flight --------------------------------------------------------

    def _try_all_in_flight(self, families: Sequence[Family]) -> EstimatedCandidate | None:
        """With the fewest ministages and few microbatches in flight, the first of these that fits; what needs
        least memory where time is over."""
        num_groups = len(self._groups)
        returns = self._ministage_counts[0] > num_groups
        plain = [
            tuple(mode for mode in family if mode.may_bound_in_flight and (mode.may_return or not returns))
            for family in families
        ]
        plain = [family for family in plain if family]
        if num_groups == 1 or not plain:
            return None
        most = self._microbatch_counts[-1]
        wanted = _MICROBATCHES_PER_GROUP * num_groups
        short_fill = min(self._microbatch_counts, key=lambda number: abs(number - wanted))
        # What needs least memory first: where that does not fit, nothing does.
        fits = self._find_least_memory(plain[-1], most)
        if fits is None:
            return None
        tries = [*product(dict.fromkeys([short_fill, most]), (IN_FLIGHT_FACTORS[-1], IN_FLIGHT_FACTORS[0]))]
        for family in plain:
            least = self._find_least_memory(family, most)
            if least is None:
                continue
            for per_device, factor in tries:
                found = self._find_fastest(family[: least[0] + 1], per_device, factor)
                if found is not None:
                    return found
        return fits[1]

    def _find_least_memory(self, family: Family, per_device: int) -> tuple[int, EstimatedCandidate] | None:
        """What needs least memory of a family, and its number; where that does not fit, what offloads less:
        of few ministages what comes back may take more room than it leaves."""
        last_of = {mode.offload: number for number, mode in enumerate(family)}
        for number in reversed(last_of.values()):
            found = self._try_in_flight(family[number], per_device, IN_FLIGHT_FACTORS[0])
            if found is not None:
                return number, found
        return None

    def _find_fastest(self, family: Family, per_device: int, factor: float) -> EstimatedCandidate | None:
        """The first of a family that fits, if each needs less memory than those before it."""
        found = self._try_in_flight(family[-1], per_device, factor)
        first, last = 0, len(family) - 1
        while found is not None and first < last:
            middle = (first + last) // 2
            faster = self._try_in_flight(family[middle], per_device, factor)
            if faster is None:
                first = middle + 1
            else:
                found, last = faster, middle
        return found

    def _try_in_flight(self, mode: Mode, per_device: int, factor: float) -> EstimatedCandidate | None:
        choice = self._choose(mode, per_device, self._ministage_counts[0], factor)
        return self._evaluator.try_choice(choice, self._grouping)


def _find_trade(found: EstimatedCandidate) -> tuple[bool, bool]:
    """What time is given for memory: whether activations are offloaded, and whether layers are recomputed."""
    mode = found.choice.groups[0].mode
    return "activations" in mode.offload, mode.recompute != "none"


def _take_better(
    first: EstimatedCandidate | None, second: EstimatedCandidate | None
) -> EstimatedCandidate | None:
    """The one with the better score, the first of equals."""
    return min((one for one in (first, second) if one), key=lambda one: one.score, default=None)
