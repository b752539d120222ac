"""Zorse's Eq. 1, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from plans import plans

from tools.papers.zorse.closed_form import estimate_step_s
from zorselike.cost.sizes import MinistageBytes
from zorselike.cost.step_costs import StepCosts, UnitBytes
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

NOTHING = MinistageBytes(
    gathered_bytes=0,
    shard_bytes=0,
    gradient_bytes=0,
    gradient_shard_bytes=0,
    state_bytes=0,
)


def make_plan(groups: Sequence[Group], owners: Sequence[int]) -> Plan:
    ministages = tuple(Ministage(group, (f"layers.{i}",)) for i, group in enumerate(owners))
    rows = max(m.stop for group in groups for m in group.microbatches)
    return Plan(global_batch=rows, groups=tuple(groups), ministages=ministages).validate()


def make_group(ranks: tuple[int, ...], rows: Sequence[int], **how: Any) -> Group:
    """Microbatches of those numbers of rows, dealt to the ranks in turn."""
    stops = [sum(rows[: i + 1]) for i in range(len(rows))]
    microbatches = tuple(
        Microbatch(ranks[i % len(ranks)], stop - number, stop)
        for i, (number, stop) in enumerate(zip(rows, stops, strict=True))
    )
    return Group(ranks=ranks, microbatches=microbatches, **how)


def make_costs(plan: Plan, *, gathered: int = 0, row_bytes: int = 0, **changes: Any) -> StepCosts:
    """One device a node on links of 10 bytes/s. A row takes 1 s forward and 2 s backward in each ministage,
    which is one unit of `gathered` bytes, and twice as many of gradients."""
    cluster = Cluster(
        nodes=tuple(Node(name=f"n{i:03}", devices=("T4",), nic=Link(10.0)) for i in range(plan.num_ranks)),
        default_link=Link(10.0),
    )
    sizes = {
        (rank, i, m.num_rows)
        for i in range(plan.num_ministages)
        for rank, own in plan.group_of(i).microbatches_by_rank.items()
        for m in own
    }
    costs = StepCosts(
        places=cluster.places,
        network=make_network(cluster, cluster.places),
        forward_s={key: float(key[2]) for key in sizes},
        backward_s={key: 2.0 * key[2] for key in sizes},
        update_s={(r, i): 0.0 for r in range(plan.num_ranks) for i in plan.ministages_of_rank(r)},
        row_bytes=(0, *[row_bytes] * (plan.num_ministages - 1)),
        units=((UnitBytes(gathered, max(1, 2 * gathered)),),) * plan.num_ministages,
        sizes=tuple(dict.fromkeys(plan.ministages_of_rank(rank), NOTHING) for rank in range(plan.num_ranks)),
    )
    return replace(costs, **changes)


def test_a_rank_alone_computes() -> None:
    plan = make_plan([make_group((0,), (2, 1))], (0, 0))
    assert estimate_step_s(plan, make_costs(plan, gathered=1000)) == 2 * 3 * (1 + 2)


def test_the_busiest_rank_of_a_group_sets_its_time() -> None:
    plan = make_plan([make_group((0, 1), (3, 1, 2))], (0,))
    assert estimate_step_s(plan, make_costs(plan)) == (3 + 2) * 3


def test_start_up_is_a_gather_and_the_first_microbatches_way() -> None:
    groups = [make_group((0, 1), (2, 2)), make_group((2,), (1, 3))]
    plan = make_plan(groups, (0, 1, 0, 1))
    costs = make_costs(plan, gathered=10, row_bytes=5)
    gather = 10 / 2 / 10
    first = 2.0 + 2 * 5 / 10
    slowest = 2 * 4 * (1 + 2)  # Group 1 computes all rows alone.
    assert estimate_step_s(plan, costs) == pytest.approx(slowest + gather + first)


def test_a_later_groups_gather_is_hidden_by_the_first_microbatch_or_not() -> None:
    groups = [make_group((0,), (4,)), make_group((1, 2), (2, 2))]
    plan = make_plan(groups, (0, 1))
    hidden = estimate_step_s(plan, make_costs(plan, gathered=20))
    assert hidden == pytest.approx(4 * 3 + 4)
    units = ((UnitBytes(0, 0),), (UnitBytes(100, 20),))
    exposed = estimate_step_s(plan, make_costs(plan, units=units))
    # Nothing of group 0 trains; the gather of 5 s, which group 1 begins with the step, ends after the 4 s of
    # the first rows.
    assert exposed == pytest.approx(max(4, 5 + (5 + 1)) + 5)


@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [
        ({"zero": 0}, 0, 2 * 2),  # An all-reduce is twice a reduce-scatter.
        ({"zero": 1}, 1, 2),
        ({"zero": 2}, 1, 1 + 2),
        ({"zero": 2, "grad_reduce": "microbatch"}, 1, 1 + 3 * 2),
        ({"zero": 3}, 3, 3 + 3 * 2),
    ],
)
def test_collectives_of_each_stage(how: dict[str, Any], forward: int, backward: int) -> None:
    """Gathers of 50 s and reductions of 100 s hide all computation, in each of two ministages."""
    plan = make_plan([make_group((0, 1), (1,) * 5, **how)], (0, 0))
    startup = 50 if how["zero"] else 0
    found = estimate_step_s(plan, make_costs(plan, gathered=1000))
    assert found == pytest.approx(2 * 50 * ((forward or 3 / 50) + backward) + startup)


def test_a_single_ministage_stays_gathered_for_its_backward() -> None:
    plan = make_plan([make_group((0, 1), (1,) * 5, zero=2)], (0,))
    assert estimate_step_s(plan, make_costs(plan, gathered=1000)) == pytest.approx(50 * (1 + 2) + 50)


def test_sending_overlaps_computation_until_it_is_longer() -> None:
    plan = make_plan([make_group((0,), (4,)), make_group((1,), (4,))], (0, 1))
    short = estimate_step_s(plan, make_costs(plan, row_bytes=5))
    assert short == pytest.approx(4 * 3 + 4 + 2)
    long = estimate_step_s(plan, make_costs(plan, row_bytes=100))
    # Group 0 sends 40 s forward and computes 8 s backward; group 1 computes 4 s and sends 40 s.
    assert long == pytest.approx(max(40 + 8, 4 + 40) + 4 + 40)


def test_ranks_that_share_a_card_send_one_after_the_other() -> None:
    plan = make_plan([make_group((0, 1), (2, 2)), make_group((2,), (4,))], (0, 1))
    costs = make_costs(plan, row_bytes=100)
    # Both arrive at rank 2, whose card takes 10 bytes a second.
    assert estimate_step_s(plan, costs) == pytest.approx(40 + 2 * 2 + 2 + 20)


def test_slow_down_counts_while_something_runs_beside() -> None:
    plan = make_plan([make_group((0, 1), (4, 4))], (0,))
    costs = make_costs(plan, gathered=20, overlap_slowdown=1.5)
    forward, backward = 4 + 0.5 * 1, 8 + 0.5 * 2
    assert estimate_step_s(plan, costs) == pytest.approx(forward + backward + 1)


def test_ministages_below_the_lowest_that_trains_run_no_backward() -> None:
    plan = make_plan([make_group((0,), (3,))], (0, 0))
    frozen = ((UnitBytes(10, 0),), (UnitBytes(10, 20),))
    assert estimate_step_s(plan, make_costs(plan, units=frozen)) == 2 * 3 + 6


@settings(max_examples=60)
@given(plans(max_groups=4, max_ranks_per_group=4, max_ministages_per_group=3))
def test_never_less_than_a_rank_computes_and_more_with_slower_links(plan: Plan) -> None:
    fast, slow = (estimate_step_s(plan, make_costs(plan, gathered=g, row_bytes=g)) for g in (1, 400))
    busy = max(
        3 * sum(m.num_rows for m in plan.microbatches_of_rank(rank)) * len(plan.ministages_of_rank(rank))
        for rank in range(plan.num_ranks)
    )
    assert busy <= fast <= slow
