"""Small changes of the best simulated candidates, until none is better."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice

from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import SearchBudget
from zorselike.planner.search.builder import Choice
from zorselike.planner.search.evaluator import (
    CandidateEvaluator,
    EstimatedCandidate,
    list_without_waiting,
)
from zorselike.planner.search.neighbours import change_choice, move_layers, move_rows
from zorselike.planner.search.top_k import WORTH_SIMULATING, SimulatedCandidate, TopK

MOST_STARTS = 3
"""Simulated candidates that are changed step by step."""
CHUNK = 16
"""Small changes whose estimates are compared before the best of them are simulated."""
SIMPLER = 1.002
"""A plan that takes up to this much longer is preferred where it is simpler."""


class LocalSearch:
    """Improves the simulated candidates of one problem."""

    def __init__(
        self,
        problem: PlanProblem,
        evaluator: CandidateEvaluator,
        top_k: TopK,
        budget: SearchBudget,
        seed: int,
    ) -> None:
        self._problem, self._evaluator, self._builder = problem, evaluator, evaluator.builder
        self._top_k, self._budget = top_k, budget
        self._random = random.Random(seed)

    def improve(self) -> None:
        """The best of what was simulated, first one of all with the same groups, then one with each number of
        ministages, changed until no small change is better."""
        starts: dict[object, SimulatedCandidate] = {}
        more: dict[object, SimulatedCandidate] = {}
        for found in self._top_k.sort():
            candidate = found.estimated.candidate
            devices = tuple(group.devices for group in candidate.groups)
            starts.setdefault(devices, found)
            more.setdefault((devices, candidate.num_ministages), found)
        for number, start in enumerate([*starts.values(), *more.values()]):
            if self._budget.is_over() or (number >= MOST_STARTS and not self._budget.is_little()):
                break
            self._descend(start)
        if self._top_k.best is not None:
            self._simplify(self._top_k.best)

    def _descend(self, start: SimulatedCandidate) -> None:
        best: SimulatedCandidate | None = start
        while best is not None and not self._budget.is_over():
            best = self._find_better(best)

    def _simplify(self, best: SimulatedCandidate) -> None:
        """The best with simpler modes where these cost next to nothing."""
        limit = best.score.wanted * SIMPLER
        for g, group in enumerate(best.estimated.candidate.groups):
            simpler = [mode for mode in self._evaluator.modes if mode.complexity < group.mode.complexity]
            for mode in sorted(simpler, key=lambda mode: mode.complexity):
                if self._budget.is_over():
                    return
                candidate = best.estimated.candidate
                groups = (*candidate.groups[:g], replace(group, mode=mode), *candidate.groups[g + 1 :])
                changed = replace(candidate, groups=groups)
                if not self._builder.has_room(changed):
                    continue
                choice = best.estimated.choice.change(g, mode=mode)
                estimated = self._evaluator.estimate(changed, choice, best.estimated.grouping)
                found = None if estimated is None else self._top_k.simulate(estimated)
                if found is None or found.score.wanted > limit:
                    continue
                if found.score.is_allowed >= best.score.is_allowed:
                    best = self._top_k.best = found
                    break

    def _find_better(self, best: SimulatedCandidate) -> SimulatedCandidate | None:
        """The first small change that is better, of those whose estimates are best first."""
        limit = WORTH_SIMULATING * best.estimated.score.wanted
        moves = self._neighbours(best.estimated)
        while chunk := list(islice(moves, CHUNK)):
            for estimated in sorted(chunk, key=lambda estimated: estimated.score):
                if self._budget.is_over():
                    return None
                if estimated.score.wanted > limit and not self._budget.is_tiny():
                    break
                found = self._top_k.simulate(estimated)
                if found is not None and found.score < best.score:
                    return found
        return None

    def _neighbours(self, estimated: EstimatedCandidate) -> Iterator[EstimatedCandidate]:
        """Those that fit: rows and layers moved, then what other choices lead to; like moves in an order that
        is the seed's."""
        plans = [*move_layers(estimated.candidate), *self._move_rows(estimated.candidate)]
        self._random.shuffle(plans)
        for candidate in plans:
            if self._budget.is_over():
                return
            fitted = None if candidate in self._top_k else self._builder.fit(candidate, estimated.choice)
            if fitted is not None and fitted not in self._top_k:
                found = self._evaluator.estimate(fitted, estimated.choice, estimated.grouping)
                if found is not None:
                    yield found
        changed = change_choice(
            estimated.choice,
            self._evaluator.modes,
            num_layers=len(self._problem.workload.layers),
            global_batch=self._problem.global_batch,
            regroup=self._problem.fixed.groups is None,
        )
        choices = [*changed, *list_without_waiting(estimated)]
        self._random.shuffle(choices)
        for choice in choices:
            if self._budget.is_over():
                return
            if self._is_possible(choice):
                found = self._evaluator.try_choice(choice, estimated.grouping)
                if found is not None and found.candidate not in self._top_k:
                    yield found

    def _move_rows(self, candidate: CandidatePlan) -> Iterator[CandidatePlan]:
        kinds = list(zip(self._problem.device_types, self._problem.nodes, strict=True))
        of_groups = [[kinds[device] for device in group.devices] for group in candidate.groups]
        return move_rows(candidate, of_groups, self._problem.most_rows_at_once)

    def _is_possible(self, choice: Choice) -> bool:
        """Whether its groups may be groups, and what is fixed or allowed is kept."""
        fixed, problem = self._problem.fixed, self._problem
        if fixed.ministages is not None and choice.num_ministages != fixed.ministages:
            return False
        if not len(choice.groups) <= choice.num_ministages <= len(self._problem.workload.layers):
            return False
        if any(self._bandwidths.slowest_link(group.devices) <= 0 for group in choice.groups):
            return False
        num_devices = sum(len(group.devices) for group in choice.groups)
        return problem.max_devices is None or num_devices <= problem.max_devices

    @cached_property
    def _bandwidths(self) -> Bandwidths:
        return self._problem.read_bandwidths(self._problem.usable)
