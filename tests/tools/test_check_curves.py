"""The check of curves finds the authors' lists, leaves the suspect out, and says what it missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_curves.py"


def run(folder: Path | None, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    figures = tmp_path / "figures.json"
    data = [] if folder is None else ["--data", str(folder)]
    done = subprocess.run(
        [sys.executable, str(TOOL), *data, "--json", str(figures)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done, json.loads(figures.read_text()) if figures.exists() else {}


def write(folder: Path, **models: Any) -> None:
    (folder / "zorse").mkdir()
    (folder / "zorse" / "model_latencies.json").write_text(json.dumps(models))


def straight(num_rows: int, start: float = 1.0) -> list[float]:
    return [start + 2.0 * rows for rows in range(1, num_rows + 1)]


def test_straight_times_are_predicted_exactly_and_suspect_ones_left_out(tmp_path: Path) -> None:
    suspect = straight(16)
    suspect[1] = 8.0
    entry = [[2.0, 1.0], [2.0, 1.0], suspect, straight(16, 3.0)]
    fits = [[2.0, 1.0], [2.0, 1.0]]
    write(
        tmp_path,
        deepspeedllama_7b={"h100-nvl": {"4096": {"float16": entry}}, "t4": {"512": {"float16": fits}}},
        gpt_1b={"t4": {"512": {"float16": 12.1}}},
    )
    done, figures = run(tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (figures["num_series"], figures["num_suspect"], figures["num_repaired"]) == (2, 1, 0)
    # Of 15 points seven are between others, of 16 as many are: the last is beyond the range.
    assert figures["num_interpolated"] == 14
    assert figures["num_extrapolated"] == 7 + 8
    assert figures["interpolation_p90_error"] < 1e-9
    assert figures["extrapolation_median_error"] < 1e-9


def test_times_that_no_curve_predicts_fail_the_check(tmp_path: Path) -> None:
    wild = [rows * (1.5 if rows % 2 else 1.0) for rows in range(1, 17)]
    write(tmp_path, model={"t4": {"512": {"float16": [[1, 0], [1, 0], wild, wild]}}})
    done, figures = run(tmp_path, tmp_path)
    assert done.returncode == 1
    assert "interpolation_median_error" in done.stderr
    assert figures["num_repaired"] > 0


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    done, _ = run(tmp_path, tmp_path)
    assert done.returncode == 2 and "has no model_latencies.json" in done.stderr


def test_the_authors_times_are_predicted_within_the_limits(tmp_path: Path) -> None:
    done, figures = run(None, tmp_path)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert figures["num_suspect"] == 11
    assert figures["num_interpolated"] > 2000
