"""Replicas on streams, watched: no race, and the numbers of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import volume
from ranks import RunRanks
from replica_cases import ReplicaCase
from stand_in import RaceStreams
from tiny import adamw, assert_same, module_names, train_all_single, train_planned, with_groups
from watched import on

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan

pytestmark = pytest.mark.pooled

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)


def make_plan(ranks: tuple[Any, ...], zero: int, *, num_ministages: int = 1, **options: Any) -> Plan:
    """Two microbatches of the first replica and one of the last."""
    first, last = ((entry if isinstance(entry, int) else entry[0]) for entry in (ranks[0], ranks[-1]))
    microbatches = (Microbatch(first, 0, 2), Microbatch(last, 3, 5), Microbatch(first, 2, 3))
    cut = NAMES if num_ministages == 1 else NAMES[:3]
    cuts = (cut, NAMES[len(cut) :])[:num_ministages]
    ministages = tuple(Ministage(0, tuple(names)) for names in cuts)
    return Plan(5, (Group(ranks, microbatches, zero=zero, **options),), ministages, sequence_length=7)


CASES = [
    ReplicaCase(
        make_plan(
            ranks,
            zero,
            num_ministages=1 + (number + zero) % 2,
            offload=OFFLOAD_KINDS if (zero + number) % 3 else (),
            recompute=("none", "layer")[(zero // 2 + number) % 2],
        ),
        NUM_LAYERS,
        seed=zero,
        max_norm=(None, 0.1)[number % 2],
        num_steps=2,
    )
    for number, ranks in enumerate((((0, 1), 2), ((0, 1, 2),), ((2, 0), (1, 3))))
    for zero in range(4)
]


def find_races(rank: int, world_size: int, cases: Sequence[ReplicaCase]) -> list[tuple[Any, list[str]]]:
    found = []
    for case in cases:
        streams = RaceStreams()
        with on(streams):
            outcome = train_planned(case)
        found.append((outcome, [str(race) for race in streams.races]))
    return found


@pytest.mark.nightly
def test_no_race_and_the_numbers_of_a_single_process(run_ranks: RunRanks) -> None:
    cases = volume.part(CASES, share=12)
    (expected,) = run_ranks(train_all_single, 1, cases, timeout=300)
    for num_ranks in sorted({case.plan.num_ranks for case in cases}):
        own = [case for case in cases if case.plan.num_ranks == num_ranks]
        found = run_ranks(find_races, num_ranks, own, timeout=600)
        races = [race for of_rank in found for _, of_case in of_rank for race in of_case]
        assert not races, "\n".join(races[:5])
        for number, case in enumerate(own):
            assert_same(found[0][number][0], expected[cases.index(case)], case)


def train_half(
    rank: int, world_size: int, cases: Sequence[ReplicaCase], dtype: torch.dtype
) -> list[tuple[list[float], Any, list[str]]]:
    """With master weights: losses, weights and races of each."""
    return [train_half_of(case, dtype) for case in cases]


def train_half_of(case: ReplicaCase, dtype: torch.dtype) -> tuple[list[float], Any, list[str]]:
    streams = RaceStreams()
    with on(streams):
        pipe = HeteroPipeline(
            case.model().float(), case.plan, optimizer=adamw, max_norm=0.5, param_dtype=dtype, seed=case.seed
        )
        with pipe:
            losses = [pipe.step_global(*case.batch(step)).loss for step in range(case.num_steps)]
            return losses, pipe.full_state_dict(), [str(race) for race in streams.races]


@volume.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_under_watch_are_the_bits_of_a_resident_run(
    dtype: torch.dtype, run_ranks: RunRanks
) -> None:
    plan = make_plan(((0, 1), 2), 2, num_ministages=2, offload=OFFLOAD_KINDS)
    case = ReplicaCase(plan, NUM_LAYERS, num_steps=2)
    resident = replace(case, plan=with_groups(case.plan, lambda group: replace(group, offload=())))
    found, expected = run_ranks(train_half, 3, (case, resident), dtype)[0]
    assert not found[2] + expected[2]
    assert found[0] == expected[0]
    assert all(torch.equal(values, found[1][name]) for name, values in expected[1].items())
