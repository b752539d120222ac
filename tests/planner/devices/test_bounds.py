"""No simulated step is faster or cheaper than the bounds of its devices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import volume
from clusters import make_cluster
from device_problems import SPEEDS, WORKLOAD, make_nodes, make_problem

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.errors import ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.by_shares import SharesJob, plan_shares
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.problem import Fixed, PlanProblem

KINDS = ("embedding", "layer", "head")


def draw_problem(draw: Random) -> PlanProblem:
    types = draw.sample(sorted(SPEEDS), draw.randint(1, 3))
    nodes = tuple(
        Node(
            name=f"n{i}",
            devices=tuple(draw.choice(types) for _ in range(draw.randint(1, 3))),
            fabric=Link(1e12),
            price_per_hour=draw.choice((1.0, 10.0)),
        )
        for i in range(draw.randint(1, 3))
    )
    num_frozen = draw.choice((0, 0, 2))
    layers = (("embed", "embedding"), *((f"layers.{i}", "layer") for i in range(5)), ("out", "head"))
    kinds = {
        name: LayerKind(
            name=name,
            num_parameters=1000,
            num_trainable=0 if num_frozen and name == "embedding" else None,
            forward_flops_per_row=1e9,
            activation_bytes_per_row=1000,
            input_elements_per_row=10,
        )
        for name in KINDS
    }
    workload = Workload(
        model="any", sequence_length=128, dtype="float16", layers=layers, kinds=kinds, num_moments=2
    )
    measured = (1, 2, 3, 5, 8)
    profile = Profile(
        model="any",
        layers=tuple(draw_times(draw, kind, device, measured) for device in types for kind in KINDS),
    )
    return PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=nodes, default_link=Link(1e12)),
        profile=profile,
        global_batch=draw.choice((12, 30)),
    )


def draw_times(draw: Random, kind: str, device: str, rows: tuple[int, ...]) -> LayerTimes:
    """Not in proportion to rows, and of kinds that suit devices differently."""
    forward, seconds = [], draw.uniform(0.0, 0.5)
    for _ in rows:
        seconds += draw.uniform(0.01, 1.0)
        forward.append(seconds)
    return LayerTimes(
        kind=kind,
        device=device,
        dtype="float16",
        sequence_length=128,
        rows=rows,
        forward_s=tuple(forward),
        backward_s=tuple(2 * each for each in forward),
        max_rows=draw.choice((None, 4)),
        source=Source("measured"),
    )


@volume.parametrize("seed", range(60))
def test_no_simulated_step_is_under_a_bound(seed: int) -> None:
    draw = Random(seed)
    problem = draw_problem(draw)
    num_devices = problem.cluster.num_devices
    groups = len({*(device for node in problem.cluster.nodes for device in node.devices)})
    job = SharesJob(
        global_batch=problem.global_batch,
        ministages=draw.randint(1, len(problem.workload.layers) // groups),
        rows_per_microbatch=draw.choice((1, 3, 8)),
        zero=draw.choice((0, 2, 3)),
        recompute=draw.choice(("none", "layer")),
    )
    plan = plan_shares(
        problem.workload, problem.cluster, LayerTimeModel(problem.profile, problem.workload), job
    )
    step = problem.setting.simulate(plan).simulation
    bounds = DeviceBounds(problem)
    devices = range(num_devices)
    assert 0 < bounds.floor_s == bounds.bound_s(devices) <= step.iteration_s
    assert bounds.least_cost(devices) <= bounds.bound_cost(devices) * (1 + 1e-9)
    assert bounds.bound_cost(devices) <= step.cost


@volume.parametrize("seed", range(40))
def test_fewer_devices_never_have_a_lower_bound(seed: int) -> None:
    draw = Random(seed)
    problem = draw_problem(draw)
    devices = range(problem.cluster.num_devices)
    some = sorted(draw.sample(devices, draw.randint(1, len(devices))))
    bounds = DeviceBounds(problem)
    assert bounds.bound_s(some) >= bounds.floor_s * (1 - 1e-9)
    assert bounds.bound_cost(some) >= bounds.least_cost(devices) * (1 - 1e-9)
    at_most = DeviceBounds(replace(problem, max_devices=len(some)))
    assert at_most.floor_s <= bounds.bound_s(some) * (1 + 1e-9)


def test_speeds_add_up() -> None:
    problem = make_problem(make_nodes("a", "A100-40 T4"), make_nodes("b", "V100-16 V100-16"))
    bounds = DeviceBounds(problem)
    assert bounds.bound_s((0, 1)) == pytest.approx(64 / 5)
    assert bounds.floor_s == pytest.approx(64 / 9)
    assert DeviceBounds(replace(problem, max_devices=2)).floor_s == pytest.approx(64 / 6)


def test_a_row_must_pass_all_layers() -> None:
    """Of one row only one device computes at a time."""
    problem = make_problem(make_nodes("a", "A100-40 A100-40 A100-40 A100-40"), global_batch=1)
    assert DeviceBounds(problem).floor_s == pytest.approx(1 / 4)
    # Plans by hand may have degrees that the planner has none of.
    assert DeviceBounds(problem, degree=3).floor_s == pytest.approx(1 / 12)


def test_every_layer_is_on_the_device_that_suits_it() -> None:
    """Two types as fast as each other in all; a row takes 2 s through the layer that one is good at, 4 s
    through the other."""
    workload = Workload(
        model="two kinds",
        sequence_length=128,
        dtype="float16",
        layers=(("layers.0", "a"), ("layers.1", "b")),
        kinds={
            name: LayerKind(name=name, num_parameters=10, forward_flops_per_row=1e9) for name in ("a", "b")
        },
    )
    fast, slow = (1.0,), (2.0,)
    profile = Profile(
        model="two kinds",
        layers=tuple(
            LayerTimes(
                kind=kind,
                device=device,
                dtype="float16",
                sequence_length=128,
                rows=(1,),
                forward_s=seconds,
                backward_s=seconds,
                source=Source("measured"),
            )
            for device, good_at in (("A100-40", "a"), ("V100-16", "b"))
            for kind in ("a", "b")
            for seconds in (fast if kind == good_at else slow,)
        ),
    )
    problem = make_problem(make_nodes("n", "A100-40 V100-16"), workload=workload, profile=profile)
    assert DeviceBounds(problem).floor_s == pytest.approx(64 * 2)


def test_larger_microbatches_count_where_they_fit() -> None:
    """A second for a row alone, two for eight at once."""
    times = LayerTimes(
        kind="layer",
        device="T4",
        dtype="float16",
        sequence_length=128,
        rows=(1, 8),
        forward_s=(1.0, 2.0),
        backward_s=(0.0, 0.0),
        source=Source("measured"),
    )
    num_layers = len(WORKLOAD.layers)

    def floor_s(times: LayerTimes, **given: object) -> float:
        profile = Profile(model=WORKLOAD.model, layers=(times,))
        problem = make_problem(make_nodes("n", "T4"), profile=profile, global_batch=8, **given)
        return DeviceBounds(problem).floor_s / num_layers

    assert floor_s(times) == pytest.approx(2.0)
    assert floor_s(times, fixed=Fixed(rows_per_microbatch=1)) == pytest.approx(8.0)
    # Without recomputation four fit, and nobody looked how many with it.
    assert floor_s(replace(times, max_rows=4)) == pytest.approx(2.0)
    both = Profile(
        model=WORKLOAD.model,
        layers=(replace(times, max_rows=1), replace(times, max_rows=4, recompute="layer")),
    )
    problem = make_problem(make_nodes("n", "T4"), profile=both, global_batch=8)
    assert DeviceBounds(problem).floor_s / num_layers == pytest.approx(2 * (1 + 3 / 7))


def test_money_counts_whole_nodes() -> None:
    problem = make_problem(
        make_nodes("a", "A100-40 A100-40", price=3600.0), make_nodes("t", "T4", price=360.0)
    )
    bounds = DeviceBounds(problem)
    assert bounds.price_per_hour((0,)) == bounds.price_per_hour((0, 1)) == 3600
    assert bounds.bound_cost((0,)) == pytest.approx(64 / 4)
    assert bounds.bound_cost((0, 1, 2)) == pytest.approx(1.1 * 64 / 9)
    assert bounds.least_cost((0, 1, 2)) == pytest.approx(0.1 * 64)


def test_a_device_that_nobody_knows_is_named() -> None:
    cluster = make_cluster(("T4", 1, 1, 1e9))
    nodes = (replace(cluster.nodes[0], devices=("Abacus",)),)
    problem = replace(make_problem(make_nodes("a", "T4")), cluster=replace(cluster, nodes=nodes))
    with pytest.raises(ProfileError, match="Abacus"):
        DeviceBounds(problem).bound_s((0,))
