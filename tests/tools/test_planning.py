"""What holds the planner's answers: random questions, all plans of small ones, and the judge of answers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import volume

from tools import check_planner
from tools.bench.desks import list_desk_questions
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Estimates, Plan
from zorselike.planner.answer import PlanAnswer, Planned, Progress
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import ONE_STEP
from zorselike.simulator.report.speeds import measure_speeds

from planner_oracle.clusters import WIDE, Limits, draw_cluster
from planner_oracle.every_plan import Options, Shape, cut, divide, find_mirrors, list_shapes, make_plan
from planner_oracle.fitting import count_tries, find_fit, list_options
from planner_oracle.optimum import find_optimum, fits
from planner_oracle.problems import draw_problem, find_ideal_s
from planner_oracle.small_cases import draw_case
from planner_oracle.verdict import SAME, find_faults
from planner_oracle.workloads import make_chain

ONE_BY_ONE = Options(zero=2, grad_reduce="once", recompute="none", offload=(), rows_per_microbatch=1)


def make_problem(
    *devices: str, num_layers: int = 3, rows: int = 3, memory_bytes: int | None = None, **others: object
) -> PlanProblem:
    """Each device a node by itself."""
    workload = make_chain([1.0] * num_layers, width=256, tokens=128, dtype="float16")
    nodes = tuple(
        Node(
            name=f"n{i}",
            devices=(device,),
            memory_bytes=() if memory_bytes is None else (memory_bytes,),
            host_memory_bytes=2**30,
        )
        for i, device in enumerate(devices)
    )
    return PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=nodes, default_link=Link(1e9)),
        profile=Profile(model="chain"),
        global_batch=rows,
        **others,  # type: ignore[arg-type]
    )


# -- random questions ----------------------------------------------------------------------


@volume.parametrize("seed", range(40))
def test_questions_are_drawn_within_their_limits_and_are_askable(seed: int) -> None:
    problem = draw_problem(seed, Limits(max_devices=12, max_types=3, max_regions=2)).problem
    problem.check()
    assert problem == draw_problem(seed, Limits(max_devices=12, max_types=3, max_regions=2)).problem
    assert 1 <= problem.cluster.num_devices <= 12
    assert len({device for node in problem.cluster.nodes for device in node.devices}) <= 3
    assert len({node.region for node in problem.cluster.nodes}) <= 2
    clock = LayerTimeModel(problem.profile, problem.workload)
    for place in problem.cluster.places:
        for kind in problem.workload.kinds:
            assert clock.forward_s(kind, problem.cluster.device_type(place), 1, "none") >= 0
    assert find_ideal_s(problem) > 0


def test_questions_about_a_few_cards_are_askable() -> None:
    asked = list_desk_questions()
    assert len({question.name for question in asked}) == len(asked)
    for question in asked:
        problem = question.make()
        problem.check()
        assert 2 <= len(problem.usable) <= 5


def test_questions_differ_in_all_that_planners_must_bear() -> None:
    problems = [draw_problem(seed).problem for seed in range(300)]
    clusters = [problem.cluster for problem in problems]
    assert max(cluster.num_devices for cluster in clusters) > 50
    assert {len({node.region for node in cluster.nodes}) for cluster in clusters} == {1, 2, 3}
    assert max(len({d for node in cluster.nodes for d in node.devices}) for cluster in clusters) >= 5
    assert any(len({len(node.devices) for node in cluster.nodes}) > 1 for cluster in clusters), "ragged"
    assert any(len({*node.devices}) > 1 for cluster in clusters for node in cluster.nodes), "mixed nodes"
    assert any(cluster.default_link is None for cluster in clusters), "unconnected"
    assert any(problem.global_batch < problem.cluster.num_devices for problem in problems)
    assert any(problem.global_batch > 10 * problem.cluster.num_devices for problem in problems)
    assert any(problem.objective == "cost" for problem in problems)
    assert any(problem.workload.ties for problem in problems)
    assert any(kind.trainable < kind.num_parameters for p in problems for kind in p.workload.kinds.values())
    for field in (
        "groups",
        "ministages",
        "rows_per_microbatch",
        "zero",
        "grad_reduce",
        "recompute",
        "offload",
    ):
        assert any(getattr(problem.fixed, field) is not None for problem in problems), field


def test_a_cluster_in_two_parts_has_links_inside_each_only() -> None:
    rng = random.Random(1)
    clusters = [draw_cluster(rng, ["T4", "L4"], WIDE) for _ in range(100)]
    for cluster in (own for own in clusters if own.default_link is None):
        names = [node.name for node in cluster.nodes]
        reached = {names[0]}
        for _ in names:
            reached |= {name for pair in cluster.node_links if reached & {*pair} for name in pair}
        assert reached < {*names}
        assert len(names) <= len(cluster.node_links) + 2


# -- all plans -----------------------------------------------------------------------------


def test_rows_and_layers_are_divided_in_every_way() -> None:
    assert list(divide(2, 2)) == [(0, 2), (1, 1), (2, 0)]
    assert len(list(divide(8, 4))) == math.comb(11, 3)
    assert list(cut(4, 2)) == [(1, 3), (2, 2), (3, 1)]
    assert sum(len(list(cut(6, number))) for number in range(1, 7)) == 2**5


def test_shapes_of_two_unlike_devices_are_counted_by_hand() -> None:
    """Alone, each has 4 cuts of 3 layers. In a group, 4 cuts and 4 divisions of 3 rows. In two groups, two
    orders and the 3 cuts into at least 2 ministages."""
    assert len(list(list_shapes(make_problem("A100-40", "T4")))) == 2 * 4 + 4 * 4 + 2 * 3


def test_equal_devices_change_places_once() -> None:
    """One alone instead of two, the divisions (0, 3) and (1, 2) without (3, 0) and (2, 1), one order."""
    assert len(list(list_shapes(make_problem("T4", "T4")))) == 4 + 2 * 4 + 3


@pytest.mark.parametrize("devices", [("T4", "T4", "L4"), ("T4", "L4", "A10G"), ("T4", "T4", "T4")])
def test_no_shape_is_the_mirror_of_another(devices: tuple[str, ...]) -> None:
    problem = make_problem(*devices, num_layers=2, rows=2)
    mirrors = find_mirrors(problem.cluster)

    def mirror(shape: Shape, order: tuple[int, ...]) -> tuple[object, ...]:
        groups = tuple(
            frozenset((order[device], rows) for device, rows in zip(group, own, strict=True))
            for group, own in zip(shape.groups, shape.rows, strict=True)
        )
        return groups, shape.sizes

    shapes = list(list_shapes(problem))
    classes = [frozenset(mirror(shape, order) for order in mirrors) for shape in shapes]
    assert len({*classes}) == len(shapes)
    unlike = make_problem("T4", "L4", "A10G", num_layers=2, rows=2)
    assert len(frozenset().union(*classes)) == len(list(list_shapes(unlike))), "each is the mirror of one"


def test_devices_of_a_node_are_not_those_of_another() -> None:
    fabric = Link(1e10)
    nodes = (
        Node(name="a", devices=("T4", "T4"), fabric=fabric),
        Node(name="b", devices=("T4",)),
        Node(name="c", devices=("T4",)),
    )
    mirrors = find_mirrors(Cluster(nodes=nodes, default_link=Link(1e9)))
    assert {*mirrors} == {(0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2)}


@pytest.mark.parametrize("seed", range(5))
def test_every_shape_is_a_valid_plan_of_its_own(seed: int) -> None:
    case = draw_case(seed, max_plans=150)
    plans = [make_plan(case.problem, shape, case.options).validate() for shape in list_shapes(case.problem)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    for plan in plans:
        assert sum(len(ministage.modules) for ministage in plan.ministages) == len(
            case.problem.workload.layers
        )


def test_what_is_fixed_bounds_the_shapes() -> None:
    problem = make_problem("A100-40", "T4", "L4", fixed=Fixed(groups=((2,), (0,)), ministages=3))
    assert [shape.groups for shape in list_shapes(problem)] == [((2,), (0,))]
    assert all(len(s.groups) == 1 for s in list_shapes(make_problem("A100-40", "T4", max_devices=1)))
    usable = {
        d for s in list_shapes(make_problem("T4", "L4", "T4", devices=(1, 2))) for g in s.groups for d in g
    }
    assert usable == {1, 2}


@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_out_by_the_bound_is_never_the_best(seed: int) -> None:
    case = draw_case(seed, max_plans=40)
    pruned = find_optimum(case.problem, case.options)
    whole = find_optimum(case.problem, case.options, prunes=False)
    assert whole.num_simulated == whole.num_plans == pruned.num_plans
    assert (pruned.case is None) == (whole.case is None)
    if pruned.case is not None and whole.case is not None:
        assert pruned.case.simulation.iteration_s == whole.case.simulation.iteration_s


def test_the_optimum_is_the_best_of_all_that_fit() -> None:
    free = find_optimum(make_problem("A100-40", "T4"), ONE_BY_ONE)
    assert free.case is not None
    peak = max(free.case.peak_bytes)
    tight = find_optimum(make_problem("A100-40", "T4", memory_bytes=peak - 1), ONE_BY_ONE)
    assert tight.case is not None
    assert fits(tight.case)
    assert tight.case.simulation.iteration_s > free.case.simulation.iteration_s
    assert find_optimum(make_problem("A100-40", "T4", memory_bytes=10_000), ONE_BY_ONE).case is None


# -- whether anything fits -----------------------------------------------------------------


def test_the_last_byte_decides_whether_anything_fits() -> None:
    """Devices with the least that any plan needs, and with one byte less."""
    fixed = Fixed(recompute="layer")
    problem = make_problem("T4", "T4", num_layers=2, rows=2, fixed=fixed)
    tried = [
        max(
            problem.setting.simulate(
                make_plan(problem, shape, replace(options, rows_per_microbatch=rows))
            ).peak_bytes
        )
        for shape, options, rows in product(list_shapes(problem), list_options(fixed), (1, 2))
    ]
    assert len(tried) == 2 * count_tries(problem)
    least = min(tried)
    case = find_fit(make_problem("T4", "T4", num_layers=2, rows=2, fixed=fixed, memory_bytes=least))
    assert case is not None
    assert fits(case)
    less = make_problem("T4", "T4", num_layers=2, rows=2, fixed=fixed, memory_bytes=least - 1)
    assert find_fit(less) is None


def test_groups_have_options_of_their_own_where_a_host_is_small() -> None:
    """One node without memory for what is offloaded, one whose device is too small without that."""
    fixed = Fixed(groups=((0,), (1,)), ministages=4, zero=2, grad_reduce="once", recompute="none")
    problem = make_problem("T4", "T4", num_layers=4, rows=2, fixed=fixed)
    shape = next(iter(list_shapes(problem)))
    case = problem.setting.simulate(make_plan(problem, shape, ONE_BY_ONE))
    peak_bytes, buffer_bytes = case.peak_bytes, case.host_bytes[0]  # The latter of transfers over the host.
    first, second = problem.cluster.nodes
    nodes = (
        replace(first, host_memory_bytes=buffer_bytes),
        replace(second, memory_bytes=(peak_bytes[1] - 1,)),
    )
    problem = replace(problem, cluster=replace(problem.cluster, nodes=nodes))
    case = find_fit(problem)
    assert case is not None
    assert case.plan.groups[0].offload == ()
    assert case.plan.groups[1].offload
    assert find_fit(replace(problem, fixed=replace(fixed, offload=()))) is None
    assert find_fit(replace(problem, fixed=replace(fixed, offload=case.plan.groups[1].offload))) is None


# -- the judge -----------------------------------------------------------------------------


def make_answer(problem: PlanProblem, plan: Plan, **changes: object) -> PlanAnswer:
    """As the search gives it."""
    case = problem.setting.simulate(plan)
    simulation = case.simulation
    clock = LayerTimeModel(problem.profile, problem.workload)
    ideal_s = problem.global_batch / sum(measure_speeds(plan, problem.workload, problem.cluster, clock))
    estimates = Estimates(
        iteration_s=simulation.iteration_s,
        peak_memory_bytes=case.peak_bytes,
        cost_per_iteration=simulation.cost,
        share_of_ideal=ideal_s / simulation.iteration_s,
        limited_by=("Waiting limits.",),
    )
    planned = replace(case, plan=replace(plan, estimates=replace(estimates, **changes)))
    progress = Progress(
        elapsed_s=0.0, num_estimated=1, num_simulated=1, best_s=None, best_cost=None, bound_s=ideal_s / 2
    )
    answer = Planned(case=planned, grouping="by hand", ideal_s=ideal_s)
    return PlanAnswer(plans=(answer,), progress=progress, ending="finished")


SHAPE = Shape(groups=((0,), (1,)), rows=((3,), (3,)), sizes=(1, 1, 1))


def test_a_right_answer_has_no_faults() -> None:
    problem = make_problem("A100-40", "T4")
    assert find_faults(problem, make_answer(problem, make_plan(problem, SHAPE, ONE_BY_ONE))) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"iteration_s": 1.0}, "its step is promised as 1.0"),
        ({"peak_memory_bytes": (1, 1)}, "memory is promised as (1, 1)"),
        ({"share_of_ideal": 0.5}, "its share of the ideal is promised as 0.5"),
        ({"limited_by": ()}, "of the ideal and names no cause"),
    ],
)
def test_a_promise_that_is_not_kept_is_a_fault(changes: dict[str, object], fault: str) -> None:
    problem = make_problem("A100-40", "T4")
    answer = make_answer(problem, make_plan(problem, SHAPE, ONE_BY_ONE), **changes)
    assert any(fault in found for found in find_faults(problem, answer))


def test_a_time_of_one_step_is_simulated_so_and_must_be_said() -> None:
    """A pipeline whose steps overlap: two in a row take less than two from a standing start."""
    problem = make_problem("A100-40", "T4")
    plan = make_plan(problem, SHAPE, ONE_BY_ONE)
    several, one = problem.setting.simulate(plan), problem.setting.simulate(plan, num_steps=1)
    assert one.simulation.iteration_s > several.simulation.iteration_s * (1 + SAME)
    answer = make_answer(problem, plan, iteration_s=one.simulation.iteration_s)
    bound_s = answer.plans[0].ideal_s
    estimates = replace(
        answer.plans[0].case.plan.estimates, share_of_ideal=bound_s / one.simulation.iteration_s
    )
    case = replace(one, plan=replace(plan, estimates=estimates))
    planned = Planned(case=case, grouping="by hand", ideal_s=bound_s, is_first_step=True)
    silent = replace(answer, plans=(planned,))
    assert find_faults(problem, silent) == ["its time is that of one step, and it does not say so"]
    assert find_faults(problem, replace(silent, notes=(ONE_STEP,))) == []
    assert find_faults(problem, replace(silent, plans=(replace(planned, is_first_step=False),)))


@pytest.mark.parametrize(
    ("others", "fault"),
    [
        ({"memory_bytes": 1_000_000}, "of 1000000 bytes"),
        ({"max_devices": 1}, "2 devices, more than 1"),
        ({"devices": (0,)}, "devices [1] may not be used"),
        ({"min_throughput": 1e6}, "iterations/s, fewer than 1e+06"),
        ({"fixed": Fixed(zero=3)}, "zero is 2, fixed is 3"),
        ({"fixed": Fixed(ministages=2)}, "3 ministages, fixed are 2"),
        ({"fixed": Fixed(groups=((1,), (0,)))}, "fixed are"),
        ({"fixed": Fixed(offload=("params",))}, "offloads ()"),
        ({"rows": 3, "fixed": Fixed(grad_reduce="microbatch")}, "grad_reduce is once"),
    ],
)
def test_what_was_asked_for_and_is_not_kept_is_a_fault(others: dict[str, object], fault: str) -> None:
    plan = make_plan(make_problem("A100-40", "T4"), SHAPE, ONE_BY_ONE)
    problem = make_problem("A100-40", "T4", **others)  # type: ignore[arg-type]
    assert any(fault in found for found in find_faults(problem, make_answer(problem, plan)))


def test_bounds_order_and_doubles_are_looked_at() -> None:
    problem = make_problem("A100-40", "T4")
    fast = make_answer(problem, make_plan(problem, SHAPE, ONE_BY_ONE))
    slow = make_answer(problem, make_plan(problem, Shape(((1,), (0,)), ((3,), (3,)), (1, 1, 1)), ONE_BY_ONE))
    assert fast.best.case.simulation.iteration_s < slow.best.case.simulation.iteration_s
    assert find_faults(problem, replace(fast, plans=(*fast.plans, *slow.plans))) == []
    wrong_order = find_faults(problem, replace(fast, plans=(*slow.plans, *fast.plans)))
    assert any("not in the order" in fault for fault in wrong_order)
    doubled = find_faults(problem, replace(fast, plans=fast.plans * 2))
    assert any("twice" in fault for fault in doubled)
    above = replace(fast, progress=replace(fast.progress, bound_s=1e3))
    assert any("the bound of 1000 s" in fault for fault in find_faults(problem, above))


def test_one_question_is_written_as_well(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    assert check_planner.main(["--seed", "0", "--budget", "0.1", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["seed"] == 0
