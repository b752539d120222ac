"""The order of stream waits, proven on CPU ranks: no race, and the numbers of a resident run.

`stand_in.RaceStreams` takes the place of the device's streams. That it would find a forgotten wait
is shown too: each stream's waits are left out once, and so is each single wait of the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RunRanks
from stand_in import RaceEvent, RaceStream, RaceStreams
from tiny import Case, adamw, module_names, with_groups
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Microbatch, Ministage, Plan, Recompute
from zorselike.runtime import assembly
from zorselike.runtime.alarm import Alarm
from zorselike.runtime.executor import Executor
from zorselike.runtime.host_memory import HostPool
from zorselike.runtime.sharding import local_tensor

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:4], NAMES[4:])
SUBSETS = tuple(chain.from_iterable(combinations(OFFLOAD_KINDS, n) for n in range(len(OFFLOAD_KINDS) + 1)))
EVERYTHING = SUBSETS[-1]
SETTINGS: tuple[tuple[Recompute, torch.dtype | None, float | None], ...] = (
    ("none", None, None),
    ("layer", torch.bfloat16, 0.1),
    ("none", torch.float16, None),
)
"""Recomputation, dtype to compute in, norm to clip to."""
STREAMS = ("compute", "gather", "load", "load_state", "store", "fetch", "stash", "update")

COVERED = {
    "compute in Executor._settle": "for readers outside of steps; see the last test",
    "compute in Retired.settle": "compute joins the update at the end of a step",
    "load_state in Retired.settle": "it waits for the update before it frees the state",
    "store in Gradients.arrive": "it waits for compute, which has waited for the update",
}
"""Waits without which no run here has a race, and why."""


@dataclass(frozen=True)
class Run:
    """A training run under one setting of everything that touches streams."""

    plan: Plan
    offload: tuple[str, ...] = ()
    recompute: Recompute = "none"
    param_dtype: torch.dtype | None = None
    max_norm: float | None = None
    tied: bool = False
    num_steps: int = 2

    @property
    def case(self) -> Case:
        plan = with_groups(self.plan, lambda g: replace(g, offload=self.offload, recompute=self.recompute))
        return Case(
            plan, NUM_LAYERS, tied=self.tied, max_norm=self.max_norm, evaluate_before=(1,), num_steps=2
        )


def one_group(zero: int, num_ranks: int, grad_reduce: GradReduce = "once") -> Plan:
    """Three microbatches; on two ranks two and one."""
    rows = ((0, 1), (1, 3), (3, 4))
    microbatches = tuple(Microbatch(i % num_ranks, *rows[i]) for i in range(len(rows)))
    group = Group(tuple(range(num_ranks)), microbatches, zero=zero, grad_reduce=grad_reduce)
    return Plan(4, (group,), tuple(Ministage(0, tuple(cut)) for cut in CUTS))


def two_groups(zero: int) -> Plan:
    """Two ranks, each a group, visited twice."""
    microbatches = ((Microbatch(0, 0, 2), Microbatch(0, 2, 4)), (Microbatch(1, 0, 1), Microbatch(1, 1, 4)))
    groups = tuple(Group((rank,), own, zero=zero) for rank, own in enumerate(microbatches))
    return Plan(4, groups, tuple(Ministage(i % 2, tuple(cut)) for i, cut in enumerate(CUTS)))


@dataclass
class Outcome:
    numbers: list[float]
    """Losses and norms of steps and evaluations."""
    weights: dict[str, Tensor]
    """On rank 0."""
    moments: list[Tensor]
    """This rank's, and its fp32 master weights."""


def train(run: Run) -> Outcome:
    """Two or three steps, with an evaluation in between."""
    case = run.case
    pipe = HeteroPipeline(
        case.model(), case.plan, optimizer=adamw, param_dtype=run.param_dtype, max_norm=case.max_norm
    )
    results = []
    for step in range(case.num_steps):
        batch = case.batch(step)
        if step in case.evaluate_before:
            results.append(pipe.evaluate_global(*batch))
        results.append(pipe.step_global(*batch))
    numbers = [number for result in results for number in (result.loss, result.grad_norm)]
    with pipe.loaded():
        kept = [
            tensor
            for optimizer in pipe.optimizers.values()
            for parameter, state in optimizer.state.items()
            for tensor in (parameter.detach(), *state.values())
        ]
        moments = [local_tensor(tensor).clone() for tensor in kept]
    weights = pipe.full_state_dict()
    pipe.close()
    return Outcome(numbers, weights, moments)


@contextmanager
def on(streams: RaceStreams) -> Iterator[None]:
    """Pipelines made inside run on these streams, under watch."""
    allocate, enter = HostPool._allocate, Alarm.enter

    def allocate_on_host(pool: HostPool, *args: Any) -> Tensor:
        slab = allocate(pool, *args)
        streams.mark_host(slab)
        streams.name_storage(slab, f"host memory for {args[0]}")
        return slab

    def enter_action(alarm: Alarm, action: Any) -> None:
        streams.label = str(action)
        enter(alarm, action)

    with (
        mock.patch.object(assembly, "make_streams", lambda device: streams),
        mock.patch.object(HostPool, "_allocate", allocate_on_host),
        mock.patch.object(Alarm, "enter", enter_action),
        streams.watching(),
    ):
        yield


def find_mistakes(run: Run, expected: Outcome) -> list[str]:
    """The races of a run, and where its numbers are not those of a resident one."""
    streams = RaceStreams()
    with on(streams):
        found = train(run)
    mistakes = [str(race) for race in streams.races]
    if repr(found.numbers) != repr(expected.numbers):  # The norm of gradients that overflow is no number.
        mistakes.append(f"losses and norms {found.numbers} are not {expected.numbers}")
    mistakes += [
        f"weight {name} differs by {(found.weights[name] - weight).abs().max():.1e}"
        for name, weight in expected.weights.items()
        if not torch.equal(found.weights[name], weight)
    ]
    assert len(found.moments) == len(expected.moments) > 0
    if not all(map(torch.equal, found.moments, expected.moments)):
        mistakes.append("the optimizers' states differ")
    return [f"offload={list(run.offload)}, {run}: {mistake}" for mistake in mistakes]


def find_all_mistakes(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    """Of all runs; each is compared with the same run without offload on a CPU rank's own streams."""
    resident: dict[Run, Outcome] = {}
    mistakes = []
    for run in runs:
        reference = replace(run, offload=())
        if reference not in resident:
            resident[reference] = train(reference)
        mistakes += find_mistakes(run, resident[reference])
    return mistakes


def assert_no_mistake(run_ranks: RunRanks, num_ranks: int, runs: list[Run]) -> None:
    mistakes = [m for own in run_ranks(find_all_mistakes, num_ranks, runs, timeout=240) for m in own]
    assert not mistakes, "\n".join(mistakes[:5])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_subset_on_one_rank(zero: int, run_ranks: RunRanks) -> None:
    runs = [
        Run(one_group(zero, 1), offload, *SETTINGS[(number + zero) % len(SETTINGS)])
        for number, offload in enumerate(SUBSETS)
    ]
    assert_no_mistake(run_ranks, 1, runs)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks(zero: int, run_ranks: RunRanks) -> None:
    subsets = ((), ("params",), ("optimizer", "activations"), EVERYTHING, EVERYTHING)
    runs = [
        Run(one_group(zero, 2), offload, *SETTINGS[(number + zero) % 2])
        for number, offload in enumerate(subsets)
    ]
    if zero == 2:
        runs += [Run(one_group(2, 2, "microbatch"), EVERYTHING, *setting) for setting in SETTINGS[:2]]
    assert_no_mistake(run_ranks, 2, runs)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_everything_offloaded(
    recompute: Recompute, param_dtype: torch.dtype | None, max_norm: float | None, run_ranks: RunRanks
) -> None:
    runs = [Run(one_group(zero, 1), EVERYTHING, recompute, param_dtype, max_norm) for zero in (2, 3)]
    assert_no_mistake(run_ranks, 1, runs)


@pytest.mark.parametrize("tied", [False, True])
def test_two_groups(tied: bool, run_ranks: RunRanks) -> None:
    runs = [
        Run(two_groups(zero), EVERYTHING, *SETTINGS[number], tied=tied) for number, zero in enumerate((2, 3))
    ]
    assert_no_mistake(run_ranks, 2, runs)


# -- what is forgotten is found --------------------------------------------------------------


def forget_stream(rank: int, world_size: int, run: Run, name: str) -> int:
    """How many races there are if one stream never waits."""
    streams = RaceStreams()
    getattr(streams, name).wait = lambda event: None
    with on(streams):
        train(run)
    return len(streams.races)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_never_waits_is_found(name: str, run_ranks: RunRanks) -> None:
    assert all(run_ranks(forget_stream, 2, Run(one_group(3, 2), EVERYTHING), name))


def name_wait(waiter: str) -> str:
    """Who waits, and the function that makes it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(("streams.py", "stand_in.py")):
        frame = frame.f_back
    return f"{waiter} in {frame.f_code.co_qualname}"


def train_without(run: Run, *forgotten: str) -> tuple[set[str], int]:
    """The waits that a run met, and its races if some of them are left out."""
    streams = RaceStreams()
    met: set[str] = set()
    synchronize = RaceEvent.synchronize

    def wait(stream: RaceStream, event: RaceEvent) -> None:
        met.add(name := name_wait(stream.name))
        if name not in forgotten:
            stream.learn(event.clock)

    def wait_on_host(event: RaceEvent) -> None:
        met.add(name := name_wait("the host"))
        if name not in forgotten:
            synchronize(event)

    with (
        on(streams),
        mock.patch.object(RaceStream, "wait", wait),
        mock.patch.object(RaceEvent, "synchronize", wait_on_host),
    ):
        train(run)
    return met, len(streams.races)


def forget_each(rank: int, world_size: int, run: Run, needed: set[str]) -> dict[str, int]:
    """How many races there are without each wait that is not known to be needed."""
    met, num_races = train_without(run)
    assert num_races == 0
    return {name: train_without(run, name)[1] for name in sorted(met - needed)}


def test_a_wait_that_is_forgotten_is_found(run_ranks: RunRanks) -> None:
    """Each wait in the runtime is needed in one of two runs, but for those that others cover."""
    needed: set[str] = set()
    met: set[str] = set()
    for run, num_ranks in (
        (Run(one_group(2, 1), EVERYTHING, "layer", torch.bfloat16, 0.1, num_steps=2), 1),
        (Run(one_group(3, 2), EVERYTHING, num_steps=2), 2),
    ):
        for num_races in run_ranks(forget_each, num_ranks, run, needed, timeout=240):
            met |= num_races.keys()
            needed |= {name for name, number in num_races.items() if number}
    assert met - needed == COVERED.keys()


def read_after_step(rank: int, world_size: int, wait: bool) -> int:
    """Races of one who reads the weights after a step."""
    streams = RaceStreams()
    case = Run(one_group(2, 1)).case
    with (
        on(streams),
        nullcontext() if wait else mock.patch.object(Executor, "_settle", lambda executor: None),
    ):
        pipe = HeteroPipeline(case.model(), case.plan, optimizer=adamw)
        pipe.step_global(*case.batch(0))
        for parameter in (p for o in pipe.optimizers.values() for p in o.state):
            local_tensor(parameter).sum()
        found = len(streams.races)
        pipe.close()
    return found


def test_weights_may_be_read_after_a_step(run_ranks: RunRanks) -> None:
    assert run_ranks(read_after_step, 1, True) == [0]
    assert run_ranks(read_after_step, 1, False) > [0]
