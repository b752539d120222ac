"""The GPU benchmark: its arithmetic, its sections on made-up jobs, and one tiny run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tools import bench_gpu
from tools.gpu.child import classify, run_job
from tools.gpu.job import COMPARED, Job, Measurement, Outcome, Shape, merge
from tools.gpu.sections import SECTIONS, GpuBench, find_losses, find_ratios, search_largest
from tools.gpu.trainers import build_model, config_of, fill, make_plan
from tools.report import list_figures, make_parser, to_plain
from zorselike import initialize
from zorselike.errors import ConfigError
from zorselike.models.llama import Llama

TINY = Shape(num_layers=4, dim=32, num_heads=2, ffn_hidden=48, vocab_size=64, sequence=8, microbatch_rows=2)


# -- figures -------------------------------------------------------------------------------


def measurement(variant: str, num_tokens: int = 65_536, step_s: float = 1.0, **more: Any) -> Measurement:
    usual = {
        "num_ministages": 8,
        "num_layers": 4,
        "num_parameters": 10,
        "loss": 5.0,
        "device_bytes": 100,
        "reserved_bytes": None,
        "host_bytes": None,
        "set_up_s": 1.0,
        "device_name": "card",
    }
    return Measurement(variant, num_tokens, step_s=(step_s,), **usual | more)


def test_ratios_are_of_tokens_a_second() -> None:
    measured = {
        ("a", 65_536): measurement("a", step_s=1.0, device_bytes=100),
        ("c", 65_536): measurement("c", step_s=1.25, device_bytes=40),
        ("d", 65_536): measurement("d", step_s=5.0),
        ("a", 32_768): measurement("a", 32_768, step_s=0.5),
        ("c", 32_768): measurement("c", 32_768, step_s=0.5),
    }
    found = {ratio.name: ratio for ratio in find_ratios(measured)}
    assert found["c_over_a"].value == 0.8 and found["c_over_a"].target == 0.97
    assert found["c_over_a_32768"].value == 1.0 and found["c_over_a_32768"].target == 0.95
    assert found["c_over_d"].value == 4.0 and found["c_over_d"].target == 3.0
    assert found["peak_memory_c_over_a"].value == 0.4 and found["peak_memory_c_over_a"].at_most
    assert "b_over_a" not in found and "a_over_e" not in found
    assert all(ratio.target is None for ratio in find_ratios(measured, has_targets=False))


def test_losses_are_compared_with_kernels_that_add_in_one_order() -> None:
    asked: list[Job] = []

    def run(job: Job, timeout_s: float) -> Outcome:
        asked.append(job)
        return Outcome(measurement(job.variant, loss=5.0 if job.is_deterministic else 5.1))

    losses = find_losses(GpuBench(TINY, run=run, say=lambda _: None), {"b", "a"})
    assert losses == {"a": 5.0, "b": 5.0}
    assert [(job.variant, job.is_deterministic, job.num_warm_up + job.num_steps) for job in asked] == [
        ("a", True, 3),
        ("b", True, 3),
    ]


def test_repetitions_are_merged() -> None:
    both = merge([measurement("a", step_s=1.0), measurement("a", step_s=3.0, device_bytes=120)])
    assert both.step_s == (1.0, 3.0) and both.median_s == 2.0 and both.device_bytes == 120


# -- the largest model ---------------------------------------------------------------------


@given(st.integers(0, 90), st.integers(1, 90), st.integers(1, 8))
def test_the_search_finds_the_most_that_fits(fitting: int, guess: int, resolution: int) -> None:
    highest = 80
    tried = []

    def try_layers(layers: int) -> str:
        tried.append(layers)
        return "" if layers <= fitting else "device memory"

    reasons = search_largest(try_layers, guess=guess, highest=highest, resolution=resolution)
    assert len(tried) == len(set(tried)) and all(1 <= layers <= highest for layers in tried)
    trained = [layers for layers, reason in reasons.items() if not reason]
    if fitting == 0:
        assert not trained and min(reasons) == 1
    else:
        assert min(fitting, highest) - resolution < max(trained) <= min(fitting, highest)


def test_the_search_ends_when_time_does() -> None:
    answers = iter(["", None])
    assert search_largest(lambda layers: next(answers), guess=4, highest=80, resolution=1) == {4: ""}


def test_what_ran_out_is_told_apart() -> None:
    assert classify(torch.OutOfMemoryError("CUDA out of memory")) == "device memory"
    assert classify(ConfigError("offloading needs 9 GiB more host memory")) == "host memory"
    assert classify(RuntimeError("CUDA error: out of memory")) == "host memory"
    assert classify(RuntimeError("anything else")) == "other"


# -- the model -----------------------------------------------------------------------------


def test_a_plan_offloads_what_its_variant_says() -> None:
    job = Job(TINY, variant="c", num_tokens=48, num_ministages=3)
    plan = make_plan(job)
    plan.validate()
    assert plan.groups[0].offload == ("params", "optimizer", "activations")
    assert [m.num_rows for m in plan.groups[0].microbatches] == [2, 2, 2]
    with pytest.raises(ValueError, match="no multiple of --sequence 8"):
        make_plan(replace(job, num_tokens=50))


def test_weights_are_a_repeated_tile() -> None:
    job = Job(TINY, device="cpu")
    drawn = initialize(build_model(job), seed=3)
    with torch.device("meta"):
        model = Llama(config_of(TINY))
    filled = initialize(model, seed=3)
    assert not torch.equal(drawn.output.weight, filled.output.weight)
    fill(filled)
    for name, parameter in drawn.named_parameters():
        assert torch.equal(parameter, filled.get_parameter(name)), name
        assert parameter.dim() == 1 or 0.015 < float(parameter.detach().std()) < 0.025


# -- sections ------------------------------------------------------------------------------


def fake(job: Job, timeout_s: float) -> Outcome:
    """Jobs of a card that holds 40 layers with everything offloaded, 20 without."""
    if job.shape.num_layers > (40 if job.variant == "c" else 20):
        return Outcome(failure="device memory", reason="OutOfMemoryError: all gone")
    step_s = {"a": 1.0, "b": 1.0, "c": 1.25, "o": 1.5, "d": 4.0, "e": 1.0}[job.variant]
    step_s *= (0.5 if job.compiles else 1.0) * (2.0 if job.updates == "deferred" else 1.0)
    held = 100 if job.num_ministages == 1 else 60
    made = measurement(
        job.variant, job.num_tokens, step_s, num_ministages=job.num_ministages, device_bytes=held
    )
    return Outcome(replace(made, num_layers=job.shape.num_layers))


def make_bench(**options: Any) -> tuple[GpuBench, list[str]]:
    said: list[str] = []
    return GpuBench(TINY, run=fake, tokens=(8, 16), say=said.append, **options), said


def test_all_sections_on_made_up_jobs() -> None:
    bench, said = make_bench()
    for section in SECTIONS.values():
        section(bench)
    assert set(bench.measured) == {(variant, n) for variant in COMPARED for n in (8, 16)}
    assert len(bench.measured["a", 16].step_s) == 2
    assert {ratio.name: ratio.value for ratio in find_ratios(bench.measured)}["c_over_a"] == 0.8
    assert [m.num_ministages for m in bench.sweep] == [1, 2, 4, 8]
    assert {variant: found["num_layers"] for variant, found in bench.largest.items()} == {
        "c": 40,
        "e": 20,
        "d": 20,
    }
    figures = {figure.name: figure.value for figure in bench.figures}
    assert figures["compiled_c_over_c"] == 2.0
    assert figures["deferred_over_at_once_o"] == figures["deferred_over_at_once_clipped_a"] == 0.5
    # The sweep is relative to one ministage.
    assert [line.split()[-1] for line in said if line.split()[:1] in (["1"], ["8"])] == ["1.000", "0.600"]
    assert bench.is_sound
    assert any("losses with and without offloading are equal" in line for line in said)
    json.dumps(to_plain(bench) | list_figures(bench.figures))


def test_nothing_starts_when_the_time_is_over() -> None:
    bench, said = make_bench(seconds=0.0)
    for section in SECTIONS.values():
        section(bench)
    assert not bench.measured and not bench.largest and "  no time left" in said


def test_a_job_that_fails_for_its_own_reason_is_no_measurement() -> None:
    bench, said = make_bench()
    bench.run = lambda job, timeout_s: Outcome(failure="other", reason="ValueError: a mistake")
    SECTIONS["throughput"](bench)
    assert not bench.is_sound and not bench.measured
    assert "ValueError: a mistake" in said[0]


# -- runs ----------------------------------------------------------------------------------


def test_a_job_runs_in_a_process_of_its_own() -> None:
    job = Job(TINY, "cpu", "c", num_tokens=16, num_ministages=2, num_warm_up=0, num_steps=1)
    outcome = run_job(replace(job, updates="deferred"), 120.0)
    assert outcome.measurement is not None, outcome.reason
    assert outcome.measurement.variant == "c" and "optimizer state" in outcome.measurement.memory
    assert run_job(replace(job, num_tokens=17), 120.0).reason.startswith("ValueError: --tokens 17")


def test_the_program_on_made_up_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real ones of all these variants are a part of the battery (`test_gpu_battery.py`)."""
    path = tmp_path / "figures.json"
    asked: list[Job] = []
    monkeypatch.setattr(
        bench_gpu, "run_job", lambda job, timeout_s: asked.append(job) or fake(job, timeout_s)
    )
    command = ["--device", "cpu", "--quick", "--tokens", "32", "--only", "throughput", "--json", str(path)]
    assert bench_gpu.main(command) == 0
    assert {(job.device, job.num_tokens, job.num_ministages, job.num_steps) for job in asked} == {
        ("cpu", 32, 4, 2)
    }
    assert "speeds mean nothing" in capsys.readouterr().out
    found = json.loads(path.read_text())
    names = {"b_over_a", "c_over_a", "c_over_d", "a_over_e", "peak_memory_c_over_a"}
    assert names <= found["figures"].keys()
    assert found["device"] == "card" and not found["bench"]["failures"]
    assert {m["variant"] for m in found["bench"]["measured"].values()} == {*COMPARED}


def test_a_file_of_results_that_cannot_be_written_is_refused_before_all_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = str(tmp_path / "figures.json")
    assert make_parser("").parse_args(["--json", given]).json == Path(given)
    for wrong, why in ((tmp_path / "no" / "figures.json", "make it first"), (tmp_path, "name another file")):
        with pytest.raises(SystemExit):
            make_parser("").parse_args(["--json", str(wrong)])
        assert why in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main([])
    assert ended.value.code == 2 and "torch finds no GPU here; --device cpu" in capsys.readouterr().err
