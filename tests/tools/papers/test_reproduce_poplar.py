"""The reproduction of Poplar's paper: rooms, rounds, ways to deal rows, neighbours, and the tool itself."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from paper_data import DATA as PAPER_DATA
from paper_data import needs_data, write_zorse
from schedules import as_checked

from tools.papers.poplar.runs import (
    CLUSTERS,
    NUMBERS,
    TOKENS_PER_STEP,
    Job,
    PoplarCluster,
    deal_rounds,
    make_job,
)
from tools.papers.poplar.shares import (
    Run,
    list_neighbours,
    run_even,
    run_ours,
    run_poplar,
    run_whale,
    try_neighbours,
)
from tools.papers.reproduce_poplar import STAGES, WAYS, Study, find_stage, list_claims
from tools.papers.zorse.times import find_folder, make_workload
from tools.report import to_plain
from zorselike.cost.catalogue import find_device
from zorselike.cost.curves import CurveWarning
from zorselike.cost.profile import LayerTimes, Overheads, Profile, Source
from zorselike.schedule.checker.check import check

TOOL = Path(__file__).parents[3] / "tools" / "papers" / "reproduce_poplar.py"

A, B, C = CLUSTERS


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Some of the authors' times fall a little; that is tested with the reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurveWarning)
        yield


def make_times(device: str, slope: float, start: float) -> LayerTimes:
    """A line of a forward's seconds, twice as much backward."""
    rows = (1, 2, 4, 8)
    return LayerTimes(
        kind="layer",
        device=device,
        dtype="float32",
        sequence_length=512,
        rows=rows,
        forward_s=tuple(start + slope * n for n in rows),
        backward_s=tuple(2 * (start + slope * n) for n in rows),
        source=Source("given"),
    )


def small_job(zero: int, *, num_strong: int = 2, num_weak: int = 1, num_rows: int = 60) -> Job:
    """Llama of four layers; the V100s compute three times as fast as the T4, the peaks say 1.94."""
    paper = B.with_numbers(num_strong, num_weak)
    workload = make_workload(
        "llama small",
        hidden=2048,
        num_layers=4,
        num_parameters=50_000_000,
        sequence_length=512,
        dtype="float32",
    )
    return Job(
        workload=workload,
        cluster=paper.cluster,
        profile=Profile(
            model="llama small",
            layers=(make_times("V100-16", 0.01, 0.002), make_times("T4", 0.03, 0.003)),
            overheads=Overheads(context_bytes=10**9),
        ),
        num_rows=num_rows,
        zero=zero,
    )


def largest_rows(job: Job, run: Run) -> list[int]:
    assert all(most <= card.max_rows for most, card in zip(run.rows_at_once, job.cards, strict=True))
    return list(run.rows_at_once)


# -- room and rounds -----------------------------------------------------------------------


@pytest.mark.parametrize("zero", STAGES)
def test_so_many_rows_fit_at_once_and_no_more(zero: int) -> None:
    job = small_job(zero, num_rows=500)
    for rank in (0, 2):
        most = job.cards[rank].max_rows
        assert 0 < most < 500
        for rows, is_overfull in ((most, False), (most + 1, True)):
            sizes = [(1, 1)] * 3
            sizes[rank] = (rows, rows)
            assert job.simulate(deal_rounds(sizes)).is_overfull(rank) is is_overfull


def test_room_grows_with_the_stage_as_poplar_raises_it() -> None:
    room = [small_job(zero, num_rows=500).cards[2].max_rows for zero in (0, 1, 3)]
    assert room == sorted(room) and room[0] < room[2]


def test_microbatches_on_one_card_take_what_its_curve_says() -> None:
    """One V100 alone: no collectives, and the sum of its microbatches is the step but for the update."""
    job = small_job(0, num_strong=1, num_weak=0, num_rows=9)
    case = job.simulate(deal_rounds([(4, 3, 2)]))
    update_s = job.clock.update_s("V100-16", job.workload.num_parameters)
    computed_s = sum(job.cards[0].seconds[n - 1] for n in (4, 3, 2))
    assert case.simulation.iteration_s == pytest.approx(computed_s + update_s)
    assert job.tflops(case) == pytest.approx(
        job.workload.flops_per_row() * 9 / case.simulation.iteration_s / 1e12
    )


def test_a_round_of_zero_2_hides_its_reductions_and_of_zero_3_most() -> None:
    job = small_job(2)
    # A ring of three: two thirds of all gradients cross the machines' link, fp32, at 25 Gb/s.
    expected_s = 2 / 3 * 4 * job.workload.num_parameters / (25e9 / 8)
    assert job.round_s.alone == pytest.approx(expected_s, rel=0.01)
    assert job.round_s.exposed == pytest.approx(0, abs=1e-9)
    assert job.round_s.hidden == pytest.approx(job.round_s.alone)
    sharded = small_job(3).round_s
    assert sharded.alone == pytest.approx(3 * expected_s, rel=0.01)  # Two gathers and a reduction.
    assert sharded.hidden > sharded.exposed > 0
    assert sharded.alone == pytest.approx(sharded.exposed + sharded.hidden)


@pytest.mark.parametrize("zero", [2, 3])
def test_rounds_take_what_the_shares_assume(zero: int) -> None:
    """A step of equal rounds grows by just a round's time with each."""
    job = small_job(zero)
    sizes = (4, 4, 1)
    steps_s = [
        job.simulate(deal_rounds([(n,) * number for n in sizes])).simulation.iteration_s for number in (3, 4)
    ]
    computed_s = max(job.cards[rank].seconds[n - 1] for rank, n in enumerate(sizes))
    _, exposed_s, hidden_s = job.round_s
    assert steps_s[1] - steps_s[0] == pytest.approx(max(computed_s, hidden_s) + exposed_s, rel=0.02)


# -- ways to deal rows ---------------------------------------------------------------------


@pytest.mark.parametrize("zero", STAGES)
def test_every_way_deals_all_rows_as_it_should(zero: int) -> None:
    job = small_job(zero)
    even, whale, poplar, ours = (run(job) for run in (run_even, run_whale, run_poplar, run_ours))
    assert even and whale and poplar and ours
    for run in (even, whale, poplar, ours):
        assert sum(map(sum, run.sizes)) == 60
        assert largest_rows(job, run)
        plan = job.lay_plan(deal_rounds(run.sizes))
        check(as_checked(job.setting.make_spec(plan)), job.setting.list_actions(plan, "1f1b"))
    assert [sum(own) for own in even.sizes] == [20, 20, 20]
    peaks = {device: find_device(device).peak_flops["float32"] for device in ("V100-16", "T4")}
    share = peaks["T4"] / (peaks["T4"] + 2 * peaks["V100-16"])
    assert sum(whale.sizes[2]) == pytest.approx(60 * share, abs=1)
    assert sum(ours.sizes[2]) < sum(whale.sizes[2]) < 20
    assert len({len(own) for own in whale.sizes}) == 1
    # Times that a card three times as slow asks for: even shares wait for it most.
    assert even.iteration_s > whale.iteration_s > poplar.iteration_s * 0.999
    assert ours.iteration_s <= poplar.iteration_s * 1.01


def test_what_does_not_fit_is_none() -> None:
    """fp32 with 12 bytes of gradients and moments for each parameter: 1.1 B fit whole on no V100."""
    job = small_job(0)
    large = replace(
        job,
        workload=make_workload(
            "llama small",
            hidden=2048,
            num_layers=22,
            num_parameters=50_000_000,
            sequence_length=512,
            dtype="float32",
        ),
    )
    assert [run(large) for run in (run_even, run_whale, run_poplar, run_ours)] == [None] * 4
    assert run_ours(replace(large, zero=3)) is not None


# -- neighbours ----------------------------------------------------------------------------


@pytest.mark.parametrize("zero", STAGES)
def test_neighbours_are_whole_steps_that_fit(zero: int) -> None:
    job = small_job(zero)
    run = run_ours(job)
    assert run is not None
    found = {sizes for sizes in list_neighbours(job, run.sizes) if sizes != run.sizes}
    assert found
    for sizes in found:
        assert sum(map(sum, sizes)) == 60 and len(sizes) == 3
        assert all(1 <= n <= card.max_rows for own, card in zip(sizes, job.cards, strict=True) for n in own)
        assert all(list(own) == sorted(own, reverse=True) for own in sizes)
    if not job.has_rounds:
        moved = {tuple(sum(own) for own in sizes) for sizes in found}
        rows = [sum(own) for own in run.sizes]
        assert all(sorted(a - b for a, b in zip(each, rows, strict=True)) == [-1, 0, 1] for each in moved)


@pytest.mark.parametrize("zero", STAGES)
def test_a_better_neighbour_is_found_and_ours_has_none(zero: int) -> None:
    job = small_job(zero)
    even, ours = run_even(job), run_ours(job)
    assert even is not None and ours is not None
    assert try_neighbours(job, even).best_gain > 0.001
    tried = try_neighbours(job, ours)
    assert tried.number > 3 and tried.best_gain <= 0.002


# -- clusters of the paper -----------------------------------------------------------------


def test_clusters_are_those_of_table_1() -> None:
    assert [paper.describe() for paper in CLUSTERS] == [
        "4 A100-80 + 4 A100-40",
        "2 V100-16 + 2 T4",
        "4 A800-80 + 4 V100-PCIe-32",
    ]
    for paper in CLUSTERS:
        assert paper.num_rows * paper.sequence_length == TOKENS_PER_STEP
        assert paper.cluster.num_devices == paper.num_strong + paper.num_weak
    assert C.with_numbers(0, 3).cluster.num_devices == 3
    assert {(4, n) for n in (1, 2, 3, 4)} | {(n, 4) for n in (1, 2, 3, 4)} < set(NUMBERS)


@needs_data
def test_models_are_those_of_the_paper() -> None:
    sizes = {
        model: make_job(find_folder(PAPER_DATA), A, model, 3).workload.num_parameters for model in A.models
    }
    assert sizes["0.5b"] == pytest.approx(0.5e9, rel=0.03)
    assert sizes["tiny"] == pytest.approx(1.33e9, rel=0.01)
    assert sizes["7b"] == pytest.approx(6.88e9, rel=0.01)


@needs_data
def test_the_a100s_compute_equally_fast_where_one_stands_for_the_other() -> None:
    job = make_job(find_folder(PAPER_DATA), A, "0.5b", 0)
    strong, weak = job.cards[0].seconds, job.cards[7].seconds
    assert len(strong) > len(weak) > 16 and strong[: len(weak)] == weak
    measured = make_job(find_folder(PAPER_DATA), A, "7b", 3)
    assert measured.cards[0].seconds[:3] != measured.cards[7].seconds[:3]


def make_study(
    monkeypatch: pytest.MonkeyPatch, folder: Path, paper: PoplarCluster, model: str, *, tokens: int
) -> Study:
    """One model on one cluster."""
    monkeypatch.setattr("tools.papers.reproduce_poplar.CLUSTERS", (replace(paper, models=(model,)),))
    return Study(
        folder,
        clusters=(paper.name,),
        network_bytes_per_s=25e9 / 8,
        tokens_per_step=tokens,
        say=lambda _: None,
    )


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=needs_data)])
def test_cells_and_claims_of_cluster_a(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_real: bool
) -> None:
    folder = find_folder(PAPER_DATA) if is_real else write_zorse(tmp_path)
    monkeypatch.setattr("tools.papers.reproduce_poplar.STAGES", (0, 3))
    study = make_study(monkeypatch, folder, A, "0.5b", tokens=TOKENS_PER_STEP if is_real else 2**18)
    for cell in study.cells:
        assert set(cell.runs) == set(WAYS) and all(cell.runs.values())
        assert cell.ratio("Whale", "even") == pytest.approx(1)  # Equal peaks.
        assert (cell.ratio("ours", "even") or 0) > (
            (1.15 if cell.job.zero == 3 else 1.004) if is_real else 0.999
        )
        assert (cell.ratio("ours", "Poplar") or 0) > 0.995
        assert cell.neighbours["ours"].best_gain <= 0
    assert find_stage(study.cells) == "from ZeRO 0 on a row fits on every card"
    claims = {claim.what: claim for claim in list_claims(study)}
    assert claims["cluster A: Whale over DeepSpeed"].ours == "1.00 to 1.00"
    assert "in 0 of 2 cells" in claims["shares one row away from our answer that are faster"].ours
    assert study.by_numbers == {}
    json.dumps(to_plain(study.cells))


def test_a_model_that_fits_at_zero_3_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = make_study(monkeypatch, write_zorse(tmp_path), B, "tiny", tokens=2**16)
    assert [cell.runs["ours"] is None for cell in study.cells] == [True, True, True, False]
    assert find_stage(study.cells) == "from ZeRO 3 on a row fits on every card"
    assert find_stage(study.cells[:2]) == "a row fits on no card at any stage"


def test_the_tool_prints_and_writes_what_it_finds(tmp_path: Path) -> None:
    path = tmp_path / "poplar.json"
    small = ("--cluster", "C", "--network-gbit", "100", "--tokens", str(2**17))
    write_zorse(tmp_path)
    done = run_tool(*small, "--json", str(path), "--data", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Fig. 5: TFLOP/s of our shares" in done.stdout
    assert "paper 1.02 to 3.92; here " in done.stdout
    assert "45% of 112 TFLOP/s" in done.stdout
    said = json.loads(path.read_text(encoding="utf-8"))
    assert len(said["cells"]) == 8 and len(said["by_numbers"]) == len(NUMBERS)
    for cell in said["cells"]:
        assert sum(map(sum, cell["runs"]["ours"]["sizes"])) == 2**17 // C.sequence_length


def test_the_tool_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    done = run_tool("--data", str(tmp_path))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        f"{tmp_path}: no data/model_stats.json of github.com/benson-guo/zorse; "
        f"git clone https://github.com/benson-guo/zorse {tmp_path}/zorse\n"
    )
    assert "0 Gb/s; give more than 0" in run_tool("--data", ".", "--network-gbit", "0").stderr
    assert "5 tokens; give at least 1024, one row" in run_tool("--data", ".", "--tokens", "5").stderr


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)
