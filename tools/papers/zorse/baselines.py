"""Table 5's baselines: what the paper measured of them, and what ours take on the same layer times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorselike.planner.baselines.systems import Baseline, plan_baselines
from zorselike.planner.problem import Fixed, PlanProblem

from .paper import PaperCluster, make_clusters
from .runs import Setup, make_setup

SYSTEMS = ("TorchTitan-Het", "HexiScale", "Cephalo")
"""The systems in the order of the table."""

PAPER: Mapping[tuple[str, str], tuple[float | None, float | None, float | None]] = {
    ("A", "7b"): (4223.80, 3193.46, 1714.52),
    ("A", "13b"): (3837.49, 3270.32, 1656.29),
    ("A", "33b"): (944.47, 3064.22, 1943.89),
    ("A", "65b"): (None, 2048.63, 1937.64),
    ("B", "7b"): (2033.53, 1194.89, 2274.50),
    ("B", "13b"): (1956.09, 1152.73, 1992.24),
    ("B", "33b"): (None, 657.16, 1373.31),
    ("C", "7b"): (2441.70, 2624.63, 1213.39),
    ("C", "13b"): (2061.55, 1952.31, 1222.96),
    ("C", "33b"): (None, None, 775.42),
}
"""TFLOP/s of each system by cluster and model; None: out of memory."""

OURS: Mapping[str, str] = {
    "TorchTitan-Het": "TorchTitan-Het",
    "HexiScale": "HexiScale-like",
    "Cephalo": "Cephalo-like",
}
"""Their names among `plan_baselines`; the paper has no even shares and no Whale."""

BASELINE_ASSUMPTIONS = (
    "layer times, links and memory are those of Zorse's own cells; all recompute layers; each baseline has "
    "the best setting within its rules that we find, where the paper's were set by hand or by their planners",
    "tensor parallelism: layers take 1/t of their time and two all-reduces a pass over the node's fabric, "
    "memory is divided by t (no times of it are published)",
    "collectives reach the full rate of the links and hide behind computation where the order lets them",
)


@dataclass(frozen=True)
class BaselineCell:
    """One cluster and model."""

    cluster: str
    model: str
    flops_per_step: float
    """The recomputed forward counted."""
    baselines: tuple[Baseline, ...]

    def tflops(self, name: str) -> float | None:
        """Throughput of one of `plan_baselines`; None where it does not fit."""
        case = next(own.simulated for own in self.baselines if own.name == name)
        return None if case is None else self.flops_per_step / case.simulation.iteration_s / 1e12

    @property
    def paper(self) -> Mapping[str, float | None]:
        return dict(zip(SYSTEMS, PAPER[self.cluster, self.model], strict=True))


def make_problem(setup: Setup) -> PlanProblem:
    """The cell's question; layers are recomputed, as in all of the paper's runs (section 6.1)."""
    return PlanProblem(
        workload=setup.workload,
        cluster=setup.cluster,
        profile=setup.profile,
        global_batch=setup.global_batch,
        fixed=Fixed(recompute="layer"),
    )


def plan_cells(
    folder: Path, *, say: Callable[[str], None] = print, clusters: Mapping[str, PaperCluster] | None = None
) -> list[BaselineCell]:
    """All of Table 5.

    Args:
        folder: with the authors' files.
    """
    found = []
    for name, model in PAPER:
        say(f"cluster {name}: baselines of Llama {model}")
        setup = make_setup(folder, model, (clusters or make_clusters())[name])
        flops = setup.workload.flops_per_row(recompute=True) * setup.global_batch
        found.append(BaselineCell(name, model, flops, plan_baselines(make_problem(setup))))
    return found


def format_baselines(cells: Sequence[BaselineCell]) -> list[str]:
    """Their columns beside the paper's, and the setting of each."""
    others = ("even shares", "Whale")
    lines = [
        "Table 5, baselines: TFLOP/s, simulated beside the paper's (OOM: out of memory)",
        f"{'cluster':<8}{'model':<7}"
        + "".join(f"{name:>16}{'paper':>8}" for name in SYSTEMS)
        + "".join(f"{name:>13}" for name in others),
    ]
    for cell in cells:
        pairs = ((cell.tflops(OURS[name]), cell.paper[name]) for name in SYSTEMS)
        lines.append(
            f"{cell.cluster:<8}{cell.model:<7}"
            + "".join(f"{_show(ours):>16}{_show(paper):>8}" for ours, paper in pairs)
            + "".join(f"{_show(cell.tflops(name)):>13}" for name in others)
        )
    lines.append("settings, or why nothing fits:")
    for cell in cells:
        lines += [
            f"  {cell.cluster} {cell.model} {own.name}: {own.how or own.reason}" for own in cell.baselines
        ]
    return [*lines, "assumed beside what is assumed above:", *(f"  {line}" for line in BASELINE_ASSUMPTIONS)]


def _show(tflops: float | None) -> str:
    return "OOM" if tflops is None else f"{tflops:.0f}"
