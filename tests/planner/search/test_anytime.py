"""More time never makes an answer worse, and devices that do not pay are left out."""

from __future__ import annotations

import random
from dataclasses import replace

import device_problems
import pytest
import volume
from searched_problems import draw_problem, make_decoder

from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.baselines.even import find_even
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.choice import Choice
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search import search
from zorselike.planner.search.budget import BudgetOverError, SearchBudget
from zorselike.planner.search.enumerator import NAMED_TURN, Refinements
from zorselike.planner.search.evaluator import EstimatedCandidate
from zorselike.planner.search.paying import PAYS, choose_paying, describe_unused
from zorselike.planner.search.score import Score
from zorselike.planner.search.search import search_plans
from zorselike.planner.search.top_k import SimulatedCandidate, TopK
from zorselike.simulator import events
from zorselike.simulator.simulated_plan import SimulatedPlan

BUDGETS_S = (0.1, 0.4, 0.8, 1.6, 3.0)
"""Counted by looks at the clock (`support/counted_time.py`)."""


def draw_priced(seed: int) -> PlanProblem:
    """A few nodes, of which half the problems know prices."""
    rng = random.Random(seed)
    problem = draw_problem(rng, global_batch=rng.choice([8, 16]))
    price = rng.choice([0.0, 2.0])
    nodes = tuple(
        Node(
            name=node.name,
            devices=node.devices,
            fabric=node.fabric,
            nic=node.nic,
            host_memory_bytes=node.host_memory_bytes,
            price_per_hour=price * rng.uniform(0.5, 4.0),
        )
        for node in problem.cluster.nodes
    )
    wants = rng.choice(["throughput", "cost"]) if price else "throughput"
    return PlanProblem(
        workload=make_decoder(4),
        cluster=Cluster(nodes=nodes, default_link=Link(12e9, 2e-5)),
        profile=problem.profile,
        global_batch=problem.global_batch,
        objective=wants,
    )


@volume.parametrize("seed", range(30), share=15)
def test_more_time_never_makes_an_answer_worse(seed: int) -> None:
    """By what is asked for; and where cards that do not pay are left out, not slower and dearer at once."""
    problem = draw_priced(seed)
    kept = [search_plans(problem, budget_s=budget_s, top=1, all_devices=True) for budget_s in BUDGETS_S]
    wanted = [measure(problem, answer) for answer in kept]
    assert wanted == sorted(wanted, reverse=True), wanted
    if problem.objective == "throughput" and any(node.price_per_hour for node in problem.cluster.nodes):
        paying = [
            search_plans(problem, budget_s=budget_s, top=1).best.case.simulation for budget_s in BUDGETS_S
        ]
        for i, later in enumerate(paying):
            assert later.iteration_s <= wanted[i] * (1 + PAYS)
            assert not any(
                later.iteration_s > own.iteration_s and later.cost > own.cost for own in paying[:i]
            )


def measure(problem: PlanProblem, answer) -> float:
    simulation = answer.best.case.simulation
    return simulation.cost if problem.objective == "cost" else simulation.iteration_s


def test_a_longer_search_begins_as_a_shorter_one_does():
    problem = draw_priced(3)
    first, second = (search_plans(problem, budget_s=budget_s).improvements for budget_s in (1.0, 3.0))
    assert [own.iteration_s for own in second][: len(first)] == [own.iteration_s for own in first]
    assert [own.num_simulated for own in second][: len(first)] == [own.num_simulated for own in first]


def make_simulated(devices: str, seconds: float, cost: float) -> SimulatedCandidate:
    """A plan of one group of these devices."""
    groups = (CandidateGroup(tuple(map(int, devices)), Mode(), ((1,),) * len(devices)),)
    candidate = CandidatePlan(groups, (0,), (1,))
    order = Score(0.0, seconds, cost, len(devices))
    estimated = EstimatedCandidate(Choice((), 1), candidate, order, "by hand")
    return SimulatedCandidate(order, 0, estimated, seconds, cost, False)


def test_the_cheapest_of_the_plans_that_are_nearly_as_fast_is_chosen():
    simulated = [
        make_simulated("0123", 10.0, 9.0),
        make_simulated("0123", 10.01, 1.0),  # The same devices: faster is better.
        make_simulated("01", 10.05, 4.0),
        make_simulated("012", 10.09, 5.0),
        make_simulated("0", 10.2, 2.0),  # More than a hundredth slower.
    ]
    assert choose_paying(simulated) is simulated[2]


def test_without_prices_the_fastest_is_chosen():
    simulated = [make_simulated("0123", 10.0, 0.0), make_simulated("01", 10.01, 0.0)]
    assert choose_paying(simulated) is simulated[0]


def test_devices_that_are_left_out_are_told_of():
    nodes = device_problems.make_nodes("a", "A100-40 A100-40", 1, 4.0, zone="a")
    nodes += device_problems.make_nodes("t", "T4 T4", 1, 1.0, zone="b")
    problem = device_problems.make_problem(nodes)
    fast, chosen = make_simulated("0123", 10.0, 9.0), make_simulated("01", 10.05, 4.0)
    (told,) = describe_unused(problem, chosen, [fast, chosen])
    assert told.startswith("2 T4 of b left out: ") and "0.50% faster" in told and "--all-devices" in told
    (told,) = describe_unused(problem, chosen, [make_simulated("0123", 5.0, 9.0), chosen])
    assert "takes 5 s a step, 101.00% faster" in told
    (told,) = describe_unused(problem, chosen, [chosen])
    assert "no plan found with more of them" in told
    assert describe_unused(problem, fast, [fast, chosen]) == []
    # What has none of those that are used says nothing of what the others would add.
    others = make_simulated("23", 10.5, 1.0)
    (told,) = describe_unused(problem, chosen, [chosen, others])
    assert "no plan found with more of them" in told
    (told,) = describe_unused(replace(problem, max_devices=2), chosen, [chosen, others])
    assert told == "2 T4 of b left out: no more than 2 devices may be used"
    (told,) = describe_unused(replace(problem, fixed=Fixed(groups=((0,), (1,)))), chosen, [chosen])
    assert told == "2 T4 of b left out: the fixed groups have none of them"


def test_what_people_would_leave_out_is_looked_at_now_and_then():
    sides = [
        device_problems.make_nodes(zone, device, 4, 4.0, region=zone, zone=zone)
        for zone, device in (("a", "A100-40"), ("b", "T4"))
    ]
    links = {"default_link": Link(10e9), "region_links": {("a", "b"): Link(1e9, 1e-3)}}
    problem = device_problems.make_problem(*sides, links=links, global_batch=16)
    looking = search._Search(problem, 100.0, 0, None)
    looking._looks.begin(search.propose_devices(problem, bounds=looking._bounds))
    named = [look for look in looking._looks.looks if look.devices.is_share]
    assert len(named) >= 3
    for _ in range(NAMED_TURN * len(named)):
        assert looking._looks.peek() is not None
        looking._looks.advance()
    assert all(look.num_looked for look in named)


def test_the_first_answer_is_no_worse_than_one_node_alone():
    """A card behind a slow link makes all devices together the most promising by what they compute."""
    nodes = device_problems.make_nodes("a", "A100-40 A100-40"), device_problems.make_nodes("b", "T4")
    problem = device_problems.make_problem(*nodes, links={"default_link": Link(1e3)})
    alone = find_even("alone", problem.setting, problem.cluster.places[:2], problem.global_batch).simulated
    assert alone is not None
    best = search_plans(problem, budget_s=1e-9).best.case
    assert best.simulation.iteration_s < 1.1 * alone.simulation.iteration_s


def test_refining_turns_to_what_promises_more_and_comes_back():
    problem = device_problems.make_problem(
        device_problems.make_nodes("a", "A100-40 A100-40", 2, 4.0), global_batch=16
    )
    looking = search._Search(problem, 100.0, 0, None)
    looking._looks.begin(search.propose_devices(problem, bounds=looking._bounds))
    looks, refinements = looking._looks, looking._refinements
    while len(looks.looks[0].coarse) < 2:
        assert looks.peek() is not None
        looks.advance()
    better, poor = looks.looks[0].coarse[:2]
    looks.looks[0].coarse = [poor]
    begun = [advance(refinements) for _ in range(3)]
    assert begun[0] is begun[1] is begun[2]
    # Whatever is found on the way, the other promises more.
    looks.looks[0].coarse = [replace(better, score=replace(better.score, wanted=1e-9)), poor]
    other = advance(refinements)
    assert other is not begun[0] and advance(refinements) is other
    while advance(refinements) is other:
        pass
    assert refinements._next is begun[0] and refinements.num_waiting == 1


def advance(refinements: Refinements) -> object:
    """Which of them was changed."""
    assert refinements.peek() is not None
    refinements.advance()
    return refinements._next


def test_what_does_not_fit_as_a_whole_is_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of memory may be wrong by a little: all that is told of the search is of plans that fit."""
    problem = draw_priced(3)
    first = search_plans(problem, budget_s=1.6, top=1).best.case.plan
    fitting = SimulatedPlan.fits.func

    def fits(case: SimulatedPlan) -> bool:
        return len(case.plan.groups) != len(first.groups) and fitting(case)

    monkeypatch.setattr(SimulatedPlan, "fits", property(fits))
    answer = search_plans(problem, budget_s=1.6, top=1, all_devices=True)
    simulation = answer.best.case.simulation
    assert len(answer.best.case.plan.groups) != len(first.groups)
    assert answer.progress.best_s == answer.improvements[-1].iteration_s == simulation.iteration_s


def test_a_simulation_that_outlasts_the_budget_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another takes longer than those before let expect: what was found until then is the answer."""
    problem = draw_priced(3)
    monkeypatch.setattr(events, "_CHECKED_EVERY", 1)
    simulate, check = TopK._simulate, SearchBudget.check
    begun: list[object] = []

    def begin(top_k: TopK, task, its_check=None) -> SimulatedPlan:
        begun.append(task)
        case = simulate(top_k, task, its_check)
        begun.append(None)
        return case

    def refuse(budget: SearchBudget, num_actions: int = 0) -> None:
        check(budget, num_actions)
        if len(begun) > 1 and begun[-1] is not None:  # In another than the first.
            raise BudgetOverError

    monkeypatch.setattr(TopK, "_simulate", begin)
    monkeypatch.setattr(SearchBudget, "check", refuse)
    answer = search_plans(problem, budget_s=100.0, top=1)
    assert answer.ending == "budget" and begun.pop() is not None
    assert answer.progress.num_simulated == len(begun) // 2
    assert answer.progress.elapsed_s < 100.0
