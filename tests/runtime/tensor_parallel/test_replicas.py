"""Replicas of any degrees inside one group train as a single process does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import volume
from ranks import RunRanks
from replica_cases import ReplicaCase, make_replica_case
from tiny import adamw, assert_same, module_names, train_all_planned, train_all_single

from zorselike import HeteroPipeline
from zorselike.plan.pieces import count_communicators
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.meshes import Meshes

NUM_LAYERS = 2
NAMES = tuple(module_names(NUM_LAYERS))


def one_group(ranks: tuple[Any, ...], zero: int, **options: Any) -> Plan:
    """Two microbatches of the first replica and one of the last, in a sequence that no degree divides."""
    first, last = ((entry if isinstance(entry, int) else entry[0]) for entry in (ranks[0], ranks[-1]))
    microbatches = (Microbatch(first, 0, 2), Microbatch(last, 3, 5), Microbatch(first, 2, 3))
    group = Group(ranks, microbatches, zero=zero, **options)
    return Plan(5, (group,), (Ministage(0, NAMES),), sequence_length=7)


CASES = [make_replica_case(seed) for seed in range(56)]
CASES += [
    ReplicaCase(one_group(((6, 1, 4, 3), (0, 5), 2), zero, recompute=recompute), NUM_LAYERS, max_norm=0.5)
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
    joined = [case for case in CASES if len({group.degree for group in case.plan.groups}) > 1]
    assert len(joined) >= 10
    assert sum(case.tied for case in joined) >= 3
    assert sum(bool(case.frozen) for case in joined) >= 3


@pytest.mark.nightly
def test_training_equals_a_single_process(run_ranks: RunRanks) -> None:
    cases = volume.part(volume.part(CASES), least=3)  # Up to eight ranks each: fewer than a tenth.
    (expected,) = run_ranks(train_all_single, 1, cases, timeout=300)
    for num_ranks in sorted({case.plan.num_ranks for case in cases}):
        own = [case for case in cases if case.plan.num_ranks == num_ranks]
        found = run_ranks(train_all_planned, num_ranks, own, timeout=300)
        for number, case in enumerate(own):
            assert_same(found[0][number], expected[cases.index(case)], case)
            for other in found[1:]:
                assert other[number].losses == found[0][number].losses


def count_collectives(rank: int, world_size: int, plan: Plan) -> Counter[str]:
    """Of one step, by kind and by whether they stay inside this rank's replica."""
    counter: Counter[str] = Counter()
    inside = sorted(plan.replica_of(rank).ranks)

    def patch(name: str, kind: str) -> None:
        original = getattr(dist, name, None)
        if original is None:
            return

        def counted(*args: Any, **kwargs: Any) -> Any:
            ranks = dist.get_process_group_ranks(kwargs.get("group") or args[2])
            counter[kind, len(inside) > 1 and ranks == inside] += 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)

    patch("all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor", "gather")
    patch(
        "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor", "sum"
    )
    case = ReplicaCase(plan, NUM_LAYERS)
    with HeteroPipeline(case.model(), plan, optimizer=adamw) as pipe:
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
