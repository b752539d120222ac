"""Copies and mirrors of a running pipeline: what is copied once, and when memory for them is taken."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import RunRanks
from tiny import Case, adamw, module_names

from zorselike import HeteroPipeline
from zorselike.elastic.replicas import Replicas
from zorselike.errors import ClusterError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

pytestmark = pytest.mark.pooled

NAMES = module_names(2)
NUM_STEPS = 3
MARK = 7
"""Written over what is not to be copied again."""


def mirror(rank: int, world_size: int, offload: tuple[str, ...]) -> tuple[list[int], list[bool], list[int]]:
    """After each step: how often host memory was taken. At the end: by buffer, of frozen weights and of the
    others, whether the mark is still there, and the steps whose states are held."""
    microbatches = tuple(Microbatch(own, own, own + 1) for own in range(world_size))
    group = Group(tuple(range(world_size)), microbatches, offload=offload)
    plan = Plan(world_size, (group,), (Ministage(0, tuple(NAMES[:2])), Ministage(0, tuple(NAMES[2:]))))
    case = Case(plan, 2, frozen=("layers.0.up", "layers.1.up"))
    taken, nodes = [], [f"node {own}" for own in range(world_size)]
    with HeteroPipeline(case.model(), plan, optimizer=adamw) as pipe:
        replicas = Replicas(pipe, 0, nodes, share=1.0, interval=1)
        for step in range(NUM_STEPS):
            pipe.step_global(*case.batch(step))
            replicas.take({}, busy=pipe.assembly.busy.reading())
            taken.append(len(replicas._memory.pool._slabs))
            if not step:
                for buffer in find_own(replicas, rank).buffers:
                    buffer.fill_(MARK)
        own = find_own(replicas, rank)
        marks = [bool((buffer == MARK).all()) for buffer in own.buffers]
        steps = sorted({held.origin.step for held in replicas.held})
        assert len(replicas.list_busy_s()) == NUM_STEPS
        replicas.close()
    replicas.forget()
    return taken, marks, steps


def find_own(replicas: Replicas, rank: int) -> Any:
    return next(held for held in replicas.held if held.origin.rank == rank)


def test_frozen_weights_are_copied_once_and_memory_is_taken_before_steps_run_beside(
    run_ranks: RunRanks,
) -> None:
    for offload in ((), ("params", "optimizer")):
        for taken, marks, steps in run_ranks(mirror, 2, offload):
            assert taken == [taken[0]] * NUM_STEPS
            assert marks == [True, True, False, False]
            assert steps == [NUM_STEPS]


def copy_after_an_abort(rank: int, world_size: int) -> list[int]:
    """The steps whose states are held."""
    group = Group((0,), (Microbatch(0, 0, 1),))
    case = Case(Plan(1, (group,), (Ministage(0, tuple(NAMES)),)), 2)
    with HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe:
        replicas = Replicas(pipe, 0, ["node"], share=1.0, interval=1)
        for is_aborted in (False, True):
            pipe.step_global(*case.batch(0))
            pipe.assembly.groups.is_aborted = is_aborted
            if is_aborted:
                with pytest.raises(ClusterError, match="other ranks are gone"):
                    replicas.take({})
            else:
                replicas.take({})
        replicas.close()
    return [held.origin.step for held in replicas.held]


def test_what_is_copied_once_streams_no_longer_wait_for_others_is_not_held(run_ranks: RunRanks) -> None:
    assert run_ranks(copy_after_an_abort, 1) == [[1]]


def copy_after_an_offer(rank: int, world_size: int) -> list[int]:
    """The steps whose states are held."""
    group = Group((0,), (Microbatch(0, 0, 1),))
    case = Case(Plan(1, (group,), (Ministage(0, tuple(NAMES)),)), 2)
    with HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe:
        replicas = Replicas(pipe, 0, ["node"], share=1.0, interval=1)
        for step in range(4):
            pipe.step_global(*case.batch(step))
            replicas.take({})
            if step == 1:
                replicas.keep()
        replicas.close()
    return [held.origin.step for held in replicas.held]


def test_what_a_generation_that_is_over_has_offered_stays(run_ranks: RunRanks) -> None:
    """Where a spare was lost, the one rank went on for a step or two, and nobody held any more what all were
    to go on from."""
    assert run_ranks(copy_after_an_offer, 1) == [[2, 3, 4]]
