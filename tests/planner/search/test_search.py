"""The whole search: what it returns, and how it ends."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from itertools import combinations, count
from types import SimpleNamespace

import device_problems
import pytest
from searched_problems import draw_problem, make_decoder

from zorselike.cost.profile import Profile
from zorselike.errors import ConfigError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.answer import NothingFitsError
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.rows import share_rows
from zorselike.planner.rows.microbatch_sums import sum_microbatches
from zorselike.planner.search import budget as search_budget
from zorselike.planner.search.search import search_plans


def make_problem(*nodes: Node, **changes: object) -> PlanProblem:
    cluster = Cluster(nodes=nodes, default_link=Link(3e9, 2e-5))
    settings = {"cluster": cluster, "global_batch": 32, "workload": make_decoder(), **changes}
    return draw_problem(random.Random(0), **settings)


def make_node(name: str, device: str, number: int, **changes: object) -> Node:
    return Node(name=name, devices=(device,) * number, fabric=Link(50e9, 5e-6), **changes)  # type: ignore[arg-type]


def test_plans_carry_estimates_and_come_best_first():
    nodes = (make_node("a", "A100-40", 1), make_node("b", "T4", 1))
    answer = search_plans(make_problem(*nodes, global_batch=8, workload=make_decoder(3)), budget_s=300)
    assert answer.ending == "finished"
    times = [planned.case.simulation.iteration_s for planned in answer.plans]
    assert times == sorted(times) or times[0] < 1.01 * min(times)  # The first may be the simpler one.
    best = answer.best
    estimates = best.case.plan.estimates
    assert estimates.iteration_s == best.case.simulation.iteration_s
    assert estimates.peak_memory_bytes == best.case.peak_bytes
    assert answer.gap >= 0 and 0 < best.share_of_ideal <= 1
    assert estimates.share_of_ideal == best.share_of_ideal
    plans = [own.case.plan for own in answer.plans]
    structures = {(plan.devices, plan.groups, plan.ministages) for plan in plans}
    assert len(structures) == len(answer.plans)


def test_the_ideal_is_that_of_any_plan_whatever_is_fixed():
    profile = device_problems.make_profile()
    faster = [
        replace(own, forward_s=own.forward_s[:1] * 3) for own in profile.layers
    ]  # The more rows at once.
    nodes = device_problems.make_nodes("a", "A100-40 A100-40")
    problem = device_problems.make_problem(nodes, profile=replace(profile, layers=tuple(faster)))
    fixed = replace(problem, fixed=Fixed(rows_per_microbatch=1))
    best = search_plans(fixed, budget_s=2).best
    devices = range(problem.cluster.num_devices)
    assert best.ideal_s == DeviceBounds(problem).bound_s(devices) < DeviceBounds(fixed).bound_s(devices)


def test_plans_of_devices_that_are_alike_take_the_time_of_all_of_them():
    """The search simulates one rank of those that are alike."""
    nodes = [make_node(f"a{i}", "A100-40", 4, nic=Link(3e9)) for i in range(2)]
    problem = make_problem(*nodes, make_node("b", "T4", 4, nic=Link(1e9)), workload=make_decoder(3))
    answer = search_plans(problem, budget_s=2)
    num_actions = []
    for planned in answer.plans:
        case = planned.case
        whole = problem.setting.simulate(case.plan)
        assert case.simulation.iteration_s == pytest.approx(whole.simulation.iteration_s, rel=1e-9)
        assert case.simulation.cost == pytest.approx(whole.simulation.cost, rel=1e-9)
        assert case.peak_bytes == whole.peak_bytes and case.host_bytes == whole.host_bytes
        assert {rank: [*actions] for rank, actions in case.actions.items()} == whole.actions
        num_actions.append((case.simulation.num_actions, whole.simulation.num_actions))
    assert any(own < of_all for own, of_all in num_actions)


def make_adapted(num_layers: int = 8) -> Workload:
    """Large frozen layers beside small trained ones, on which a row keeps much unless it is recomputed."""
    kind = LayerKind(
        name="layer",
        num_parameters=400_000_000,
        num_trainable=1_000_000,
        forward_flops_per_row=8e11,
        backward_flops_per_row=8e11,
        input_elements_per_row=2**20,
        output_elements_per_row=2**20,
        activation_bytes_per_row=2**29,
    )
    layers = tuple((f"layers.{i}", "layer") for i in range(num_layers))
    return Workload(
        model="adapted",
        sequence_length=1024,
        dtype="float16",
        layers=layers,
        kinds={"layer": kind},
        num_moments=2,
    )


def test_one_device_computes_nothing_twice_where_small_microbatches_fit():
    """Whole weights beside the sharded ones leave no room but with recomputation, nor do many rows at once:
    neither is as good as row after row, gathered layer by layer."""
    cluster = Cluster(nodes=(make_node("a", "T4", 1),))
    workload = make_adapted()
    problem = PlanProblem(
        workload=workload, cluster=cluster, profile=Profile(model="adapted"), global_batch=16
    )
    for fixed in (Fixed(), Fixed(recompute="none")):
        answer = search_plans(replace(problem, fixed=fixed), budget_s=5)
        (group,) = answer.best.case.plan.groups
        assert (group.zero, group.recompute, group.offload) == (3, "none", ())
        assert answer.best.share_of_ideal > 0.95


def test_plans_that_differ_in_alike_devices_alone_are_shown_once():
    """Two cards of one node, and two such nodes: whoever is first, it is the same plan to a reader."""
    nodes = [make_node("a", "A100-40", 2), make_node("b", "T4", 1), make_node("c", "T4", 1)]
    answer = search_plans(make_problem(*nodes, global_batch=8, workload=make_decoder(3)), budget_s=3, top=12)
    nodes_shown, kinds_shown = [], []
    for planned in answer.plans:
        plan = planned.case.plan
        node_of = {device.rank: device.node for device in plan.devices}
        seen = [name for name in dict.fromkeys(node_of.values()) if name != "a"]
        kind_of = {"a": "a"} | {name: f"T4 node {number}" for number, name in enumerate(seen)}

        def describe(names, plan=plan, node_of=node_of):
            groups = [
                (
                    sorted(names.get(node_of[rank], node_of[rank]) for rank in group.flat_ranks),
                    group.zero if len(group.ranks) > 1 else 0,
                    group.recompute,
                )
                for group in plan.groups
            ]
            return repr((groups, plan.bounds_in_flight))

        nodes_shown.append(describe({}))
        kinds_shown.append((f"{planned.case.simulation.iteration_s:.6g}", describe(kind_of)))
    assert len({*nodes_shown}) == len(nodes_shown) > 3
    assert len({*kinds_shown}) == len(kinds_shown)


def test_what_is_fixed_is_kept():
    fixed = Fixed(groups=((2, 3), (0,)), ministages=4, zero=2, recompute="layer", rows_per_microbatch=3)
    problem = make_problem(make_node("a", "A100-40", 2), make_node("b", "T4", 2), fixed=fixed)
    for planned in search_plans(problem, budget_s=2).plans:
        plan = planned.case.plan
        assert [[(d.node, d.local_rank) for d in plan.devices if d.rank in g.ranks] for g in plan.groups] == [
            [("b", 0), ("b", 1)],
            [("a", 0)],
        ]
        assert plan.num_ministages == 4
        assert {(group.zero, group.recompute) for group in plan.groups} == {(2, "layer")}
        assert max(m.num_rows for group in plan.groups for m in group.microbatches) <= 3


def test_microbatches_in_flight_are_bounded_where_memory_is_short():
    """All forward first, these two cards must recompute."""
    small = [make_node(name, "A10G", 1, memory_bytes=(8 * 2**30,)) for name in ("a", "b")]
    fixed = Fixed(groups=((0,), (1,)), offload=())
    problem = make_problem(*small, global_batch=64, workload=make_decoder(8, tokens=1024), fixed=fixed)
    found = {
        bounds: search_plans(
            replace(problem, fixed=replace(problem.fixed, bounds_in_flight=bounds)), budget_s=2, top=3
        )
        for bounds in (None, False, True)
    }
    for bounds in (False, True):
        assert {own.case.plan.bounds_in_flight for own in found[bounds].plans} == {bounds}
    step_s = {bounds: own.best.case.simulation.iteration_s for bounds, own in found.items()}
    assert step_s[True] < 0.97 * step_s[False]
    assert step_s[None] <= step_s[True] * 1.01
    costly = {
        bounds: any(group.recompute == "layer" for group in own.best.case.plan.groups)
        for bounds, own in found.items()
    }
    assert costly[False] and not costly[True]


def test_one_card_offloads_where_that_costs_less_than_computing_twice():
    """With few ministages of small microbatches, other numbers than those at which something fits first."""
    card = make_node("a", "RTX4090", 1)
    problem = make_problem(card, global_batch=16, workload=make_decoder(20, tokens=2048))
    found = search_plans(problem, budget_s=5).best.case
    (group,) = found.plan.groups
    assert group.recompute == "none" and "activations" in group.offload
    fixed = replace(problem, fixed=Fixed(recompute="layer"))
    recomputed = search_plans(fixed, budget_s=5).best.case
    assert found.simulation.iteration_s < 0.85 * recomputed.simulation.iteration_s


def test_few_microbatches_in_flight_are_found_where_offload_leaves_no_room():
    """Of few ministages the state that comes back to be updated takes more room than it had left."""
    cards = make_node("a", "RTX3090", 1), make_node("b", "RTX3070", 1)
    workload = make_decoder(22, tokens=1024)
    fixed = Fixed(groups=((0,), (1,)), bounds_in_flight=True)
    problem = make_problem(*cards, global_batch=16, workload=workload, fixed=fixed)
    plan = search_plans(problem, budget_s=1).best.case.plan
    assert plan.bounds_in_flight


def test_devices_that_cost_nothing_are_the_cheapest():
    nodes = (make_node("a", "A100-40", 2, price_per_hour=10.0), make_node("b", "T4", 1))
    found = search_plans(make_problem(*nodes, objective="cost"), budget_s=2).best.case
    assert found.simulation.cost == 0 and {device.node for device in found.plan.devices} == {"b"}


def test_reductions_are_waited_for_where_memory_has_no_room_beside_them():
    """And only there: whole gradients of two ministages do not fit one of these groups, those of one do."""

    def search(gib, overlap):
        nodes = [make_node(name, "T4", 2, memory_bytes=(int(gib * 2**30),) * 2) for name in ("a", "b")]
        fixed = Fixed(
            groups=((0, 1), (2, 3)),
            ministages=6,
            zero=2,
            recompute="layer",
            offload=(),
            overlap_grad_reduce=overlap,
        )
        problem = make_problem(*nodes, global_batch=16, workload=make_decoder(8), fixed=fixed)
        case = search_plans(problem, budget_s=2, top=1).best.case
        return [group.overlap_grad_reduce for group in case.plan.groups], case.simulation.iteration_s

    assert sorted(search(3.2, None)[0]) == [False, True]
    assert search(3.2, False)[0] == [False, False]
    with pytest.raises(NothingFitsError):
        search(3.2, True)
    beside, step_s = search(4.0, None)
    assert beside == [True, True]
    assert step_s < search(4.0, False)[1]


def test_plans_do_not_differ_by_how_groups_reduce_where_that_makes_no_difference():
    """A rank alone has nobody to wait for, and ZeRO 3 reduces inside its backwards."""
    nodes = (make_node("a", "A100-40", 1), make_node("b", "T4", 1))
    alone = make_problem(*nodes, fixed=Fixed(groups=((0,), (1,)), overlap_grad_reduce=False))
    sharded = make_problem(make_node("a", "T4", 2), fixed=Fixed(zero=3, overlap_grad_reduce=False))
    for problem in (alone, sharded):
        plan = search_plans(problem, budget_s=1, top=1).best.case.plan
        assert all(group.overlap_grad_reduce for group in plan.groups)


@pytest.mark.parametrize("reduces", [{"zero": 3}, {"zero": 2, "grad_reduce": "microbatch"}])
def test_microbatches_in_flight_are_bounded_where_each_is_reduced(reduces):
    fixed = Fixed(bounds_in_flight=True, **reduces)
    problem = make_problem(make_node("a", "A100-40", 2), make_node("b", "T4", 2), fixed=fixed)
    plan = search_plans(problem, budget_s=2, top=1).best.case.plan
    assert plan.bounds_in_flight and all(group.reduces_per_microbatch for group in plan.groups)


def test_what_needs_least_memory_is_found_however_short_the_time_is():
    """Slow searches must not say that nothing fits before they have looked at what needs least."""
    problem = make_problem(
        make_node("a", "A10G", 2, memory_bytes=(3 * 2**30,) * 2), make_node("b", "T4", 2), global_batch=16
    )
    assert search_plans(problem, budget_s=0.0, top=1).best.case.plan.num_ranks


def test_a_batch_of_tens_of_thousands_of_rows_is_planned_as_one_of_thousands(monkeypatch):
    """Such as images: tables of many times as many entries take so long that no search goes further than to
    what fits first."""
    tabulated = 0

    def sum_and_note(seconds: tuple[float, ...], num_rows: int) -> tuple[float, ...]:
        nonlocal tabulated
        tabulated = max(tabulated, num_rows * len(seconds))
        return sum_microbatches(seconds, num_rows)

    monkeypatch.setattr(share_rows, "sum_microbatches", sum_and_note)
    nodes, workload = (make_node("a", "A100-40", 1), make_node("b", "T4", 1)), make_decoder(2, tokens=16)
    few, many = 2**12, 2**15 + 5
    each_s, most = {}, {}
    for rows in (few, many):
        tabulated = 0
        problem = make_problem(*nodes, workload=workload, global_batch=rows)
        best = search_plans(problem, budget_s=0.1, top=1).best
        assert best.case.plan.global_batch == rows
        each_s[rows], most[rows] = best.case.simulation.iteration_s / rows, tabulated
    assert each_s[many] <= 1.5 * each_s[few] and most[many] <= 2 * most[few]


@pytest.mark.parametrize("bounds_in_flight", [None, True])
def test_a_machine_that_stands_still_is_no_reason_to_say_that_nothing_fits(monkeypatch, bounds_in_flight):
    fixed = Fixed(bounds_in_flight=bounds_in_flight)
    problem = make_problem(make_node("a", "A100-40", 2), make_node("b", "T4", 2), fixed=fixed)
    ticks = count()
    monkeypatch.setattr(
        search_budget,
        "time",
        SimpleNamespace(monotonic=lambda: 30.0 * next(ticks), process_time=time.process_time),
    )
    assert search_plans(problem, budget_s=2, top=1).ending == "budget"


def test_ctrl_c_gives_the_best_so_far():
    def interrupt(progress):
        if progress.num_estimated > 5:
            raise KeyboardInterrupt

    problem = make_problem(make_node("a", "A100-40", 4), make_node("b", "V100-16", 4))
    answer = search_plans(problem, budget_s=60, on_progress=Every(interrupt))
    assert answer.ending == "interrupted" and answer.plans


class Every:
    """Calls through once; the search tells of its progress ten times a second."""

    def __init__(self, then):
        self._then = then
        self._is_over = False

    def __call__(self, progress):
        if not self._is_over:
            try:
                self._then(progress)
            except KeyboardInterrupt:
                self._is_over = True
                raise


def test_nothing_fits_says_how_much_memory_would():
    node = make_node("a", "T4", 2, memory_bytes=(2**29, 2**29), host_memory_bytes=2**30)
    with pytest.raises(
        NothingFitsError, match=r"The smallest change that would: .* more than the 512.0 MiB of each T4"
    ):
        search_plans(make_problem(node, workload=make_decoder(3)), budget_s=5)


def test_one_ministage_is_recomputed_where_that_alone_fits():
    """What needs least memory otherwise, to offload activations, is nothing for it."""
    known = {"workload": make_decoder(14, tokens=4096), "fixed": Fixed(ministages=1), "global_batch": 8}
    node = make_node("a", "A100-40", 1, memory_bytes=(19 * 2**30,))
    answer = search_plans(make_problem(node, **known), budget_s=0.5)
    assert {group.recompute for group in answer.best.case.plan.groups} == {"layer"}
    with pytest.raises(
        NothingFitsError, match=r"The smallest change that would: .* GiB more than the 4.0 GiB"
    ):
        search_plans(make_problem(replace(node, memory_bytes=(2**32,)), **known), budget_s=0.5)


def test_a_model_of_a_single_layer_is_planned():
    whole = make_decoder()
    workload = replace(whole, layers=(("net", "layer"),), kinds={"layer": whole.kinds["layer"]})
    node = make_node("a", "A100-40", 2)
    answer = search_plans(make_problem(node, workload=workload, global_batch=4), budget_s=0.5)
    assert answer.best.case.plan.num_ministages == 1 and answer.best.case.fits


@pytest.mark.parametrize("types", [("T4",), ("RTX3070", "T4"), ("T4", "L4", "V100-16", "RTX3090")])
def test_what_would_fit_is_enough(types):
    """A node a type, each with little memory: what each lacks is told, and with it a plan is found."""
    nodes = {name: make_node(name, name, 1, memory_bytes=(2**28,)) for name in types}
    fixed = Fixed(groups=tuple((device,) for device in range(len(types))), offload=())
    known = {"workload": make_decoder(4, tokens=2048), "fixed": fixed, "global_batch": 8}
    with pytest.raises(NothingFitsError) as caught:
        search_plans(make_problem(*nodes.values(), **known), budget_s=2)
    told = re.findall(r"([\d.]+) ([MG])iB more than the 256.0 MiB of each ([\w-]+)", str(caught.value))
    assert len(told) == len(types)
    for lack, unit, name in told:
        size = 2**28 + int(float(lack) * {"M": 2**20, "G": 2**30}[unit])
        nodes[name] = replace(nodes[name], memory_bytes=(size,))
    assert search_plans(make_problem(*nodes.values(), **known), budget_s=1).plans


def test_where_hosts_alone_are_too_small_nothing_is_asked_of_devices():
    nodes = [make_node(name, "RTX4090", 1, host_memory_bytes=2**32) for name in ("a", "b")]
    workload = make_decoder(20, tokens=2048)
    problem = make_problem(*nodes, global_batch=16, workload=workload, is_mirrored=True)
    with pytest.raises(NothingFitsError) as caught:
        search_plans(problem, budget_s=5)
    assert "more than the 4.0 GiB of host memory of each of nodes a and b" in str(caught.value)
    assert "of each RTX4090" not in str(caught.value)


def test_a_search_that_ran_out_of_time_does_not_say_that_nothing_fits(monkeypatch):
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: 0.0, process_time=lambda: 30.0 * next(ticks))
    monkeypatch.setattr(search_budget, "time", clock)
    node = make_node("a", "T4", 2, memory_bytes=(2**29, 2**29), host_memory_bytes=2**30)
    with pytest.raises(NothingFitsError, match=r"^plan: nothing that fits was found in time"):
        search_plans(make_problem(node, workload=make_decoder(3)), budget_s=5)


def test_a_part_that_is_not_joined_is_left_out_and_that_is_said():
    nodes = (make_node("a", "T4", 1), make_node("b", "A100-40", 2), make_node("c", "A100-40", 2))
    cluster = Cluster(nodes=nodes, node_links={("b", "c"): Link(10e9)})
    answer = search_plans(replace(make_problem(*nodes), cluster=cluster), budget_s=5)
    assert {device.node for device in answer.best.case.plan.devices} <= {"b", "c"}
    assert [note for note in answer.notes if "node a" in note]


def test_devices_without_the_dtype_are_left_out_and_that_is_said():
    workload = replace(make_decoder(), dtype="bfloat16")
    answer = search_plans(
        make_problem(make_node("a", "A100-40", 1), make_node("b", "T4", 1), workload=workload), budget_s=5
    )
    assert {device.type for device in answer.best.case.plan.devices} == {"A100-40"}
    assert [note for note in answer.notes if note.startswith("T4 left out")]
    with pytest.raises(ProfileError, match="T4"):
        search_plans(make_problem(make_node("b", "T4", 1), workload=workload), budget_s=5)


def test_devices_on_which_the_model_takes_no_time_are_left_out_and_that_is_said():
    """As of a profile whose clock was too coarse: nothing can be divided by their speed."""
    profile = device_problems.make_profile(T4=float("inf"))
    nodes = [device_problems.make_nodes(device, device) for device in ("A100-40", "T4")]
    answer = search_plans(device_problems.make_problem(*nodes, profile=profile), budget_s=5)
    assert {device.type for device in answer.best.case.plan.devices} == {"A100-40"}
    assert "T4 left out: round takes no time on T4 by the profile; measure it again" in answer.notes
    with pytest.raises(ProfileError, match="takes no time on T4"):
        search_plans(device_problems.make_problem(nodes[1], profile=profile), budget_s=5)


def test_estimates_leave_no_devices_out():
    """Of all devices the estimate is the least, for it knows no egress: simulated they are far too dear."""
    sides = [
        device_problems.make_nodes(region, "A100-40", 2, 3.6, region=region, zone=region) for region in "ab"
    ]
    apart = device_problems.make_nodes("c", "T4", 1, 0.9, region="c", zone="c")
    pairs = [(one.name, other.name) for one, other in combinations([*sides[0], *sides[1]], 2)]
    links = {
        "node_links": dict.fromkeys(pairs, Link(10e9)),
        "egress_price_per_gb": {("a", "b"): 1000.0, ("b", "a"): 1000.0},
    }
    problem = device_problems.make_problem(
        *sides, apart, links=links, global_batch=8, max_cost_per_iteration=0.006
    )
    plan = search_plans(problem, budget_s=10).best.case.plan
    assert len({device.node[0] for device in plan.devices}) == 1


def test_no_plan_that_breaks_a_constraint_is_returned():
    nodes = (make_node("a", "A100-40", 1, price_per_hour=4.0), make_node("b", "T4", 4, price_per_hour=1.0))
    free = search_plans(make_problem(*nodes, objective="cost"), budget_s=5).best.case.simulation
    tight = make_problem(*nodes, max_cost_per_iteration=free.cost * 1.05)
    for planned in search_plans(tight, budget_s=0.01).plans:
        assert planned.case.simulation.cost <= free.cost * 1.05
    with pytest.raises(NothingFitsError):
        search_plans(make_problem(*nodes, max_cost_per_iteration=free.cost * 0.2), budget_s=1)


def test_contradictions_are_refused_before_work():
    node = make_node("a", "A100-40", 2)
    decoder = make_decoder()
    kinds = {name: replace(kind, forward_flops_per_row=0.0) for name, kind in decoder.kinds.items()}
    one = replace(decoder, layers=decoder.layers[1:2], ties=())
    for changes, message in (
        ({"global_batch": 0}, "batch of 0 rows"),
        ({"devices": ()}, "no devices may be used"),
        ({"max_devices": 0}, "at most 0 devices"),
        ({"objective": "cost"}, "no node of the cluster has a price"),
        ({"workload": replace(decoder, kinds=kinds)}, "no layer of decoder computes anything"),
        ({"fixed": Fixed(ministages=99)}, "99 ministages are fixed"),
        ({"fixed": Fixed(ministages=2), "workload": one}, "decoder has 1 layer, give 1$"),
        ({"fixed": Fixed(groups=((0,), (0,)))}, "a device twice"),
        ({"fixed": Fixed(zero=3, grad_reduce="once")}, "ZeRO 3 reduces after every microbatch"),
        ({"fixed": Fixed(zero=1, grad_reduce="microbatch")}, "ZeRO 1 keeps whole gradients"),
    ):
        with pytest.raises(ConfigError, match=message):
            search_plans(make_problem(node, **changes))
