"""What is said of a planner's answer: what tells plans apart, what is proven, what is not worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searched import CLUSTER, WORKLOAD, measure, plan_by_shares, search_by_shares

from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Estimates
from zorselike.planner.answer import NothingFitsError, PlanAnswer, Planned
from zorselike.planner.explain.answer import describe_search, format_answer, list_limits
from zorselike.planner.explain.kinds import (
    Addition,
    describe_additions,
    find_additions,
    leave_out,
    measure_additions,
)
from zorselike.planner.explain.plans import (
    SETTINGS,
    describe_groups,
    describe_trade,
    drop_alike,
    tabulate_plans,
)
from zorselike.planner.explain.step import describe_time, tabulate_baselines
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.simulator.simulated_plan import Baseline

PROBLEM = PlanProblem(workload=WORKLOAD, cluster=CLUSTER, profile=measure("A100-40", "T4"), global_batch=8)
BY_TYPE = plan_by_shares(PROBLEM)


def change(
    planned: Planned,
    *,
    slower: float = 1.0,
    dearer: float = 1.0,
    recompute: bool = False,
    zero: int | None = None,
) -> Planned:
    """The same plan as if it took so many times as long and cost so many times as much."""
    case = planned.case
    simulation = replace(
        case.simulation,
        iteration_s=case.simulation.iteration_s * slower,
        cost=case.simulation.cost * dearer,
    )
    groups = tuple(
        replace(
            group,
            recompute="layer" if recompute else group.recompute,
            zero=group.zero if zero is None else zero,
        )
        for group in case.plan.groups
    )
    return replace(planned, case=replace(case, simulation=simulation, plan=replace(case.plan, groups=groups)))


# -- plans beside each other -------------------------------------------------------------------


def test_columns_are_what_differs() -> None:
    heading, first, second, alike = tabulate_plans([BY_TYPE, change(BY_TYPE, slower=1.5, zero=3)])
    assert heading.split()[-4:] == ["of", "ideal", "ZeRO", "grad_reduce"]
    assert first.split()[-2:] == ["2", "once"] and second.split()[-2:] == ["3", "microbatch"]
    assert alike.startswith("In all of them: groups 1 A100-40 > 2 T4; made by device type; ministages 2; ")


def test_a_plan_that_waits_for_reductions_says_so() -> None:
    case = BY_TYPE.case
    groups = tuple(replace(group, overlap_grad_reduce=False) for group in case.plan.groups)
    waiting = replace(BY_TYPE, case=replace(case, plan=replace(case.plan, groups=groups)))
    _, first, second, _ = tabulate_plans([BY_TYPE, waiting])
    assert first.split()[-1] == "once"
    assert second.endswith("once/once, waited for")  # The first group is a rank alone.


def test_plans_that_look_alike_are_shown_once() -> None:
    other = change(BY_TYPE, slower=1.2)
    # Shown as 21.07 and 21.08 s, and nothing else tells them apart.
    assert drop_alike([BY_TYPE, change(BY_TYPE, slower=1.002), other]) == [BY_TYPE, other]
    fewer = plan_by_shares(
        leave_out(PROBLEM, "T4")
    )  # Beside other groups nothing tells how these were found.
    assert drop_alike([BY_TYPE, replace(BY_TYPE, grouping="minimum 2-cut"), fewer]) == [BY_TYPE, fewer]


def test_one_plan_has_no_columns_of_settings() -> None:
    heading, only, settings = tabulate_plans([BY_TYPE])
    assert len(heading.split()) == len(["s", "per", "step", "tokens/s", "USD", "per", "step", "of", "ideal"])
    assert only.split()[0] == "1" and settings.startswith("It has: groups 1 A100-40 > 2 T4;")


def test_many_groups_are_counted() -> None:
    def describe(*devices: tuple[str, ...]) -> str:
        nodes = [
            Node(name=f"n{i}", devices=own, fabric=Link(1e9) if len(own) > 1 else None)
            for i, own in enumerate(devices)
        ]
        cluster = Cluster(nodes=tuple(nodes), default_link=Link(1e9))
        layers = tuple((f"layers.{i}", "layer") for i in range(8))
        problem = replace(PROBLEM, cluster=cluster, workload=replace(WORKLOAD, layers=layers))
        return describe_groups(plan_by_shares(problem, "node"))

    assert describe(("T4", "A100-40"), ("T4",)) == "1 T4 + 1 A100-40 > 1 T4"
    assert describe(*[("T4", "T4")] * 5, ("A100-40",)) == "5 x (2 T4) > 1 A100-40"
    assert describe(*[("T4",), ("A100-40",)] * 3) == "6 groups of 3 T4 + 3 A100-40"


def test_settings_of_groups_in_turn() -> None:
    plan = BY_TYPE.case.plan
    first = replace(plan.groups[0], zero=0, offload=("params", "optimizer"))
    second = replace(plan.groups[1], offload=("params", "optimizer", "activations"))
    planned = replace(BY_TYPE, case=replace(BY_TYPE.case, plan=replace(plan, groups=(first, second))))
    zero, offload = SETTINGS["ZeRO"], SETTINGS["offload"]
    assert (zero(planned), offload(planned)) == ("0/2", "params+optimizer/all")
    assert (zero(BY_TYPE), offload(BY_TYPE)) == ("2", "none")


# -- what is proven ----------------------------------------------------------------------------


def answer_with(best: Planned, *, gap: float = 0.2) -> PlanAnswer:
    answer = search_by_shares(PROBLEM)
    bound_s = best.case.simulation.iteration_s / (1 + gap)
    return replace(answer, plans=(best,), progress=replace(answer.progress, bound_s=bound_s))


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (0.2, "A step takes at most 20.0% more than the fastest possible; proven: no plan of the 3 devices"),
        (0.004, "It is the fastest there is, to 0.4%; proven"),
        (2.5, "A step takes at most 3.5 x the fastest possible"),
    ],
)
def test_the_gap_is_said(gap: float, said: str) -> None:
    assert said in describe_search(answer_with(BY_TYPE, gap=gap), PROBLEM, 30.0)[1]


def test_the_cheapest_plan_is_not_called_fast() -> None:
    problem = replace(PROBLEM, objective="cost")
    assert describe_search(answer_with(BY_TYPE), problem, 30.0)[1].startswith("It is the cheapest found, at ")


def test_what_limits_a_plan_far_from_its_ideal_is_listed() -> None:
    plan = replace(
        BY_TYPE.case.plan, estimates=Estimates(share_of_ideal=0.5, limited_by=("slow links", "few rows"))
    )
    limited = replace(BY_TYPE, case=replace(BY_TYPE.case, plan=plan))
    heading, *lines = list_limits(answer_with(limited))
    assert heading.startswith("It reaches only ") and lines == ["- slow links", "- few rows"]
    assert list_limits(answer_with(BY_TYPE)) == []
    shown, page = (
        "\n".join(format_answer(answer_with(limited), PROBLEM, budget_s=1.0, tells_limits=tells))
        for tells in (True, False)
    )
    assert "- slow links" in shown and "- slow links" not in page


def test_of_many_ranks_groups_are_listed() -> None:
    nodes = tuple(Node(name=f"n{i}", devices=("T4",) * 8, fabric=Link(1e9)) for i in range(9))
    cluster = Cluster(nodes=nodes, default_link=Link(1e9))
    problem = replace(PROBLEM, cluster=cluster, global_batch=72)
    best = plan_by_shares(problem)
    shown = format_answer(answer_with(best), problem, budget_s=1.0)[0].splitlines()
    assert shown[-2].startswith("group 0: ranks 0-71; ZeRO 2") and shown[-1].startswith("`zorselike show`")


# -- what is worth it --------------------------------------------------------------------------


def describe(
    *,
    slower: float = 1.0,
    dearer: float = 1.0,
    num_used: int = 2,
    problem: PlanProblem = PROBLEM,
    **more: object,
) -> str:
    """What is said of T4s without which a plan is so many times as slow."""
    without = change(plan_by_shares(leave_out(PROBLEM, "T4")))
    best = BY_TYPE.case.simulation
    now = without.case.simulation
    without = change(
        without, slower=slower * best.iteration_s / now.iteration_s, dearer=dearer * best.cost / now.cost
    )
    addition = Addition(device="T4", num_usable=2, num_used=num_used, without=without)
    (said,) = describe_additions(problem, BY_TYPE, [replace(addition, **more)])  # type: ignore[arg-type]
    return said


def test_what_a_kind_of_device_adds() -> None:
    assert describe(slower=1.4).startswith("The 2 T4 add 40.0%: without, a step takes ")
    assert "Not worth it" not in describe(slower=1.4)
    assert "with 1 device in place of 3." in describe(slower=1.4)
    assert describe(slower=1.4, num_used=1).startswith("The one T4 adds 40.0%")


def test_what_is_not_worth_it_is_said_plainly() -> None:
    little = describe(slower=1.03)
    assert little.startswith("The 2 T4 add 3.0%: ") and "Not worth it, unless idle anyway" in little
    nothing = describe(slower=0.9)
    assert nothing.startswith("The 2 T4 are not worth it: without, a step takes ")
    assert nothing.endswith("Leave out: --quota T4=0.")
    unused = describe(num_used=0, without=None)
    assert unused == "The 2 T4 are not worth it: the best plan found goes without."


def test_what_a_search_did_not_come_to_is_not_called_worthless() -> None:
    unused = Addition(device="T4", num_usable=2, num_used=0, without=None)
    (said,) = describe_additions(PROBLEM, BY_TYPE, [unused], ending="budget")
    assert said == "The 2 T4 are not in the best plan found; a longer search may find a better one with them."


def test_with_money_as_the_aim_devices_save() -> None:
    assert describe(dearer=1.2, problem=replace(PROBLEM, objective="cost")).startswith(
        "The 2 T4 save 20.0%: "
    )


def test_where_some_nodes_are_free_no_share_of_nothing_is_asked_for() -> None:
    problem = replace(PROBLEM, objective="cost")
    priced, free = BY_TYPE, change(BY_TYPE, dearer=0.0)
    slower = change(free, slower=1.4)
    for best, without, start in (
        (free, priced, "The 2 T4 save all that a step costs: without, "),
        (free, slower, "The 2 T4 add 40.0%: without, "),
        (priced, free, "The 2 T4 are not worth it: without, "),
    ):
        addition = Addition(device="T4", num_usable=2, num_used=2, without=without)
        (said,) = describe_additions(problem, best, [addition])
        assert said.startswith(start) and ("USD in place of" in said) == (without is not slower)


def test_devices_without_which_nothing_fits_are_needed() -> None:
    def search(problem: PlanProblem, what: str) -> PlanAnswer:
        if what == "without A100-40":
            raise NothingFitsError("plan: no room for one row")
        return search_by_shares(problem)

    answer = search_by_shares(PROBLEM)
    additions = measure_additions(PROBLEM, answer, search)
    assert [addition.device for addition in additions] == ["A100-40", "T4"]
    said, _ = describe_additions(PROBLEM, answer.best, additions)
    assert said == "The one A100-40 is needed: without, no room for one row."


def test_one_kind_of_device_has_nothing_to_add() -> None:
    problem = replace(PROBLEM, devices=(1, 2))
    answer = search_by_shares(problem)
    assert measure_additions(problem, answer, lambda *_: pytest.fail("searches")) == ()


def test_who_ends_a_search_ends_all() -> None:
    def search(problem: PlanProblem, what: str) -> PlanAnswer:
        return search_by_shares(problem, ending="interrupted")

    assert len(measure_additions(PROBLEM, search_by_shares(PROBLEM), search)) == 1


def test_a_better_plan_without_some_devices_is_taken() -> None:
    def search(problem: PlanProblem, what: str) -> PlanAnswer:
        answer = search_by_shares(problem)
        return replace(answer, plans=(change(answer.best, slower=0.5 if what == "without T4" else 3),))

    answer, additions = find_additions(PROBLEM, search_by_shares(PROBLEM), search)
    assert answer.best.case.device_types == ("A100-40",) and len(answer.plans) == 4
    assert answer.notes == ("A plan with A100-40 alone was found to be better, and is the first below.",)
    assert [(addition.device, addition.num_used) for addition in additions] == [("A100-40", 1), ("T4", 0)]
    # Not where the user wants groups kept.
    fixed = replace(PROBLEM, fixed=Fixed(groups=((0,), (1, 2))))
    kept, _ = find_additions(fixed, search_by_shares(fixed), search)
    assert len({*kept.best.case.device_types}) == 2


def test_ctrl_c_in_a_search_for_an_explanation_keeps_the_plan() -> None:
    def search(problem: PlanProblem, what: str) -> PlanAnswer:
        raise KeyboardInterrupt

    answer = search_by_shares(PROBLEM)
    assert find_additions(PROBLEM, answer, search) == (answer, ())


def test_fixed_groups_lose_the_devices_that_are_left_out() -> None:
    problem = replace(PROBLEM, fixed=Fixed(groups=((1, 0), (2,)), zero=1))
    assert leave_out(problem, "T4").fixed == Fixed(groups=((0,),), zero=1)
    assert leave_out(problem, "A100-40").fixed == Fixed(groups=((1,), (2,)), zero=1)
    assert leave_out(problem, "T4").usable == (0,)


# -- the next best -----------------------------------------------------------------------------


def test_what_the_next_best_plan_would_trade() -> None:
    best = change(BY_TYPE, recompute=True)
    said = describe_trade(best, change(BY_TYPE, slower=1.1, dearer=0.8))
    assert said.startswith(
        "The next best plan (by device type: 1 A100-40 > 2 T4) is 10.0% slower; in exchange"
    )
    # In half the time is twice as fast, whichever of the two stands first.
    assert "is 100.0% faster" in describe_trade(change(BY_TYPE, slower=2, dearer=0.5), BY_TYPE)
    assert "is 20.0% cheaper" in said and said.endswith("recomputes nothing.")
    by_node = plan_by_shares(PROBLEM, ministages=2)
    fewer = describe_trade(change(by_node, slower=0.01, dearer=0.01), BY_TYPE)
    assert "has 2 ministages in place of 4" in fewer and "slower and " in fewer and "dearer" in fewer
    assert describe_trade(BY_TYPE, change(BY_TYPE, slower=1.1)).endswith(
        "slower, and has nothing in exchange."
    )
    assert "is as good by time and money" in describe_trade(BY_TYPE, BY_TYPE)


def test_less_memory_is_something_in_exchange() -> None:
    planned = plan_by_shares(PROBLEM, rows=1), plan_by_shares(PROBLEM, rows=8)
    full, roomy = sorted(planned, key=lambda each: -max(each.case.peak_bytes))
    walks = [replace(walk, device_bytes=(10**10,)) for walk in full.case.simulation.memory]
    simulation = replace(full.case.simulation, memory=walks)
    fuller = replace(full, case=replace(full.case, simulation=simulation))
    assert "fills memory to " in describe_trade(fuller, roomy)


# -- others ------------------------------------------------------------------------------------


def test_who_does_not_fit_says_why() -> None:
    slower = change(BY_TYPE, slower=2).case
    others = [
        Baseline(name="even", how="3 ranks", simulated=slower),
        Baseline(name="Whale", how="", simulated=None, reason="OUT OF MEMORY: T4 of node b"),
    ]
    heading, ours, even, whale = tabulate_baselines(BY_TYPE, others)
    assert heading.split() == ["s", "per", "step", "tokens/s", "USD", "per", "step"]
    assert ours.split()[:2] == ["this", "plan"]
    assert "plan 2.00 x as fast  3 ranks" in even
    assert whale.split()[0] == "Whale" and whale.endswith("OUT OF MEMORY: T4 of node b")


def test_shares_of_time_add_up() -> None:
    said = describe_time(BY_TYPE.case)
    shares = [int(word.rstrip("%,.")) for word in said.split() if "%" in word]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=2)
