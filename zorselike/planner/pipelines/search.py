"""The best pipeline at one degree of data parallelism and one microbatch size (Sailor section 4.2.2).

Sailor's recursion minimises one number though a step's time mixes a sum with maxima, and guesses the
straggler; here partial pipelines are kept as long as some completion could make them the best. From the last
stage towards the first (the stages after one decide how many microbatches it holds), a state is the first
layer covered, the number of stages, the devices used and the option of the first stage so far. A partial
pipeline is dropped when another in the same state is no worse whatever comes before: its sum of stage times,
plus m - 1 times what its straggler is slower, plus what its sync and update are slower, is no more, nor is
its egress. That is one search for all caps on the straggler at once, and exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

from zorselike.planner.pipelines.bounds import Bounds, Floors, Reach
from zorselike.planner.pipelines.costs import Figures, PipelineCosts, Rent, Stage, evaluate

_CAPS = (1.1, 1.3)
"""Times the least straggler."""


@dataclass
class Incumbent:
    """The best pipeline so far, and the one place where better is decided."""

    minimise_dollars: bool
    max_s: float
    """Of a step."""
    max_dollars: float
    max_devices: float
    max_tried: float
    """Partial pipelines after which no more are tried."""
    figures: Figures | None = None
    stages: tuple[Stage, ...] = ()
    problem: int = -1
    """Which problem it is of."""
    num_tried: int = 0

    @property
    def is_exhausted(self) -> bool:
        return self.num_tried >= self.max_tried

    def allows(self, iteration_s: float, dollars: float) -> bool:
        """Whether a pipeline of at least so much could be the best."""
        best = self.figures
        if iteration_s > self.max_s or dollars > self.max_dollars:
            return False
        if best is None:
            return True
        if self.minimise_dollars:
            return dollars < best.dollars * (1 - 1e-9)
        return iteration_s < best.iteration_s * (1 - 1e-9)

    def offer(self, problem: int, figures: Figures, stages: tuple[Stage, ...]) -> None:
        if sum(figures.used) <= self.max_devices and self.allows(figures.iteration_s, figures.dollars):
            self.figures, self.stages, self.problem = figures, stages, problem

    @property
    def slowest_s(self) -> float:
        """No pipeline slower than this is of use."""
        if self.figures is None or self.minimise_dollars:
            return self.max_s
        return min(self.max_s, self.figures.iteration_s)


class _Partial(NamedTuple):
    """Stages from `stage.start` to the last layer."""

    straggler_s: float
    """The slowest stage but for the first of these."""
    pending_s: float
    """Time of the first of these, without what it sends backward."""
    sum_s: float
    """With `pending_s`."""
    sync_s: float
    update_s: float
    egress: float
    stage: Stage
    after: _Partial | None


_Key = tuple[int, int, tuple[int, ...]]
"""First layer, option of the first stage, devices used."""


class PipelineSearch:
    """One search; `run` improves the incumbent."""

    def __init__(self, problem: int, bounds: Bounds, rent: Rent, incumbent: Incumbent) -> None:
        self.problem, self.bounds, self.rent, self.incumbent = problem, bounds, rent, incumbent
        self.costs: PipelineCosts = bounds.costs
        self._factor = self.costs.num_microbatches - 1
        self._counts_money = incumbent.minimise_dollars or incumbent.max_dollars < inf
        self._cap_s = inf
        self._floors: Floors
        self._reach: Reach | None = None
        self._forward_s = cache(self.costs.forward_send_s)
        self._backward_s = cache(self.costs.backward_send_s)
        self._stage: dict[Stage, tuple[float, float, float]] = {}
        self._befores: dict[tuple[int, int, int], list[tuple[Stage, float]]] = {}
        self._rates: dict[tuple[int, ...], tuple[float, float]] = {}

    def run(self, floors: Floors) -> None:
        """Where the incumbent cuts little, first under caps that rise from the least straggler, for a better
        one; the last sweep has no cap but the incumbent's."""
        self._floors = floors
        if self._factor and not self.incumbent.minimise_dollars:
            for slack in _CAPS:
                if floors.straggler_s * slack * _CAPS[0] >= self._useful_cap_s():
                    break
                self._sweep(floors.straggler_s * slack)
        self._sweep(self._useful_cap_s())

    def _useful_cap_s(self) -> float:
        return self._floors.slowest_straggler_s(self.incumbent.slowest_s)

    def _sweep(self, cap_s: float) -> None:
        self._cap_s = cap_s * (1 + 1e-12)
        self._befores.clear()
        self._reach = self.bounds.reach(cap_s) if cap_s < inf else None
        frontier: dict[_Key, list[_Partial]] = {}
        for depth in range(1, self.costs.num_layers + 1):
            following: dict[_Key, list[_Partial]] = {}
            for used, partial in self._last_stages() if depth == 1 else self._extend(frontier, depth):
                if partial.stage.start == 0:
                    self._complete(partial)
                else:
                    self._keep(following, used, partial)
            frontier = following
            if not frontier or self.incumbent.is_exhausted:
                break

    def _last_stages(self) -> Iterator[tuple[tuple[int, ...], _Partial]]:
        last = self.costs.num_layers
        for option in self.bounds.options:
            used = tuple(self.costs.uses[option])
            covers = self._layers_left(used)
            for stage, seconds in self._stages_before(option, last, 1):
                if stage.start > covers:
                    continue
                sync_s, update_s, egress = self._once_a_step(stage)
                partial = _Partial(0.0, seconds, seconds, sync_s, update_s, egress, stage, None)
                if self._may_win(partial, used):
                    yield used, partial

    def _extend(
        self, frontier: dict[_Key, list[_Partial]], depth: int
    ) -> Iterator[tuple[tuple[int, ...], _Partial]]:
        """By one stage before each; `depth` counts it."""
        for (stop, following, used), partials in frontier.items():
            if self.incumbent.is_exhausted:
                return
            for option in self.bounds.options:
                taken = tuple(a + b for a, b in zip(used, self.costs.uses[option], strict=True))
                if (covers := self._layers_left(taken)) < 0:
                    continue
                backward_s = self._backward_s(following, option, stop, depth == 2)
                egress = self._boundary_dollars(option, following, stop)
                befores = [
                    (max(p.straggler_s, p.pending_s + backward_s), p.sum_s + backward_s, p.egress + egress, p)
                    for p in partials
                ]
                for stage, seconds in self._stages_before(option, stop, depth):
                    first_of = depth if stage.start == 0 else 0
                    own_s = seconds + self._forward_s(option, following, stop, first_of)
                    if stage.start > covers or own_s > self._cap_s:
                        continue
                    sync_s, update_s, own_egress = self._once_a_step(stage)
                    for straggler_s, sum_s, paid, partial in befores:
                        if straggler_s > self._cap_s:
                            continue
                        longer = _Partial(
                            straggler_s,
                            own_s,
                            sum_s + own_s,
                            max(partial.sync_s, sync_s),
                            max(partial.update_s, update_s),
                            paid + own_egress,
                            stage,
                            partial,
                        )
                        if self._may_win(longer, taken):
                            yield taken, longer

    def _stages_before(self, option: int, stop: int, depth: int) -> list[tuple[Stage, float]]:
        """Those that end at `stop`, and their compute, as far as memory and the cap let them start."""
        key = (option, stop, depth)
        if (found := self._befores.get(key)) is None:
            found = self._befores[key] = []
            prefix = self.bounds.prefix_s[option]
            for start in range(stop - 1, -1, -1):
                seconds = prefix[stop] - prefix[start]
                if seconds > self._cap_s or not self.costs.fits(option, start, stop, depth):
                    break
                found.append((Stage(option, start, stop), seconds))
        return found

    def _layers_left(self, used: tuple[int, ...]) -> int:
        """How many layers from the first the other devices are enough for, at most; -1: too many used."""
        left = [q - u for q, u in zip(self.bounds.quota, used, strict=True)]
        if min(left) < 0 or sum(used) > self.incumbent.max_devices:
            return -1
        return self.costs.num_layers if self._reach is None else self._reach.layers(left)

    def _may_win(self, partial: _Partial, used: tuple[int, ...]) -> bool:
        self.incumbent.num_tried += 1
        start, floors = partial.stage.start, self._floors
        straggler_s = max(floors.straggler_s, partial.straggler_s, partial.pending_s)
        iteration_s = (
            self._factor * straggler_s
            + partial.sum_s
            + self.bounds.least_s[start]
            + max(floors.sync_s, partial.sync_s)
            + max(floors.update_s, partial.update_s)
        )
        rent = 0.0
        if self._counts_money:
            billed, busy = self._rate(used)
            rent = max(billed * iteration_s, busy * iteration_s + self.bounds.least_dollars[start])
        return self.incumbent.allows(iteration_s * (1 - 1e-12), (rent + partial.egress) * (1 - 1e-12))

    def _keep(self, states: dict[_Key, list[_Partial]], used: tuple[int, ...], new: _Partial) -> None:
        kept = states.setdefault((new.stage.start, new.stage.option, used), [])
        if not any(self._is_no_worse(old, new) for old in kept):
            kept[:] = [old for old in kept if not self._is_no_worse(new, old)]
            kept.append(new)

    def _is_no_worse(self, a: _Partial, b: _Partial) -> bool:
        """Whether `a` completed in any way takes no longer than `b` so completed, and costs no more."""
        least = self._floors.straggler_s
        slower_s = max(0.0, a.straggler_s - max(b.straggler_s, least), a.pending_s - b.pending_s)
        excess_s = (
            a.sum_s
            - b.sum_s
            + self._factor * slower_s
            + max(0.0, a.sync_s - b.sync_s)
            + max(0.0, a.update_s - b.update_s)
        )
        return excess_s <= 0 and a.egress <= b.egress

    def _complete(self, partial: _Partial) -> None:
        stages = []
        at: _Partial | None = partial
        while at is not None:
            stages.append(at.stage)
            at = at.after
        self.incumbent.offer(self.problem, evaluate(self.costs, stages, self.rent), tuple(stages))

    def _once_a_step(self, stage: Stage) -> tuple[float, float, float]:
        """Sync, update and egress of a stage."""
        found = self._stage.get(stage)
        if found is None:
            option, start, stop = stage.option, stage.start, stage.stop
            found = self._stage[stage] = (
                self.costs.sync_s(option, start, stop),
                self.costs.update_s(option, start, stop),
                self.costs.sync_dollars(option, start, stop) if self._counts_money else 0.0,
            )
        return found

    def _boundary_dollars(self, option: int, following: int, stop: int) -> float:
        return self.costs.boundary_dollars(option, following, stop) if self._counts_money else 0.0

    def _rate(self, used: tuple[int, ...]) -> tuple[float, float]:
        """Dollars a second with and without idle devices; stages to come may be given the idle ones."""
        if used not in self._rates:
            busy = Rent(self.rent.pools, bill_idle=False).dollars_per_s(used)
            self._rates[used] = (self.rent.dollars_per_s(used), busy)
        return self._rates[used]
