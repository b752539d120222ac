"""The order of stream waits, proven on CPU ranks: no race, and the numbers of a resident run.

`stand_in.RaceStreams` takes the place of the device's streams. That it would find a forgotten wait
is shown too: each single wait of the runtime, and each event that it records, is left out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, count, cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
import volume
from memory_races import Clocks
from odd_optimizers import ODD_OPTIMIZERS
from offloaded import state_tensors
from ranks import RunRanks
from stand_in import RaceStreams, StreamRace
from stream_work import Trace, Work, without
from tiny import Case, adamw, module_names, with_groups
from torch import Tensor
from waits import ordering_places, place_of

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Microbatch, Ministage, Plan, Recompute
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.memory.memory import HostPool
from zorselike.runtime.ministage import settings
from zorselike.schedule.actions import Action, Kind

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
_THREAD = "another thread waits, which is not seen; see `test_host_waits.py`"
NOT_NEEDED = {
    "busy.py: BusyClock": "only on CUDA: it measures, nothing comes after it",
    "comm/transport.py: _StagedChannel": "only on CUDA",
    "comm/transport.py: Transport._warm_up": "only on CUDA",
    "comm/transport.py: Transport.take": "the channel waits",
    "executor.py: Executor._settle: self._streams": "what is settled next waits for the update; for readers",
    "loss.py: Loss.finish": "nobody reads the sum where there was no backward",
    "memory/host_backed.py: HostBackedTensors.discard": "its next writer is the stream that wrote it",
    "memory/pinned.py: copy_to_host": _THREAD,
    "memory/pinned.py: unpin_abandoned": "only on CUDA",
    "ministage/gradients.py: Gradients.arrive: self._memory.streams.store.wait": (
        "store waits for compute, and that for the update that has read what arrived"
    ),
    "ministage/norm_sums.py: NormSums.start.reduce": _THREAD,
    "ministage/ties.py: TiedWeights._pass_on": _THREAD,
    "ministage/ties.py: TiedWeights.finish": _THREAD,
    "ministage/sharded_units.py: ShardedUnits.wait_gathered: handle.wait": "only on a CPU rank's own streams",
    "pipeline.py: HeteroPipeline.close": "only on CUDA",
    "result.py: SumOverRanks": "on CUDA another thread waits, on a CPU rank the host reads the sum",
}
"""What can be left out without a race that the detector sees, by the start of its name, and why."""


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
    breaks_at: float | None = None
    """A step precedes the last that breaks off after this share of its actions before the first update."""

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


SCENES: tuple[tuple[int, list[Run]], ...] = (
    (1, [Run(one_group(2, 1), num_steps=1), Run(one_group(2, 1), EVERYTHING, "layer", torch.bfloat16, 0.1)]),
    (1, [Run(one_group(2, 1), EVERYTHING, optimizer="a new tensor each step", num_steps=3, breaks_at=0.5)]),
    (2, [Run(one_group(3, 2), EVERYTHING), Run(two_groups(2), ("params", "activations"), tied=True)]),
)
"""Numbers of ranks and runs, in which everything that orders work is needed."""


@dataclass
class Outcome:
    numbers: list[float]
    """Losses and norms of steps and evaluations."""
    weights: dict[str, Tensor]
    """On rank 0."""
    moments: list[Tensor]
    """This rank's, and its weights as the optimizers have them."""


def break_off(pipe: HeteroPipeline, batch: tuple[Tensor, Tensor], share: float) -> None:
    """Begins a step."""
    executor, numbers = pipe._executor, count()
    last = int(share * [action.kind for action in executor._step_actions].index(Kind.STEP))

    def enter(action: Action) -> None:
        if next(numbers) == last:
            raise ArithmeticError
        entered(action)

    entered, executor.enter = executor.enter, enter
    with suppress(ArithmeticError):
        pipe.step_global(*batch)
    executor.enter = entered


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
            if run.breaks_at is not None and step == case.num_steps - 1:
                break_off(pipe, batch, run.breaks_at)
            results.append(pipe.step_global(*batch))
        if not run.offload:  # Whoever reads the weights after a step need not wait.
            for tensor in state_tensors(pipe):
                tensor.sum()
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


@pytest.mark.nightly
def test_a_step_that_breaks_off(run_ranks: RunRanks) -> None:
    """With copies on their way, before any update; the next is as if it had not begun."""
    runs = [
        Run(one_group(zero, 1), EVERYTHING, max_norm=max_norm, breaks_at=share)
        for share, (zero, max_norm) in product((1.0, 0.97, 0.9, 0.8, 0.5, 0.3, 0.1), ((3, 0.1), (2, None)))
    ]
    assert_no_mistake(run_ranks, 1, runs)


# -- what is forgotten is found --------------------------------------------------------------


def trace_of(run: Run) -> list[Work]:
    """All that a run without races gives its streams."""
    streams, trace = RaceStreams(), Trace()
    streams.judges.append(trace)
    with on(streams):
        train(run)
    assert not streams.races
    return trace.work


def is_found(work: Iterable[Work]) -> bool:
    """Whether there is a race in it."""
    clocks = Clocks(raises=True)
    try:
        for each in work:
            clocks.see(each)
    except StreamRace:
        return True
    return False


def forget_each(rank: int, world_size: int, runs: list[Run], known: frozenset[str]) -> dict[str, bool]:
    """Whether it is found, by the place in the runtime that does not order work; what is known to be found is
    looked at no more."""
    found: dict[str, bool] = {}
    for run in runs:
        trace = trace_of(run)
        for place in {place for work in trace if (place := place_of(work))}:
            if place not in known and not found.get(place):
                found[place] = is_found(without(trace, lambda o, out=place: place_of(o) == out))
    return found


def test_a_wait_that_is_forgotten_is_found(run_ranks: RunRanks) -> None:
    """Everything in the runtime that orders work is needed in one of these runs, but for what is listed; a
    new wait that is not needed here fails this."""
    found: dict[str, bool] = {}
    for num_ranks, runs in SCENES:
        known = frozenset(place for place, is_race in found.items() if is_race)
        for own in run_ranks(forget_each, num_ranks, runs, known, timeout=240):
            found |= {place: is_race or found.get(place, False) for place, is_race in own.items()}
    blind = {place for place in ordering_places().values() if not found.get(place)}
    unneeded = {place for place in blind if place.startswith(tuple(NOT_NEEDED))}
    assert blind == unneeded
    for start in NOT_NEEDED:
        assert any(place.startswith(start) for place in unneeded), f"{start} is needed, or no more there"
