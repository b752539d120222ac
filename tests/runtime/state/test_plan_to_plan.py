"""What one plan has saved another goes on from, as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_case, other_plan, with_offload
from plans import with_replicas
from ranks import run_ranks
from replica_cases import ReplicaCase, make_replica_case
from saved import contents
from tiny import Case, module_names
from volume import parametrize

from zorselike import HeteroPipeline
from zorselike.checkpoint.layout import step_folder
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

pytestmark = pytest.mark.pooled

NUM_PAIRS = 60
NUM_REPLICA_PAIRS = 30
STEPS_BEFORE, STEPS_AFTER = 1, 2
MAX_RANKS = 5


@dataclass(frozen=True)
class Pair:
    """A run that is saved under one plan, and goes on under another."""

    saved: Case
    loaded: Case
    param_dtype: torch.dtype | None
    in_background: bool


def make_pair(seed: int) -> Pair:
    rng = random.Random(seed)
    case = make_case(seed, max_ranks=MAX_RANKS)
    other = replace(case, plan=other_plan(case, rng, max_ranks=MAX_RANKS))
    if rng.random() < 0.5:
        case, other = with_offload(case, rng), with_offload(other, rng)
    dtype = rng.choice((None, None, None, torch.bfloat16, torch.float16))
    return Pair(case, other, dtype, in_background=rng.random() < 0.5)


def of_seven_and_four(seed: int) -> Pair:
    """From degrees 4, 2 and 1 to two replicas of 2, or back."""
    num_layers, zero = 2, seed % 4
    rows = ((0, 2), (2, 3), (3, 5))
    plans = []
    for ranks, firsts in ((((6, 1, 4, 3), (0, 5), 2), (6, 2, 6)), (((3, 0), (1, 2)), (3, 1, 1))):
        microbatches = tuple(Microbatch(first, *own) for first, own in zip(firsts, rows, strict=True))
        group = Group(ranks, microbatches, zero=zero)
        plans.append(Plan(5, (group,), (Ministage(0, tuple(module_names(num_layers))),), sequence_length=7))
        zero = 3 - zero
    cases = [ReplicaCase(plan, num_layers, seed, max_norm=0.5) for plan in plans]
    saved, loaded = cases if seed % 2 else cases[::-1]
    return Pair(saved, loaded, None, in_background=True)


def make_replica_pair(seed: int) -> Pair:
    """Between random degrees of tensor parallelism, in every fifth to single ranks."""
    if seed >= NUM_REPLICA_PAIRS - 4:
        return of_seven_and_four(seed)
    rng = random.Random(f"replicas {seed}")
    case = make_replica_case(seed, max_ranks=MAX_RANKS + 1)
    plan = other_plan(case, rng, max_ranks=MAX_RANKS)
    plan = plan if seed % 5 == 4 else with_replicas(plan, rng)
    length = max(case.plan.sequence_length or 0, plan.sequence_length or 0)
    case = replace(case, plan=replace(case.plan, sequence_length=length))
    other = replace(case, plan=replace(plan, sequence_length=length))
    if rng.random() < 0.5:
        other = with_offload(other, rng)
    if rng.random() < 0.5:
        case, other = other, case
    dtype = rng.choice((None, None, None, torch.bfloat16, torch.float16))
    return Pair(case, other, dtype, in_background=rng.random() < 0.5)


def build(case: Case, pair: Pair, **options: Any) -> HeteroPipeline:
    model = case.model() if pair.param_dtype is None else case.model().float()
    return HeteroPipeline(
        model,
        case.plan,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        max_norm=case.max_norm,
        seed=case.seed,
        param_dtype=pair.param_dtype,
        **options,
    )


def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def save_and_go_on(rank: int, size: int, pair: Pair, folder: Path) -> tuple[list[float], Any]:
    with build(pair.saved, pair) as pipe:
        schedulers = pipe.lr_schedulers(halve)
        losses = []
        for step in range(STEPS_BEFORE + STEPS_AFTER):
            if step == STEPS_BEFORE:
                pipe.evaluate_global(*pair.saved.batch(98))  # It leaves parameters whole, under some plans.
                save = pipe.save(folder, extra={"step": step}, wait=not pair.in_background)
            losses.append(pipe.step_global(*pair.saved.batch(step)).loss)
            schedulers.step()
        assert save is not None
        assert save.wait() == folder / step_folder(STEPS_BEFORE)
        return losses[STEPS_BEFORE:], pipe.full_state_dict()


def load_and_go_on(
    rank: int, size: int, pair: Pair, case: Case, folder: Path, *, trained_before: bool
) -> tuple[list[float], Any]:
    """`trained_before`: what is loaded takes the place of another state."""
    with build(case, pair, skip_init=not trained_before) as pipe:
        schedulers = pipe.lr_schedulers(halve)
        if trained_before:
            pipe.step_global(*case.batch(99))
            schedulers.step()
            pipe.evaluate_global(*case.batch(98))
        loaded = pipe.load(folder)
        assert (loaded.step, loaded.extra) == (STEPS_BEFORE, {"step": STEPS_BEFORE})
        assert pipe.rows_seen == STEPS_BEFORE * case.plan.global_batch
        if not trained_before:
            schedulers = pipe.lr_schedulers(halve)  # Those that are made later go on too.
        pipe.save(folder / f"again-{trained_before}", extra=loaded.extra)
        losses = []
        for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            losses.append(pipe.step_global(*case.batch(step)).loss)
            schedulers.step()
        return losses, pipe.full_state_dict()


def check(pair: Pair, folder: Path) -> None:
    expected = run_ranks(save_and_go_on, pair.saved.plan.num_ranks, pair, folder)
    saved = contents(folder)
    for case, again in ((pair.loaded, False), (pair.saved, True)):
        load = partial(load_and_go_on, trained_before=again)
        found = run_ranks(load, case.plan.num_ranks, pair, case, folder)
        assert contents(folder / f"again-{again}") == saved
        losses, state = found[0]
        if again:  # The same plan: the same bits.
            assert losses == expected[0][0]
        elif pair.param_dtype is None:
            assert losses == pytest.approx(expected[0][0], rel=1e-12)
        for name, tensor in expected[0][1].items() if again or pair.param_dtype is None else ():
            largest = tensor.abs().max().clamp_min(1e-30)
            assert (state[name] - tensor).abs().max() / largest <= (0 if again else 1e-10), name


@parametrize("seed", range(NUM_PAIRS), share=60)
def test_another_plan_goes_on_exactly(seed: int, tmp_path: Path) -> None:
    check(make_pair(seed), tmp_path)


def test_the_pairs_cover_degrees() -> None:
    pairs = list(map(make_replica_pair, range(NUM_REPLICA_PAIRS)))
    degrees = [
        [[replica.degree for replica in group.replicas] for group in case.plan.groups]
        for pair in pairs
        for case in (pair.saved, pair.loaded)
    ]
    assert sum(a != b for a, b in zip(degrees[::2], degrees[1::2], strict=True)) >= 25
    assert sum(len({*own}) > 1 for of_plan in degrees for own in of_plan) >= 10  # Unequal inside a group.
    assert {max(own) for of_plan in degrees for own in of_plan} >= {1, 2, 3, 4}
    assert sum(pair.param_dtype is not None for pair in pairs) >= 4


@parametrize("seed", range(NUM_REPLICA_PAIRS), share=30)
def test_other_degrees_go_on_exactly(seed: int, tmp_path: Path) -> None:
    check(make_replica_pair(seed), tmp_path)
