"""Plans by proportion: every rank gets rows, and every group layers, as it is fast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.by_shares import SharesJob, plan_shares

SOURCE = Source("measured", "2026-11-21", "a test")

WORKLOAD = Workload(
    model="made up",
    sequence_length=128,
    dtype="bfloat16",
    layers=(
        ("tok_embeddings", "embedding"),
        *((f"layers.{i}", "layer") for i in range(12)),
        ("norm", "norm"),
        ("output", "head"),
    ),
    kinds={
        "embedding": LayerKind(name="embedding", num_parameters=1000, forward_flops_per_row=0),
        "layer": LayerKind(name="layer", num_parameters=1000, forward_flops_per_row=100),
        "norm": LayerKind(name="norm", num_parameters=10, forward_flops_per_row=1),
        "head": LayerKind(name="head", num_parameters=1000, forward_flops_per_row=200),
    },
)


def profile(max_rows: int | None = None, **seconds: float) -> Profile:
    """Times in proportion to rows: `seconds` for the forward of one row of `layer` on each device."""
    relative = {"embedding": 0.01, "layer": 1.0, "norm": 0.01, "head": 2.0}
    rows = (1, 2, 4)
    return Profile(
        model="made up",
        layers=tuple(
            LayerTimes(
                kind=kind,
                device=device.replace("_", "-"),
                dtype="bfloat16",
                sequence_length=128,
                rows=rows,
                forward_s=tuple(n * each * factor for n in rows),
                backward_s=tuple(2 * n * each * factor for n in rows),
                max_rows=max_rows,
                source=SOURCE,
            )
            for device, each in seconds.items()
            for kind, factor in relative.items()
        ),
    )


def cluster(**nodes: str) -> Cluster:
    fabric = Link(10e9)
    return Cluster(
        nodes=tuple(
            Node(name=name, devices=tuple(types.split()), fabric=fabric) for name, types in nodes.items()
        ),
        default_link=Link(1e9),
    )


def make(machines: Cluster, known: Profile, **settings: Any) -> Plan:
    job = SharesJob(**{"global_batch": 24, **settings})
    return plan_shares(WORKLOAD, machines, LayerTimeModel(known, WORKLOAD), job)


def rows_of(plan: Plan) -> list[int]:
    return [sum(m.num_rows for m in plan.microbatches_of_rank(rank)) for rank in range(plan.num_ranks)]


def layers_of(plan: Plan) -> list[int]:
    return [
        sum(
            name.startswith("layers.")
            for i in plan.ministages_of_group(g)
            for name in plan.ministages[i].modules
        )
        for g in range(len(plan.groups))
    ]


MIXED = cluster(fast="A100-40 A100-40", slow="T4 T4 T4", odd="T4 A100-40")
KNOWN = profile(A100_40=1.0, T4=4.0)


def test_groups_of_a_type_share_rows_evenly_and_layers_by_speed() -> None:
    plan = make(MIXED, KNOWN)
    assert [len(group.ranks) for group in plan.groups] == [3, 4]
    assert rows_of(plan) == [8, 8, 8, 6, 6, 6, 6]
    # Three fast cards are as fast as twelve slow ones: three quarters of 14 layers, of which the head is 2.
    assert layers_of(plan) == [11, 1]
    assert plan.ministages[1].modules == ("layers.11", "norm", "output")
    assert [device.type for device in plan.devices] == ["A100-40"] * 3 + ["T4"] * 4
    assert [(d.node, d.local_rank) for d in plan.devices][2:4] == [("odd", 1), ("slow", 0)]


def test_groups_of_a_node_share_rows_by_speed() -> None:
    plan = make(MIXED, KNOWN, group_by="node", global_batch=25)
    assert [len(group.ranks) for group in plan.groups] == [2, 3, 2]
    assert sorted(rows_of(plan)[5:]) == [5, 20]
    assert [sum(rows_of(plan)[start:stop]) for start, stop in ((0, 2), (2, 5), (5, 7))] == [25, 25, 25]


def test_the_plan_says_what_it_is_for() -> None:
    plan = make(MIXED, KNOWN, zero=1, recompute="layer", offload=("optimizer",))
    assert plan.model == "made up" and plan.sequence_length == 128
    assert plan.workload_fingerprint == WORKLOAD.fingerprint
    assert plan.cluster_fingerprint == MIXED.fingerprint
    assert all((g.zero, g.recompute, g.offload) == (1, "layer", ("optimizer",)) for g in plan.groups)
    assert MIXED.place_ranks(plan)[3] == (1, 0)


def test_groups_are_visited_in_turn() -> None:
    plan = make(MIXED, KNOWN, ministages=3)
    assert [ministage.group for ministage in plan.ministages] == [0, 1, 0, 1, 0, 1]


def test_no_more_rows_at_once_than_fit() -> None:
    plan = make(MIXED, profile(max_rows=2, A100_40=1.0, T4=4.0), rows_per_microbatch=8)
    assert {m.num_rows for group in plan.groups for m in group.microbatches} == {2}


def test_no_more_rows_at_once_than_fit_through_the_head_where_it_is() -> None:
    known = profile(A100_40=1.0, T4=1.0)
    known = replace(
        known, layers=tuple(replace(t, max_rows=2 if t.kind == "head" else 8) for t in known.layers)
    )
    plan = make(cluster(first="A100-40", last="T4"), known, rows_per_microbatch=12)
    assert "output" in plan.ministages[1].modules
    assert [{m.num_rows for m in group.microbatches} for group in plan.groups] == [{8}, {2}]


def test_only_layers_are_recomputed() -> None:
    known = profile(A100_40=1.0, T4=1.0)
    clock = LayerTimeModel(known, WORKLOAD)
    job = SharesJob(global_batch=24, recompute="layer")
    plan = plan_shares(WORKLOAD, cluster(first="A100-40", last="T4"), clock, job)
    # A layer takes 4 s instead of 3 s and the head 6 s: 27 s each with 7 layers below.
    assert layers_of(plan) == [7, 5]
    assert {line.partition(" on ")[0] for line in clock.assumptions} == {"layer"}


def test_more_ministages_than_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 groups of 9 ministages need 18 modules, made up has 15"):
        make(MIXED, KNOWN, ministages=9)


@pytest.mark.parametrize("setting", ["global_batch", "ministages", "rows_per_microbatch"])
def test_numbers_below_one_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        make(MIXED, KNOWN, **{setting: 0})


@given(
    types=st.lists(
        st.lists(st.sampled_from(["A100-40", "T4", "L4"]), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    speeds=st.tuples(*[st.floats(0.01, 100)] * 3),
    global_batch=st.integers(1, 40),
    ministages=st.integers(1, 3),
    by=st.sampled_from(["type", "node"]),
    rows=st.integers(1, 5),
)
def test_any_cluster_has_a_valid_plan(
    types: list[list[str]],
    speeds: tuple[float, float, float],
    global_batch: int,
    ministages: int,
    by: str,
    rows: int,
) -> None:
    """`plan_shares` validates: rows once in each group, modules once, in order, ranks complete."""
    machines = cluster(**{f"n{i}": " ".join(own) for i, own in enumerate(types)})
    known = profile(A100_40=speeds[0], T4=speeds[1], L4=speeds[2])
    plan = make(
        machines,
        known,
        global_batch=global_batch,
        ministages=ministages,
        group_by=by,
        rows_per_microbatch=rows,
    )
    assert plan.num_ranks == machines.num_devices
    assert [name for m in plan.ministages for name in m.modules] == [name for name, _ in WORKLOAD.layers]
    assert all(m.num_rows <= rows for group in plan.groups for m in group.microbatches)


def test_what_computes_nothing_says_nothing_of_speed() -> None:
    """However many there are of it, such as activation functions that are modules of their own."""
    free = LayerKind(name="free", num_parameters=0, forward_flops_per_row=0)
    names = tuple(f"{'layer' if i % 3 == 1 else 'free'}.{i}" for i in range(12))
    workload = replace(
        WORKLOAD,
        dtype="float16",
        layers=tuple((name, name.split(".")[0]) for name in names),
        kinds={"free": free, "layer": WORKLOAD.kinds["layer"]},
    )
    plan = plan_shares(
        workload,
        cluster(odd="T4 A100-40"),
        LayerTimeModel(Profile(model="made up"), workload),
        SharesJob(global_batch=24, group_by="node"),
    )
    assert min(rows_of(plan)) < 8 and sum(rows_of(plan)) == 24


def test_where_no_kind_is_more_common_speed_is_that_of_the_layer_that_computes_most() -> None:
    """Such as a model of its own kinds only, whose first one computes nothing."""
    known = replace(KNOWN, layers=tuple(times for times in KNOWN.layers if times.kind != "embedding"))
    free = LayerKind(name="free", num_parameters=1000, forward_flops_per_row=0)
    names = ("free", "norm", "layer", "head")
    kinds = {**WORKLOAD.kinds, "free": free}
    workload = replace(
        WORKLOAD,
        layers=tuple((name, name) for name in names),
        kinds={name: kinds[name] for name in names},
    )
    job = SharesJob(global_batch=24, group_by="node")
    plan = plan_shares(workload, cluster(odd="T4 A100-40"), LayerTimeModel(known, workload), job)
    assert sorted(rows_of(plan)) == [5, 19]
