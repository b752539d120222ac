"""What the benchmark says: every run, every figure with its target, the machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .forked import Timing, num_cores


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

    def to_json(self) -> dict[str, Any]:
        shares = {"share_of_bound": self.share_of_bound, "share_of_ideal": self.share_of_ideal}
        return asdict(self) | {"median_s": self.timing.median_s} | shares


@dataclass(frozen=True)
class Figure:
    """One number that is held against a target; `target` None: only reported."""

    name: str
    value: float
    target: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def target_text(self) -> str:
        return "" if self.target is None else f"{'<=' if self.at_most else '>='} {self.target:g}"

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "MISSED"}[self.is_met]


def describe_machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # Not Linux.
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "processor": model,
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


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


def format_figures(figures: Sequence[Figure]) -> str:
    """A table of all figures with their targets."""
    lines = [f"{'figure':44} {'value':>9} {'target':>9}"]
    for figure in figures:
        lines.append(
            f"{figure.name:44} {figure.value:9.3f} {figure.target_text:>9} {figure.verdict:7} {figure.note}"
        )
    return "\n".join(lines)


def to_json(runs: Sequence[Run], figures: Sequence[Figure], seconds: float, *, quick: bool) -> dict[str, Any]:
    """Everything for `--json`; `figures` maps names to values."""
    return {
        "figures": {figure.name: figure.value for figure in figures},
        "targets": {
            figure.name: {"target": figure.target_text, "met": figure.is_met, "note": figure.note}
            for figure in figures
        },
        "runs": [run.to_json() for run in runs],
        "machine": describe_machine(),
        "quick": quick,
        "seconds": seconds,
    }
