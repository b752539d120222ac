"""The order of stream waits, proven on CPU ranks: no race, and the numbers of a resident run.

`stand_in.RaceStreams` takes the place of the device's streams. That it would find a forgotten wait
is shown too: each single wait of the runtime, and each event that it records, is left out once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, count, cycle, product
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import volume
from cases import make_case, with_offload
from memory_races import Clocks
from odd_optimizers import ODD_OPTIMIZERS
from offloaded import state_tensors
from ranks import RunRanks
from replica_cases import ReplicaCase, make_replica_case
from sanitizer import sanitize
from stand_in import RaceStreams, StreamRace
from stream_work import Allocate, Buffer, Free, Trace, Work, without
from tiny import Case, adamw, module_names, train_single, with_groups
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from waits import ordering_places, place_of
from watched import on

from zorselike import HeteroPipeline
from zorselike.cost import MinistageBytes, Purpose, walk_memory
from zorselike.elastic.replicas import Replicas
from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Group, Microbatch, Ministage, Plan, Recompute
from zorselike.runtime.ministage.updates import Clip
from zorselike.schedule import ScheduleSpec, build
from zorselike.schedule.actions import Action, Kind

pytestmark = pytest.mark.pooled

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:4], NAMES[4:])
SUBSETS = tuple(chain.from_iterable(combinations(OFFLOAD_KINDS, n) for n in range(len(OFFLOAD_KINDS) + 1)))
EVERYTHING = SUBSETS[-1]
NUM_RANDOM = 200
NUM_RANDOM_REPLICAS = 40
REPLACING = "a new tensor each step"
SETTINGS: tuple[tuple[Recompute, torch.dtype | None, float | None], ...] = (
    ("none", None, None),
    ("layer", torch.bfloat16, 0.1),
    ("none", torch.float16, None),
)
"""Recomputation, dtype to compute in, norm to clip to."""
_THREAD = "another thread waits, which is not seen; see `test_host_waits.py`"
NOT_NEEDED = {
    "ministage/busy.py: ": "only on CUDA: it measures, nothing comes after it",
    "checkpoints.py: ": "the thread that saves says when it is done",
    "comm/transport.py: _StagedChannel": "only on CUDA",
    "comm/transport.py: Transport._warm_up": "only on CUDA",
    "comm/transport.py: Transport.take": "the channel waits",
    "loss.py: Loss.finish": "nobody reads the sum where there was no backward",
    "memory/host_backed.py: HostBackedTensors.discard": "its next writer is the stream that wrote it",
    "memory/pinned.py: copy_to_host": _THREAD,
    "memory/pinned.py: unpin_abandoned": "only on CUDA",
    "ministage/gradients.py: Gradients.arrive: self._memory.streams.store.wait": (
        "store waits for compute, and that for the update that has read what arrived"
    ),
    "ministage/norm_sums.py: NormSums.start.reduce": _THREAD,
    "ministage/ties.py: TiedWeights._pass_on": _THREAD,
    "ministage/ties.py: TiedWeights._finish_earlier": _THREAD,
    "ministage/sharded_units.py: ShardedUnits.wait_gathered: handle.wait": "only on a CPU rank's own streams",
    "comm/connections.py: Connections._keep": "sockets alone: it looks again and again for new ones",
    "leaving.py: leave_alone": "only on CUDA",
    "leaving.py: leave_together": "only on CUDA",
    "state/exchange.py: exchange": "for other ranks: what travels is in host memory",
    "state/save.py: ": "the thread that saves says when it is done",
    "state/snapshot.py: Snapshot.read": _THREAD,
    "state/snapshot.py: Snapshot.take": _THREAD,
    "state/snapshot.py: _await: taken.wait": _THREAD,
    "result.py: SumOverRanks": "on CUDA another thread waits, on a CPU rank the host reads the sum",
}
"""What can be left out without a race that the detector sees, by the start of its name, and why."""


@dataclass(frozen=True)
class Run:
    """A training run under one setting of everything that touches streams."""

    case: Case
    param_dtype: torch.dtype | None = None
    clip: Clip = "global"
    optimizer: str = ""
    """Of the odd ones; else AdamW."""
    breaks_at: float | None = None
    """A step precedes the last that breaks off after this share of its actions before the first update."""
    saves: bool = False
    """A save begins before the last step, and is written beside it."""
    mirrors: bool = False
    """After each step its state is copied and mirrored, beside the next."""

    @property
    def resident(self) -> Run:
        """The same without offload."""
        case = replace(self.case, plan=with_groups(self.case.plan, lambda group: replace(group, offload=())))
        return replace(self, case=case)

    @property
    def is_plain(self) -> bool:
        """Whether a single process in plain torch does the same."""
        return self.param_dtype is None and self.clip == "global" and not self.optimizer


def make_run(
    plan: Plan,
    offload: tuple[str, ...] = (),
    recompute: Recompute = "none",
    param_dtype: torch.dtype | None = None,
    max_norm: float | None = None,
    *,
    tied: bool = False,
    optimizer: str = "",
    num_steps: int = 2,
    breaks_at: float | None = None,
    saves: bool = False,
    mirrors: bool = False,
    counts: bool = False,
    frozen: tuple[str, ...] = (),
) -> Run:
    """All groups offload and recompute alike; an evaluation precedes the second step."""
    plan = with_groups(plan, lambda group: replace(group, offload=offload, recompute=recompute))
    kind = ReplicaCase if plan.has_replicas else Case
    case = kind(
        plan,
        NUM_LAYERS,
        tied=tied,
        max_norm=max_norm,
        evaluate_before=(1,),
        frozen=frozen,
        num_steps=num_steps,
        counts=counts,
    )
    return Run(case, param_dtype, optimizer=optimizer, breaks_at=breaks_at, saves=saves, mirrors=mirrors)


def draw_run(seed: int) -> Run:
    """A random plan of at most three ranks, and random settings of all the rest."""
    rng = random.Random(seed)
    case = with_offload(make_case(seed, max_ranks=rng.choice((2, 2, 3)), max_ministages=4), rng)
    # ZeRO 3 with unequal microbatches refuses one ministage that holds both ends.
    may_tie = case.plan.num_ministages > 1 or case.plan.groups[0].zero < 3
    return Run(
        replace(case, num_steps=2, tied=case.tied and may_tie),
        rng.choice((None, None, None, torch.bfloat16, torch.float16)),
        "ministage" if case.max_norm is not None and rng.random() < 0.3 else "global",
        rng.choice(tuple(ODD_OPTIMIZERS)) if rng.random() < 0.1 else "",
        rng.random() if case.plan.num_ranks == 1 and rng.random() < 0.3 else None,
    )


def draw_replica_run(seed: int) -> Run:
    """A random plan with tensor-parallel replicas, of at most three ranks."""
    rng = random.Random(seed)
    case = replace(make_replica_case(seed, max_ranks=3), num_steps=2)
    return Run(case, rng.choice((None, None, torch.bfloat16)))


def with_replicas(*ranks: int | tuple[int, ...], zero: int) -> Plan:
    """One group, two microbatches of its first replica and one of its last."""
    first, last = (entry if isinstance(entry, int) else entry[0] for entry in (ranks[0], ranks[-1]))
    microbatches = (Microbatch(first, 0, 1), Microbatch(last, 1, 3), Microbatch(first, 3, 4))
    group = Group(ranks, microbatches, zero=zero)
    return Plan(4, (group,), tuple(Ministage(0, tuple(cut)) for cut in CUTS), sequence_length=7)


def one_group(zero: int, num_ranks: int, grad_reduce: GradReduce = "once", *, overlap: bool = True) -> Plan:
    """Three microbatches; on two ranks two and one."""
    rows = ((0, 1), (1, 3), (3, 4))
    microbatches = tuple(Microbatch(i % num_ranks, *rows[i]) for i in range(len(rows)))
    group = Group(
        tuple(range(num_ranks)),
        microbatches,
        zero=zero,
        grad_reduce=grad_reduce,
        overlap_grad_reduce=overlap,
    )
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
    moments: list[Tensor] | None
    """This rank's, and its weights as the optimizers have them, where a pipeline ran."""


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
    case, save, replicas = run.case, None, None
    with (
        TemporaryDirectory() as folder,
        HeteroPipeline(
            case.model(),
            case.plan,
            optimizer=ODD_OPTIMIZERS[run.optimizer] if run.optimizer else adamw,
            param_dtype=run.param_dtype,
            max_norm=case.max_norm,
            clip=run.clip,
            seed=case.seed,
        ) as pipe,
    ):
        results = []
        if run.mirrors:
            replicas = Replicas(pipe, 1, ["node"] * case.plan.num_ranks, share=1.0, interval=1)
        for step in range(case.num_steps):
            batch = case.batch(step)
            if step in case.evaluate_before:
                results.append(pipe.evaluate_global(*batch))
            if run.saves and step == case.num_steps - 1:
                save = pipe.save(folder, wait=False)
            if run.breaks_at is not None and step == case.num_steps - 1:
                break_off(pipe, batch, run.breaks_at)
            results.append(pipe.step_global(*batch))
            if replicas is not None:
                replicas.take({})
        if not any(
            group.offload for group in case.plan.groups
        ):  # Whoever reads the weights after a step need not wait.
            for tensor in state_tensors(pipe):
                tensor.sum()
        assert save is None or save.wait()
        if replicas is not None:
            assert len(replicas.held) == min(2, case.plan.num_ranks)
            replicas.close()
            replicas.forget()
        numbers = [number for result in results for number in (result.loss, result.grad_norm)]
        with pipe.loaded():
            moments = [tensor.clone() for tensor in state_tensors(pipe)]
        return Outcome(numbers, pipe.full_state_dict(), moments)


def train_alone(run: Run) -> Outcome:
    """A plain run in a single process."""
    single = train_single(run.case)
    evaluations, numbers = iter(single.evaluations), []
    for step in range(run.case.num_steps):
        if step in run.case.evaluate_before:
            numbers += [next(evaluations), 0.0]
        numbers += [single.losses[step], single.norms[step]]
    return Outcome(numbers, single.state, None)


def find_mistakes(run: Run, expected: Outcome) -> list[str]:
    """The races of a run, and where its numbers are not those of a resident one, or of a single process."""
    streams = RaceStreams()
    with on(streams):
        found = train(run)
    mistakes = [str(race) for race in streams.races]
    is_exact = bool(expected.moments)
    if is_exact:
        is_same = repr(found.numbers) == repr(
            expected.numbers
        )  # Of gradients that overflow the norm is none.
    else:
        is_same = found.numbers == pytest.approx(expected.numbers, rel=1e-12, abs=1e-12)
    if not is_same:
        mistakes.append(f"losses and norms {found.numbers} are not {expected.numbers}")
    assert found.weights.keys() in ({*()}, expected.weights.keys())
    for name, weight in found.weights.items():
        error = (weight - expected.weights[name]).abs().max()
        if not error <= (0 if is_exact else 1e-10 * expected.weights[name].abs().max()):
            mistakes.append(f"weight {name} differs by {error:.1e}")
    if found.moments and expected.moments is not None:
        assert len(found.moments) == len(expected.moments)
        if not all(map(torch.equal, found.moments, expected.moments)):
            mistakes.append("the optimizers' states differ")
    return [f"{run}: {mistake}" for mistake in mistakes]


def find_all_mistakes(rank: int, world_size: int, runs: list[Run], alone: bool) -> list[str]:
    """Of all runs; each is compared with the same run without offload on a CPU rank's own streams, or, if
    `alone`, with a single process where that does the same."""
    resident: dict[Run, Outcome] = {}
    mistakes = []
    for run in runs:
        if alone and run.is_plain:
            mistakes += find_mistakes(run, train_alone(run))
            continue
        if run.resident not in resident:
            resident[run.resident] = train(run.resident)
        mistakes += find_mistakes(run, resident[run.resident])
    return mistakes


def assert_no_mistake(run_ranks: RunRanks, num_ranks: int, runs: list[Run], *, alone: bool = False) -> None:
    mistakes = [m for own in run_ranks(find_all_mistakes, num_ranks, runs, alone, timeout=900) for m in own]
    assert not mistakes, "\n".join(mistakes[:5])


def every_subset() -> Iterator[Run]:
    for zero, (number, offload) in product(range(4), enumerate(SUBSETS)):
        yield make_run(one_group(zero, 1), offload, *SETTINGS[(number + zero) % len(SETTINGS)])


def on_two_ranks() -> Iterator[Run]:
    """Their collectives are on streams too; one rank has shown what each kind of offload does alone."""
    some = (("optimizer", "activations"), (), ("params",), ())
    for zero in range(4):
        for number, offload in enumerate((EVERYTHING, EVERYTHING, some[zero]), zero):
            yield make_run(one_group(zero, 2), offload, *SETTINGS[number % 2])
    for setting in SETTINGS[:2]:
        yield make_run(one_group(2, 2, "microbatch"), EVERYTHING, *setting)
    for zero in range(3):
        yield make_run(one_group(zero, 2, overlap=False), (EVERYTHING, ())[zero % 2], *SETTINGS[zero % 2])
    yield make_run(one_group(2, 2, "microbatch", overlap=False), EVERYTHING, *SETTINGS[1])


def all_offloaded() -> Iterator[Run]:
    """With recomputation, in bf16, clipped, and each way of combining those; under ZeRO 2 and 3 any two."""
    for number, setting in enumerate(product(("none", "layer"), (None, torch.bfloat16), (None, 0.1))):
        yield make_run(one_group(2 + number.bit_count() % 2, 1), EVERYTHING, *setting)


def over_two_groups() -> Iterator[Run]:
    for zero, setting in zip((2, 3), SETTINGS, strict=False):
        for tied in (False, True):
            yield make_run(two_groups(zero), EVERYTHING, *setting, tied=tied)


def of_a_single_ministage(num_ranks: int) -> Iterator[Run]:
    """Whose microbatches go forward and at once backward."""
    plans = [one_group(zero, num_ranks) for zero in range(4)] + [one_group(2, num_ranks, "microbatch")]
    whole = (Ministage(0, tuple(name for cut in CUTS for name in cut)),)
    for number, plan in enumerate([*plans, *plans[::-1]]):
        yield make_run(replace(plan, ministages=whole), EVERYTHING, *SETTINGS[number % len(SETTINGS)])


def with_odd_optimizers(num_ranks: int) -> Iterator[Run]:
    """Whose state comes, goes and is replaced; updates run beside backwards, or after them all."""
    names = ODD_OPTIMIZERS if num_ranks == 1 else (REPLACING, REPLACING)
    for max_norm, name in zip(cycle((None, 0.1)), names, strict=False):
        offload = ("params", "optimizer") if num_ranks == 1 else EVERYTHING
        plan = one_group(1 + num_ranks, num_ranks)
        yield make_run(plan, offload, max_norm=max_norm, optimizer=name, num_steps=3)


def that_break_off() -> Iterator[Run]:
    """A step with copies on their way, before any update; the next is as if it had not begun."""
    for share, (zero, max_norm) in product((1.0, 0.97, 0.9, 0.8, 0.5, 0.3, 0.1), ((3, 0.1), (2, None))):
        yield make_run(one_group(zero, 1), EVERYTHING, max_norm=max_norm, breaks_at=share)


def that_save(num_ranks: int) -> Iterator[Run]:
    """What is on the device is copied beside the next step, and its updates wait for that."""
    plans = [one_group(zero, num_ranks) for zero in range(4)]
    for plan, offload in zip(plans, ((), ("params",), ("optimizer",), EVERYTHING), strict=True):
        param_dtype = torch.bfloat16 if offload else None
        yield make_run(
            plan, offload, param_dtype=param_dtype, saves=True, counts=bool(plan.groups[0].zero % 2)
        )
    yield make_run(one_group(2, num_ranks), optimizer=REPLACING, num_steps=3, saves=True)


def that_mirror(num_ranks: int) -> Iterator[Run]:
    """What trains after each step, what is frozen once."""
    frozen = ("tok_embeddings", "layers.0.up")
    for zero, offload in enumerate(((), EVERYTHING, ("params",), ())):
        plan = one_group(zero, num_ranks)
        yield make_run(plan, offload, frozen=frozen, counts=True, num_steps=3, mirrors=True)


def over_replicas(*ranks: int | tuple[int, ...]) -> Iterator[Run]:
    """Whose pieces are FSDP2's too, each over its holders, and some of a rank alone."""
    for zero in range(4):
        plan = with_replicas(*ranks, zero=zero)
        yield make_run(plan, EVERYTHING if zero % 2 else ("params",), *SETTINGS[zero % 2])
        yield make_run(plan, saves=True)


RUNS = {
    1: [
        *every_subset(),
        *all_offloaded(),
        *of_a_single_ministage(1),
        *with_odd_optimizers(1),
        *that_break_off(),
        *that_save(1),
        *that_mirror(1),
    ],
    2: [
        *on_two_ranks(),
        *over_two_groups(),
        *of_a_single_ministage(2),
        *with_odd_optimizers(2),
        *that_save(2),
        *that_mirror(2),
        *over_replicas((0, 1)),
    ],
    3: [*over_replicas((0, 1), 2)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", RUNS)
def test_no_race_and_the_numbers_of_a_resident_run(num_ranks: int, run_ranks: RunRanks) -> None:
    assert_no_mistake(run_ranks, num_ranks, volume.part(RUNS[num_ranks], share=40))


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_plans(num_ranks: int, run_ranks: RunRanks) -> None:
    """Equal to a single process, or where precision or optimizer are odd to the same run without offload."""
    drawn = map(draw_run, volume.part(range(NUM_RANDOM), share=20))
    runs = [run for run in drawn if run.case.plan.num_ranks == num_ranks]
    assert_no_mistake(run_ranks, num_ranks, runs, alone=True)


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_plans_with_replicas(num_ranks: int, run_ranks: RunRanks) -> None:
    """Equal to the same run without offload, or to a single process."""
    drawn = map(draw_replica_run, range(NUM_RANDOM_REPLICAS))
    runs = [run for run in drawn if run.case.plan.num_ranks == num_ranks]
    assert_no_mistake(run_ranks, num_ranks, volume.part(runs, share=40), alone=True)


def watch_reductions(
    rank: int, world_size: int, zero: int, overlap: bool, max_norm: float | None = None
) -> dict[str, bool]:
    """Of each backward of a step, and of its end: whether compute has waited for the last reduction. Clipped
    are ministages, if any."""
    plan = one_group(zero, world_size, overlap=overlap)
    case, streams, waits = make_run(plan).case, RaceStreams(), {}
    num_steps = [0]

    def note(text: str) -> None:
        known = streams.clocks.num_before(streams.compute.number, streams.reduce.number)
        waits[text] = known >= num_steps[0] > 0

    def enter(action: Action) -> None:
        if action.kind is Kind.B:
            note(action.text)

    def leave(action: Action) -> None:
        if action.kind is Kind.REDUCE_GRAD:
            num_steps[0] = streams.clocks.num_before(streams.reduce.number, streams.reduce.number)

    clips: dict[str, Any] = {"max_norm": max_norm, "clip": "ministage"} if max_norm else {}
    with on(streams), HeteroPipeline(case.model(), case.plan, optimizer=adamw, **clips) as pipe:
        with pipe.watching(enter, leave):
            pipe.step_global(*case.batch(0))
        note("end")
    return waits


@pytest.mark.parametrize("zero", [0, 2])
def test_the_next_backward_does_not_wait_for_a_reduction(zero: int, run_ranks: RunRanks) -> None:
    for max_norm in (None, 0.1):
        for waits in run_ranks(watch_reductions, 2, zero, True, max_norm):
            assert len(waits) > 4
            assert [text for text, is_waited in waits.items() if is_waited] == ["end"]
    (alone,) = run_ranks(watch_reductions, 1, zero, True)
    assert not any(alone.values()), "with nobody to reduce with it has no stream of its own"
    for waits in run_ranks(watch_reductions, 2, zero, False):
        assert not any(waits.values()), "where the plan says so either"


def count_whole_gradients(rank: int, world_size: int, run: Run) -> list[tuple[str, int]]:
    """Of each action of a step that computes or reduces: how many ministages' whole gradients the rank holds
    after it."""
    case, streams = run.case, RaceStreams()
    held: dict[int, list[StorageWeakRef]] = {}
    counts: list[tuple[str, int]] = []
    with on(streams), HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe:
        ministages = pipe._assembly.ministages

        def leave(action: Action) -> None:
            i = action.ministage
            if i is None or action.kind not in (Kind.F, Kind.B, Kind.REDUCE_GRAD):
                return
            if action.kind is Kind.B:
                whole = ministages[i]._units.unreduced()
                held[i] = [StorageWeakRef(gradient.untyped_storage()) for gradient in whole]
            there = [any(not storage.expired() for storage in own) for own in held.values()]
            counts.append((action.text, sum(there)))

        with pipe.watching(lambda action: None, leave):
            pipe.step_global(*case.batch(0))
    return counts


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_whole_gradients_are_there_as_long_as_the_memory_model_says(zero: int, run_ranks: RunRanks) -> None:
    """Until the next reduction where reductions run beside backwards, else until their own."""
    for overlap, most, after in ((True, 2, 1), (False, 1, 0)):
        run = make_run(one_group(zero, 2, overlap=overlap))
        for counts in run_ranks(count_whole_gradients, 2, run):
            assert max(number for _, number in counts) == most
            reductions = {number for text, number in counts if "REDUCE" in text}
            assert reductions == {after}
        sizes = MinistageBytes(
            gathered_bytes=0,
            shard_bytes=0,
            gradient_bytes=8,
            gradient_shard_bytes=0,
            state_bytes=0,
            largest_unit_gradient_bytes=8,
        )
        plan = run.case.plan
        lists = build(ScheduleSpec(plan))
        walk = walk_memory(plan, 0, lists[0], dict.fromkeys(range(len(CUTS)), sizes), on_gpu=True)
        assert walk.device[Purpose.GRADIENTS] == most * sizes.gradient_bytes


# -- pools of streams ------------------------------------------------------------------------


def find_pools(_rank: int, _world_size: int, run: Run) -> dict[str, int]:
    """The most bytes of each stream's pool in use at once, which it keeps."""
    in_use, most = Counter[str](), Counter[str]()
    pool_of: dict[Buffer, str] = {}
    for work in trace_of(run):
        match work:
            case Allocate(step, buffer):
                pool = pool_of[buffer] = step.stream_name
                in_use[pool] += buffer.num_bytes
                most[pool] = max(most[pool], in_use[pool])
            case Free(buffer, _) if buffer in pool_of:
                in_use[pool_of.pop(buffer)] -= buffer.num_bytes
    return most


def test_state_that_goes_to_the_host_is_made_in_the_pool_to_which_it_returns(run_ranks: RunRanks) -> None:
    first = make_run(one_group(2, 1), ("optimizer",), num_steps=1)
    (pools,) = run_ranks(find_pools, 1, first)
    assert pools["load_state"] > 0 and not pools["update"]
    (later,) = run_ranks(find_pools, 1, replace(first, case=replace(first.case, num_steps=2)))
    assert later["load_state"] == pools["load_state"]


# -- what is forgotten is found --------------------------------------------------------------


def with_an_idle_rank() -> Plan:
    """Rank 1 has no rows: it gathers in its reduction, beside which what follows computes."""
    both = Group((0, 1), (Microbatch(0, 0, 2), Microbatch(0, 2, 4)), zero=0)
    alone = Group((2,), (Microbatch(2, 0, 1), Microbatch(2, 1, 4)), zero=2)
    return replace(two_groups(2), groups=(both, alone))


SCENES: tuple[tuple[int, list[Run]], ...] = (
    (
        1,
        [
            make_run(one_group(2, 1), num_steps=1),
            make_run(one_group(2, 1), saves=True, counts=True),
            make_run(one_group(2, 1), ("optimizer",), max_norm=0.1, optimizer="no state"),
            make_run(one_group(2, 1), EVERYTHING, "layer", torch.bfloat16, 0.1),
            make_run(one_group(2, 1), EVERYTHING, optimizer=REPLACING, num_steps=3, breaks_at=0.3),
        ],
    ),
    (
        2,
        [
            make_run(one_group(3, 2), EVERYTHING),
            make_run(two_groups(2), ("params", "activations"), tied=True),
            make_run(one_group(2, 2), param_dtype=torch.bfloat16, max_norm=0.1),
        ],
    ),
    (3, [make_run(with_an_idle_rank(), ("params",), max_norm=0.1)]),
)
"""Numbers of ranks and runs, in which everything that orders work is needed."""


def trace_of(run: Run) -> list[Work]:
    """All that a run gives its streams."""
    streams, trace = RaceStreams(), Trace()
    streams.judges.append(trace)
    with on(streams):
        train(run)
    return trace.work


def is_found(work: Sequence[Work], *, by_both: bool) -> bool:
    """Whether there is a race in it; `by_both`: torch's own sanitizer says the same."""
    clocks = Clocks(raises=True)
    with suppress(StreamRace):
        for each in work:
            clocks.see(each)
    if by_both:
        found = sanitize(work)
        assert bool(found) == bool(clocks.races), f"the sanitizer found {found}, clocks {clocks.races}"
    return bool(clocks.races)


def forget_each(rank: int, world_size: int, runs: list[Run], known: frozenset[str]) -> dict[str, bool]:
    """Whether it is found, by the place in the runtime that does not order work; what is known to be found is
    looked at no more."""
    found: dict[str, bool] = {}
    for run in runs:
        trace = trace_of(run)
        assert not is_found(trace, by_both=True)
        for place in {place for work in trace if (place := place_of(work))}:
            if place not in known and not found.get(place):
                work = list(without(trace, lambda order, out=place: place_of(order) == out))
                found[place] = is_found(work, by_both=world_size == 1)
    return found


def test_a_wait_that_is_forgotten_is_found(run_ranks: RunRanks) -> None:
    """Everything in the runtime that orders work is needed in one of these runs, but for what is listed; a
    new wait that is not needed here fails this."""
    places = ordering_places().values()  # Read once, before ranks are forked.
    found: dict[str, bool] = {}
    for num_ranks, runs in SCENES:
        known = frozenset(place for place, is_race in found.items() if is_race)
        for own in run_ranks(forget_each, num_ranks, runs, known, timeout=240):
            found |= {place: is_race or found.get(place, False) for place, is_race in own.items()}
    blind = {place for place in places if not found.get(place)}
    unneeded = {place for place in blind if place.startswith(tuple(NOT_NEEDED))}
    assert blind == unneeded
    for start in NOT_NEEDED:
        assert any(place.startswith(start) for place in unneeded), f"{start} is needed, or no more there"
