"""Simulated steps of tensor-parallel replicas, beside what their parts take by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plain_costs import PlainNetwork, make_costs

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule import ScheduleSpec, build
from zorselike.simulator import Simulation, simulate


def two_groups(*first: int | tuple[int, ...], zero: int = 0) -> Plan:
    """Rows 0 to 3 in the first replica, the rest in the second; a single rank takes all of them next."""
    group = Group(ranks=first, microbatches=(), zero=zero)
    firsts = [replica.first for replica in group.replicas]
    group = replace(group, microbatches=tuple(Microbatch(r, 4 * i, 4 * i + 4) for i, r in enumerate(firsts)))
    rows, last = 4 * len(firsts), len(group.flat_ranks)
    last_group = Group(ranks=(last,), microbatches=(Microbatch(last, 0, rows),), zero=0)
    stages = (Ministage(0, ("a",)), Ministage(1, ("b",)))
    return Plan(rows, (group, last_group), stages, sequence_length=8).validate()


def run(plan: Plan, **costs: object) -> Simulation:
    return simulate(plan, build(ScheduleSpec(plan)), make_costs(plan, **costs), num_steps=1)  # type: ignore[arg-type]


def test_the_slowest_rank_of_a_replica_sets_its_pace() -> None:
    plan = two_groups((0, 1))
    together = run(plan, forward=lambda rank, i, rows: 1.0)
    assert together.iteration_s == pytest.approx(2 * (1.0 + 2.0))
    # Rank 1 is late by half a second for its backward: rank 0 cannot begin without it.
    slow = run(plan, forward=lambda rank, i, rows: 1.5 if rank == 1 else 1.0)
    assert slow.iteration_s == pytest.approx(1.5 + 1.0 + 2.0 + 3.0)
    backward = {rank: slow.ranks[rank].backward_s for rank in (0, 1)}
    assert backward == pytest.approx({0: 2.0, 1: 3.0})


@pytest.mark.parametrize("entries", [((0, 1),), ((0, 1, 2, 3),), ((0, 1), 2)])
def test_every_rank_sends_its_positions_alone(entries: tuple[int | tuple[int, ...], ...]) -> None:
    plan = two_groups(*entries)
    network = PlainNetwork(sorted(plan.group_of_rank), rate=1e3)
    found = run(plan, network=network, row_bytes=16)
    for replica in plan.groups[0].replicas:
        for rank in replica.ranks:
            assert found.bytes_by_link[f"node {rank}, out"] == 4 * 16 / replica.degree
    last = plan.num_ranks - 1
    assert found.bytes_by_link[f"node {last}, out"] == plan.global_batch * 16


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_pieces_are_gathered_and_reduced_among_their_holders(zero: int) -> None:
    """Two replicas of degrees 2 and 1: each of two pieces is half of the bytes, held by two ranks; the single
    rank holds both."""
    plan = two_groups((0, 1), 2, zero=zero)
    network = PlainNetwork(sorted(plan.group_of_rank), rate=1e3)
    cut = run(plan, network=network, unit_bytes=32, is_cut=True).bytes_by_link
    # A ring of two sends a half of a buffer each way; an all-reduce twice that.
    per_collective = 32 / 2 / 2
    num_collectives = {0: 2, 1: 2, 2: 2, 3: 3}[zero]
    assert [cut[f"node {rank}, out"] for rank in (0, 1, 2)] == pytest.approx(
        [num_collectives * per_collective] * 2 + [2 * num_collectives * per_collective]
    )
    whole = run(plan, network=network, unit_bytes=32).bytes_by_link
    assert whole["node 0, out"] == pytest.approx(num_collectives * 32 * 2 / 3)


def test_what_a_replica_has_alone_is_not_gathered() -> None:
    plan = two_groups((0, 1), zero=2)
    network = PlainNetwork(sorted(plan.group_of_rank), rate=1e3)
    assert run(plan, network=network, unit_bytes=32, is_cut=True).bytes_by_link.get("node 0, out", 0.0) == 0.0
