"""A benchmark in progress: cases, contestants that ran on them, figures that came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zorselike.plan.plan import Plan
from zorselike.schedule import ScheduleSpec, build

from ..report import Figure
from .forked import Timing
from .plans import make_plan
from .runs import Emulation, run_fsdp, run_mesh, run_ours
from second_simulator.actions import MIN_COST_ROWS, Workload, simulate
from second_simulator.meshes import Cluster, Mesh, simulate_mesh

MIN_SLEEP_S = 0.045
"""The shortest sleep of a ministage with seven ranks: what Python and Gloo do for one action of
every rank then stays far under 30 % of two cores over that time."""
LONG_STEP_S = 10.0
"""Fewer steps are timed where they are longer."""
QUICK = 0.8
"""Factor on all sleeps with `--quick`."""
MIN_STEP_S = 5.0
"""The shortest step, so that what a step costs once (collectives of seven ranks on two cores)
stays small against it, as it is against a real step."""


@dataclass(frozen=True)
class Run:
    """One contestant in one case."""

    case: str
    contestant: str
    timing: Timing
    bound_s: float
    """Seconds of a step in the simulation of the same actions."""
    ideal_s: float
    """All rows over the summed speed of all ranks."""

    @property
    def share_of_bound(self) -> float:
        return self.bound_s / self.timing.median_s

    @property
    def share_of_ideal(self) -> float:
        return self.ideal_s / self.timing.median_s


def format_runs(runs: Sequence[Run]) -> str:
    """A table of all timed steps."""
    lines = [
        f"{'case':28} {'contestant':36} "
        f"{'step s':>8} {'bound s':>8} {'of bound':>8} {'of ideal':>8} {'cpu':>5}"
    ]
    for run in runs:
        lines.append(
            f"{run.case:28} {run.contestant:36} {run.timing.median_s:8.3f} {run.bound_s:8.3f} "
            f"{run.share_of_bound:8.3f} {run.share_of_ideal:8.3f} {run.timing.cpu_share:5.0%}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Case:
    """A plan with the devices it runs on."""

    name: str
    plan: Plan
    layers: tuple[int, ...]
    """Layers of each ministage."""
    emulation: Emulation

    @property
    def workload(self) -> Workload:
        emulation = self.emulation
        return Workload(emulation.seconds_of_rank, self.layers, emulation.row_bytes, emulation.layer_bytes)

    @property
    def cluster(self) -> Cluster:
        """The same devices for a mesh of torch's."""
        emulation = self.emulation
        return Cluster(emulation.seconds_of_rank, emulation.links, emulation.row_bytes, emulation.layer_bytes)


@dataclass
class Bench:
    """Runs contestants and keeps what came out; ours on a case runs once."""

    is_quick: bool = False
    say: Callable[[str], None] = print
    runs: list[Run] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    _ours: dict[Case, Run] = field(default_factory=dict)

    def num_steps(self, ideal_s: float) -> int:
        """How many steps to time of which each takes at least so long."""
        if self.is_quick:
            return 1
        return 3 if ideal_s < LONG_STEP_S else 2

    @property
    def pace(self) -> float:
        """Factor on all sleeps."""
        return QUICK if self.is_quick else 1.0

    def case(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        layers: Sequence[int],
        speeds: Sequence[float],
        *,
        num_rows: int,
        num_microbatches: int,
        ministages: int,
    ) -> Case:
        """A plan by speed, on devices so slow that no forward sleeps less than `MIN_SLEEP_S` and an
        ideal step takes `MIN_STEP_S`."""
        plan, sizes = make_plan(
            groups,
            speeds,
            layers,
            num_rows=num_rows,
            num_microbatches=num_microbatches,
            ministages=ministages,
        )
        ideal_units = Workload(tuple(1 / speed for speed in speeds), sizes).ideal_s(num_rows)
        unit_s = max(MIN_SLEEP_S / shortest_forward(plan, sizes, speeds), MIN_STEP_S / ideal_units)
        unit_s *= self.pace
        num_steps = self.num_steps(unit_s * ideal_units)
        emulation = Emulation(tuple(unit_s / speed for speed in speeds), num_steps=num_steps)
        return Case(f"{name} x {ministages}", plan, sizes, emulation)

    def ours(self, case: Case) -> Run:
        """Our runtime on a plan, with the bound of its own actions."""
        if case not in self._ours:
            workload = case.workload
            bound_s = simulate(
                case.plan, build(ScheduleSpec(case.plan)), workload, case.emulation.links
            ).makespan_s
            timing = run_ours(case.plan, case.layers, case.emulation)
            ideal_s = workload.ideal_s(case.plan.global_batch)
            self._ours[case] = self._add(Run(case.name, "zorselike", timing, bound_s, ideal_s))
        return self._ours[case]

    def mesh(self, case: Case, mesh: Mesh) -> Run:
        """Torch's pipelining on the devices of a case, with the bound of its own order."""
        bound_s = simulate_mesh(mesh, case.cluster).makespan_s
        name = f"{mesh.schedule} dp {mesh.dp} pp {mesh.pp} x {mesh.loops}"
        ideal_s = case.workload.ideal_s(case.plan.global_batch)
        return self._add(Run(case.name, name, run_mesh(mesh, case.emulation), bound_s, ideal_s))

    def fsdp(self, case: Case, rows_of_rank: tuple[int, ...]) -> Run:
        """Plain FSDP2 on the devices of a case; its units are the case's ministages."""
        seconds = zip(rows_of_rank, case.emulation.seconds_of_rank, strict=True)
        bound_s = max(3 * rows * sum(case.layers) * rank_s for rows, rank_s in seconds)
        timing = run_fsdp(rows_of_rank, case.layers, case.emulation)
        ideal_s = case.workload.ideal_s(case.plan.global_batch)
        return self._add(Run(case.name, "FSDP2, even shares", timing, bound_s, ideal_s))

    def _add(self, run: Run) -> Run:
        self.runs.append(run)
        self.say(
            f"  {run.case}, {run.contestant}: {run.timing.median_s:.3f} s a step, "
            f"{run.share_of_bound:.3f} of its bound, cores {run.timing.cpu_share:.0%} busy"
        )
        return run

    def hold(
        self,
        name: str,
        values: dict[str, float],
        target: float | None = None,
        *,
        worst: Callable[[Sequence[float]], float] = min,
    ) -> None:
        """Records the worst of some values as a figure, all of them in its note."""
        note = ", ".join(f"{key}: {value:.3f}" for key, value in values.items())
        self.figures.append(Figure(name, worst(list(values.values())), target, worst is max, note))


def shortest_forward(plan: Plan, layers: Sequence[int], speeds: Sequence[float]) -> float:
    """The least `rows * layers / speed` of any forward of the plan."""
    return min(
        max(microbatch.num_rows, MIN_COST_ROWS) * layers[i] / speeds[microbatch.rank]
        for i in range(plan.num_ministages)
        for microbatch in plan.group_of(i).microbatches
    )


def even_rows(num_rows: int, num_ranks: int) -> tuple[int, ...]:
    """Equal shares; what does not divide goes to the first ranks."""
    return tuple(num_rows // num_ranks + (rank < num_rows % num_ranks) for rank in range(num_ranks))
