"""Small changes of the best simulated candidates, until none is better."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.computers import list_computers
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import SearchBudget
from zorselike.planner.search.choice import Choice, Groups
from zorselike.planner.search.enumerator import WORTH_SIMULATING
from zorselike.planner.search.evaluator import (
    CandidateEvaluator,
    EstimatedCandidate,
    list_without_waiting,
)
from zorselike.planner.search.neighbours import change_choice, drop_nodes, move_layers, move_rows
from zorselike.planner.search.top_k import SimulatedCandidate, TopK

MOST_STARTS = 3
"""Simulated candidates that are changed step by step; more where simulations are short."""
CHUNK = 16
"""Small changes whose estimates are compared before the best of them are simulated."""


@dataclass
class _Descent:
    """The way from one simulated candidate to better and better ones."""

    best: SimulatedCandidate
    steps: Iterator[float]
    """Nominal seconds of what is done next, before it is done."""
    next_s: float | None = None
    """Those of the next; None before it was asked for."""
    is_over: bool = False


class LocalSearch:
    """Improves the simulated candidates of one problem (`turns.Work`)."""

    def __init__(
        self,
        problem: PlanProblem,
        evaluator: CandidateEvaluator,
        top_k: TopK,
        budget: SearchBudget,
        starts: Sequence[SimulatedCandidate],
        seed: int,
    ) -> None:
        """`starts`: what was simulated because of its estimate, more of it as time goes on."""
        self._problem, self._evaluator, self._builder = problem, evaluator, evaluator.builder
        self._top_k, self._budget, self._starts = top_k, budget, starts
        self._random = random.Random(seed)
        self._descents: dict[object, _Descent] = {}
        self._more: set[object] = set()
        """Groups and numbers of ministages from which something began."""
        self._num_seen = 0
        """Starts that were looked at."""

    def forget(self) -> None:
        self._descents.clear()
        self._more.clear()
        self._num_seen = 0

    # -- whose turn it is --------------------------------------------------------------------

    def peek(self) -> float | None:
        if self._budget.is_spent:
            return None
        while (descent := self._choose()) is not None:
            if descent.next_s is None:
                descent.next_s = next(descent.steps, None)
            if descent.next_s is not None:
                return descent.next_s
            descent.is_over = True
        return None

    def advance(self) -> float:
        descent = self._choose()
        assert descent is not None, "peek found one"
        begin_s = self._top_k.nominal_s + self._evaluator.nominal_s
        descent.next_s = next(descent.steps, None)
        descent.is_over = descent.next_s is None
        return self._top_k.nominal_s + self._evaluator.nominal_s - begin_s

    def _choose(self) -> _Descent | None:
        """The one that has come furthest."""
        self._find_starts()
        best = self._find_going()
        if best is None and self._budget.is_little:
            self._begin_one_more()
            best = self._find_going()
        return best

    def _find_going(self) -> _Descent | None:
        going = (own for own in self._descents.values() if not own.is_over)
        return min(going, key=lambda own: own.best, default=None)

    def _begin_one_more(self) -> None:
        """From the best of other numbers of ministages."""
        for found in sorted(self._starts):
            key = _list_groups(found), found.estimated.candidate.num_ministages
            if key not in self._more:
                self._more.add(key)
                self._begin(key, found)
                return

    def _find_starts(self) -> None:
        """The best that were simulated because of their estimates, first one of all with the same groups;
        where simulations are short, then one with each number of ministages."""
        if self._num_seen == len(self._starts):
            return
        self._num_seen = len(self._starts)
        for found in sorted(self._starts):
            groups = _list_groups(found)
            before = self._descents.get(groups)
            if before is None and not self._may_begin(found):
                continue
            if before is None or found.score < before.best.score:
                self._more.add((groups, found.estimated.candidate.num_ministages))
                self._begin(groups, found)

    def _begin(self, key: object, start: SimulatedCandidate) -> None:
        descent = _Descent(start, iter(()))
        descent.steps = self._descend(descent)
        self._descents[key] = descent

    def _may_begin(self, found: SimulatedCandidate) -> bool:
        """The first few, and what is better than all of them."""
        if len(self._descents) < MOST_STARTS or self._budget.is_little:
            return True
        return all(found.score < own.best.score for own in self._descents.values())

    # -- step by step ------------------------------------------------------------------------

    def _descend(self, descent: _Descent) -> Iterator[float]:
        is_better = True
        while is_better:
            is_better = False
            for seconds in self._find_better(descent):
                if seconds is None:
                    is_better = True
                    break
                yield seconds
        yield from self._simplify(descent)

    def _find_better(self, descent: _Descent) -> Iterator[float | None]:
        """Goes to the first small change that is better, of those whose estimates are best first; None is
        the last where there is one."""
        limit = WORTH_SIMULATING * descent.best.estimated.score.wanted
        moves = self._neighbours(descent.best.estimated)
        nominal_s = CHUNK * self._evaluator.nominal_of(descent.best.estimated.candidate.num_devices)
        while True:
            yield nominal_s
            chunk = list(islice(moves, CHUNK))
            if not chunk:
                return
            ordered = sorted(chunk, key=lambda estimated: estimated.score)
            for number, estimated in enumerate(ordered):
                if estimated.score.wanted > limit and not self._budget.is_tiny:
                    break
                for following in ordered[number:]:
                    if not self._top_k.offer(following.candidate):
                        break
                yield self._top_k.expect_s(estimated.candidate)
                found = self._top_k.simulate(estimated)
                if found is not None and found.score < descent.best.score:
                    descent.best = found
                    yield None
                    return

    def _simplify(self, descent: _Descent) -> Iterator[float]:
        """The end of the way with simpler modes where these cost nothing."""
        for g, group in enumerate(descent.best.estimated.candidate.groups):
            simpler = [mode for mode in self._evaluator.modes if mode.complexity < group.mode.complexity]
            for mode in sorted(simpler, key=lambda mode: mode.complexity):
                best = descent.best.estimated
                groups = (
                    *best.candidate.groups[:g],
                    replace(group, mode=mode),
                    *best.candidate.groups[g + 1 :],
                )
                changed = replace(best.candidate, groups=groups)
                yield self._evaluator.nominal_of(changed.num_devices)
                if changed in self._top_k or not self._builder.has_room(changed):
                    continue
                choice = best.choice.change(g, mode=mode)
                estimated = self._evaluator.estimate(changed, choice, best.grouping)
                if estimated is None:
                    continue
                yield self._top_k.expect_s(changed)
                found = self._top_k.simulate(estimated)
                if found is not None and found.score < descent.best.score:
                    descent.best = found
                    break

    def _neighbours(self, estimated: EstimatedCandidate) -> Iterator[EstimatedCandidate]:
        """Those that fit: rows and layers moved, then what other choices lead to; like moves in an order that
        is the seed's."""
        plans = [*move_layers(estimated.candidate), *self._move_rows(estimated.candidate)]
        self._random.shuffle(plans)
        for candidate in plans:
            fitted = None if candidate in self._top_k else self._builder.fit(candidate, estimated.choice)
            if fitted is not None and fitted not in self._top_k:
                found = self._evaluator.estimate(fitted, estimated.choice, estimated.grouping)
                if found is not None:
                    yield found
        changed = change_choice(
            estimated.choice,
            self._evaluator.modes,
            num_layers=len(self._problem.workload.layers),
            most_rows=[
                -(-self._problem.global_batch // self._evaluator.count_replicas(own.devices, own.degrees))
                for own in estimated.choice.groups
            ],
            regroup=self._problem.fixed.groups is None,
        )
        choices = [
            *changed,
            *self._drop_nodes(estimated.choice),
            *list_without_waiting(estimated),
            *self._change_degrees(estimated.choice),
        ]
        self._random.shuffle(choices)
        for choice in choices:
            if self._is_possible(choice):
                found = self._evaluator.try_choice(choice, estimated.grouping)
                if found is not None and found.candidate not in self._top_k:
                    yield found

    def _drop_nodes(self, choice: Choice) -> Iterator[Choice]:
        if self._problem.fixed.groups is not None:
            return iter(())
        return drop_nodes(
            choice, self._problem.nodes, self._evaluator.node_kinds, len(self._problem.workload.layers)
        )

    def _change_degrees(self, choice: Choice) -> Iterator[Choice]:
        """Of each group by itself."""
        if self._problem.fixed.tensor_parallel is None:
            for g in range(len(choice.groups)):
                yield from self._evaluator.list_degrees(choice, [g])

    def _move_rows(self, candidate: CandidatePlan) -> Iterator[CandidatePlan]:
        problem = self._problem
        of_groups = [
            [
                (computer, problem.nodes[first])
                for computer, first in zip(list_computers(group, problem), group.firsts, strict=True)
            ]
            for group in candidate.groups
        ]
        return move_rows(candidate, of_groups, problem.most_rows_at_once)

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


def _list_groups(found: SimulatedCandidate) -> Groups:
    return tuple(replica for group in found.estimated.candidate.groups for replica in (*group.replicas, ()))
