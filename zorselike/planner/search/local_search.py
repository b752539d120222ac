"""Small changes of the best simulated candidates, until none is better."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush, nsmallest
from itertools import islice
from math import inf

from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.choice import Choice, Groups
from zorselike.planner.candidate.computers import list_computers
from zorselike.planner.candidate.deal_rows import count_blocks
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import SearchBudget
from zorselike.planner.search.builder import FEW_DEVICES
from zorselike.planner.search.enumerator import WORTH_SIMULATING
from zorselike.planner.search.evaluator import (
    ESTIMATING_SHARE,
    CandidateEvaluator,
    EstimatedCandidate,
    list_without_waiting,
)
from zorselike.planner.search.neighbours import (
    change_choice,
    change_modes,
    drop_nodes,
    list_layer_moves,
    move_layers,
    move_rows,
)
from zorselike.planner.search.score import Score
from zorselike.planner.search.top_k import LONG, SimulatedCandidate, TopK

MOST_STARTS = 3
"""Simulated candidates that are changed step by step; more where simulations are short."""
WORTH_CHANGING = 1.15
"""Up to so many times what the best takes others are changed where simulations are short."""
MOST_VAIN = 32
"""Ways in a row that led to nothing better, after which a search ends."""
MOST_OFFERED = 16
"""To processes that simulate beforehand."""
_LEAST = 1e-30
_Describe = Callable[[SimulatedCandidate], Hashable]


@dataclass
class _Descent:
    """The way from one simulated candidate to better and better ones."""

    best: SimulatedCandidate
    steps: Iterator[float]
    """Nominal seconds of what is done next, before it is done."""
    next_s: float | None = None
    """Those of the next; None before it was asked for."""
    is_new: bool = True
    """Whether no change was tried yet."""
    is_over: bool = False


class _Waiting:
    """Small changes that were estimated and wait to be simulated, by the way in which they were made: how
    much worse those of a way come out than their estimates is learnt from those that were simulated."""

    def __init__(self, errors: dict[Hashable, tuple[float, int]]) -> None:
        """`errors`: by way, their sum and number; is kept up to date."""
        self._errors = errors
        self._heaps: dict[Hashable, list[tuple[Score, int, EstimatedCandidate]]] = {}
        self._num_added = 0

    def add(self, way: Hashable, estimated: EstimatedCandidate) -> None:
        self._num_added += 1
        heappush(self._heaps.setdefault(way, []), (estimated.score, self._num_added, estimated))

    def learn(self, way: Hashable, error: float) -> None:
        total, number = self._errors.get(way, (1.0, 1))
        self._errors[way] = total + error, number + 1

    def take(self, limit: float) -> Iterator[tuple[Hashable, EstimatedCandidate]]:
        """What promises most, one after the other, up to an estimate."""
        while True:
            possible = (way for way, heap in self._heaps.items() if heap[0][0].wanted <= limit)
            way = min(possible, key=self._promise, default=None)
            if way is None:
                return
            _, _, estimated = heappop(self._heaps[way])
            if not self._heaps[way]:
                del self._heaps[way]
            yield way, estimated

    def list_next(self, number: int) -> list[EstimatedCandidate]:
        """About what is taken next."""
        waiting = [own for heap in self._heaps.values() for own in nsmallest(number, heap)]
        return [estimated for _, _, estimated in nsmallest(number, waiting)]

    def _promise(self, way: Hashable) -> tuple[float, float]:
        first = self._heaps[way][0][0]
        total, number = self._errors.get(way, (1.0, 1))
        return first.excess, first.wanted * total / number


def _find_error(found: SimulatedCandidate) -> float:
    return found.score.wanted / max(found.estimated.score.wanted, _LEAST)


class LocalSearch:
    """Improves the simulated candidates of one problem (`turns.Work`)."""

    def __init__(
        self,
        problem: PlanProblem,
        table: LayerTable,
        evaluator: CandidateEvaluator,
        top_k: TopK,
        budget: SearchBudget,
        starts: Sequence[SimulatedCandidate],
        seed: int,
    ) -> None:
        """`starts`: what was simulated because of its estimate, more of it as time goes on."""
        self._problem, self._table = problem, table
        self._evaluator, self._builder = evaluator, evaluator.builder
        self._top_k, self._budget, self._starts = top_k, budget, starts
        self._random = random.Random(seed)
        self._descents: dict[object, _Descent] = {}
        self._more: set[object] = set()
        """What is alike, and something began from one of it."""
        self._errors: dict[Hashable, tuple[float, int]] = {}
        """By the way in which a candidate was changed, as `_Waiting` learns them."""
        self._num_seen = 0
        """Starts that were looked at."""
        self._best: Score | None = None
        """When the last began once all else was done."""
        self._num_vain = 0
        """Those since the last that led to something better."""

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
        """From the best of other groups and numbers of ministages; of all that were simulated where that
        takes next to no time."""
        simulated = self._top_k.sort() if self._budget.is_tiny else sorted(self._starts)
        self._begin_first(simulated, _describe_alike)

    def begin_another(self) -> bool:
        """Whether there is one more, once all else was done: the best that was simulated of each structure,
        as worse modes are on the way to better ones; until so many in a row led to nothing better."""
        best = self._top_k.best
        if best is None or self._num_vain >= MOST_VAIN:
            return False
        self._num_vain = self._num_vain + 1 if self._best == best.score else 0
        self._best = best.score
        return self._begin_first(self._top_k.sort(), _describe_structure)

    def _begin_first(self, simulated: Iterable[SimulatedCandidate], describe: _Describe) -> bool:
        """From the first of these that is like none from which something began."""
        best = self._top_k.best
        for found in simulated:
            if best is not None and found.score.wanted > WORTH_CHANGING * best.score.wanted:
                break
            key = describe(found)
            if key not in self._more:
                self._more.add(key)
                self._begin(key, found)
                return True
        return False

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
                self._more.add(_describe_alike(found))
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
        start = descent.best.estimated
        limit = WORTH_SIMULATING * start.score.wanted
        is_new, descent.is_new = descent.is_new, False
        if is_new and (dealt := self._deal_otherwise(start)):
            yield self._top_k.expect_s(dealt.candidate)
            if self._simulate(descent, dealt)[0]:
                yield None
                return
        each_s = self._evaluator.nominal_of(start.candidate.num_devices)
        if is_new and start.candidate.has_rounds and self._top_k.is_long(start.candidate, each_s):
            layer_moves = list_layer_moves(start.candidate)
            yield len(layer_moves) * ESTIMATING_SHARE * each_s
            moved = self._evaluator.move_layers(start, layer_moves)
            if moved is not start:
                yield self._top_k.expect_s(moved.candidate)
                if self._simulate(descent, moved)[0]:
                    yield None
                    return
        # Of so many the best are simulated; where that is long, of as many as are estimated meanwhile.
        number = max(LONG, round(self._top_k.nominal_of(start.candidate) / each_s))
        moves, waiting = self._neighbours(start), _Waiting(self._errors)
        is_over = False
        while not is_over:
            yield number * each_s
            chunk = list(islice(moves, number))
            is_over = len(chunk) < number
            for way, estimated in chunk:
                waiting.add(way, estimated)
            takes_all = is_over or number == LONG
            for way, estimated in waiting.take(limit if not self._budget.is_tiny else inf):
                if self._top_k.offer(estimated.candidate):
                    for following in waiting.list_next(MOST_OFFERED):
                        self._top_k.offer(following.candidate)
                yield self._top_k.expect_s(estimated.candidate)
                is_better, error = self._simulate(descent, estimated)
                waiting.learn(way, error)
                if is_better:
                    yield None
                    return
                if not takes_all:
                    break
        if not is_new and (dealt := self._deal_otherwise(start)):
            yield self._top_k.expect_s(dealt.candidate)
            if self._simulate(descent, dealt)[0]:
                yield None

    def _simulate(self, descent: _Descent, estimated: EstimatedCandidate) -> tuple[bool, float]:
        """Whether it is better than the best of the descent, and now is that; and how much more of what is
        wanted little of it takes than the best did, each beside its estimate."""
        before = descent.best
        found = self._top_k.simulate(estimated)
        if found is None:
            return False, 1.0
        is_better = found.score < before.score and self._top_k.fits(found)
        if is_better:
            descent.best = found
        error = _find_error(before)  # None where what is used costs nothing.
        return is_better, _find_error(found) / error if error else 1.0

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
                choice = best.choice.change(g, mode=mode)
                if choice != self._evaluator.shard_alone(choice):
                    continue
                if changed in self._top_k or not self._builder.room.has_room(changed):
                    continue
                estimated = self._evaluator.estimate(changed, choice, best.grouping)
                if estimated is None:
                    continue
                yield self._top_k.expect_s(changed)
                found = self._top_k.simulate(estimated)
                if found is not None and found.score < descent.best.score and self._top_k.fits(found):
                    descent.best = found
                    break

    def _neighbours(self, estimated: EstimatedCandidate) -> Iterator[tuple[Hashable, EstimatedCandidate]]:
        """Those that fit, each with the way in which it was changed: layers moved, rows moved, another mode
        with the same layers and rows, or what other choices lead to; in an order that is the seed's."""
        start, now = estimated.candidate, estimated.choice
        changed = change_choice(
            now,
            self._evaluator.modes,
            num_layers=len(self._problem.workload.layers),
            most_rows=[
                -(-self._problem.global_batch // self._evaluator.count_replicas(own.devices, own.degrees))
                for own in now.groups
            ],
            regroup=self._problem.fixed.groups is None,
        )
        ways: list[tuple[str, CandidatePlan | None, Choice]] = [
            *(("layers", candidate, now) for candidate in move_layers(start)),
            *(("rows", candidate, now) for candidate in self._move_rows(start)),
            *(("choice", None, choice) for choice in changed),
            *(("choice", None, choice) for choice in self._drop_nodes(now)),
            *(("choice", None, choice) for choice in list_without_waiting(estimated)),
            *(("choice", None, choice) for choice in self._change_degrees(now)),
        ]
        if start.num_devices <= FEW_DEVICES:
            for g, choice in change_modes(now, self._evaluator.modes):
                if choice == self._evaluator.shard_alone(choice):
                    ways.append(("mode", start.with_mode(g, choice.groups[g].mode), choice))
        self._random.shuffle(ways)
        for way, candidate, choice in ways:
            if candidate is None:
                found = self._try_choice(choice, estimated.grouping)
            else:
                found = self._fit(candidate, choice, estimated.grouping)
            if found is None or found.candidate in self._top_k or _saves_memory_alone(estimated, found):
                continue
            yield (way, found.candidate.bounds_in_flight), found

    def _fit(self, candidate: CandidatePlan, choice: Choice, grouping: str) -> EstimatedCandidate | None:
        if candidate in self._top_k:
            return None
        fitted = self._builder.fit(candidate, choice)
        if fitted is None or fitted in self._top_k:
            return None
        return self._evaluator.estimate(fitted, choice, grouping)

    def _try_choice(self, choice: Choice, grouping: str) -> EstimatedCandidate | None:
        return self._evaluator.try_choice(choice, grouping) if self._is_possible(choice) else None

    def _deal_otherwise(self, estimated: EstimatedCandidate) -> EstimatedCandidate | None:
        """The same with rows dealt in blocks, or no longer; None where there is one way."""
        candidate = estimated.candidate
        other = replace(candidate, deals_otherwise=not candidate.deals_otherwise)
        if other in self._top_k or self._count_blocks(candidate) == (1, 1):
            return None
        return replace(estimated, candidate=other)

    def _count_blocks(self, candidate: CandidatePlan) -> tuple[int, int]:
        computers = [list_computers(group, self._problem) for group in candidate.groups]
        return count_blocks(candidate, self._table, self._problem.nodes, computers)

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
        num_blocks, _ = self._count_blocks(candidate)
        nodes = self._problem.nodes
        of_groups = [
            [
                (computer, nodes[first] if num_blocks == 1 else 0)
                for computer, first in zip(list_computers(group, self._problem), group.firsts, strict=True)
            ]
            for group in candidate.groups
        ]
        return move_rows(candidate, of_groups, self._problem.most_rows_at_once, num_blocks)

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


def _saves_memory_alone(before: EstimatedCandidate, after: EstimatedCandidate) -> bool:
    """Whether all that changed are modes, of which none is simpler now, and it promises no more: what such
    modes save is memory, and nobody has more rows or layers for it."""
    groups = [*zip(before.candidate.groups, after.candidate.groups, strict=False)]
    is_simpler = any(new.mode.complexity < old.mode.complexity for old, new in groups)
    if after.score.wanted < before.score.wanted or is_simpler:
        return False
    with_modes = tuple(replace(old, mode=new.mode) for old, new in groups)
    return after.candidate == replace(before.candidate, groups=with_modes)


def _describe_structure(found: SimulatedCandidate) -> Hashable:
    """All but rows and layers."""
    candidate = found.estimated.candidate
    groups = tuple((group.replicas, group.mode) for group in candidate.groups)
    return groups, candidate.num_ministages, candidate.bounds_in_flight


def _describe_alike(found: SimulatedCandidate) -> Hashable:
    """Sizes of groups, the number of ministages and the time: other devices that are alike make no difference
    to these."""
    candidate = found.estimated.candidate
    sizes = tuple(len(group.devices) for group in candidate.groups)
    return sizes, candidate.num_ministages, f"{found.score.wanted:.9g}"


def _list_groups(found: SimulatedCandidate) -> Groups:
    return tuple(replica for group in found.estimated.candidate.groups for replica in (*group.replicas, ()))
