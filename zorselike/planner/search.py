"""The search for the best plan (DESIGN section 9).

Sets of devices, their groupings and the orders of groups are looked at in the order of what they promise;
for each, rows, layers, modes, rounds and ministages are decided by an estimate of the step (`pace.py`) and
the memory walk. The most promising sketches are simulated, and the best of them changed step by step until
nothing improves. What is done is counted, not timed: an answer is the same each time unless the budget ends
it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import isfinite, log2
from typing import NamedTuple

from zorselike.cost.layer_times import LayerClock
from zorselike.cost.sizes import find_gradient_itemsize
from zorselike.plan.errors import ClusterError, ProfileError
from zorselike.plan.plan import Estimates
from zorselike.planner.answer import (
    Ending,
    NothingFitsError,
    OnProgress,
    PlanAnswer,
    Planned,
    Progress,
)
from zorselike.planner.bandwidths import Bandwidths, read_bandwidths
from zorselike.planner.compose import Choice, Composer
from zorselike.planner.device_bounds import DeviceBounds
from zorselike.planner.device_choice import DeviceSet, propose_devices
from zorselike.planner.explore import Candidate, Explorer, Groups
from zorselike.planner.goal import WORST, Rank, rank
from zorselike.planner.group_orders import order_by_bandwidth, order_groups
from zorselike.planner.groups import Grouping, find_groupings
from zorselike.planner.layer_table import LayerTable
from zorselike.planner.neighbours import change_choice, describe_kinds, move_layers, move_rows
from zorselike.planner.nothing_fits import describe_nothing
from zorselike.planner.pace import Pace
from zorselike.planner.problem import PlanProblem
from zorselike.planner.rank_memory import RankMemory
from zorselike.planner.sketch import Sketch, make_plan
from zorselike.simulator.case import Case
from zorselike.simulator.limits import describe_limit

ASSUMED_ROUNDS = 32
"""Of a step, in the first guess at groupings."""
MOST_ORDERS = 24
"""Of groups, beyond which only the paper's order is looked at."""
MOST_DEEPENED = 6
"""Groupings of a set of devices that are looked at closely."""
MOST_FINALISTS = 16
"""Sketches that are simulated before the best are changed."""
MOST_STARTS = 3
"""Of these, how many are changed step by step."""
WORTH_SIMULATING = 1.3
"""Estimates up to this many times the best one's are simulated."""
FEW_ACTIONS = 1_500_000
"""Up to so many simulated actions, about ten seconds, more finalists are looked at than those."""
GLANCING_SHARE, EXPLORING_SHARE = 0.25, 0.6
"""Of the budget, after which no more groupings are glanced at, and none looked at closely: then the best are
simulated."""
MANY_ACTIONS, WORTH_OF_HALF = 20_000, 0.02
"""Beyond so many actions a candidate with half of them is simulated first if it takes no longer than by this
share."""
MOST_ACTIONS = 12_000_000
"""Simulated in all, about two minutes; and so deterministic."""
CHUNK = 16
"""Small changes whose estimates are compared before the best of them are simulated."""
SIMPLER = 1.002
"""A plan that takes up to this much longer is preferred where it is simpler."""
TIGHTER = 0.9
"""Of the memory there is, with what is planned where whole plans turn out not to fit."""
FUTILE_S = 10.0
"""After so many seconds beyond the budget without anything that fits the search gives up."""
FEW_SETS, FEW_GROUPINGS = 2, 2
"""Of devices, and of each: in which something that fits is looked for, were there more memory."""
LIMITING_SHARE = 0.7
"""Below this share of the ideal a plan says what limits it."""


def search_plans(
    problem: PlanProblem,
    *,
    budget_s: float = 30.0,
    top: int = 5,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> PlanAnswer:
    """The best plans found within a time; one that fits is returned however short the time is.

    Args:
        problem: what is asked.
        budget_s: after so many seconds the best so far is returned; Ctrl-C does the same at once.
        top: how many plans, the best first; those after it differ from it in groups or modes.
        seed: of the order in which small changes are tried.
        on_progress: is told every now and then how far it is.

    Raises:
        ConfigError: The problem contradicts itself.
        NothingFitsError: No plan fits, or none keeps the constraints; says the smallest change that would.
        ProfileError: Nothing is known of the speed of any device.
        ClusterError: Nothing says how devices are connected.
    """
    problem.check()
    return _Search(problem, budget_s, seed, on_progress).run(top)


class _Simulated(NamedTuple):
    """A candidate whose step was simulated."""

    rank: Rank
    number: int
    """Which one, in the order of simulation."""
    candidate: Candidate
    case: Case


@dataclass
class _Counts:
    """Of simulations."""

    simulated: int = 0
    actions: int = 0
    estimated_actions: int = 0
    seconds: float = 0.0


def _weigh(candidate: Candidate) -> float:
    """What is wanted little of, and more of it for many actions."""
    doublings = max(0.0, log2(max(1, candidate.sketch.num_actions) / MANY_ACTIONS))
    return candidate.rank.wanted * (1 + WORTH_OF_HALF * doublings)


class _Search:
    def __init__(
        self, problem: PlanProblem, budget_s: float, seed: int, on_progress: OnProgress | None
    ) -> None:
        self._started_s = time.monotonic()
        self._budget_s = budget_s
        self._random = random.Random(seed)
        self._on_progress = on_progress
        self._notes: list[str] = []
        self._sets_seen: list[DeviceSet] = []
        self._clock = LayerClock(problem.profile, problem.workload)
        self._problem = problem = self._leave_out_unknown(problem)
        self._table = LayerTable(problem.workload, self._clock)
        self._pace = Pace(problem, self._table)
        self._memory = RankMemory(problem, self._table, self._clock.kept_bytes)
        self._composer = Composer(problem, self._table, self._pace, self._memory)
        self._bounds = DeviceBounds(problem, self._clock)
        self._explorer = Explorer(
            problem,
            self._table,
            self._composer,
            self._pace,
            self._bounds.price_per_hour,
            self._is_exploring_over,
        )
        self._found: dict[Sketch, Candidate] = {}
        """By estimate."""
        self._simulated: dict[Sketch, _Simulated | None] = {}
        self._best: _Simulated | None = None
        self._counts = _Counts()
        self._told_s = 0.0
        self._may_stop = False
        """Once something fits and keeps the constraints."""

    def _leave_out_unknown(self, problem: PlanProblem) -> PlanProblem:
        """Without devices of which nothing says how fast they are, such as those without this dtype."""
        cluster, kind = problem.cluster, problem.workload.layers[0][1]
        unknown: dict[str, ProfileError] = {}
        for device in dict.fromkeys(cluster.device_type(cluster.places[d]) for d in problem.usable):
            try:
                for kind in problem.workload.kinds:
                    self._clock.forward_s(kind, device, 1, "none")
            except ProfileError as error:
                unknown[device] = error
        if not unknown:
            return problem
        known = tuple(d for d in problem.usable if cluster.device_type(cluster.places[d]) not in unknown)
        given = {d for group in problem.fixed.groups or () for d in group}
        if not known or given - {*known}:
            raise next(iter(unknown.values()))
        self._notes += [f"{device} left out: {error}" for device, error in unknown.items()]
        return replace(problem, devices=known)

    # -- time ------------------------------------------------------------------------------

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _is_exploring_over(self) -> bool:
        return self._is_past(EXPLORING_SHARE)

    def _is_past(self, share: float) -> bool:
        """Whether a share of the budget is over."""
        self._tell()
        if not self._may_stop:
            return self._elapsed_s > self._budget_s + FUTILE_S
        return self._elapsed_s > share * self._budget_s

    def _is_over(self) -> bool:
        self._tell()
        is_worked_out = self._counts.actions > MOST_ACTIONS
        return self._may_stop and (self._elapsed_s > self._budget_s or is_worked_out)

    def _progress(self) -> Progress:
        best = None if self._best is None else self._best.case.simulation
        return Progress(
            elapsed_s=self._elapsed_s,
            num_estimated=self._explorer.num_estimated,
            num_simulated=self._counts.simulated,
            best_s=None if best is None else best.iteration_s,
            best_cost=None if best is None else best.cost,
            bound_s=self._bounds.floor_s,
        )

    def _tell(self, *, now: bool = False) -> None:
        if self._on_progress is not None and (now or self._elapsed_s - self._told_s > 0.1):
            self._told_s = self._elapsed_s
            self._on_progress(self._progress())

    # -- the whole -------------------------------------------------------------------------

    def run(self, top: int) -> PlanAnswer:
        ending = self._look()
        plans = self._choose(top)
        if not plans:  # What was walked in parts fits, and the whole plans do not, by a little.
            self._memory.scale = TIGHTER
            self._forget()
            ending = self._look()
            plans = self._choose(top)
        if not plans:
            self._memory.scale = 1.0
            raise NothingFitsError(self._explain_nothing())
        assert self._best is not None
        used = {device for group in self._best.candidate.sketch.groups for device in group.devices}
        self._notes += [own.note for own in self._sets_seen if own.note and used <= {*own.devices}][:1]
        self._tell(now=True)
        return PlanAnswer(
            plans=plans, progress=self._progress(), ending=ending, notes=tuple(dict.fromkeys(self._notes))
        )

    def _look(self) -> Ending:
        """Finds candidates, simulates the best and improves them."""
        try:
            self._explore()
            self._simulate_best()
            self._improve()
        except KeyboardInterrupt:
            if not self._found:
                raise
            self._budget_s = 0.0
            self._simulate_best()
            return "interrupted"
        return "budget" if self._elapsed_s > self._budget_s else "finished"

    def _forget(self) -> None:
        """All that was found with more memory."""
        self._explorer.forget()
        self._found.clear()
        self._simulated.clear()
        self._best = None
        self._may_stop = False

    def _explore(self) -> None:
        """Finds candidates by estimate: in every set of devices all groupings, the best of these closely."""
        best: Rank = WORST
        sets = propose_devices(
            self._problem, bounds=self._bounds, time_limit_s=min(0.3, 0.03 * self._budget_s)
        )
        for number, devices in enumerate(sets):
            if best.is_allowed and not self._bound(devices) < best:
                continue
            if self._is_exploring_over():
                break
            self._sets_seen.append(devices)
            glances = self._glance(devices)
            best = min([best, *(glance.rank for glance in glances)])
            for glance in glances[: MOST_DEEPENED if number == 0 else MOST_DEEPENED // 4]:
                if self._is_exploring_over():
                    break
                for candidate in self._deepen(glance, devices):
                    self._keep(candidate)
                    best = min(best, candidate.rank)

    def _bound(self, devices: DeviceSet) -> Rank:
        """No plan of these devices ranks before."""
        cost = self._bounds.least_cost(devices.devices)
        bound = rank(self._problem, devices.bound_s, cost, 0)
        return replace(bound, excess=0.0)

    def _glance(self, devices: DeviceSet) -> list[Candidate]:
        """Every grouping of a set of devices, the most promising first."""
        found: list[Candidate] = []
        for groups, name in self._list_groups(devices):
            if self._is_past(GLANCING_SHARE):
                break
            candidate = self._explorer.glance(groups, name)
            if candidate is not None:
                found.append(candidate)
                self._keep(candidate)
        return sorted(found, key=lambda candidate: candidate.rank)

    def _keep(self, candidate: Candidate) -> None:
        self._found.setdefault(candidate.sketch, candidate)
        self._may_stop = self._may_stop or candidate.rank.is_allowed

    def _list_groups(self, devices: DeviceSet) -> Iterator[tuple[Groups, str]]:
        """Groupings, their groups in the paper's order."""
        fixed = self._problem.fixed
        if fixed.groups is not None:
            yield fixed.groups, "fixed"
            return
        bandwidths = self._read_bandwidths(devices)
        most = fixed.ministages or len(self._table.keys)
        groupings = find_groupings(bandwidths, max_groups=min(most, self._most_groups(bandwidths)))
        for grouping in sorted(groupings, key=lambda own: self._guess_s(bandwidths, own)):
            order = order_by_bandwidth(bandwidths, grouping.groups)
            yield tuple(grouping.groups[i] for i in order), grouping.name

    def _guess_s(self, bandwidths: Bandwidths, grouping: Grouping) -> float:
        """What speaks against a grouping before it is looked at, in seconds: all gradients of the slowest
        group over its slowest link, and a microbatch's way through each group."""
        speeds = [
            sum(1 / self._bounds.model_s(self._bounds.type_of(d)) for d in own) for own in grouping.groups
        ]
        model_bytes = self._problem.workload.num_parameters * find_gradient_itemsize(
            self._problem.workload.itemsize
        )
        reduced_s = max(
            model_bytes * speed / sum(speeds) / bandwidths.slowest_link(own)
            for speed, own in zip(speeds, grouping.groups, strict=True)
        )
        fill_s = self._problem.global_batch / sum(speeds) * len(grouping.groups) / ASSUMED_ROUNDS
        return reduced_s + fill_s

    def _deepen(self, glance: Candidate, devices: DeviceSet) -> Iterator[Candidate]:
        """One decision after the other, then the groups in other orders, and the best of these again."""
        best = self._explorer.deepen(glance)
        yield best
        groups = tuple(own.devices for own in best.choice.groups)
        if self._problem.fixed.groups is not None or len(groups) == 1:
            return
        orders = order_groups(self._read_bandwidths(devices), groups, max_orders=MOST_ORDERS)
        turned = best
        for order in orders:
            if self._is_exploring_over():
                return
            choice = replace(best.choice, groups=tuple(best.choice.groups[i] for i in order))
            found = self._explorer.try_choice(choice, f"{glance.grouping}, in another order")
            if found is not None:
                yield found
                turned = min(turned, found, key=lambda candidate: candidate.rank)
        if turned is not best:
            yield self._explorer.deepen(turned)

    def _most_groups(self, bandwidths: Bandwidths) -> int:
        num_nodes = len({block.node for block in bandwidths.blocks})
        return max(num_nodes, min(len(bandwidths.devices), 8))

    def _read_bandwidths(self, devices: DeviceSet) -> Bandwidths:
        return read_bandwidths(
            self._problem.cluster, devices.devices, span_regions=self._problem.spans_regions
        )

    # -- simulation ------------------------------------------------------------------------

    def _simulate_best(self) -> None:
        """The best by estimate, one that fits in any case. Of those that are about as good, one with few
        actions comes first, which is as good to run and quicker to simulate."""
        candidates = sorted(self._found.values(), key=lambda own: (own.rank.excess, _weigh(own)))
        if not candidates:
            raise NothingFitsError(self._explain_nothing())
        least = candidates[0].rank.wanted
        for number, candidate in enumerate(candidates):
            if self._best is not None and self._best.rank.is_allowed:
                if self._is_over() or candidate.rank.wanted > WORTH_SIMULATING * least:
                    break
                if number >= MOST_FINALISTS and self._counts.actions > FEW_ACTIONS:
                    break
            self._simulate(candidate)
        if self._best is None:
            raise NothingFitsError(self._explain_nothing())

    def _simulate(self, candidate: Candidate) -> _Simulated | None:
        """None for what does not fit after all, or whose ranks are not joined."""
        sketch = candidate.sketch
        if sketch not in self._simulated:
            if self._best is not None and self._best.rank.is_allowed and self._would_overrun(sketch):
                return None
            self._simulated[sketch] = self._run(candidate)
        found = self._simulated[sketch]
        if found is not None and (self._best is None or found.rank < self._best.rank):
            self._best = found
        return found

    def _would_overrun(self, sketch: Sketch) -> bool:
        """Whether a simulation would end after the budget, by how long those before took."""
        each_s = self._counts.seconds / max(1, self._counts.estimated_actions)
        return self._elapsed_s + each_s * sketch.num_actions > self._budget_s

    def _run(self, candidate: Candidate) -> _Simulated | None:
        began_s = self._elapsed_s
        try:
            plan = make_plan(candidate.sketch, self._problem, self._table).validate()
            case = self._problem.setting.simulate(plan)
        except (ClusterError, ProfileError):
            return None
        self._counts.simulated += 1
        self._counts.actions += sum(map(len, case.actions.values()))
        self._counts.estimated_actions += candidate.sketch.num_actions
        self._counts.seconds += self._elapsed_s - began_s
        simulation = case.simulation
        order = rank(self._problem, simulation.iteration_s, simulation.cost, plan.num_ranks)
        return _Simulated(order, self._counts.simulated, candidate, case)

    # -- small changes ---------------------------------------------------------------------

    def _improve(self) -> None:
        """The best of what was simulated, first one of all with the same groups, then one with each number of
        ministages, changed until no small change is better."""
        starts: dict[object, _Simulated] = {}
        more: dict[object, _Simulated] = {}
        for found in sorted(own for own in self._simulated.values() if own is not None):
            sketch = found.candidate.sketch
            devices = tuple(own.devices for own in sketch.groups)
            starts.setdefault(devices, found)
            more.setdefault((devices, sketch.num_ministages), found)
        for number, start in enumerate([*starts.values(), *more.values()]):
            if self._is_over() or (number >= MOST_STARTS and self._counts.actions > FEW_ACTIONS):
                break
            self._climb(start)
        if self._best is not None:
            self._simplify(self._best)

    def _climb(self, start: _Simulated) -> None:
        best = start
        while not self._is_over():
            better = self._find_better(best)
            if better is None:
                return
            best = better

    def _simplify(self, best: _Simulated) -> None:
        """The best with simpler modes where these cost next to nothing."""
        limit = best.rank.wanted * SIMPLER
        for g, group in enumerate(best.candidate.sketch.groups):
            simpler = [mode for mode in self._explorer.modes if mode.complexity < group.mode.complexity]
            for mode in sorted(simpler, key=lambda mode: mode.complexity):
                if self._is_over():
                    return
                sketch = best.candidate.sketch
                groups = (*sketch.groups[:g], replace(group, mode=mode), *sketch.groups[g + 1 :])
                changed = replace(sketch, groups=groups)
                if not self._has_room(changed):
                    continue
                choice = best.candidate.choice.change(g, mode=mode)
                candidate = self._explorer.estimate(changed, choice, best.candidate.grouping)
                found = None if candidate is None else self._simulate(candidate)
                if found is None or found.rank.wanted > limit:
                    continue
                if found.rank.is_allowed >= best.rank.is_allowed:
                    best = self._best = found
                    break

    def _find_better(self, best: _Simulated) -> _Simulated | None:
        """The first small change that is better, of those whose estimates are best first."""
        limit = WORTH_SIMULATING * best.candidate.rank.wanted
        moves = self._neighbours(best.candidate)
        while chunk := list(islice(moves, CHUNK)):
            for candidate in sorted(chunk, key=lambda candidate: candidate.rank):
                if self._is_over():
                    return None
                if candidate.rank.wanted > limit:
                    break
                found = self._simulate(candidate)
                if found is not None and found.rank < best.rank:
                    return found
        return None

    def _neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Those that fit: rows and layers moved, then what other choices lead to; like moves in an order that
        is the seed's."""
        sketches = [*move_layers(candidate.sketch), *self._move_rows(candidate.sketch)]
        self._random.shuffle(sketches)
        for sketch in sketches:
            if self._is_over():
                return
            if sketch not in self._simulated and self._has_room(sketch):
                found = self._explorer.estimate(sketch, candidate.choice, candidate.grouping)
                if found is not None:
                    yield found
        choices = list(
            change_choice(
                candidate.choice,
                self._explorer.modes,
                num_layers=len(self._table.keys),
                global_batch=self._problem.global_batch,
                regroup=self._problem.fixed.groups is None,
            )
        )
        self._random.shuffle(choices)
        for choice in choices:
            if self._is_over():
                return
            if self._is_possible(choice):
                found = self._explorer.try_choice(choice, candidate.grouping)
                if found is not None and found.sketch not in self._simulated:
                    yield found

    def _has_room(self, sketch: Sketch) -> bool:
        return not self._composer.find_overfull(sketch) and not self._memory.overfull_hosts(sketch)

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
        if not len(choice.groups) <= choice.num_ministages <= len(self._table.keys):
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

    # -- the answer ------------------------------------------------------------------------

    def _choose(self, top: int) -> tuple[Planned, ...]:
        """The best that fit, each with other groups or modes than those before."""
        chosen: list[Planned] = []
        seen: set[object] = set()
        assert self._best is not None
        refused: _Simulated | None = None
        simulated = sorted(own for own in self._simulated.values() if own is not None)
        for found in [self._best, *simulated]:
            structure = tuple((own.devices, own.mode) for own in found.candidate.sketch.groups)
            if structure in seen or not self._fits(found.case):
                continue
            if not found.rank.is_allowed:
                refused = refused or found
                continue
            seen.add(structure)
            chosen.append(self._finish(found))
            if len(chosen) == max(1, top):
                break
        if not chosen and refused is not None:
            raise NothingFitsError(self._explain_refused(refused))
        return tuple(chosen)

    def _explain_refused(self, found: _Simulated) -> str:
        """Where plans fit, and none keeps what is asked for."""
        simulation, problem = found.case.simulation, self._problem
        asked = []
        if isfinite(problem.max_cost_per_iteration):
            asked.append(
                f"at most {problem.max_cost_per_iteration:g} {problem.cluster.currency} an iteration"
            )
        if problem.min_throughput:
            asked.append(f"at least {problem.min_throughput:g} iterations/s")
        return (
            f"plan: none of the {self._counts.simulated} plans that were simulated keeps "
            f"{' and '.join(asked)}; the nearest costs {simulation.cost:.4g} {problem.cluster.currency} an "
            f"iteration and makes "
            f"{1 / simulation.iteration_s:.4g} iterations/s; ease what is asked for, or search longer"
        )

    def _fits(self, case: Case) -> bool:
        """By the walk over every rank's own list."""
        ranks = range(case.plan.num_ranks)
        return not any(map(case.is_overfull, ranks)) and not any(map(case.is_host_overfull, case.host_bytes))

    def _finish(self, found: _Simulated) -> Planned:
        case, simulation = found.case, found.case.simulation
        devices = [device for group in found.candidate.sketch.groups for device in group.devices]
        ideal_s = self._bounds.bound_s(devices)
        share = ideal_s / simulation.iteration_s
        estimates = Estimates(
            iteration_s=simulation.iteration_s,
            cost_per_iteration=simulation.cost if simulation.cost else None,
            peak_memory_bytes=case.peak_bytes,
            share_of_ideal=share,
            limited_by=tuple(describe_limit(case)) if share < LIMITING_SHARE else (),
        )
        plan = replace(case.plan, estimates=estimates)
        return Planned(replace(case, plan=plan), found.candidate.grouping, ideal_s)

    def _explain_nothing(self) -> str:
        sets = propose_devices(self._problem, bounds=self._bounds)[:FEW_SETS]
        likely = [own for devices in sets for own in islice(self._list_groups(devices), FEW_GROUPINGS)]

        def find() -> Candidate | None:
            self._explorer.forget()
            found = (self._explorer.find_any(groups, name) for groups, name in likely)
            return next((own for own in found if own is not None), None)

        return describe_nothing(self._problem, self._memory, find)
