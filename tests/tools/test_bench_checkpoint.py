"""The benchmark of checkpoints: its arithmetic, and one tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_checkpoint
from tools.checkpoint.contest import NATIVE, OWN, Contest, Times
from tools.checkpoint.stall import SaveCost, Stall, find_slowdown, find_stall_share
from tools.checkpoint.timed import LoadCost

COST = LoadCost(read_bytes=2**20 * 30, box_bytes=2**20 * 10, num_slices=5, peak_bytes=60, ministage_bytes=40)


def test_costs_of_a_load() -> None:
    assert COST.excess_mib == 4
    assert COST.peak_ministages == 1.5


def test_a_ratio_is_of_speeds_of_the_same_round() -> None:
    times = {OWN: Times((1.0, 4.0, 2.0), (1.0,)), NATIVE: Times((2.0, 4.0, 1.0), (0.5,))}
    contest = Contest(1, times, COST)
    assert contest.over(NATIVE, "save_s") == 1.0
    assert contest.over(NATIVE, "load_s") == 0.5


def test_a_stall_is_that_of_the_rank_that_has_more() -> None:
    quick = Stall((SaveCost(0.01, 0.0, 0.05, 1.0, 2.0, 1.0),), 0.0, COST)
    slow = Stall((SaveCost(0.01, 0.1, 0.09, 1.0, 2.2, 1.0),), 0.0, COST)
    assert find_stall_share([quick, slow]) == pytest.approx(0.2)
    assert find_slowdown([quick, slow]) == pytest.approx(1.2)


def test_it_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    small = ["--megabytes", "2", "--layers", "2", "--rows", "2", "--sequence", "8", "--rounds", "1"]
    bench_checkpoint.main([*small, "--folder", str(tmp_path), "--json", str(path)])  # Too small for targets.
    result = json.loads(path.read_text())
    assert {"save_over_dcp", "load_over_dcp", "stall_share", "step_slowdown"} <= set(result["figures"])
    assert result["targets"]["read_excess_mib_per_slice"]["met"]
    assert result["figures"]["save_over_dcp"] > 0
    assert "DCP native" in capfd.readouterr().out
    assert [own.name for own in tmp_path.iterdir()] == [path.name]
