"""Other systems' plans on our costs: they fit, keep their systems' rules, and say why where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Overheads, Profile, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.baselines.cephalo import spread_state
from zorselike.planner.baselines.even import make_data_parallel_plan
from zorselike.planner.baselines.replicas import Exchanges, cut_into_replicas
from zorselike.planner.baselines.stages import Stages
from zorselike.planner.baselines.systems import Baseline, plan_baselines
from zorselike.planner.candidate.to_plan import name_devices
from zorselike.planner.problem import Fixed, PlanProblem

NUM_LAYERS = 8
PARAMETERS = 10**7
ACTIVATIONS = 10**7
ELEMENTS = 10**5
LAYERS = tuple(f"layers.{i}" for i in range(NUM_LAYERS))
WORKLOAD = Workload(
    model="chain",
    sequence_length=100,
    dtype="float16",
    layers=(("embed", "embedding"), *((name, "layer") for name in LAYERS), ("head", "head")),
    kinds={
        "embedding": LayerKind(
            name="embedding",
            num_parameters=PARAMETERS // 10,
            forward_flops_per_row=0.0,
            output_elements_per_row=ELEMENTS,
        ),
        "layer": LayerKind(
            name="layer",
            num_parameters=PARAMETERS,
            forward_flops_per_row=1e9,
            input_elements_per_row=ELEMENTS,
            output_elements_per_row=ELEMENTS,
            activation_bytes_per_row=ACTIVATIONS,
        ),
        "head": LayerKind(
            name="head",
            num_parameters=PARAMETERS // 10,
            forward_flops_per_row=1e8,
            input_elements_per_row=ELEMENTS,
            activation_bytes_per_row=ELEMENTS,
        ),
    },
    max_tensor_parallel=8,
)
SECONDS_PER_ROW = {"A100-40": 0.01, "T4": 0.04}
"""Forward of one layer; its backward takes twice as long."""
FABRIC = 10e9
CLUSTER = Cluster(
    nodes=(
        Node(name="fast", devices=("A100-40",) * 2, fabric=Link(FABRIC)),
        Node(name="slow", devices=("T4",) * 4, fabric=Link(FABRIC)),
    ),
    default_link=Link(1e9),
)
NAMES = (
    "2 x A100-40 alone",
    "even shares",
    "Whale",
    "Megatron-like",
    "TorchTitan-Het",
    "HexiScale-like",
    "Cephalo-like",
)


def make_profile(*, max_rows: int | None = None, context_bytes: int = 0) -> Profile:
    rows = (1, 2, 64)
    layers = tuple(
        LayerTimes(
            kind="layer",
            device=device,
            dtype="float16",
            sequence_length=100,
            rows=rows,
            forward_s=tuple(each * n for n in rows),
            backward_s=tuple(2 * each * n for n in rows),
            max_rows=max_rows,
            source=Source("given"),
        )
        for device, each in SECONDS_PER_ROW.items()
    )
    return Profile(model="chain", layers=layers, overheads=Overheads(context_bytes=context_bytes))


def make_problem(
    *, cluster: Cluster = CLUSTER, global_batch: int = 48, recompute: Recompute | None = None
) -> PlanProblem:
    return PlanProblem(
        workload=WORKLOAD,
        cluster=cluster,
        profile=make_profile(),
        global_batch=global_batch,
        fixed=Fixed(recompute=recompute),
    )


def with_memory(fast: int, slow: int) -> Cluster:
    """The cluster with this much on each device of its nodes."""
    memory = (fast, slow)
    nodes = (
        replace(node, memory_bytes=(own,) * len(node.devices))
        for node, own in zip(CLUSTER.nodes, memory, strict=True)
    )
    return replace(CLUSTER, nodes=tuple(nodes))


def check_sound(baselines: tuple[Baseline, ...], global_batch: int) -> None:
    """Each is a valid plan of all rows that fits by the walk over all of its memory, or says why not."""
    for own in baselines:
        if own.simulated is None:
            assert own.reason, own.name
            continue
        own.simulated.plan.validate()
        assert own.simulated.plan.global_batch == global_batch
        overfull = [rank for rank in range(own.simulated.plan.num_ranks) if own.simulated.is_overfull(rank)]
        assert not overfull, (own.name, own.how)
        assert own.simulated.simulation.iteration_s > 0


def find(baselines: tuple[Baseline, ...], name: str) -> Baseline:
    return next(own for own in baselines if own.name == name)


# -- all of them -------------------------------------------------------------------------------


def test_all_are_planned_and_none_beats_what_the_devices_can_do() -> None:
    told: list[str] = []
    baselines = plan_baselines(make_problem(), told.append)
    assert told == [own.name for own in baselines]
    assert tuple(own.name for own in baselines) == NAMES
    check_sound(baselines, 48)
    rows_per_s = sum(
        1 / (NUM_LAYERS * 3 * SECONDS_PER_ROW[device]) for node in CLUSTER.nodes for device in node.devices
    )
    for own in baselines:
        assert own.simulated is not None, own.reason
        assert own.simulated.simulation.iteration_s > 48 / rows_per_s
        assert own.how


def test_most_layers_may_compute_nothing() -> None:
    """As activation functions that are modules of their own."""
    free = LayerKind(name="free", num_parameters=0, forward_flops_per_row=0.0)
    layers = tuple(
        entry
        for name, kind in WORKLOAD.layers
        for entry in ((name, kind), (f"free.{name}", "free"), (f"f.{name}", "free"))
    )
    workload = replace(WORKLOAD, layers=layers, kinds={**WORKLOAD.kinds, "free": free})
    problem = replace(make_problem(), workload=workload, profile=Profile(model="chain"))
    baselines = plan_baselines(problem)
    assert all(own.simulated is not None for own in baselines)
    check_sound(baselines, 48)


@settings(max_examples=12)
@given(
    nodes=st.lists(st.tuples(st.sampled_from(["A100-40", "T4"]), st.integers(1, 4)), min_size=1, max_size=3),
    global_batch=st.integers(1, 40),
    memory=st.sampled_from([10**8, 5 * 10**8, 10**9, 2 * 10**9, 10**11]),
)
def test_whatever_is_given_they_fit_or_say_why(
    nodes: list[tuple[str, int]], global_batch: int, memory: int
) -> None:
    cluster = Cluster(
        nodes=tuple(
            Node(
                name=f"n{i}",
                devices=(device,) * number,
                memory_bytes=(memory,) * number,
                fabric=Link(FABRIC),
            )
            for i, (device, number) in enumerate(nodes)
        ),
        default_link=Link(1e9),
    )
    check_sound(plan_baselines(make_problem(cluster=cluster, global_batch=global_batch)), global_batch)


def test_where_nothing_fits_device_and_bytes_are_named() -> None:
    for own in plan_baselines(make_problem(cluster=with_memory(10**7, 10**7))):
        assert own.simulated is None
        assert own.reason.startswith("OUT OF MEMORY: "), own
        assert "of node" in own.reason and own.reason.endswith("of 9.5 MiB"), own


def test_only_the_devices_that_may_be_used_are() -> None:
    problem = replace(make_problem(), devices=(1, 3, 4), max_devices=2)
    for own in plan_baselines(problem):
        assert own.simulated is not None, own.reason
        assert len(own.simulated.costs.places) <= 2
        assert set(own.simulated.device_types) <= {"A100-40", "T4"}
    even = find(plan_baselines(problem), "even shares").simulated
    assert even is not None
    assert even.costs.places == (Place(0, 1), Place(1, 1))


def test_a_fixed_recomputation_is_heeded() -> None:
    for again in ("none", "layer"):
        for own in plan_baselines(make_problem(recompute=again)):  # type: ignore[arg-type]
            assert own.simulated is not None
            assert {group.recompute for group in own.simulated.plan.groups} == {again}


def test_devices_that_nothing_joins_are_a_reason_not_an_error() -> None:
    baselines = plan_baselines(make_problem(cluster=replace(CLUSTER, default_link=None)))
    alone = find(baselines, NAMES[0])
    assert alone.simulated is not None
    for own in baselines[1:]:
        assert own.simulated is None
        assert "connected" in own.reason or "joined" in own.reason, own


def test_rows_that_the_profile_says_do_not_fit_are_not_planned() -> None:
    problem = replace(make_problem(), profile=make_profile(max_rows=2))
    for own in plan_baselines(problem):
        assert own.simulated is not None, own
    even = find(plan_baselines(problem), "even shares").simulated
    assert even is not None
    assert max(m.num_rows for m in even.plan.groups[0].microbatches) <= 2


# -- one by one --------------------------------------------------------------------------------


def test_whale_shares_by_peaks() -> None:
    case = find(plan_baselines(make_problem(global_batch=94)), "Whale").simulated
    assert case is not None
    (group,) = case.plan.groups
    rows = [sum(m.num_rows for m in own) for own in group.microbatches_by_rank.values()]
    # 312 and 65 TFLOP/s: 94 rows in shares of 4.8 to 1, twice and four times.
    assert rows[:2] == [33, 33]
    assert set(rows[2:]) == {7}


def test_megatron_has_a_rectangle_and_as_many_layers_everywhere() -> None:
    own = find(plan_baselines(make_problem(cluster=with_memory(6 * 10**8, 6 * 10**8))), "Megatron-like")
    assert own.simulated is not None, own.reason
    plan = own.simulated.plan
    assert len(plan.groups) > 1, "one stage does not fit"
    assert len({len(group.ranks) for group in plan.groups}) == 1
    assert {group.zero for group in plan.groups} == {1}
    layers = {sum(name in LAYERS for name in stage.modules) for stage in plan.ministages}
    assert len(layers) == 1
    assert plan.ministages[0].modules[0] == "embed" and plan.ministages[-1].modules[-1] == "head"


def test_megatron_takes_parts_of_the_model_in_turn_where_that_is_faster() -> None:
    """Two stages of one device and few microbatches: half of the pipeline's filling is left."""
    nodes = tuple(replace(node, devices=node.devices[:1]) for node in with_memory(11 * 10**8, 0).nodes[:1])
    cluster = Cluster(nodes=(*nodes, replace(nodes[0], name="other")), default_link=Link(1e12))
    own = find(plan_baselines(make_problem(cluster=cluster, global_batch=4)), "Megatron-like")
    assert own.simulated is not None, own.reason
    assert own.simulated.schedule == "interleaved" and "in 4 parts" in own.how, own.how
    assert [stage.group for stage in own.simulated.plan.ministages] == [0, 1] * 4


def test_megatron_has_no_stages_of_different_layers() -> None:
    """One stage of three devices does not fit; for three stages 8 layers are no multiple."""
    nodes = (Node(name="three", devices=("T4",) * 3, memory_bytes=(85 * 10**7,) * 3, fabric=Link(FABRIC)),)
    baselines = plan_baselines(make_problem(cluster=Cluster(nodes=nodes)))
    megatron, titan = (find(baselines, name) for name in ("Megatron-like", "TorchTitan-Het"))
    assert megatron.simulated is None and megatron.reason.startswith("OUT OF MEMORY")
    assert titan.simulated is not None, titan.reason
    assert len(titan.simulated.plan.groups) == 3


def test_torchtitan_has_a_rectangle_and_uneven_layers() -> None:
    own = find(plan_baselines(make_problem()), "TorchTitan-Het")
    assert own.simulated is not None
    plan = own.simulated.plan
    assert len({len(group.ranks) for group in plan.groups}) == 1
    assert {group.zero for group in plan.groups} == {2}
    assert own.simulated.schedule == "1f1b"
    for group in plan.groups:
        rows = {sum(m.num_rows for m in mine) for mine in group.microbatches_by_rank.values()}
        assert max(rows) - min(rows) <= 1 * group.max_microbatches
    if len(plan.groups) > 1:
        layers = {len(stage.modules) for stage in plan.ministages}
        assert len(layers) > 1, "fast stages have more"


def test_hexiscale_is_no_worse_than_torchtitan_where_stages_may_differ() -> None:
    baselines = plan_baselines(make_problem())
    titan, hexi = (find(baselines, name).simulated for name in ("TorchTitan-Het", "HexiScale-like"))
    assert titan is not None and hexi is not None
    assert hexi.simulation.iteration_s <= 1.01 * titan.simulation.iteration_s


def test_cephalo_puts_state_where_there_is_room() -> None:
    roomy = find(plan_baselines(make_problem()), "Cephalo-like").simulated
    assert roomy is not None
    even_bytes = {own[0].state_bytes for own in roomy.costs.sizes}
    assert len(even_bytes) == 1
    total = sum(own[0].state_bytes for own in roomy.costs.sizes)
    tight = with_memory(2 * 10**9, 2 * 10**8)
    case = find(plan_baselines(make_problem(cluster=tight)), "Cephalo-like").simulated
    assert case is not None
    state = [own[0].state_bytes for own in case.costs.sizes]
    assert min(state[:2]) > 2 * max(state[2:])
    assert sum(state) == pytest.approx(total, rel=1e-5)
    updates = case.costs.update_s
    assert updates[0, 0] / updates[1, 0] == pytest.approx(1.0)
    even = find(plan_baselines(make_problem(cluster=tight)), "even shares")
    assert even.simulated is None, "that is what uneven shards are for"


def test_state_without_room_is_there_all_the_same() -> None:
    """Nothing vanishes: what no rank has room for is on all of them, and found not to fit."""
    cluster = with_memory(10**7, 10**7)
    problem = make_problem(cluster=cluster)
    plan = make_data_parallel_plan(WORKLOAD, cluster, cluster.places, (8,) * 6, zero=3, num_microbatches=8)
    costs = problem.setting.find_costs(plan)
    spread = spread_state(plan, problem.setting, costs)
    before, after = (sum(own[0].state_bytes for own in each.sizes) for each in (costs, spread))
    assert after == pytest.approx(before, rel=1e-5)


# -- tensor parallelism ------------------------------------------------------------------------


def make_stages(problem: PlanProblem, groups: list[list[Place]], degree: int) -> Stages:
    inputs = problem.setting
    shape = cut_into_replicas(problem.cluster, groups, degree)
    clock = LayerTimeModel(problem.profile, problem.workload)
    return Stages(inputs, shape, Exchanges(inputs), clock, evenly=True)


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_a_stage_of_replicas_takes_what_its_plan_costs(recompute: Recompute) -> None:
    problem = make_problem()
    slow = [place for place in CLUSTER.places if place.node == 1]
    stages = make_stages(problem, [slow[:2], slow[2:]], 2)
    assert [[len(members) for members in group] for group in stages.groups] == [[2], [2]]
    assert stages.ranks == [[(0, 1)], [(2, 3)]]
    modules = [name for name, _ in WORKLOAD.layers]
    plan = Plan(
        4,
        tuple(
            Group(tuple(ranks), (Microbatch(ranks[0][0], 0, 4),), recompute=recompute)
            for ranks in stages.ranks
        ),
        (Ministage(0, tuple(modules[:5])), Ministage(1, tuple(modules[5:]))),
        devices=name_devices(CLUSTER, stages.places),
        sequence_length=100,
    ).validate()
    costs = problem.setting.find_costs(plan)
    for g, ranks in enumerate(stages.ranks):
        kinds = [WORKLOAD.kind_of[name].name for name in plan.ministages[g].modules]
        expected = sum(stages.seconds(stages.groups[g][0], kind, 4, recompute) for kind in kinds)
        for rank in ranks[0]:
            assert costs.forward_s[rank, g, 4] + costs.backward_s[rank, g, 4] == pytest.approx(expected)


def test_a_shared_fabric_carries_all_replicas_at_once() -> None:
    shared = replace(
        CLUSTER,
        nodes=(CLUSTER.nodes[0], replace(CLUSTER.nodes[1], fabric_total_bytes_per_s=FABRIC)),
    )
    slow = [place for place in shared.places if place.node == 1]
    exchanges = Exchanges(make_problem(cluster=shared).setting)
    alone = exchanges.seconds([tuple(slow[:2])], 10**9)
    both = exchanges.seconds([tuple(slow[:2]), tuple(slow[2:])], 10**9)
    assert both == pytest.approx(2 * alone)


def test_replicas_are_of_one_type_within_a_node() -> None:
    mixed = Cluster(
        nodes=(Node(name="a", devices=("A100-40", "T4", "T4"), fabric=Link(FABRIC)),),
    )
    (whole,) = cut_into_replicas(mixed, [mixed.places], 2)
    assert {*map(len, whole)} == {1}
    parts = cut_into_replicas(mixed, [mixed.places[1:], mixed.places[:1]], 2)
    assert {len(members) for group in parts for members in group} == {1}, "a node has one degree"
    assert cut_into_replicas(mixed, [mixed.places[1:]], 2) == ((tuple(mixed.places[1:]),),)


def test_models_that_cannot_be_cut_have_single_devices() -> None:
    whole = replace(make_problem(), workload=replace(WORKLOAD, max_tensor_parallel=1))
    for baseline in plan_baselines(whole):
        assert baseline.simulated is None or not baseline.simulated.plan.has_replicas


def test_tensor_parallelism_makes_room() -> None:
    """A layer's state does not fit on a card, and there is nobody to share it with but inside a replica."""
    node = Node(
        name="a", devices=("T4",) * 4, memory_bytes=(9 * 10**8,) * 4, fabric=Link(1e15), nic=Link(1e8)
    )
    big = replace(
        WORKLOAD,
        layers=(("embed", "embedding"), ("layers.0", "layer"), ("head", "head")),
        kinds=WORKLOAD.kinds | {"layer": replace(WORKLOAD.kinds["layer"], num_parameters=10**8)},
    )
    problem = PlanProblem(
        workload=big, cluster=Cluster(nodes=(node,)), profile=make_profile(), global_batch=8
    )
    titan = find(plan_baselines(problem), "TorchTitan-Het")
    assert titan.simulated is not None, titan.reason
    assert " x 4" in titan.how or " x 2" in titan.how
    assert titan.simulated.plan.has_replicas
