"""Questions that Sailor's planner was asked, what it answered, and what our search answers.

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1. Sailor's figures
are those of its public planner scored by its own simulator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from zorselike.planner.allocation import Allocation, AllocationGoal, allocate

from .sailor_arithmetic import Place, SailorArithmetic, SailorFigures, SailorPlan
from .sailor_library import Library
from .sailor_pipelines import Quotas, make_problems, to_sailor_plan

MODEL = "OPT-350"
GLOBAL_BATCH = 1024
ZONES = ("us-central1-a", "us-central1-b")


@dataclass(frozen=True)
class Case:
    """A question, and what is known of the answer."""

    name: str
    group: str
    """`same`, `mixed` or `money`."""
    a100: int
    """In each zone."""
    v100: int
    reach: float
    """Iterations a second that our search must reach."""
    sailor: float | None
    """What Sailor's planner reached."""
    num_zones: int = 1
    goal: AllocationGoal = field(default_factory=lambda: AllocationGoal(bill_idle=False))
    reach_dollars: float | None = None
    """An iteration, at most."""

    @property
    def quotas(self) -> Quotas:
        counts = {"A100-40": self.a100, "V100-16": self.v100}
        return Quotas({(gpu, zone): n for zone in ZONES[: self.num_zones] for gpu, n in counts.items() if n})


CASES = (
    Case("32 A100", "same", 32, 0, 0.1297, 0.1251),
    Case("80 A100", "same", 80, 0, 0.2722, 0.2722),
    Case("128 A100", "same", 128, 0, 0.4175, 0.4175),
    Case("32 A100 + 32 V100", "mixed", 32, 32, 0.1505, 0.1351),
    Case("32 A100 + 96 V100", "mixed", 32, 96, 0.200, 0.1700),
    Case("80 A100 + 240 V100", "mixed", 80, 240, 0.400, 0.3609),
    Case("128 A100 + 384 V100", "mixed", 128, 384, 0.550, 0.5229),
    Case(
        "2 zones of 128 A100 + 128 V100, at most $1.2",
        "money",
        128,
        128,
        0.70,
        0.6629,
        num_zones=2,
        goal=AllocationGoal(max_cost_per_iteration=1.2, bill_idle=False),
        reach_dollars=1.2,
    ),
    Case(
        "2 zones of 128 A100 + 128 V100, cheapest",
        "money",
        128,
        128,
        0.2,
        None,
        num_zones=2,
        goal=AllocationGoal(objective="cost", min_throughput=0.2, bill_idle=False),
        reach_dollars=0.2779,
    ),
)


@dataclass(frozen=True)
class Answer:
    """What our search found, by their arithmetic."""

    case: Case
    found: Allocation
    plan: SailorPlan
    figures: SailorFigures
    search_s: float

    @property
    def dollars(self) -> float:
        return self.figures.rent + self.figures.egress

    @property
    def reached(self) -> bool:
        """To the digits that are published."""
        enough = round(self.figures.throughput, 4) >= self.case.reach
        limit = self.case.reach_dollars
        return self.figures.fits and enough and (limit is None or self.dollars <= limit)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "iterations_per_s": self.figures.throughput,
            "reach": self.case.reach,
            "sailor": self.case.sailor,
            "dollars": self.dollars,
            "reach_dollars": self.case.reach_dollars,
            "reached": self.reached,
            "search_s": self.search_s,
            "problems": self.found.num_problems,
            "searched": self.found.num_searched,
            "goal": {k: v for k, v in asdict(self.case.goal).items() if v != float("inf")},
            "plan": self.plan.to_json(),
        }


def answer(case: Case, library: Library, *, mixed: bool = False) -> Answer:
    """Searches, and scores what is found by the arithmetic as a whole.

    Raises:
        AssertionError: The search counted other seconds or dollars than the arithmetic.
    """
    quotas = case.quotas
    arithmetic = SailorArithmetic(library, MODEL, quotas.gpus)
    start = time.perf_counter()
    found = allocate(make_problems(arithmetic, quotas, GLOBAL_BATCH, mixed=mixed), quotas.pools, case.goal)
    search_s = time.perf_counter() - start
    plan = to_sailor_plan(found, GLOBAL_BATCH)
    figures = arithmetic.score(plan)
    assert abs(figures.iteration_s / found.figures.iteration_s - 1) < 1e-9, (figures, found.figures)
    assert abs((figures.rent + figures.egress) / found.figures.dollars - 1) < 1e-9, (figures, found.figures)
    return Answer(case, found, plan, figures, search_s)


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
