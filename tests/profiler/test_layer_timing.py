"""One layer of each kind: what it is called with, its times, and the most rows under a limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from profiled import SMALL, TOKENS, build, measured_model, workload
from ranks import RunRanks
from torch import nn

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.cost.sizes import GATHERS_PER_LAYER
from zorselike.errors import ConfigError
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import LayerKind, Workload
from zorselike.profiler.layers.probes import ProbeTensor, find_probes, make_inputs
from zorselike.profiler.layers.row_search import TrialResult
from zorselike.profiler.layers.timing import LayerBench
from zorselike.profiler.machine.device_memory import HostMemory
from zorselike.profiler.program.update_timing import measure_update

CPU = torch.device("cpu")
SOURCE = Source("measured", "2026-11-21", "a test")


# -- probes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_probe_for_each_kind_with_what_the_model_gives_it(family: str) -> None:
    probes = {probe.kind: probe for probe in find_probes(lambda: build(family), workload(family))}
    assert {kind: (p.module, p.num_instances) for kind, p in probes.items()} == {
        "embedding": ("tok_embeddings", 1),
        "layer": ("layers.0", 2),
        "norm": ("norm", 1),
        "head": ("output", 1),
    }
    assert probes["embedding"].inputs[0] == ProbeTensor((TOKENS,), torch.int64, has_rows=True)
    hidden = ProbeTensor((TOKENS, 64), torch.float32, has_rows=True, carries_grad=True)
    assert all(probes[kind].inputs == (hidden,) for kind in ("layer", "norm", "head"))
    assert [kind for kind, p in probes.items() if not p.carries_grad] == ["embedding"]
    assert [kind for kind, p in probes.items() if p.is_last] == ["head"]
    assert [kind for kind, p in probes.items() if p.is_numbered] == ["layer"]


def test_inputs_have_the_rows_and_the_dtype_that_are_asked_for() -> None:
    probes = {p.kind: p for p in find_probes(build, workload(dtype="bfloat16"))}
    (tokens, positions), _ = make_inputs(probes["embedding"], 3, num_tokens=SMALL["vocab_size"], device=CPU)
    assert positions is None
    assert tokens.shape == (3, TOKENS) and tokens.max() < SMALL["vocab_size"]
    (hidden,), kwargs = make_inputs(probes["layer"], 5, num_tokens=1, device=CPU)
    assert hidden.shape == (5, TOKENS, 64) and hidden.dtype == torch.bfloat16 and hidden.requires_grad
    assert kwargs == {"positions": None, "mask": None}


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def test_a_module_that_is_not_called_is_named() -> None:
    kinds = {
        name: LayerKind(name=name, num_parameters=16, forward_flops_per_row=1) for name in ("used", "unused")
    }
    odd = Workload(
        model="odd",
        sequence_length=4,
        dtype="float32",
        layers=(("used", "used"), ("unused", "unused")),
        kinds=kinds,
    )
    with torch.device("meta"), pytest.raises(ConfigError, match="does not call unused"):
        find_probes(Skips, odd)


# -- times -----------------------------------------------------------------------------------


def measure_kind(
    rank: int,
    size: int,
    kind: str,
    recompute: Recompute,
    limit: int | None,
    most_rows: int,
    family: str = "llama",
    degree: int = 1,
) -> tuple[LayerTimes | None, list[tuple[int, TrialResult]]]:
    probe = next(p for p in find_probes(lambda: build(family), workload(family)) if p.kind == kind)
    trials: list[tuple[int, TrialResult]] = []
    model = measured_model(family, most_rows=most_rows, repeats=2)
    bench = LayerBench(model, probe, device=CPU, memory=HostMemory(limit), recompute=recompute, degree=degree)
    times = bench.measure(
        device="CPU", source=SOURCE, told=lambda rows, result: trials.append((rows, result))
    )
    return times, trials


@pytest.mark.parametrize("kind", ["embedding", "layer", "norm", "head"])
def test_each_kind_has_times_against_rows(run_ranks: RunRanks, kind: str) -> None:
    times, trials = run_ranks(measure_kind, 1, kind, "none", None, 4, init=False)[0]
    assert times is not None and times.kind == kind and times.rows == (1, 2, 4)
    assert [rows for rows, _ in trials] == [1, 2, 4]
    assert all(seconds > 0 for seconds in (*times.forward_s, *times.backward_s))
    assert times.max_rows is None  # Four rows are what was asked for, not what fits.
    assert times.memory_bytes_per_row is not None and times.memory_bytes_per_row > 0
    kept = [result.kept_bytes for _, result in trials]
    assert kept[0] < kept[1] < kept[2]


def test_recomputation_keeps_the_input_alone(run_ranks: RunRanks) -> None:
    kept: dict[Recompute, float] = {}
    for recompute in ("none", "layer"):
        times, _ = run_ranks(measure_kind, 1, "layer", recompute, None, 4, init=False)[0]
        kept[recompute] = times.memory_bytes_per_row
        assert times.recompute == recompute
    assert kept["layer"] == TOKENS * 64 * 4
    assert kept["none"] > 5 * kept["layer"]


def test_a_part_of_a_layer_keeps_what_the_memory_model_says(run_ranks: RunRanks) -> None:
    """A rank of a replica of two has half of the weights and positions, and what its attention and its
    feed-forward take in of all positions."""
    whole, _ = run_ranks(measure_kind, 1, "layer", "none", None, 4, "llama", 1, init=False)[0]
    part, _ = run_ranks(measure_kind, 1, "layer", "none", None, 4, "llama", 2, init=False)[0]
    assert (whole.tensor_parallel, part.tensor_parallel, part.rows) == (1, 2, (1, 2, 4))
    assert all(seconds > 0 for seconds in (*part.forward_s, *part.backward_s))
    inputs = TOKENS * 64 * 4
    gathered = GATHERS_PER_LAYER * (inputs - inputs / 2)
    assert part.memory_bytes_per_row == pytest.approx(whole.memory_bytes_per_row / 2 + gathered, rel=0.05)
    profile = Profile(model="llama debug", layers=(whole, part))
    clock = LayerTimeModel(profile, workload())
    assert clock.forward_s("layer", "CPU", 4, "none", 2) == part.forward_s[2]
    assert clock.forward_s("layer", "CPU", 4, "none", 1) == whole.forward_s[2]


def test_a_limit_is_found_and_failed_sizes_leave_no_times(run_ranks: RunRanks) -> None:
    free, trials = run_ranks(measure_kind, 1, "layer", "none", None, 8, init=False)[0]
    peaks = {rows: result.peak_bytes for rows, result in trials}
    per_row = (peaks[8] - peaks[4]) // 4
    limit = peaks[8] + 3 * per_row + per_row // 2
    assert free is not None
    times, trials = run_ranks(measure_kind, 1, "layer", "none", limit, 64, init=False)[0]
    tried = dict(trials)
    assert times is not None and times.max_rows == times.rows[-1]
    assert times.rows == tuple(sorted(rows for rows, result in tried.items() if result.fits))
    assert all(not tried[rows].fits for rows in tried if rows > times.max_rows)
    assert times.max_rows == 11 and not tried[12].fits


def test_where_not_one_row_fits_there_is_no_entry(run_ranks: RunRanks) -> None:
    times, trials = run_ranks(measure_kind, 1, "layer", "none", 1000, 4, init=False)[0]
    assert times is None and [(rows, result.fits) for rows, result in trials] == [(1, False)]


def break_layer(rank: int, size: int) -> str:
    """An error that is no refusal is nobody's limit."""

    def fail(outputs: Any, targets: Any) -> Any:
        raise ValueError("a bug")

    probe = next(p for p in find_probes(build, workload()) if p.is_last)
    bench = LayerBench(measured_model(loss_fn=fail), probe, device=CPU, memory=HostMemory())
    with pytest.raises(ValueError, match="a bug") as raised:
        bench.try_rows(1, repeats=1)
    return str(raised.value)


def test_other_errors_come_through(run_ranks: RunRanks) -> None:
    assert run_ranks(break_layer, 1, init=False) == ["a bug"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_a_line_over_parameters(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    found = run_ranks(time_update, 1, dtype, init=False)[0]
    assert found.device == "CPU" and found.dtype == str(dtype).removeprefix("torch.")
    assert found.seconds_per_parameter > 0 and found.seconds_per_call >= 0


def time_update(rank: int, size: int, dtype: torch.dtype) -> Any:
    return measure_update(CPU, type="CPU", dtype=dtype, repeats=1, source=SOURCE)
