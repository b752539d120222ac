"""The order of stream waits, proven on CPU ranks: no race, and the numbers of a resident run.

`stand_in.RaceStreams` takes the place of the device's streams. That it would find a forgotten wait
is shown too: each stream's waits are left out once, and so is each single wait of the runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
import volume
from odd_optimizers import ODD_OPTIMIZERS
from offloaded import state_tensors
from ranks import RunRanks
from stand_in import RaceEvent, RaceStream, RaceStreams, StreamRace
from tiny import Case, adamw, module_names, with_groups
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Microbatch, Ministage, Plan, Recompute
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.executor import Executor
from zorselike.runtime.memory.memory import HostPool
from zorselike.runtime.ministage import settings
from zorselike.runtime.ministage.sharding import local_tensor

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
    "compute in DeferredFrees.settle": "compute joins the update at the end of a step",
    "load_state in DeferredFrees.settle": "it waits for the update before it frees the state",
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
    optimizer: str = ""
    """Of the odd ones; else AdamW."""
    num_steps: int = 2

    @property
    def case(self) -> Case:
        plan = with_groups(self.plan, lambda g: replace(g, offload=self.offload, recompute=self.recompute))
        return Case(
            plan,
            NUM_LAYERS,
            tied=self.tied,
            max_norm=self.max_norm,
            evaluate_before=(1,),
            num_steps=self.num_steps,
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
    """This rank's, and its weights as the optimizers have them."""


def train(run: Run) -> Outcome:
    """Some steps, with an evaluation in between."""
    case = run.case
    with HeteroPipeline(
        case.model(),
        case.plan,
        optimizer=ODD_OPTIMIZERS[run.optimizer] if run.optimizer else adamw,
        param_dtype=run.param_dtype,
        max_norm=case.max_norm,
    ) as pipe:
        results = []
        for step in range(case.num_steps):
            batch = case.batch(step)
            if step in case.evaluate_before:
                results.append(pipe.evaluate_global(*batch))
            results.append(pipe.step_global(*batch))
        numbers = [number for result in results for number in (result.loss, result.grad_norm)]
        with pipe.loaded():
            moments = [tensor.clone() for tensor in state_tensors(pipe)]
        return Outcome(numbers, pipe.full_state_dict(), moments)


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
        mock.patch.object(settings, "make_streams", lambda device: streams),
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
    runs = volume.part(runs, least=2 if num_ranks == 1 else 1)
    mistakes = [m for own in run_ranks(find_all_mistakes, num_ranks, runs, timeout=240) for m in own]
    assert not mistakes, "\n".join(mistakes[:5])


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_subset_on_one_rank(zero: int, run_ranks: RunRanks) -> None:
    runs = [
        Run(one_group(zero, 1), offload, *SETTINGS[(number + zero) % len(SETTINGS)])
        for number, offload in enumerate(SUBSETS)
    ]
    assert_no_mistake(run_ranks, 1, runs)


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks(zero: int, run_ranks: RunRanks) -> None:
    """Their collectives are on streams too; one rank has shown what each kind of offload does alone."""
    some = (("optimizer", "activations"), (), ("params",), ())[zero]
    runs = [
        Run(one_group(zero, 2), offload, *SETTINGS[number % 2])
        for number, offload in enumerate((EVERYTHING, EVERYTHING, some), zero)
    ]
    if zero == 2:
        runs += [Run(one_group(2, 2, "microbatch"), EVERYTHING, *setting) for setting in SETTINGS[:2]]
    assert_no_mistake(run_ranks, 2, runs)


@pytest.mark.nightly
def test_everything_offloaded(run_ranks: RunRanks) -> None:
    """With recomputation, in bf16, clipped, and each way of combining those; under ZeRO 2 and 3 any two."""
    settings = product(("none", "layer"), (None, torch.bfloat16), (None, 0.1))
    runs = [
        Run(one_group(2 + number.bit_count() % 2, 1), EVERYTHING, *setting)
        for number, setting in enumerate(settings)
    ]
    assert_no_mistake(run_ranks, 1, runs)


@pytest.mark.nightly
def test_two_groups(run_ranks: RunRanks) -> None:
    runs = [
        Run(two_groups(zero), EVERYTHING, *setting, tied=tied)
        for zero, setting in zip((2, 3), SETTINGS, strict=False)
        for tied in (False, True)
    ]
    assert_no_mistake(run_ranks, 2, runs)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_single_ministage(num_ranks: int, run_ranks: RunRanks) -> None:
    """Whose microbatches go forward and at once backward."""
    plans = [one_group(zero, num_ranks) for zero in range(4)] + [one_group(2, num_ranks, "microbatch")]
    whole = (Ministage(0, tuple(name for cut in CUTS for name in cut)),)
    runs = [
        Run(replace(plan, ministages=whole), EVERYTHING, *SETTINGS[number % len(SETTINGS)])
        for number, plan in enumerate([*plans, *plans[::-1]])
    ]
    assert_no_mistake(run_ranks, num_ranks, runs)


@pytest.mark.nightly
def test_odd_optimizers(run_ranks: RunRanks) -> None:
    """Whose state comes, goes and is replaced; updates run beside backwards, or after them all."""
    runs = [
        Run(one_group(2, 1), ("params", "optimizer"), max_norm=max_norm, optimizer=name, num_steps=3)
        for max_norm, name in zip(cycle((None, 0.1)), ODD_OPTIMIZERS, strict=False)
    ]
    assert_no_mistake(run_ranks, 1, runs)
    replacing = Run(one_group(3, 2), EVERYTHING, optimizer="a new tensor each step", num_steps=3)
    assert_no_mistake(run_ranks, 2, [replacing, replace(replacing, max_norm=0.1)])


# -- what is forgotten is found --------------------------------------------------------------


def forget_streams(rank: int, world_size: int, run: Run) -> list[str]:
    """The streams without whose waits there is no race."""
    blind = []
    for name in STREAMS:
        streams = RaceStreams(raises=True)
        getattr(streams, name).wait = lambda event: None
        with on(streams), suppress(StreamRace):
            train(run)
        if not streams.races:
            blind.append(name)
    return blind


def test_a_stream_that_never_waits_is_found(run_ranks: RunRanks) -> None:
    assert run_ranks(forget_streams, 1, Run(one_group(3, 1), EVERYTHING), timeout=120) == [[]]


def name_wait(waiter: str) -> str:
    """Who waits, and the function that makes it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(("streams.py", "stand_in.py")):
        frame = frame.f_back
    return f"{waiter} in {frame.f_code.co_qualname}"


def train_without(run: Run, *forgotten: str, to_the_end: bool = True) -> tuple[set[str], int]:
    """The waits that a run met, and its races if some of them are left out; `to_the_end`: not only up
    to the first of them."""
    streams = RaceStreams(raises=not to_the_end)
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
        suppress(StreamRace),
    ):
        train(run)
    return met, len(streams.races)


def forget_each(rank: int, world_size: int, run: Run, known: set[str]) -> dict[str, int]:
    """How many races there are without each wait of which that is not known; one alone stops at the
    first, several must go on together."""
    met, num_races = train_without(run)
    assert num_races == 0
    to_the_end = world_size > 1
    return {name: train_without(run, name, to_the_end=to_the_end)[1] for name in sorted(met - known)}


def test_a_wait_that_is_forgotten_is_found(run_ranks: RunRanks) -> None:
    """Each wait in the runtime is needed in one of two runs, but for those that others cover."""
    run = Run(one_group(2, 1), EVERYTHING, "layer", torch.bfloat16, 0.1)
    (num_races,) = run_ranks(forget_each, 1, run, set(), timeout=240)
    needed, met = {name for name, number in num_races.items() if number}, {*num_races}
    run = Run(one_group(3, 2), EVERYTHING)
    for num_races in run_ranks(forget_each, 2, run, needed | COVERED.keys(), timeout=240):
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
