"""From plan, workload, cluster and profile to costs; and what does not fit together is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import random_plan

from zorselike.cost.assemble import make_costs
from zorselike.cost.catalogue import find_device
from zorselike.cost.layer_times import REACHED_OF_PEAK, REACHED_OF_WHOLE
from zorselike.cost.memory import walk_memory
from zorselike.cost.profile import HostLinkRates, LayerTimes, Overheads, Profile, Source, UpdateTime
from zorselike.cost.sizes import measure_ministages
from zorselike.cost.step_costs import UnitBytes
from zorselike.errors import ClusterError, PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.schedule import Kind, ScheduleSpec, build

SOURCE = Source("measured", "2026-11-21")
GIB = 2**30


def make_kind(name: str, num_parameters: int, flops: float, inputs: int, **more: Any) -> LayerKind:
    return LayerKind(
        name=name,
        num_parameters=num_parameters,
        forward_flops_per_row=flops,
        input_elements_per_row=inputs,
        **more,
    )


WORKLOAD = Workload(
    model="llama 7b",
    sequence_length=512,
    dtype="float16",
    layers=(
        ("emb", "embedding"),
        *((f"layers.{i}", "layer") for i in range(4)),
        ("norm", "norm"),
        ("head", "head"),
    ),
    kinds={
        "embedding": make_kind("embedding", 1000, 0.0, 0),
        "layer": make_kind("layer", 600, 1e9, 50, activation_bytes_per_row=900),
        "norm": make_kind("norm", 10, 0.0, 50),
        "head": make_kind("head", 0, 2e9, 50, num_borrowed=800),
    },
    ties=(("emb", "head"),),
)


def layer_times(device: str, forward_s: float, **changes: Any) -> LayerTimes:
    """Proportional to rows; backward twice the forward."""
    times = LayerTimes(
        kind="layer",
        device=device,
        dtype="float16",
        sequence_length=512,
        rows=(1, 2),
        forward_s=(forward_s, 2 * forward_s),
        backward_s=(2 * forward_s, 4 * forward_s),
        source=SOURCE,
    )
    return replace(times, **changes)


PROFILE = Profile(
    model="llama 7b",
    layers=(layer_times("T4", 4.0), layer_times("A100-40", 1.0)),
    updates=tuple(
        UpdateTime(device=device, dtype="float16", seconds_per_parameter=1.0, source=SOURCE)
        for device in ("T4", "A100-40")
    ),
    overheads=Overheads(action_s=(("F", 0.25),), overlap_slowdown=1.2, context_bytes=7, allocator_share=0.1),
)
CLUSTER = Cluster(
    nodes=(
        Node(
            name="a",
            devices=("A100-40", "A100-40"),
            fabric=Link(100.0),
            nic=Link(10.0),
            region="eu",
            zone="eu-1",
            price_per_hour=8.0,
        ),
        Node(name="b", devices=("T4",), nic=Link(10.0), region="us", price_per_hour=1.0),
        Node(name="c", devices=("T4",), nic=Link(10.0), region="us", price_per_hour=1.0),
    ),
    default_link=Link(20.0),
    egress_price_per_gb={("eu", "us"): 0.09, ("us", "eu"): 0.12},
    currency="EUR",
)
PLAN = Plan(
    global_batch=4,
    groups=(
        Group(ranks=(0, 1), microbatches=(Microbatch(0, 0, 2), Microbatch(1, 2, 4)), recompute="layer"),
        Group(ranks=(2,), microbatches=(Microbatch(2, 0, 1), Microbatch(2, 1, 4))),
    ),
    ministages=(
        Ministage(0, ("emb", "layers.0", "layers.1")),
        Ministage(1, ("layers.2",)),
        Ministage(0, ("layers.3",)),
        Ministage(1, ("norm", "head")),
    ),
).validate()


def test_everything_that_a_schedule_needs() -> None:
    costs = make_costs(PLAN, WORKLOAD, CLUSTER, PROFILE)
    assert [tuple(place) for place in costs.places] == [(0, 0), (0, 1), (1, 0)]
    assert costs.forward_s == {
        **{(rank, 0, 2): 2 * 2.0 for rank in (0, 1)},
        **{(rank, 2, 2): 2.0 for rank in (0, 1)},
        (2, 1, 1): 4.0,
        (2, 1, 3): 12.0,
        (2, 3, 1): 8.0,
        (2, 3, 3): 24.0,
    }
    # Recomputed in group 0: backward and a second forward.
    assert costs.backward_s[0, 0, 2] == 2 * (4.0 + 2.0)
    assert costs.backward_s[2, 1, 3] == 24.0
    assert costs.update_s == {
        **{(rank, 0): 500.0 + 2 * 300.0 for rank in (0, 1)},
        **{(rank, 2): 300.0 for rank in (0, 1)},
        (2, 1): 600.0,
        (2, 3): 10.0,  # Not of the borrowed weight.
    }
    assert costs.row_bytes == (0, 100, 100, 100)
    assert costs.units[0] == (
        UnitBytes(2000, 4000),
        *[UnitBytes(1200, 2400, is_cut=True)] * 2,
    )
    assert costs.units[3] == (UnitBytes(20, 40), UnitBytes(1600, 3200))
    assert (costs.tie_bytes, costs.tie_gradient_bytes) == ({(0, 3): 1600}, {(0, 3): 3200})
    assert costs.sizes[2][1].activation_bytes_per_row == 900
    assert costs.sizes[0][2].activation_bytes_per_row == 100
    assert costs.host_s == {"F": 0.25}
    assert (costs.overlap_slowdown, costs.context_bytes, costs.allocator_share) == (1.2, (7, 7, 7), 0.1)
    assert costs.is_cpu == (False,) * 3
    a100, t4 = (find_device(name).memory_bytes for name in ("A100-40", "T4"))
    assert costs.memory_bytes == (a100, a100, t4)
    assert costs.price_per_hour == 9.0  # Node c holds no rank.
    assert costs.egress_price_per_gb == {(0, 1): 0.09, (1, 0): 0.12}
    assert costs.currency == "EUR"
    assert [line.partition(";")[0] for line in costs.assumptions] == [
        "layer on A100-40: recomputation was not measured",
        "layer on T4: more than the 2 rows that were measured",
        "head on T4: not measured",
    ]


def test_a_zones_price_of_egress_goes_before_its_regions() -> None:
    prices = {("eu-1", ""): 0.5, ("eu", "us"): 0.09}
    costs = make_costs(PLAN, WORKLOAD, replace(CLUSTER, egress_price_per_gb=prices), PROFILE)
    assert costs.egress_price_per_gb == {(0, 1): 0.5}


def test_devices_of_the_plan_say_where_ranks_are() -> None:
    devices = tuple(
        Device(rank, node, local) for rank, node, local in ((0, "a", 1), (1, "a", 0), (2, "c", 0))
    )
    costs = make_costs(replace(PLAN, devices=devices), WORKLOAD, CLUSTER, PROFILE)
    assert [tuple(place) for place in costs.places] == [(0, 1), (0, 0), (2, 0)]


def test_memory_that_is_not_known() -> None:
    def memory_of(node: Node) -> tuple[int, ...]:
        cluster = replace(CLUSTER, nodes=(CLUSTER.nodes[0], node))
        layers = (*PROFILE.layers, layer_times("CPU", 9.0), layer_times("T5", 9.0))
        return make_costs(PLAN, WORKLOAD, cluster, replace(PROFILE, layers=layers)).memory_bytes

    base = Node(name="b", devices=("CPU", "CPU"), nic=Link(10.0))
    assert memory_of(base) == ()
    assert memory_of(replace(base, host_memory_bytes=8 * GIB))[2] == 4 * GIB
    assert memory_of(replace(base, devices=("T5",))) == ()
    assert memory_of(replace(base, devices=("T5",), memory_bytes=(GIB,)))[2] == GIB


def test_threads_compute_on_cpus() -> None:
    nodes = (CLUSTER.nodes[0], replace(CLUSTER.nodes[1], devices=("CPU",)))
    cluster = replace(CLUSTER, nodes=nodes)
    profile = replace(PROFILE, layers=(*PROFILE.layers, layer_times("CPU", 9.0)))
    assert make_costs(PLAN, WORKLOAD, cluster, profile).is_cpu == (False, False, True)


def test_what_is_only_in_the_catalogue_is_computed_at_a_share_of_its_peak() -> None:
    costs = make_costs(PLAN, WORKLOAD, CLUSTER, Profile(model="llama 7b"))
    assert costs.forward_s[2, 1, 3] == pytest.approx(3e9 / (REACHED_OF_PEAK * 65e12))
    assert any("nothing was measured on it" in line for line in costs.assumptions)


def test_overheads_that_nobody_measured_are_said() -> None:
    costs = make_costs(PLAN, WORKLOAD, CLUSTER, replace(PROFILE, overheads=Overheads()))
    assert costs.assumptions[-2:] == (
        "A100-40, T4: memory of a process beside tensors was not measured and counts as 0",
        "seconds of the program itself, beside its layers, were not measured and count as 0",
    )


def test_copies_that_nobody_measured_are_said() -> None:
    def assumptions_of(**changes: Any) -> list[str]:
        groups = (PLAN.groups[0], replace(PLAN.groups[1], offload=("params",)))
        nodes = (CLUSTER.nodes[0], replace(CLUSTER.nodes[1], **changes.pop("node", {})))
        cluster = replace(CLUSTER, nodes=nodes)
        profile = replace(PROFILE, **changes)
        costs = make_costs(replace(PLAN, groups=groups), WORKLOAD, cluster, profile)
        return [line for line in costs.assumptions if "host" in line]

    told = ["T4: copies between it and its host were not measured; 80% of its bus"]
    assert assumptions_of() == told
    rates = HostLinkRates(device="T4", to_device=1.0, to_host=1.0, both=1.0, source=SOURCE)
    assert assumptions_of(host_links=(rates,)) == []
    assert assumptions_of(node={"host_link": Link(5.0)}) == []


# -- what does not fit together ------------------------------------------------------------


def rename(plan: Plan, old: str, new: str) -> Plan:
    ministages = tuple(
        replace(m, modules=tuple(new if name == old else name for name in m.modules)) for m in plan.ministages
    )
    return replace(plan, ministages=ministages)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (rename(PLAN, "layers.2", "layer.2"), "has no module 'layer.2'; did you mean 'layers.2'"),
        (replace(PLAN, sequence_length=1024), "plan is for 1024 tokens a row, the workload has 512"),
        (
            replace(PLAN, ministages=(*PLAN.ministages[:3], Ministage(1, ("norm",)))),
            "head",
        ),
    ],
)
def test_a_plan_of_another_model_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_costs(plan, WORKLOAD, CLUSTER, PROFILE)


def test_a_plan_for_another_workload_is_refused() -> None:
    plan = replace(PLAN, workload_fingerprint="0123456789ab")
    with pytest.raises(
        PlanError,
        match=r"made for workload 0123456789ab, this is [0-9a-f]{12} \('llama 7b' in \w+, 512 tokens a row\)",
    ):
        make_costs(plan, WORKLOAD, CLUSTER, PROFILE)
    same = replace(PLAN, workload_fingerprint=WORKLOAD.fingerprint)
    make_costs(same, WORKLOAD, CLUSTER, PROFILE)


def test_a_profile_for_another_model_is_refused() -> None:
    with pytest.raises(ProfileError, match="is of 'gpt', the workload is 'llama 7b'"):
        make_costs(PLAN, WORKLOAD, CLUSTER, replace(PROFILE, model="gpt"))


def test_microbatches_that_did_not_fit_are_refused() -> None:
    tight = replace(PROFILE, layers=(layer_times("T4", 4.0, max_rows=2), PROFILE.layers[1]))
    with pytest.raises(ProfileError, match=r"rank 2 \(T4\) has microbatches of 3 rows .* at most 2 fit"):
        make_costs(PLAN, WORKLOAD, CLUSTER, tight)
    # What fits is found out for each setting of recomputation.
    recomputed = layer_times("A100-40", 1.0, recompute="layer", max_rows=2)
    make_costs(PLAN, WORKLOAD, CLUSTER, replace(PROFILE, layers=(*PROFILE.layers, recomputed)))
    recomputed = replace(recomputed, max_rows=None, rows=(1,), forward_s=(1.0,), backward_s=(1.0,))
    recomputed = replace(recomputed, max_rows=1)
    with pytest.raises(ProfileError, match=r"rank 0 \(A100-40\) has microbatches of 2 rows .* at most 1 fit"):
        make_costs(PLAN, WORKLOAD, CLUSTER, replace(PROFILE, layers=(*PROFILE.layers, recomputed)))


def test_a_device_that_nobody_knows_is_refused() -> None:
    nodes = (CLUSTER.nodes[0], replace(CLUSTER.nodes[1], devices=("T5",)))
    with pytest.raises(ProfileError, match="no times of layer on T5"):
        make_costs(PLAN, WORKLOAD, replace(CLUSTER, nodes=nodes), PROFILE)


def test_a_missing_link_is_found_at_once() -> None:
    without = replace(CLUSTER, default_link=None)
    with pytest.raises(ClusterError, match="nothing says how nodes a and b are connected"):
        make_costs(PLAN, WORKLOAD, without, PROFILE)
    # Node c is not used, so that nothing need be known of it.
    enough = replace(without, node_links={("a", "b"): Link(10.0)})
    make_costs(PLAN, WORKLOAD, enough, PROFILE)
    nodes = (replace(CLUSTER.nodes[0], fabric=None), *CLUSTER.nodes[1:])
    with pytest.raises(ClusterError, match="devices of node a are connected"):
        make_costs(PLAN, WORKLOAD, replace(CLUSTER, nodes=nodes), PROFILE)


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ClusterError, match="3 ranks"):
        make_costs(PLAN, WORKLOAD, replace(CLUSTER, nodes=CLUSTER.nodes[:1]), PROFILE)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_every_action_of_a_schedule_has_its_cost(seed: int) -> None:
    plan = random_plan(random.Random(seed), max_groups=3, max_ranks_per_group=4, max_ministages_per_group=3)
    names = list(plan.ministage_of)
    workload = replace(WORKLOAD, layers=tuple((name, "layer") for name in names), ties=())
    nodes = tuple(Node(name=f"n{i}", devices=("T4",)) for i in range(plan.num_ranks))
    cluster = Cluster(nodes=nodes, default_link=Link(10.0))
    costs = make_costs(plan, workload, cluster, PROFILE)
    for rank, actions in build(ScheduleSpec(plan, masters=workload.masters)).items():
        rows = [microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank)]
        for action in actions:
            i, m = action.ministage, action.microbatch
            if action.kind.value in ("F", "B") and m is not None and m < len(rows):
                times = costs.forward_s if action.kind.value == "F" else costs.backward_s
                assert times[rank, i, rows[m]] > 0  # type: ignore[index]
            elif action.kind.value == "STEP":
                assert costs.update_s[rank, i] > 0  # type: ignore[index]
            elif action.peer is not None:
                costs.network.transfer(rank, action.peer, 1.0)
    assert len(costs.units) == len(costs.row_bytes) == plan.num_ministages
    assert [set(own) for own in costs.sizes] == [
        set(plan.ministages_of_rank(rank)) for rank in range(plan.num_ranks)
    ]


def test_what_units_cost_the_host() -> None:
    overheads = Overheads(
        action_s=(("F", 0.25),),
        unit_s=(("UNSHARD", 1.0), ("STEP", 2.0)),
        shared_unit_s=(("UNSHARD", 10.0), ("F", 100.0)),
        step_s=0.5,
    )
    profile = replace(PROFILE, overheads=overheads)
    costs = make_costs(PLAN, WORKLOAD, CLUSTER, profile)
    assert (costs.host_s, costs.step_host_s) == ({"F": 0.25}, 0.5)
    units = {i: len(costs.units[i]) for i in range(4)}
    assert units == {0: 3, 1: 1, 2: 1, 3: 2}
    # Group 0 has two ranks, group 1 one; computations gather by themselves with ZeRO 3 only.
    assert costs.unit_host_s == {
        **{("UNSHARD", i): (11.0 if i % 2 == 0 else 1.0) * number for i, number in units.items()},
        **{("STEP", i): 2.0 * number for i, number in units.items()},
    }
    zero3 = tuple(replace(group, zero=3, grad_reduce="microbatch") for group in PLAN.groups)
    costs = make_costs(replace(PLAN, groups=zero3).validate(), WORKLOAD, CLUSTER, profile)
    computing = {key: seconds for key, seconds in costs.unit_host_s.items() if key[0] == "F"}
    assert computing == {("F", 0): 300.0, ("F", 2): 100.0}


# -- tensor-parallel replicas ------------------------------------------------------------------

PAIR = Plan(
    global_batch=4,
    groups=(
        Group(ranks=((0, 1),), microbatches=(Microbatch(0, 0, 4),), recompute="layer"),
        Group(ranks=(2,), microbatches=(Microbatch(2, 0, 4),)),
    ),
    ministages=(
        Ministage(0, ("emb", "layers.0", "layers.1")),
        Ministage(1, ("layers.2", "layers.3")),
        Ministage(0, ("norm", "head")),
    ),
    sequence_length=512,
).validate()
FABRIC = Link(100.0, latency_s=0.5)
QUICK = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], fabric=FABRIC), *CLUSTER.nodes[1:]))
ROW_BYTES = 2 * 50
"""At the boundary of a layer."""


def ring_s(rows: int) -> float:
    """A ring of two: half of the activations over the fabric, and one latency."""
    half = rows * ROW_BYTES / 2
    return half / FABRIC.rate(half) + FABRIC.latency_s


def test_layers_share_their_time_and_meet_in_collectives() -> None:
    costs = make_costs(PAIR, WORKLOAD, QUICK, PROFILE)
    half = 2 * REACHED_OF_WHOLE
    for rank in (0, 1):
        # Half of 4 rows' second each, and two all-gathers and two reduce-scatters a layer.
        assert costs.forward_s[rank, 0, 4] == pytest.approx(2 * (4 * 1.0 / half + 4 * ring_s(4)))
        # Recomputed: backward and a second forward, in each of them as many collectives.
        assert costs.backward_s[rank, 0, 4] == pytest.approx(2 * (4 * 3.0 / half + 8 * ring_s(4)))
        # The head's FLOPs are twice a layer's, and each rank has half of the positions.
        assert costs.forward_s[rank, 2, 4] == pytest.approx(4 * 2.0 / 2)
    assert costs.forward_s[2, 1, 4] == 2 * 4 * 4.0
    assert any("not measured at tensor parallelism 2; 1/2 of its time" in line for line in costs.assumptions)
    measured = layer_times("A100-40", 0.75, tensor_parallel=2)
    found = make_costs(PAIR, WORKLOAD, QUICK, replace(PROFILE, layers=(*PROFILE.layers, measured)))
    assert found.forward_s[0, 0, 4] == pytest.approx(2 * (4 * 0.75 + 4 * ring_s(4)))
    assert not any("tensor parallelism" in line for line in found.assumptions)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_single_card_beside_a_replica_holds_as_many_pieces_more(zero: int) -> None:
    """600 parameters of each of four layers are cut; embedding (tied to the head) and norm are not."""
    firsts = (0, 4, 6)
    microbatches = tuple(Microbatch(rank, row, row + 1) for row, rank in enumerate(firsts))
    group = Group(ranks=((0, 1, 2, 3), (4, 5), 6), microbatches=microbatches, zero=zero)
    modules = tuple(name for name, _ in WORKLOAD.layers)
    plan = Plan(3, (group,), (Ministage(0, modules),), sequence_length=512).validate()
    sizes = [own[0] for own in measure_ministages(plan, WORKLOAD)]
    uncut = 1000 + 10
    rest = -(-1000 // 7) + -(-10 // 7) if zero else uncut
    for own, degree in zip(sizes, (4, 4, 4, 4, 2, 2, 1), strict=True):
        pieces = 4 * 600 // degree
        assert own.gathered_bytes == 2 * (uncut + pieces)
        assert own.shard_bytes == 2 * (rest + pieces // (3 if zero else 1))
        # What attention and feed-forward take in is of all positions, 50 elements of 2 bytes twice a layer.
        assert own.activation_bytes_per_row == 4 * (900 // degree + 2 * (ROW_BYTES - ROW_BYTES // degree))
    if zero:  # Every piece is held once.
        assert sum(own.shard_bytes // 2 - rest for own in sizes) == 4 * 600


def test_a_walk_counts_what_a_rank_receives_of_its_positions() -> None:
    sizes = measure_ministages(PAIR, WORKLOAD)
    lists = build(ScheduleSpec(PAIR))
    assert [own[i].boundary_bytes_per_row for own, i in zip(sizes, (0, 0, 1), strict=True)] == [50, 50, 100]
    received = [action for action in lists[2] if action.kind is Kind.RECV_F]
    assert [action.positions for action in received] == [(0, 256), (256, 512)]
    held = walk_memory(PAIR, 2, lists[2], sizes[2]).device_bytes
    first, second = map(lists[2].index, received)
    assert second == first + 1 and held[second] - held[first] == 4 * ROW_BYTES / 2
