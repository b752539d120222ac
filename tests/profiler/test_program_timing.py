"""What the program itself takes: pipelines of a few layers on one rank and on several; layers in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import volume
from profiled import build, join, measured_model, workload
from ranks import RunRanks, free_port

from zorselike.cost.profile import Overheads, Source
from zorselike.plan.plan import Recompute
from zorselike.profiler.layers.in_step import (
    LONGEST_S,
    MICROBATCHES,
    NUM_COPIES,
    LayersInStep,
    estimate_in_step_s,
)
from zorselike.profiler.layers.probes import LayerProbe, find_probes
from zorselike.profiler.layers.row_search import TrialResult
from zorselike.profiler.machine.device_memory import HostMemory
from zorselike.profiler.program import timing
from zorselike.profiler.program.timing import MICROBATCHES as OF_A_RANK
from zorselike.profiler.program.timing import ProgramBench, make_plan

SOURCE = Source("measured", "2026-11-21", "a test")
CPU = torch.device("cpu")


def probes(dtype: str = "float32") -> dict[str, LayerProbe]:
    return {probe.kind: probe for probe in find_probes(build, workload(dtype=dtype))}


# -- the program -----------------------------------------------------------------------------


class Grows(HostMemory):
    """Each pipeline takes 300 bytes beside its tensors, and 70 for its streams."""

    def restart_pools(self) -> None:
        super().restart_pools()
        self.num_asked = 0

    def context_bytes(self) -> int:
        self.num_asked += 1
        return 1000 + 300 * (self.num_asked - 1)

    def pools_bytes(self) -> int:
        return 70


def measure(rank: int, size: int, port: int, dtype: str) -> tuple[Overheads, int]:
    timing.WARMUPS, timing.STEPS_PER_REPEAT = 1, 2
    num_calls = 0

    @contextmanager
    def counting() -> Iterator[Callable[[], object]]:
        def count() -> None:
            nonlocal num_calls
            num_calls += 1

        yield count

    with join(port) as processes:
        model = measured_model(dtype=dtype)
        bench = ProgramBench(model, probes(dtype)["layer"], processes, Grows(), between_steps=counting)
        return bench.measure(SOURCE), num_calls


@volume.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_finds_the_same_of_all_kinds_of_actions(run_ranks: RunRanks, dtype: str) -> None:
    (found, num_calls), (other, _) = run_ranks(measure, 2, free_port(), dtype, init=False)
    assert found == other and num_calls > 0
    usual = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "NORM", "STEP", "F", "B"}
    transfers = {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    assert dict(found.action_s).keys() == usual | transfers
    # Layers are timed with what their units cost.
    assert dict(found.unit_s).keys() == (usual | transfers) - {"F", "B"}
    assert dict(found.shared_unit_s).keys() <= {"UNSHARD", "RESHARD", "REDUCE_GRAD", "F", "B"}
    assert any(dict(found.unit_s)[kind] > 0 for kind in ("REDUCE_GRAD", "STEP"))  # Noise may hide one.
    assert found.pools_bytes == 70
    assert found.communicator_bytes == 300  # Of a group; edges each way are two.
    assert found.step_s > 0 and found.overlap_slowdown >= 1 and found.source == SOURCE


def test_one_rank_shares_with_nobody(run_ranks: RunRanks) -> None:
    ((found, _),) = run_ranks(measure, 1, free_port(), "float32", init=False)
    assert not found.shared_unit_s and found.overlap_slowdown == 1 and not found.communicator_bytes
    assert not any("SEND" in kind for kind, _ in found.action_s)


@pytest.mark.parametrize("groups", [[(0,), (1,), (2,)], [(0, 1, 2)]])
def test_every_rank_of_a_pipeline_computes_alike(groups: list[tuple[int, ...]]) -> None:
    plan = make_plan(groups, zero=2, num_units=3)
    assert [len(plan.microbatches_of_rank(rank)) for rank in range(3)] == [OF_A_RANK] * 3
    assert {len(ministage.modules) for ministage in plan.ministages} == {3}
    assert plan.num_ministages == len(groups)


def test_layers_that_take_more_than_a_hidden_state_are_not_put_in_a_row() -> None:
    assert {kind for kind, probe in probes().items() if probe.follows_itself} == {"layer"}


# -- layers in a step ------------------------------------------------------------------------


def count_calls(bench: LayersInStep) -> list[str]:
    """Grows by one with each call of the first part of each copy."""
    calls: list[str] = []
    for name, layer in bench.copies.layers.items():
        innermost = next(part for part in layer.modules() if not list(part.children()))
        innermost.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def time_kinds(rank: int, size: int, port: int, recompute: Recompute) -> dict[str, Any]:
    found = {}
    with join(port) as processes:
        for kind, probe in probes().items():
            bench = LayersInStep(
                measured_model(num_tokens=8),
                probe,
                device=CPU,
                alone=processes.alone,
                recompute=recompute if probe.is_numbered else "none",
            )
            calls = count_calls(bench)
            forward_s, backward_s = bench.time(2, repeats=2, warmups=1)
            found[kind] = forward_s, backward_s, len(calls)
    return found


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_all_copies_run_forward_and_backward(run_ranks: RunRanks, recompute: Recompute) -> None:
    (found,) = run_ranks(time_kinds, 1, free_port(), recompute, init=False)
    forwards = 3 * MICROBATCHES * NUM_COPIES
    for kind, (forward_s, backward_s, num_calls) in found.items():
        assert forward_s > 0 and backward_s > 0
        assert num_calls == forwards * (2 if kind == "layer" and recompute == "layer" else 1), kind


def test_only_what_is_short_and_fits_is_timed_in_a_step() -> None:
    short = TrialResult(fits=True, forward_s=LONGEST_S / 4, backward_s=LONGEST_S / 4, limit_bytes=1000)
    assert LayersInStep.matters(short)
    assert not LayersInStep.matters(TrialResult(fits=True, forward_s=LONGEST_S, limit_bytes=1000))
    room = 1000 // (NUM_COPIES * MICROBATCHES)
    large = TrialResult(fits=True, peak_bytes=room + 1, limit_bytes=1000, forward_s=LONGEST_S / 4)
    assert not LayersInStep.matters(large)


def test_how_long_that_takes() -> None:
    steps = 6 * MICROBATCHES * NUM_COPIES
    assert estimate_in_step_s(1e-3, 4, 5) == pytest.approx(steps * 7e-3)
    assert estimate_in_step_s(LONGEST_S, 64, 5) == 0
