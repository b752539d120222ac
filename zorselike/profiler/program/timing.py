"""What the program itself costs: host seconds of actions, of FSDP units and of a step.

The real runtime takes real steps with a few layers of the model's most frequent kind, once with every rank
in a group of its own and once, where there are several, with all ranks in one group; each with few and with
many layers in a ministage. What a group of several ranks costs more is what sharing costs.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.cost.profile import Overheads, Source
from zorselike.cost.purposes import COMMUNICATOR_BYTES
from zorselike.plan.pieces import count_communicators
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.profiler.clock import trimmed_mean
from zorselike.profiler.layers.probes import LayerProbe, MeasuredModel, fill, make_inputs
from zorselike.profiler.machine.device_memory import DeviceMemory
from zorselike.profiler.machine.overlap_timing import measure_slowdown
from zorselike.profiler.program.action_costs import (
    FEW_UNITS,
    MANY_UNITS,
    ActionClock,
    ActionCosts,
    ActionSamples,
    Seconds,
    draw_lines,
    find_shared,
)
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.model.nested import tensors_in
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.processes import Processes
from zorselike.schedule import ScheduleSpec, build
from zorselike.schedule.actions import COMPUTE, edges_of_rank

MICROBATCHES = 3
"""Of each rank: the first one after a gather is not like the others."""
WARMUPS = 2
STEPS_PER_REPEAT = 3
"""Short as they are, and noisy."""
SILENCE_S = 60.0
"""A rank on a crowded machine may be silent for long."""
BYTES_PER_PARAMETER = 24
"""At most: gathered, gradient, sum of gradients, master weight and two moments, in fp32 each."""
BYTES_PER_FROZEN = 8
"""At most: gathered, and a shard."""
_NEVER_CLIPS = 1e9
"""A norm so large that gradients stay as they are; but it is found, as where they are clipped."""

BetweenSteps = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Inside there is a call that does what the caller's program does between two steps."""


@contextmanager
def no_work() -> Iterator[Callable[[], object]]:
    """A program that does nothing between steps."""
    yield lambda: None


class ProgramBench:
    """Small pipelines of one kind of layer on all ranks; every method is collective."""

    def __init__(
        self,
        model: MeasuredModel,
        probe: LayerProbe,
        processes: Processes,
        memory: DeviceMemory,
        *,
        between_steps: BetweenSteps,
    ) -> None:
        """`probe`: of layers that pass on what they take."""
        self._memory = memory
        self._pools_bytes: list[int] = []
        """Of this rank's device, of each pipeline."""
        self._communicator_bytes: list[int] = []
        """The same, of each pipeline that has some."""
        self._model, self._probe, self._processes = model, probe, processes
        self._between_steps = between_steps
        self._work: Callable[[], object]
        self._layer = model.build().get_submodule(probe.module)
        """On meta."""
        self._num_parameters = sum(parameter.numel() for parameter in self._layer.parameters())
        self._num_trainable = sum(p.numel() for p in self._layer.parameters() if p.requires_grad)
        self._is_cpu = processes.device.type == "cpu"

    @property
    def least_bytes(self) -> int:
        """What a rank may come to hold of parameters and optimizer state."""
        num_frozen = self._num_parameters - self._num_trainable
        return MANY_UNITS * (BYTES_PER_PARAMETER * self._num_trainable + BYTES_PER_FROZEN * num_frozen)

    def measure(self, source: Source) -> Overheads:
        """The same on every rank."""
        with self._between_steps() as self._work:
            return self._measure(source)

    def _measure(self, source: Source) -> Overheads:
        size = self._processes.size
        own, rests = self._measure_layout([(rank,) for rank in range(size)], zero=2)
        shared_unit_s: dict[str, float] = {}
        slowdown = 1.0
        if size > 1:
            together = [tuple(range(size))]
            zero2, more_rests = self._measure_layout(together, zero=2)
            zero3, _ = self._measure_layout(together, zero=3)
            shared_unit_s = find_shared(own, zero2, zero3)
            rests += more_rests
            slowdown = measure_slowdown(
                self._processes.everyone,
                self._processes.device,
                num_bytes=self._num_parameters * self._model.dtype.itemsize,
                repeats=self._model.repeats,
            )
        pools, communicators = zip(
            *self._processes.gather((max(self._pools_bytes), max(self._communicator_bytes, default=0))),
            strict=True,
        )
        left_out = COMPUTE if self._is_cpu else ()  # There layers were timed with what their units cost.
        return Overheads(
            action_s=tuple(own.action_s.items()),
            unit_s=tuple((kind, unit_s) for kind, unit_s in own.unit_s.items() if kind not in left_out),
            shared_unit_s=tuple(shared_unit_s.items()),
            step_s=statistics.median(rests),
            overlap_slowdown=slowdown,
            pools_bytes=max(pools),
            # One rank alone has none: then what others have found.
            communicator_bytes=max(communicators) if size > 1 or self._is_cpu else COMMUNICATOR_BYTES,
            source=source,
        )

    def _measure_layout(
        self, groups: Sequence[tuple[int, ...]], *, zero: int
    ) -> tuple[ActionCosts, list[float]]:
        """Costs by kind, and seconds of steps beside actions."""
        (few, few_rest_s), (many, many_rest_s) = (
            self._run(groups, zero=zero, num_units=count) for count in (FEW_UNITS, MANY_UNITS)
        )
        return draw_lines(few, many), [few_rest_s, many_rest_s]

    def _run(self, groups: Sequence[tuple[int, ...]], *, zero: int, num_units: int) -> tuple[Seconds, float]:
        """Steps of a pipeline of these groups, each with one ministage of so many layers: means of actions by
        kind, and of what a step takes beside them; of what all ranks saw, on every rank."""
        samples = ActionSamples(self._is_cpu)
        rests: list[float] = []
        plan = make_plan(groups, zero=zero, num_units=num_units)
        self._memory.restart_pools()
        before_bytes = self._memory.context_bytes()
        with HeteroPipeline(
            self._make_model(plan),
            plan,
            optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=True),
            loss_fn=_sum_squares,
            count_fn=len,
            device=self._processes.device,
            param_dtype=self._model.dtype if self._model.dtype in HALF else None,
            max_norm=_NEVER_CLIPS,
            silence_s=SILENCE_S,
        ) as pipe:
            inputs = self._make_hidden(len(pipe.input_rows)) if pipe.input_rows else None
            targets = torch.zeros(len(pipe.target_rows), device="cpu") if pipe.target_rows else None
            for number in range(WARMUPS + STEPS_PER_REPEAT * self._model.repeats):
                clock = ActionClock()
                begin_s = self._now()
                with clock.running(pipe):
                    pipe.step(inputs, targets)
                step_s = self._now() - begin_s
                begin_s = time.monotonic()
                self._work()
                between_s = time.monotonic() - begin_s
                if number >= WARMUPS:
                    samples.add_step(clock.times)
                    rests.append(between_s + step_s - sum(map(samples.find_seconds, clock.times)))
            self._pools_bytes.append(self._memory.pools_bytes())
            num_communicators = count_all_communicators(plan, self._processes.rank)
            if num_communicators and num_units == MANY_UNITS:  # With few the libraries were loaded, too.
                grown = max(0, self._memory.context_bytes() - before_bytes)
                self._communicator_bytes.append(grown // num_communicators)
        return self._pool(samples, rests)

    def _now(self) -> float:
        return time.thread_time() if self._is_cpu else time.monotonic()

    def _pool(self, own: ActionSamples, rests: list[float]) -> tuple[Seconds, float]:
        pooled = ActionSamples(self._is_cpu)
        said = self._processes.gather((dict(own.seconds), trimmed_mean(rests)))
        for seconds, _ in said:
            for kind, values in seconds.items():
                pooled.seconds[kind] += values
        return pooled.means(), max(0.0, *(rest for _, rest in said))

    def _make_model(self, plan: Plan) -> nn.Module:
        """On meta; its layers are those of the probe, under the plan's names."""
        num_layers = sum(len(ministage.modules) for ministage in plan.ministages)
        return _Model(_Bound(copy.deepcopy(self._layer), self._probe) for _ in range(num_layers))

    def _make_hidden(self, rows: int) -> Tensor:
        inputs, _ = make_inputs(self._probe, rows, num_tokens=1, device=self._processes.device)
        hidden: Tensor = inputs[0].detach()
        return hidden


class _Model(nn.Sequential):
    """`layers.0`, `layers.1` and so on, with values as good as any."""

    def __init__(self, layers: Iterator[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def _init_weights(self, module: nn.Module) -> None:
        """What the runtime asks a model of Hugging Face for."""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            fill(tensor)


class _Bound(nn.Module):
    """A layer with all its arguments but the first, tensors among them made where they are first needed."""

    def __init__(self, layer: nn.Module, probe: LayerProbe) -> None:
        super().__init__()
        self.layer, self._probe = layer, probe
        self._made: dict[object, tuple[Sequence[Any], Mapping[str, Any]]] = {}
        """By what the hidden states are, fake while shapes are found, and their rows."""

    def forward(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        key = type(hidden), hidden.device, rows
        if key not in self._made:
            inputs, keywords = make_inputs(self._probe, rows, num_tokens=1, device=hidden.device)
            self._made[key] = inputs[1:], keywords
        others, kwargs = self._made[key]
        return tensors_in(self.layer(hidden, *others, **kwargs))[0]


def make_plan(groups: Sequence[tuple[int, ...]], *, zero: int, num_units: int) -> Plan:
    """One ministage a group; every rank of it computes `MICROBATCHES` microbatches of one row, and where
    groups are larger than others, the batch is what all compute."""
    global_batch = MICROBATCHES * max(map(len, groups))
    made = tuple(
        Group(
            ranks=ranks,
            microbatches=tuple(Microbatch(ranks[i % len(ranks)], i, i + 1) for i in range(global_batch)),
            zero=zero,
        )
        for ranks in groups
    )
    ministages = tuple(
        Ministage(g, tuple(f"layers.{i}" for i in range(g * num_units, (g + 1) * num_units)))
        for g in range(len(groups))
    )
    return Plan(global_batch=global_batch, groups=made, ministages=ministages).validate()


def count_all_communicators(plan: Plan, rank: int) -> int:
    """NCCL communicators of a rank on a GPU: one for each edge, and its group's."""
    edges = edges_of_rank(rank, build(ScheduleSpec(plan), ranks=[rank])[rank])
    return len(edges) + count_communicators(plan.groups[plan.group_of_rank[rank]], rank)


def _sum_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.float().square().sum()
