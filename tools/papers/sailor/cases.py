"""Questions that Sailor's planner was asked (`cases.toml`), and what our search answers.

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf
from pathlib import Path

from zorselike.errors import PlanError
from zorselike.planner.pipelines.allocation import AllocationGoal, find_allocation
from zorselike.text.dataclass_tables import read_dataclass

from .arithmetic import SailorArithmetic, SailorFigures, SailorPlan, SailorStage
from .library import Library
from .links import Place
from .pipelines import TENSOR_PARALLEL, Quotas, make_problems, to_sailor_plan


@dataclass(frozen=True)
class Planned:
    """A plan in their form, and what their simulator says of it."""

    plan: SailorPlan
    figures: SailorFigures
    search_s: float
    """Processor seconds of the search."""

    @property
    def dollars(self) -> float:
        """An iteration, egress included."""
        return self.figures.rent + self.figures.egress

    @property
    def num_gpus(self) -> int:
        return sum(self.plan.used.values())


def search_quotas(
    arithmetic: SailorArithmetic, quotas: Quotas, goal: AllocationGoal, global_batch: int
) -> Planned:
    """The best plan, scored by the arithmetic as a whole; raises `PlanError` where none keeps memory and
    constraints."""
    start = time.process_time()
    found = find_allocation(tuple(make_problems(arithmetic, quotas, global_batch)), quotas.pools, goal)
    search_s = time.process_time() - start
    if found is None:
        raise PlanError("no pipeline keeps memory and constraints; raise quotas or ease the constraints")
    plan = to_sailor_plan(found, global_batch)
    figures = arithmetic.score(plan)
    assert abs(figures.iteration_s / found.figures.iteration_s - 1) < 1e-9, (figures, found.figures)
    assert abs((figures.rent + figures.egress) / found.figures.dollars - 1) < 1e-9, (figures, found.figures)
    return Planned(plan, figures, search_s)


def lay_even_mesh(arithmetic: SailorArithmetic, quotas: Quotas, global_batch: int) -> Planned | None:
    """The fastest plan whose stages have the same number of layers, replicas and GPUs a replica, whatever
    they are on; those on the first type of the quotas come first. None where nothing fits."""
    start = time.process_time()
    best: Planned | None = None
    for plan in _list_even_meshes(arithmetic, quotas, global_batch):
        figures = arithmetic.score(plan)
        if figures.fits and (best is None or figures.iteration_s < best.figures.iteration_s):
            best = Planned(plan, figures, 0.0)
    search_s = time.process_time() - start
    return None if best is None else Planned(best.plan, best.figures, search_s)


def _list_even_meshes(
    arithmetic: SailorArithmetic, quotas: Quotas, global_batch: int
) -> Iterator[SailorPlan]:
    for degree in range(1, min(sum(quotas.of.values()), global_batch) + 1):
        for tensor_parallel in TENSOR_PARALLEL:
            hosts = [
                Place(gpu, zone, tensor_parallel)
                for (gpu, zone), number in quotas.of.items()
                for _ in range(number // (degree * tensor_parallel))
            ]
            for rows in arithmetic.rows():
                usable = [place for place in hosts if arithmetic.has(place.gpu, rows, tensor_parallel)]
                if (degree - 1) * rows >= global_batch:
                    continue
                for num_stages in range(1, min(len(usable), arithmetic.num_layers) + 1):
                    ends = [i * arithmetic.num_layers // num_stages for i in range(num_stages + 1)]
                    stages = tuple(
                        SailorStage(a, b, (place,) * degree)
                        for (a, b), place in zip(pairwise(ends), usable, strict=False)
                    )
                    yield SailorPlan(rows, global_batch, stages)


def format_plan(plan: SailorPlan) -> str:
    """`D 16, mbs 4: 7 layers on 16 V100-16 tp 2 | ...`"""
    return f"D {plan.degree}, mbs {plan.rows}: " + " | ".join(
        f"{stage.stop - stage.start} layers on {_format_replicas(stage.replicas)}" for stage in plan.stages
    )


def _format_replicas(replicas: Sequence[Place]) -> str:
    return " and ".join(
        f"{len(list(same))} {place.gpu} tp {place.tensor_parallel} {place.zone}"
        for place, same in groupby(replicas)
    )


MODEL = "OPT-350"
GLOBAL_BATCH = 1024
ZONES = ("us-central1-a", "us-central1-b")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question, and what is known of the answer."""

    name: str
    group: str
    """`same`, `mixed` or `money`."""
    a100: int
    """A100s in each zone."""
    v100: int = 0
    num_zones: int = 1
    max_cost: float = inf
    """Dollars of an iteration, at most."""
    min_throughput: float = 0.0
    """Above 0, the cheapest plan that reaches it is asked for; else the fastest."""
    reach: float
    """Iterations a second that our search must reach."""
    reach_dollars: float = inf
    """An iteration, at most."""
    sailor: float | None = None
    """What Sailor's planner reached."""

    @property
    def quotas(self) -> Quotas:
        counts = {"A100-40": self.a100, "V100-16": self.v100}
        return Quotas({(gpu, zone): n for zone in ZONES[: self.num_zones] for gpu, n in counts.items() if n})

    @property
    def goal(self) -> AllocationGoal:
        return AllocationGoal(
            objective="cost" if self.min_throughput else "throughput",
            max_cost_per_iteration=self.max_cost,
            min_throughput=self.min_throughput,
            bill_idle=False,
        )

    def is_reached(self, planned: Planned) -> bool:
        """Whether the target is reached, to the digits that are published."""
        enough = round(planned.figures.throughput, 4) >= self.reach
        return planned.figures.fits and enough and planned.dollars <= self.reach_dollars


_TABLE = tomllib.loads((Path(__file__).parent / "cases.toml").read_text(encoding="utf-8"))
CASES = tuple(read_dataclass(Case, own, own["name"]) for own in _TABLE["cases"])


def answer(case: Case, library: Library) -> Planned:
    """Searches, scored by their arithmetic."""
    arithmetic = SailorArithmetic(library, MODEL, case.quotas.gpus)
    return search_quotas(arithmetic, case.quotas, case.goal, GLOBAL_BATCH)
