"""Table 5's baselines and our plans beside the paper's: the paper's figures, verdicts, words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.papers.compare_zorse import (
    AIMS,
    CELLS,
    Comparison,
    Search,
    describe,
    format_comparison,
    format_summary,
)
from tools.papers.zorse.baselines import (
    OURS,
    BaselineCell,
    format_baselines,
    make_problem,
)
from tools.papers.zorse.paper import TABLE_5, make_cluster, make_nodes
from tools.papers.zorse.plans import Options
from tools.papers.zorse.runs import Setup, compute_bound_tflops, search
from tools.papers.zorse.times import make_workload
from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.plan.cluster.cluster import Place
from zorselike.planner.answer import PlanAnswer, Planned, Progress
from zorselike.planner.baselines.systems import plan_baselines

NUM_LAYERS = 12
ROWS = (1, 2, 4, 16)


def tiny_setup() -> Setup:
    """A node of two A10Gs and one of two T4s, half as fast."""
    nodes = make_nodes(1, "A10G", 2, nic=1e12) + make_nodes(1, "T4", 2, nic=1e12)
    layers = tuple(
        LayerTimes(
            kind="layer",
            device=device,
            dtype="float16",
            sequence_length=128,
            rows=ROWS,
            forward_s=tuple(0.01 * factor * n for n in ROWS),
            backward_s=tuple(0.02 * factor * n for n in ROWS),
            source=Source("measured"),
        )
        for device, factor in (("T4", 1.0), ("A10G", 0.5))
    )
    workload = make_workload(
        "llama tiny",
        hidden=64,
        num_layers=NUM_LAYERS,
        num_parameters=50_000,
        sequence_length=128,
        dtype="float16",
        vocabulary=32,
    )
    return Setup(
        cluster=make_cluster("tiny", nodes, nic=1e12),
        workload=workload,
        profile=Profile(model="llama tiny", layers=layers),
        groups=((Place(0, 0), Place(0, 1)), (Place(1, 0), Place(1, 1))),
        global_batch=64,
    )


@pytest.fixture(scope="module")
def setup() -> Setup:
    return tiny_setup()


# -- baselines ---------------------------------------------------------------------------------


def test_the_papers_speedups_are_what_it_says() -> None:
    """Section 6.2: on B 1.5 to 4 times, on C at least 1.5 times."""
    found = {key: cell.others.values() for key, cell in TABLE_5.items()}
    assert {key for key, row in found.items() if None in row} == {("A", "65b"), ("B", "33b"), ("C", "33b")}
    for (cluster, model), row in found.items():
        best = max(own for own in row if own is not None)
        speedup = TABLE_5[cluster, model].tflops / best
        assert speedup > (1.45 if cluster in "BC" else 1.0), (cluster, model)


def test_cells_show_both_figures_and_what_does_not_fit(setup: Setup) -> None:
    baselines = plan_baselines(make_problem(setup))
    assert set(OURS.values()) <= {own.name for own in baselines}
    flops = setup.workload.flops_per_row(recompute=True) * setup.global_batch
    cell = BaselineCell("A", "65b", flops, baselines)
    case = next(own.simulated for own in baselines if own.name == "Cephalo-like")
    assert case is not None
    assert case.plan.groups[0].recompute == "layer"
    assert cell.tflops("Cephalo-like") == pytest.approx(flops / case.simulation.iteration_s / 1e12)
    assert cell.tflops("Cephalo-like") == pytest.approx(compute_bound_tflops(setup), rel=0.3)
    broken = replace(
        cell,
        baselines=tuple(replace(own, simulated=None, how="", reason="OUT OF MEMORY: x") for own in baselines),
    )
    lines = format_baselines([cell, broken])
    assert lines[2].split()[:4] == ["A", "65b", f"{cell.tflops('TorchTitan-Het'):.0f}", "OOM"]
    assert lines[3].split()[2:] == ["OOM", "OOM", "OOM", "2049", "OOM", "1938", "OOM", "OOM"]
    assert "  A 65b Whale: OUT OF MEMORY: x" in lines
    assert {own.name for own in cell.baselines} >= {"even shares", "Whale", *OURS.values()}


# -- ours beside the paper's -------------------------------------------------------------------


def make_search(setup: Setup, *, slower: float = 1.0) -> Search:
    """A baseline's plan in the place of a search's answer, its step so many times as long."""
    even = next(own.simulated for own in plan_baselines(make_problem(setup)) if own.name == "Whale")
    assert even is not None
    simulation = replace(even.simulation, iteration_s=slower * even.simulation.iteration_s)
    case = replace(even, simulation=simulation)
    progress = Progress(
        elapsed_s=1.0, num_estimated=1, num_simulated=1, best_s=1.0, best_cost=None, bound_s=1.0
    )
    planned = Planned(case, "one group", simulation.iteration_s / 2)
    return Search(PlanAnswer(plans=(planned,), progress=progress, ending="finished"), 1.5)


def make_comparison(setup: Setup, **changes: Any) -> Comparison:
    paper = search(setup, [Options(1, 2, offload=())])
    assert paper is not None
    ours = make_search(setup)
    return replace(Comparison("A", "7b", setup, paper, ours, ours), **changes)


def test_the_verdict_is_by_seconds_and_by_what_fits(setup: Setup) -> None:
    own = make_comparison(setup)
    assert own.paper_s is not None and own.recomputed.step_s is not None
    ratio = own.paper_s / own.recomputed.step_s
    assert not own.is_worse(make_search(setup, slower=ratio))
    assert own.is_worse(make_search(setup, slower=1.01 * ratio))
    nothing = Search(None, 1.0, "nothing fits: T4")
    assert own.is_worse(nothing)
    assert not replace(own, paper=None).is_worse(nothing)
    worse = replace(own, recomputed=nothing)
    assert "WORSE" in format_comparison(worse)[0] and "nothing fits: T4" in format_comparison(worse)[2]
    assert format_summary([worse])[0].startswith("worse: A 7b recomputed")


def test_a_free_search_that_finds_less_is_named(setup: Setup) -> None:
    own = make_comparison(setup)
    assert not own.is_free_search_behind
    behind = replace(own, free=make_search(setup, slower=1.1))
    assert "found less than told to: A 7b" in format_summary([behind])[1]


def test_shares_are_of_what_devices_could_compute(setup: Setup) -> None:
    own = make_comparison(setup)
    flops = setup.workload.flops_per_row(recompute=True) * setup.global_batch
    limit_s = flops / 1e12 / compute_bound_tflops(setup)
    assert own.share_of_limit(limit_s) == pytest.approx(1.0)
    assert own.share_of_limit(2 * limit_s) == pytest.approx(0.5)
    assert own.share_of_limit(None) is None
    assert f"aimed at {AIMS['A']:.0%}" in format_summary([own])[1]


def test_a_plan_is_a_line(setup: Setup) -> None:
    case = make_search(setup).case
    assert case is not None
    stage = case.plan.groups[0].zero
    assert describe(case) == f"1 ministage; 2 A10G + 2 T4: 12 layers, ZeRO {stage}, recomputed"


def test_the_tool_says_what_it_lacks(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "tools" / "papers" / "compare_zorse.py"
    done = subprocess.run(
        [sys.executable, str(script), "--data", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no data/model_stats.json of github.com/benson-guo/zorse" in done.stderr
    wrong = subprocess.run(
        [sys.executable, str(script), "--data", ".", "--cells", "D:7b"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "give cluster and model" in wrong.stderr
    assert len(CELLS) == 10
