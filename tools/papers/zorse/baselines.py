"""Table 5's baselines: what the paper measured of them, and what ours take on the same layer times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorselike.planner.baselines.systems import Baseline, plan_baselines
from zorselike.planner.problem import Fixed, PlanProblem

from .paper import TABLE_5, TABLES, make_clusters
from .runs import Setup, make_setup

OURS = {"TorchTitan-Het": "TorchTitan-Het", "HexiScale": "HexiScale-like", "Cephalo": "Cephalo-like"}
"""The table's systems by their names among `plan_baselines`; the paper has no even shares and no Whale."""


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


def make_problem(setup: Setup) -> PlanProblem:
    """The cell's question; layers are recomputed, as in all of the paper's runs (section 6.1)."""
    return PlanProblem(
        workload=setup.workload,
        cluster=setup.cluster,
        profile=setup.profile,
        global_batch=setup.global_batch,
        fixed=Fixed(recompute="layer"),
    )


def plan_cells(folder: Path, *, say: Callable[[str], None] = print) -> list[BaselineCell]:
    """All of Table 5.

    Args:
        folder: with the authors' files.
    """
    found = []
    for name, model in TABLE_5:
        say(f"cluster {name}: baselines of Llama {model}")
        setup = make_setup(folder, model, make_clusters()[name])
        flops = setup.workload.flops_per_row(recompute=True) * setup.global_batch
        found.append(BaselineCell(name, model, flops, plan_baselines(make_problem(setup))))
    return found


def format_baselines(cells: Sequence[BaselineCell]) -> list[str]:
    """Their columns beside the paper's, and the setting of each."""
    others = ("even shares", "Whale")
    lines = [
        "Table 5, baselines: TFLOP/s, simulated beside the paper's (OOM: out of memory)",
        f"{'cluster':<8}{'model':<7}"
        + "".join(f"{name:>16}{'paper':>8}" for name in OURS)
        + "".join(f"{name:>13}" for name in others),
    ]
    for cell in cells:
        paper = TABLE_5[cell.cluster, cell.model].others
        pairs = ((cell.tflops(name), paper[system]) for system, name in OURS.items())
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
    return [
        *lines,
        "assumed beside what is assumed above:",
        *(f"  {a}" for a in TABLES["baseline_assumptions"]),
    ]


def _show(tflops: float | None) -> str:
    return "OOM" if tflops is None else f"{tflops:.0f}"
