"""Replicas of any degrees inside one group train as a single process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
import volume
from ranks import RunRanks
from replica_cases import ReplicaCase, make_replica_case
from tiny import adamw, assert_same, module_names, train_all_planned, train_all_single

from zorselike import HeteroPipeline
from zorselike.cost.purposes import Purpose
from zorselike.cost.sizes import MinistageBytes
from zorselike.errors import ConfigError
from zorselike.plan.pieces import count_communicators
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.assembly import compile_plan
from zorselike.runtime.host_checks import measure_parts
from zorselike.runtime.memory_report import MemoryLine
from zorselike.runtime.meshes import Meshes
from zorselike.runtime.ministage.updates import _refuse_for_pieces

pytestmark = pytest.mark.pooled

NUM_LAYERS = 2
NAMES = tuple(module_names(NUM_LAYERS))


def one_group(ranks: tuple[Any, ...], zero: int, **options: Any) -> Plan:
    """Two microbatches of the first replica and one of the last, in a sequence that no degree divides."""
    first, last = ((entry if isinstance(entry, int) else entry[0]) for entry in (ranks[0], ranks[-1]))
    microbatches = (Microbatch(first, 0, 2), Microbatch(last, 3, 5), Microbatch(first, 2, 3))
    group = Group(ranks, microbatches, zero=zero, **options)
    return Plan(5, (group,), (Ministage(0, NAMES),), sequence_length=7)


CASES = [make_replica_case(seed) for seed in range(60)]
CASES += [
    ReplicaCase(
        one_group(((6, 1, 4, 3), (0, 5), 2), zero, recompute=recompute), NUM_LAYERS, max_norm=0.5, num_steps=5
    )
    for zero in (0, 1, 2, 3)
    for recompute in ("none", "layer")[zero % 2 :][:1]
]


def test_the_cases_cover_what_they_should() -> None:
    groups = [group for case in CASES for group in case.plan.groups]
    unequal = [g for g in groups if len({replica.degree for replica in g.replicas}) > 1]
    assert {group.zero for group in unequal} == {0, 1, 2, 3}
    assert {kind for group in unequal for kind in group.offload} == {"params", "optimizer", "activations"}
    assert {group.recompute for group in unequal} == {"none", "layer"}
    assert {group.degree for group in unequal} >= {2, 3, 4}
    assert {(group.zero, group.grad_reduce) for group in unequal} >= {(2, "microbatch"), (3, "once")}
    assert sum(case.max_norm is not None for case in CASES) >= 20
    assert sum(bool(case.evaluate_before) for case in CASES) >= 20
    assert max(case.plan.num_ranks for case in CASES) == 8
    assert len(CASES) >= 60 and {case.num_steps for case in CASES} == {5}
    joined = [case for case in CASES if len({group.degree for group in case.plan.groups}) > 1]
    assert len(joined) >= 10
    assert sum(case.tied for case in joined) >= 3
    assert sum(bool(case.frozen) for case in joined) >= 3


@pytest.mark.nightly
def test_training_equals_a_single_process(run_ranks: RunRanks) -> None:
    cases = volume.part(CASES, share=60)  # Up to eight ranks each.
    if not volume.is_full():
        cases = [replace(case, num_steps=3) for case in cases]
    (expected,) = run_ranks(train_all_single, 1, cases, timeout=300)
    for num_ranks in sorted({case.plan.num_ranks for case in cases}):
        own = [case for case in cases if case.plan.num_ranks == num_ranks]
        found = run_ranks(train_all_planned, num_ranks, own, timeout=300)
        for number, case in enumerate(own):
            assert_same(found[0][number], expected[cases.index(case)], case)
            for other in found[1:]:
                assert other[number].losses == found[0][number].losses


def test_the_same_plan_twice_is_bit_equal(run_ranks: RunRanks) -> None:
    case = ReplicaCase(one_group(((2, 0), 1), 2), NUM_LAYERS, max_norm=0.5)
    first, second = (run_ranks(train_all_planned, 3, [case])[0][0] for _ in range(2))
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert all(torch.equal(tensor, second.state[name]) for name, tensor in first.state.items())


NORMS = ("layers.1.attention_norm", "layers.1.ffn_norm")


@pytest.mark.parametrize("more", [(), NORMS], ids=["a layer", "and what the next has whole"])
def test_frozen_first_layers_and_unequal_counts(more: tuple[str, ...], run_ranks: RunRanks) -> None:
    """A rank without a microbatch reduces pieces in the order of those that have one."""
    plan = one_group(((0, 1), 2), 3)
    frozen = ("tok_embeddings", "layers.0.", *more)
    case = ReplicaCase(plan, NUM_LAYERS, frozen=frozen, num_steps=2)
    (expected,) = run_ranks(train_all_single, 1, [case])
    found = run_ranks(train_all_planned, 3, [case], timeout=60)
    assert_same(found[0][0], expected[0], case)


def measure(rank: int, world_size: int, plan: Plan) -> tuple[MinistageBytes, MinistageBytes]:
    """As foretold, and as it is."""
    model = ReplicaCase(plan, NUM_LAYERS).model()
    (foretold,) = measure_parts(compile_plan(model, plan), rank, None).values()
    with HeteroPipeline(model, plan, optimizer=adamw) as pipe:
        (ministage,) = pipe.assembly.ministages.values()
        return foretold, ministage.sizes


@pytest.mark.parametrize("zero", [0, 2])
def test_sizes_are_foretold_by_pieces(zero: int, run_ranks: RunRanks) -> None:
    sizes = run_ranks(measure, 7, one_group(((6, 1, 4, 3), (0, 5), 2), zero))
    for foretold, found in sizes:
        assert foretold.gathered_bytes == found.gathered_bytes
        assert foretold.gradient_bytes == found.gradient_bytes
        # Rows of a piece are dealt whole.
        assert foretold.shard_bytes == pytest.approx(found.shard_bytes, rel=0 if zero == 0 else 0.3)
    whole = [foretold.gathered_bytes for foretold, _ in sizes]
    assert whole[2] > whole[0] > max(whole[rank] for rank in (6, 1, 4, 3))


Half = tuple[ReplicaCase, torch.dtype]


def report_after_a_step(rank: int, world_size: int, case: ReplicaCase) -> MemoryLine:
    with HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe:
        pipe.step_global(*case.batch(0))
        return next(line for line in pipe.memory_report().lines if line.purpose == Purpose.ACTIVATIONS)


def test_a_rank_keeps_its_own_positions_of_what_enters_layers(run_ranks: RunRanks) -> None:
    group = Group(
        ((0, 1),), (Microbatch(0, 0, 1), Microbatch(0, 1, 3)), 1, recompute="layer", offload=("activations",)
    )
    cuts = (NAMES[:1], ("layers.0",), ("layers.1",), NAMES[-2:])
    ministages = tuple(Ministage(0, names) for names in cuts)
    case = ReplicaCase(Plan(3, (group,), ministages, sequence_length=8), NUM_LAYERS)
    for line in run_ranks(report_after_a_step, 2, case):
        # Of 3 rows 4 positions of 24 numbers enter each of 2 layers; tokens of both microbatches are of all.
        hidden, tokens = 3 * 2 * 4 * 24 * 8, 3 * 8 * 8
        assert line.host_peak is not None
        assert hidden < line.host_peak <= hidden + 2 * tokens


def train_halves(rank: int, world_size: int, halves: Sequence[Half]) -> dict[Half, tuple[list[float], Any]]:
    found = {}
    for case, dtype in halves:
        model = case.model().float()
        with HeteroPipeline(model, case.plan, optimizer=adamw, max_norm=0.5, param_dtype=dtype) as pipe:
            losses = [pipe.step_global(*case.batch(0)).loss for _ in range(case.num_steps)]
            found[case, dtype] = losses, pipe.full_state_dict()
    return found


DTYPES, STAGES = (torch.bfloat16, torch.float16), (0, 2)
ALONE = ReplicaCase(one_group((0,), 2), NUM_LAYERS)
JOINED = {zero: ReplicaCase(one_group(((0, 1), 2), zero), NUM_LAYERS) for zero in STAGES}


@pytest.fixture(scope="module")
def trained_halves() -> dict[Half, tuple[list[float], Any]]:
    """All that are compared, trained by the same ranks."""
    (alone,) = ranks.run_ranks(train_halves, 1, list(product([ALONE], DTYPES)))
    return alone | ranks.run_ranks(train_halves, 3, list(product(JOINED.values(), DTYPES)))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", STAGES)
def test_master_weights_follow_those_of_one_rank(
    dtype: torch.dtype, zero: int, trained_halves: dict[Half, tuple[list[float], Any]]
) -> None:
    """As nearly as layers compute: each step moves a weight by the learning rate at most."""
    case = JOINED[zero]
    expected, found = trained_halves[ALONE, dtype], trained_halves[case, dtype]
    assert found[0] == pytest.approx(expected[0], rel=5e-3)
    assert found[0][-1] < found[0][0]
    for name, values in expected[1].items():
        assert values.dtype == torch.float32
        difference = (found[1][name] - values).abs()
        assert difference.mean() <= 0.1 * 1e-2 * case.num_steps, name
        assert difference.max() > 0 or not values.abs().sum()  # In another order than there.


def count_collectives(rank: int, world_size: int, plan: Plan) -> Counter[str]:
    """Of one step, by kind and by whether they stay inside this rank's replica."""
    counter: Counter[str] = Counter()
    inside = sorted(plan.replica_of(rank).ranks)

    def count(patch: pytest.MonkeyPatch, name: str, kind: str) -> None:
        original = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            ranks = dist.get_process_group_ranks(kwargs.get("group") or args[2])
            counter[kind, len(inside) > 1 and ranks == inside] += 1
            return original(*args, **kwargs)

        patch.setattr(dist, name, counted)

    has_single = hasattr(dist, "all_gather_single")  # torch 2.13 renamed what FSDP2 calls.
    case = ReplicaCase(plan, NUM_LAYERS)
    with (
        pytest.MonkeyPatch.context() as patch,
        HeteroPipeline(case.model(), plan, optimizer=adamw) as pipe,
    ):
        count(patch, "all_gather_single" if has_single else "all_gather_into_tensor", "gather")
        count(patch, "reduce_scatter_single" if has_single else "reduce_scatter_tensor", "sum")
        pipe.step_global(*case.batch(0))
        counter.clear()
        pipe.step_global(*case.batch(1))
    return counter


def test_collectives_of_a_step(run_ranks: RunRanks) -> None:
    """Two all-gathers and two reduce-scatters a layer and microbatch each way inside a replica, none on a
    single rank; and one of each a unit, a piece being one, among those who hold it."""
    plan = one_group(((0, 1), 2), 2)
    both = {("gather", False): len(NAMES) + NUM_LAYERS, ("sum", False): len(NAMES) + NUM_LAYERS}
    inside = 2 * NUM_LAYERS * 2 * 2
    *joined, alone = run_ranks(count_collectives, 3, plan)
    assert [*map(dict, joined)] == 2 * [both | {("gather", True): inside, ("sum", True): inside}]
    assert dict(alone) == dict.fromkeys(both, len(NAMES) + 2 * NUM_LAYERS)


def test_single_ranks_beside_a_group_of_replicas_do_what_they_did(run_ranks: RunRanks) -> None:
    """Nothing is cut there, and no collective is added."""
    counts = []
    for first in ((0,), ((0, 1),)):
        size = len(Group(first, ()).flat_ranks)
        lower = Group(first, (Microbatch(0, 0, 2), Microbatch(0, 2, 4)))
        upper = Group((size, size + 1), (Microbatch(size, 0, 3), Microbatch(size + 1, 3, 4)), zero=3)
        ministages = (Ministage(0, NAMES[:2]), Ministage(1, NAMES[2:]))
        plan = Plan(4, (lower, upper), ministages, sequence_length=7)
        counts.append(run_ranks(count_collectives, plan.num_ranks, plan)[-2:])
    assert counts[0] == counts[1] and min(map(sum, map(Counter.values, counts[0]))) > 0


def count_groups(rank: int, world_size: int, plan: Plan) -> int:
    """Communicators of several ranks over which this one exchanges parameters, sums and positions."""
    made = []
    make = Meshes._make

    def note(meshes: Meshes, members: Any) -> Any:
        made.extend([members] if rank in members and len(members) > 1 else [])
        return make(meshes, members)

    with (
        mock.patch.object(Meshes, "_make", note),
        HeteroPipeline(ReplicaCase(plan, NUM_LAYERS).model(), plan, optimizer=adamw),
    ):
        return len(made)


def test_the_memory_model_counts_the_communicators_that_are_made(run_ranks: RunRanks) -> None:
    for zero in (0, 2):
        plan = one_group(((0, 1), 2), zero)
        found = run_ranks(count_groups, 3, plan)
        assert found == [count_communicators(plan.groups[0], rank) for rank in range(3)]


def save_after_a_step(rank: int, world_size: int, case: ReplicaCase, folder: Path) -> Any:
    with HeteroPipeline(case.model(), case.plan, optimizer=adamw, max_norm=0.5) as pipe:
        pipe.step_global(*case.batch(0))
        pipe.save(folder)
        state = pipe.full_state_dict()
        return state, pipe.step_global(*case.batch(1)).loss, pipe.full_state_dict()


def load_and_go_on(rank: int, world_size: int, case: ReplicaCase, folder: Path) -> Any:
    with HeteroPipeline(case.model(), case.plan, optimizer=adamw, max_norm=0.5, skip_init=True) as pipe:
        pipe.load(folder)
        state = pipe.full_state_dict()
        return state, pipe.step_global(*case.batch(1)).loss, pipe.full_state_dict()


def test_a_checkpoint_goes_on_under_other_degrees(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Moments included: a step after it is the same."""
    source = ReplicaCase(one_group(((0, 1), 2), 2), NUM_LAYERS)
    found = run_ranks(save_after_a_step, 3, source, tmp_path)[0]
    target = one_group(((3, 0), (1, 2)), 0)
    case = ReplicaCase(target, NUM_LAYERS)
    loaded = run_ranks(load_and_go_on, target.num_ranks, case, tmp_path)[0]
    assert all(torch.equal(values, loaded[0][name]) for name, values in found[0].items())
    assert abs(loaded[1] - found[1]) <= 1e-12 * found[1]
    for name, values in found[2].items():
        assert (loaded[2][name] - values).abs().max() <= 1e-10 * values.abs().max()


# -- optimizers -------------------------------------------------------------------------------------


class LooksAtAll(torch.optim.SGD):
    """May do with a weight what it likes."""


class LooksAtEach(torch.optim.SGD):
    is_elementwise = True


def by_name(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    still = [(name, own) for name, own in named if name.endswith("attention.wq.weight")]
    moving = [pair for pair in named if not any(pair[1] is own for _, own in still)]
    groups = [{"params": still, "lr": 0.0}] if still else []
    return torch.optim.SGD([{"params": moving}, *groups], lr=0.1)


def of_replicas(optimizer: Any) -> ReplicaCase:
    """Ranks 0 and 1 have a piece of each cut weight, rank 2 both."""
    return ReplicaCase(one_group(((0, 1), 2), 2), NUM_LAYERS, optimizer=optimizer)


def test_optimizers_are_told_the_names_of_whole_weights(run_ranks: RunRanks) -> None:
    cases = [of_replicas(by_name), of_replicas(partial(LooksAtEach, lr=0.1))]
    (expected,), (found, *_) = run_ranks(train_all_single, 1, cases), run_ranks(train_all_planned, 3, cases)
    for case, own, other in zip(cases, expected, found, strict=True):
        assert_same(other, own, case)


def from_a_dictionary(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(dict(named).values(), lr=0.1)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (partial(LooksAtAll, lr=0.1), "LooksAtAll may look at weights as a whole"),
        (from_a_dictionary, "some pieces of 'w' and not others"),
        (lambda named: torch.optim.SGD([named[2]], lr=0.1), ""),
        (partial(torch.optim.Adagrad, lr=0.1), ""),
    ],
)
def test_optimizers_that_pieces_would_mislead_are_refused(factory: Any, says: str) -> None:
    trained = {name: torch.nn.Parameter(torch.ones(2)) for name in ("w.piece0", "w.piece1", "norm")}
    ministage: Any = SimpleNamespace(trained=trained, whole_name=lambda name: name.partition(".")[0])
    optimizer = factory([(ministage.whole_name(name), own) for name, own in trained.items()])
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        _refuse_for_pieces(optimizer, ministage)
