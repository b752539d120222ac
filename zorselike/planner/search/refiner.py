"""The best of a grouping: one decision after the other is changed, while estimates get better."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace

from zorselike.planner.candidate.choice import IN_FLIGHT_FACTORS, Choice, find_nearest
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.builder import FEW_DEVICES
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate, list_without_waiting
from zorselike.planner.search.neighbours import drop_nodes, move_groups

FIRST_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2)
"""Layers of a group's first ministage, in those of an even part."""
_MISSES = 2
"""Numbers in a row that are no better, after which none further on is tried."""
_FIRST_MODES = 4
"""Of each family that is not the present one's, so many are tried."""
_Refining = Generator[EstimatedCandidate, None, EstimatedCandidate]
"""Yields the best after everything that is tried, and returns the last."""


class Refiner:
    """Refines what was estimated of one problem."""

    def __init__(self, problem: PlanProblem, evaluator: CandidateEvaluator) -> None:
        self._problem, self._evaluator = problem, evaluator
        self._has_few_devices = len(problem.usable) <= FEW_DEVICES

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
            self._change_modes_and_ministages,
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
            found = self._evaluator.try_choice(choice, best.grouping, best.score)
            if found is not None and found.score < best.score:
                best = found
            yield best
        return best

    def _change_microbatches(self, best: EstimatedCandidate) -> _Refining:
        """Microbatches of all groups together, up and down from where they are while that helps."""
        groups = best.choice.groups
        fewest = min(self._evaluator.count_replicas(group.devices, group.degrees) for group in groups)
        counts = self._evaluator.list_microbatch_counts(fewest)
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
        counts = self._evaluator.list_num_ministages(len(best.choice.groups))
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
        counts = self._evaluator.list_num_ministages(num_groups)
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
            best = yield from self._improve(best, self._evaluator.list_degrees(best.choice, own))
        return best

    def _list_alike(self, choice: Choice) -> list[list[int]]:
        """Groups with as many devices of the same kinds, together: what is better for one of them mostly is
        so for the others, and a pipeline is as slow as its slowest group."""
        alike: dict[object, list[int]] = {}
        for g, group in enumerate(choice.groups):
            kinds = tuple(self._evaluator.node_kinds[device] for device in group.devices)
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
        each until so many in a row would be no better if they fitted. Of few devices also of later families,
        but for those with collectives of every microbatch."""
        now = best.choice.groups[own[0]].mode
        at = next(i for i, family in enumerate(self._evaluator.families) if now in family)
        for i, family in enumerate(self._evaluator.families):
            if i > at + 1 and (family[0].reduces_per_microbatch or not self._has_few_devices):
                continue
            missed = 0
            modes = self._list_modes(best.choice, own, family)
            for mode in modes if i == at else modes[:_FIRST_MODES]:
                if mode == now:
                    continue
                choice = best.choice.change_all(own, mode=mode)
                found = yield from self._improve(best, [choice])
                missed = 0 if found is not best else missed + self._evaluator.is_beaten(choice)
                best = found
                if missed == _MISSES:
                    break
        return best

    def _list_modes(self, choice: Choice, own: Sequence[int], modes: Iterable[Mode]) -> list[Mode]:
        """Without those that differ from others in the memory alone that they take."""
        found = (self._evaluator.shard_alone(choice.change_all(own, mode=mode)) for mode in modes)
        return [*dict.fromkeys(changed.groups[own[0]].mode for changed in found)]

    def _change_modes_and_ministages(self, best: EstimatedCandidate) -> _Refining:
        """Of few devices: the mode of all groups that are alike, to one that has room with more, smaller
        ministages alone."""
        if not self._has_few_devices:
            return best
        counts = self._evaluator.list_num_ministages(len(best.choice.groups))
        for own in self._list_alike(best.choice):
            once = (mode for mode in self._evaluator.modes if not mode.reduces_per_microbatch)
            for mode in self._list_modes(best.choice, own, once):
                if mode == best.choice.groups[own[0]].mode:
                    continue
                missed = 0
                for number in [n for n in counts if n > best.choice.num_ministages]:
                    choice = replace(best.choice.change_all(own, mode=mode), num_ministages=number)
                    found = yield from self._improve(best, [choice])
                    if found is not best:
                        best = found
                        break
                    missed += self._evaluator.is_beaten(choice)
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
        counts = self._evaluator.list_microbatch_counts(
            self._evaluator.count_replicas(group.devices, group.degrees)
        )
        position = find_nearest(counts, group.microbatches_per_device)
        near = [counts[i] for i in (position - 1, position + 1) if 0 <= i < len(counts)]
        choices = (best.choice.change_all(own, microbatches_per_device=number) for number in near)
        return (yield from self._improve(best, choices))

    def _move_groups(self, best: EstimatedCandidate) -> _Refining:
        """One group earlier or later: what holds most microbatches, or waits for large ones, makes more of a
        difference than the bandwidth that the paper's order goes by."""
        if self._problem.fixed.groups is not None:
            return best
        return (yield from self._improve(best, move_groups(best.choice, self._evaluator.node_kinds)))

    def _drop_nodes(self, best: EstimatedCandidate) -> _Refining:
        """Without some nodes, or groups, that cost more than they add."""
        if self._problem.fixed.groups is not None:
            return best
        num_layers = len(self._problem.workload.layers)
        choices = drop_nodes(best.choice, self._problem.nodes, self._evaluator.node_kinds, num_layers)
        fixed = self._problem.fixed.ministages
        return (
            yield from self._improve(best, (own for own in choices if fixed in (None, own.num_ministages)))
        )
