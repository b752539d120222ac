"""Small changes of the best finalists, until none is better."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice

from zorselike.planner.candidate.candidate import Sketch
from zorselike.planner.groups.bandwidths import Bandwidths, read_bandwidths
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.budget import Effort
from zorselike.planner.search.compose import Choice, Composer
from zorselike.planner.search.explore import Candidate, Explorer
from zorselike.planner.search.neighbours import change_choice, describe_kinds, move_layers, move_rows
from zorselike.planner.search.top_k import WORTH_SIMULATING, Finalist, Finalists

MOST_STARTS = 3
"""Of these, how many are changed step by step."""
CHUNK = 16
"""Small changes whose estimates are compared before the best of them are simulated."""
SIMPLER = 1.002
"""A plan that takes up to this much longer is preferred where it is simpler."""


class Climber:
    """Improves the finalists of one problem."""

    def __init__(
        self,
        problem: PlanProblem,
        explorer: Explorer,
        composer: Composer,
        finalists: Finalists,
        effort: Effort,
        seed: int,
    ) -> None:
        self._problem, self._explorer, self._composer = problem, explorer, composer
        self._finalists, self._effort = finalists, effort
        self._random = random.Random(seed)

    def improve(self) -> None:
        """The best of what was simulated, first one of all with the same groups, then one with each number of
        ministages, changed until no small change is better."""
        starts: dict[object, Finalist] = {}
        more: dict[object, Finalist] = {}
        for found in self._finalists.sort():
            sketch = found.candidate.sketch
            devices = tuple(own.devices for own in sketch.groups)
            starts.setdefault(devices, found)
            more.setdefault((devices, sketch.num_ministages), found)
        for number, start in enumerate([*starts.values(), *more.values()]):
            if self._effort.is_over() or (number >= MOST_STARTS and not self._effort.is_little()):
                break
            self._climb(start)
        if self._finalists.best is not None:
            self._simplify(self._finalists.best)

    def _climb(self, start: Finalist) -> None:
        best = start
        while not self._effort.is_over():
            better = self._find_better(best)
            if better is None:
                return
            best = better

    def _simplify(self, best: Finalist) -> None:
        """The best with simpler modes where these cost next to nothing."""
        limit = best.rank.wanted * SIMPLER
        for g, group in enumerate(best.candidate.sketch.groups):
            simpler = [mode for mode in self._explorer.modes if mode.complexity < group.mode.complexity]
            for mode in sorted(simpler, key=lambda mode: mode.complexity):
                if self._effort.is_over():
                    return
                sketch = best.candidate.sketch
                groups = (*sketch.groups[:g], replace(group, mode=mode), *sketch.groups[g + 1 :])
                changed = replace(sketch, groups=groups)
                if not self._composer.has_room(changed):
                    continue
                choice = best.candidate.choice.change(g, mode=mode)
                candidate = self._explorer.estimate(changed, choice, best.candidate.grouping)
                found = None if candidate is None else self._finalists.simulate(candidate)
                if found is None or found.rank.wanted > limit:
                    continue
                if found.rank.is_allowed >= best.rank.is_allowed:
                    best = self._finalists.best = found
                    break

    def _find_better(self, best: Finalist) -> Finalist | None:
        """The first small change that is better, of those whose estimates are best first."""
        limit = WORTH_SIMULATING * best.candidate.rank.wanted
        moves = self._neighbours(best.candidate)
        while chunk := list(islice(moves, CHUNK)):
            for candidate in sorted(chunk, key=lambda candidate: candidate.rank):
                if self._effort.is_over():
                    return None
                if candidate.rank.wanted > limit and not self._effort.is_tiny():
                    break
                found = self._finalists.simulate(candidate)
                if found is not None and found.rank < best.rank:
                    return found
        return None

    def _neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Those that fit: rows and layers moved, then what other choices lead to; like moves in an order that
        is the seed's."""
        sketches = [*move_layers(candidate.sketch), *self._move_rows(candidate.sketch)]
        self._random.shuffle(sketches)
        for sketch in sketches:
            if self._effort.is_over():
                return
            if sketch not in self._finalists and self._composer.has_room(sketch):
                found = self._explorer.estimate(sketch, candidate.choice, candidate.grouping)
                if found is not None:
                    yield found
        choices = list(
            change_choice(
                candidate.choice,
                self._explorer.modes,
                num_layers=len(self._problem.workload.layers),
                global_batch=self._problem.global_batch,
                regroup=self._problem.fixed.groups is None,
            )
        )
        self._random.shuffle(choices)
        for choice in choices:
            if self._effort.is_over():
                return
            if self._is_possible(choice):
                found = self._explorer.try_choice(choice, candidate.grouping)
                if found is not None and found.sketch not in self._finalists:
                    yield found

    def _move_rows(self, sketch: Sketch) -> Iterator[Sketch]:
        places, cluster = self._problem.cluster.places, self._problem.cluster
        types = [cluster.device_type(place) for place in places]
        nodes = [place.node for place in places]
        most = min(
            self._problem.global_batch, self._problem.fixed.rows_per_microbatch or self._problem.global_batch
        )
        return move_rows(sketch, [describe_kinds(own, types, nodes) for own in sketch.groups], most)

    def _is_possible(self, choice: Choice) -> bool:
        """Whether its groups may be groups, and what is fixed or allowed is kept."""
        fixed, problem = self._problem.fixed, self._problem
        if fixed.ministages is not None and choice.num_ministages != fixed.ministages:
            return False
        if not len(choice.groups) <= choice.num_ministages <= len(self._problem.workload.layers):
            return False
        return all(self._may_be_group(own.devices) for own in choice.groups) and (
            problem.max_devices is None
            or sum(len(own.devices) for own in choice.groups) <= problem.max_devices
        )

    def _may_be_group(self, devices: tuple[int, ...]) -> bool:
        return self._all_bandwidths.slowest_link(devices) > 0

    @cached_property
    def _all_bandwidths(self) -> Bandwidths:
        return read_bandwidths(
            self._problem.cluster, self._problem.usable, span_regions=self._problem.spans_regions
        )
