"""The model of Sailor's runs: on runs made up so that the answer is known, and on the real ones."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from paper_data import DATA, needs_data
from schedules import as_checked

from tools.papers.check_sailor_runs import score_folder, summarise
from tools.papers.sailor.costs import prepare, simulate_run
from tools.papers.sailor.library import Library
from tools.papers.sailor.runs import read_run
from zorselike.cost.curves import CurveWarning
from zorselike.errors import ProfileError
from zorselike.schedule import ScheduleSpec, check

ROOT = Path(__file__).parents[3]

NUM_LAYERS = 4
"""Embedding, two blocks, head."""
ELEMENTS = 1000
"""A boundary row."""
PARAMETERS = 250_000
"""Of each layer."""
LINK = 4e6
"""Bytes per second, at every size: a row takes a millisecond."""
FORWARD, BACKWARD = 0.010, 0.020
"""Of a layer and row; embedding and head take none, so that a stage of one block takes a block's time."""


def write(path: Path, found: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """A model that two GH200s run, with one GPU a machine and a degree of tensor parallelism of 1 or 2."""
    root = tmp_path / "sailor"
    sizes = {
        "params_floats": PARAMETERS,
        "act_input_floats": ELEMENTS,
        "act_output_floats": ELEMENTS,
        "act_mem_bytes": 10_000,
    }
    write(
        root / "llm_info.json",
        {"Tiny": {degree: {str(i): sizes for i in range(NUM_LAYERS)} for degree in ("1", "2")}},
    )
    times = {
        str(rows): {
            degree: {
                str(i): [FORWARD * rows * (0 < i < 3), BACKWARD * rows * (0 < i < 3), 0.004]
                for i in range(NUM_LAYERS)
            }
            for degree in ("1", "2")
        }
        for rows in (1, 2, 4)
    }
    for gpu in ("GH-96", "RTX-3090"):
        write(root / "profiles" / "Tiny" / gpu / "profile.json", times)
    fit = [[0.0, 0.0, LINK / 1e9], LINK]
    both = {gpu: {"1": fit, "2": fit} for gpu in ("GH-96", "RTX-3090")}
    by_count = {"1": {"z": both}, "2": {"z": both}}
    write(root / "providers" / "multizone_bandwidths_het.json", {"z": dict.fromkeys(both, by_count)})
    return Library(tmp_path)


def write_run(
    folder: Path,
    name: str,
    *,
    gpus: tuple[str, ...] = ("GH-96", "GH-96"),
    replicas: int = 1,
    degree: int = 1,
    **numbers: Any,
) -> Path:
    """A stage for each GPU, the layers in equal parts."""
    size = NUM_LAYERS // len(gpus)
    pipeline = {
        "layers_per_stage": [list(range(s * size, (s + 1) * size)) for s in range(len(gpus))],
        "tmp_per_stage": [[[[[gpu, 1, "z"]], degree] for _ in range(replicas)] for gpu in gpus],
    }
    measured = {"mbs": 1, "gbs": 4, "real": 1.0, "max_mem": 10**8, "N": len(gpus)} | numbers
    path = folder / f"{name}.json"
    write(path, {"pipeline_list": [pipeline], **measured})
    return path


def seconds(library: Library, path: Path) -> float:
    return simulate_run(prepare(read_run(path), library, "Tiny")).iteration_s


def update_s(num_layers: int) -> float:
    """The small model has as many parameters as this one."""
    return 0.004 * num_layers / NUM_LAYERS


ROW_S = 4 * ELEMENTS / LINK


def test_one_stage_is_the_sum_of_its_layers(library: Library, tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", gpus=("GH-96",))
    assert seconds(library, run) == pytest.approx(4 * 2 * (FORWARD + BACKWARD) + update_s(4))


def test_transfers_of_two_stages_block_both(library: Library, tmp_path: Path) -> None:
    """1F1B over two stages: the last stage computes all its microbatches, and between two of them it sends
    a gradient and receives an activation, one after the other; before it one forward and one transfer,
    after it one transfer and one backward, then the first stage's update."""
    run = write_run(tmp_path, "a")
    last = 4 * (FORWARD + BACKWARD) + 3 * 2 * ROW_S
    expected = FORWARD + ROW_S + last + ROW_S + BACKWARD + update_s(2)
    assert seconds(library, run) == pytest.approx(expected)


def test_replicas_reduce_their_gradients_over_the_link(library: Library, tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", gpus=("GH-96",), replicas=2)
    reduced = 2 * (1 / 2) * 4 * PARAMETERS * NUM_LAYERS / LINK
    assert seconds(library, run) == pytest.approx(2 * 2 * (FORWARD + BACKWARD) + reduced + update_s(4))


def test_of_equal_cards_each_tensor_parallel_rank_sends_the_whole_boundary(
    library: Library, tmp_path: Path
) -> None:
    """Over half of what two of them reach together."""
    whole = prepare(read_run(write_run(tmp_path, "a", degree=2)), library, "Tiny").costs
    assert whole.row_bytes == (0, 4 * ELEMENTS)
    assert whole.network.transfer(0, 1, 1e6).max_rate == LINK / 2
    mixed = read_run(write_run(tmp_path, "b", degree=2, gpus=("GH-96", "RTX-3090")))
    assert prepare(mixed, library, "Tiny").costs.row_bytes == (0, 4 * ELEMENTS // 2)


def test_the_schedule_is_one_that_the_checker_accepts(library: Library, tmp_path: Path) -> None:
    prepared = prepare(read_run(write_run(tmp_path, "a", replicas=2, gbs=8)), library, "Tiny")
    check(as_checked(ScheduleSpec(prepared.plan)), prepared.actions)


def test_constants_of_memory_come_from_small_runs_alone(library: Library, tmp_path: Path) -> None:
    """The first stage holds two microbatches of activations, and 24 bytes a parameter."""
    runs = tmp_path / "runs"
    held = 24 * PARAMETERS * 2

    def peak(rows: int) -> int:
        return held + 2 * rows * 20_000 + 5_000_000 + rows * 30_000

    for rows in (1, 2):
        write_run(runs, f"small{rows}", mbs=rows, gbs=8, max_mem=peak(rows))
    write_run(runs, "large", mbs=4, gbs=16, max_mem=peak(4) * 2, N=8)
    folder = score_folder(runs, library)
    assert folder.constants.num_runs == 2
    assert folder.constants.overhead_bytes == pytest.approx(5_000_000, rel=1e-6)
    assert folder.constants.working_bytes_per_row == pytest.approx(30_000, rel=1e-6)
    large = folder.scores[0]
    assert large.memory_error == pytest.approx(-0.5)
    assert summarise(folder.scores).memory_mape == pytest.approx(0.5 / 3)


def test_runs_that_cannot_be_simulated_are_listed_and_the_others_scored(
    library: Library, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    write_run(runs, "good", N=4)
    write_run(runs, "twin", gpus=("GH-96",), N=4)
    write_run(runs, "uneven", gbs=3, mbs=2)
    write_run(runs, "unknown", gpus=("GH-96", "B1000"))
    write_run(runs, "empty", max_mem=100, N=4, real=2.0)
    write(runs / "notes.json", {"by": "hand"})
    write(runs / "list.json", [1, 2])
    folder = score_folder(runs, library)
    assert [score.run.name for score in folder.scores] == ["empty", "good", "twin"]
    assert len(folder.refused) == 4
    assert any("notes" in line and "not a run" in line for line in folder.refused)
    assert any("list.json" in line and "expected an object" in line for line in folder.refused)
    assert any("B1000" in line for line in folder.refused)
    doubts = {score.run.name: score.doubts for score in folder.scores}
    assert doubts["good"] == ("the same seconds as twin",)
    assert "max_mem is less than" in doubts["empty"][0]
    # Of runs that held too little nothing is fitted, and of none at all neither.
    assert folder.constants.num_runs == 0


def test_a_model_is_guessed_only_where_one_fits(library: Library) -> None:
    assert library.guess_model(NUM_LAYERS) == "Tiny"
    with pytest.raises(ProfileError, match=r"7 layers are of 0 models; say which \(known: Tiny 4\)"):
        library.guess_model(7)


@needs_data
def test_the_real_runs_are_met() -> None:
    """What is asked for: 6.5 % of time on all, 5 % above two nodes, 3 % of memory."""
    library = Library(DATA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = score_folder(library.find("measured/OPT-350-GH200"), library)
    found = summarise(folder.scores)
    assert found.num_runs == 15
    assert not folder.refused
    assert found.time_mape is not None and found.time_mape <= 0.065
    assert found.time_mape_large is not None and found.time_mape_large <= 0.05
    assert found.memory_mape is not None and found.memory_mape <= 0.03
    # Only runs of 1 and 2 nodes give constants, and the profile's falling times are named.
    assert folder.constants.num_runs == 4
    assert any(
        issubclass(w.category, CurveWarning) and "tensor parallelism 4" in str(w.message) for w in caught
    )


def test_the_tool_writes_what_it_prints(library: Library, tmp_path: Path) -> None:
    runs = tmp_path / "sailor" / "measured" / "OPT-350-GH200"
    write_run(runs, "a", N=4, real=0.2)
    out = tmp_path / "figures.json"
    command = [sys.executable, ROOT / "tools" / "papers" / "check_sailor_runs.py", "--data"]
    done = subprocess.run([*command, tmp_path, "--json", out], capture_output=True, text=True, check=True)
    found = json.loads(out.read_text())
    (score,) = found["folder"]["scores"]
    time_error = found["summary"]["time_mape"]
    assert time_error == pytest.approx(abs(score["iteration_s"] / 0.2 - 1)) == abs(score["time_error"])
    assert f"{time_error:.1%}" in done.stdout
    missing = subprocess.run([*command, tmp_path / "no"], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "of github.com/eth-easl/sailor; git clone" in missing.stderr
