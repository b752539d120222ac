"""Questions that Sailor's planner was asked, what it answered, and what our search answers.

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1. Sailor's figures
are those of its public planner scored by its own simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zorselike.planner.pipelines.allocation import AllocationGoal

from .arithmetic import SailorArithmetic
from .library import Library
from .pipelines import Quotas
from .planning import Searched, search_quotas

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
    """A100s in each zone."""
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
    searched: Searched

    @property
    def reached(self) -> bool:
        """Whether the target is reached, to the digits that are published."""
        figures, limit = self.searched.figures, self.case.reach_dollars
        enough = round(figures.throughput, 4) >= self.case.reach
        return figures.fits and enough and (limit is None or self.searched.dollars <= limit)


def answer(case: Case, library: Library, *, mixed: bool = False) -> Answer:
    """Searches; `mixed` as `make_problems`."""
    arithmetic = SailorArithmetic(library, MODEL, case.quotas.gpus)
    return Answer(case, search_quotas(arithmetic, case.quotas, case.goal, GLOBAL_BATCH, mixed=mixed))
