"""Questions that Sailor's planner was asked (`cases.toml`), and what our search answers.

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from math import inf
from pathlib import Path

from zorselike.planner.pipelines.allocation import AllocationGoal
from zorselike.text.dataclass_tables import read_dataclass

from .arithmetic import SailorArithmetic
from .library import Library
from .pipelines import Quotas
from .planning import Planned, search_quotas

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
