"""How long a rank computed, by a clock that only layers and waits for gathers advance."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from ranks import RunRanks
from tiny import Case, Layer, adamw, module_names
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.ministage import busy

NUM_LAYERS = 3
MICROBATCHES = {0: 2, 1: 1}
WAIT_S = 100.0


def compute(rank: int, world_size: int, zero: int) -> tuple[float, float, int]:
    """Busy seconds of an evaluation and of a step, and how many gathers were waited for inside forwards."""
    now, num_waits = 0.0, 0
    layer, wait = Layer.forward, FSDPParamGroup.wait_for_unshard

    def forward(self: Layer, *args: Any) -> Any:
        nonlocal now
        now += 1.0
        return layer(self, *args)

    def wait_long(self: FSDPParamGroup) -> None:
        nonlocal now, num_waits
        if self._all_gather_result is not None:
            now += WAIT_S
            num_waits += 1
        wait(self)

    microbatches = tuple(Microbatch(*m) for m in ((0, 0, 1), (1, 1, 3), (0, 3, 4)))
    plan = Plan(
        4, (Group((0, 1), microbatches, zero=zero),), (Ministage(0, tuple(module_names(NUM_LAYERS))),)
    )
    case = Case(plan, NUM_LAYERS)
    with (
        mock.patch.object(busy, "time", mock.Mock(perf_counter=lambda: now)),
        mock.patch.object(Layer, "forward", forward),
        mock.patch.object(FSDPParamGroup, "wait_for_unshard", wait_long),
        HeteroPipeline(case.model(), plan, optimizer=adamw) as pipe,
    ):
        pipe.step_global(*case.batch(0))
        num_waits = 0
        pipe.evaluate_global(*case.batch(0))
        evaluating_s, waits = pipe.busy_s, num_waits
        pipe.step_global(*case.batch(0))
        step_s, read = pipe.busy_s, pipe._assembly.busy.reading()
        pipe.evaluate_global(*case.batch(0))
        assert (read(), pipe.busy_s) == (step_s, evaluating_s)
        return evaluating_s, step_s, waits


@pytest.mark.parametrize("zero", [2, 3])
def test_waiting_for_gathers_is_not_computing(run_ranks: RunRanks, zero: int) -> None:
    for rank, (evaluating_s, step_s, num_waits) in enumerate(run_ranks(compute, 2, zero)):
        computed_s = float(NUM_LAYERS * MICROBATCHES[rank])
        assert evaluating_s == computed_s and num_waits > NUM_LAYERS
        # What ZeRO 3 gathers in a backward by itself is in it.
        assert step_s == computed_s if zero == 2 else step_s > WAIT_S


class Event:
    """Of a GPU that has got to none of them before somebody waits."""

    num_recorded = 0
    waited: ClassVar[list[float]] = []

    def __init__(self, **_: Any) -> None:
        self.ms = 0.0

    def record(self) -> None:
        Event.num_recorded += 1
        self.ms = 1000.0 * Event.num_recorded

    def synchronize(self) -> None:
        Event.waited.append(self.ms)

    def elapsed_time(self, other: Event) -> float:
        return other.ms - self.ms


def test_a_gpu_is_waited_for_by_who_reads() -> None:
    """The next step may have begun."""
    with mock.patch.object(torch.cuda, "Event", Event):
        clock = busy.BusyClock(torch.device("cuda", 0))
        with clock.running(), clock.waiting():
            pass
        read = clock.reading()
        clock.restart()
        with clock.running():
            pass
        assert not Event.waited
        assert read() == 3.0 - 1.0 and Event.waited == [4000.0]
        assert clock.seconds() == 1.0
