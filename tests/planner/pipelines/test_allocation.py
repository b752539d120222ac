"""The search for an allocation against every pipeline there is, on cases small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, inf
from random import Random

import pytest
import volume
from table_costs import POOLS, TableCosts, chain

from zorselike.planner.pipelines.allocation import Allocation, AllocationGoal, Problem, find_allocation
from zorselike.planner.pipelines.bounds import Bounds
from zorselike.planner.pipelines.costs import Figures, Pool, Rent, Stage, evaluate


def every_pipeline(problem: Problem, pools: Sequence[Pool], goal: AllocationGoal) -> Iterator[Figures]:
    """Of all pipelines that keep memory, quotas and constraints."""
    costs, rent = problem.costs, Rent(tuple(pools), goal.bill_idle)
    most = inf if goal.max_devices is None else goal.max_devices
    for cuts in product((False, True), repeat=costs.num_layers - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), costs.num_layers]
        num_stages = len(edges) - 1
        for options in product(range(len(costs.uses)), repeat=num_stages):
            stages = [Stage(k, edges[i], edges[i + 1]) for i, k in enumerate(options)]
            if not all(costs.fits(*stage, num_stages - i) for i, stage in enumerate(stages)):
                continue
            figures = evaluate(costs, stages, rent)
            if (
                all(u <= pool.num_devices for u, pool in zip(figures.used, pools, strict=True))
                and sum(figures.used) <= most
                and figures.dollars <= goal.max_cost_per_iteration
                and figures.iteration_s * goal.min_throughput <= 1
            ):
                yield figures


def best_of_all(problems: Sequence[Problem], pools: Sequence[Pool], goal: AllocationGoal) -> float | None:
    found = [figures for problem in problems for figures in every_pipeline(problem, pools, goal)]
    return min((measure(figures, goal) for figures in found), default=None)


def measure(figures: Figures, goal: AllocationGoal) -> float:
    return figures.dollars if goal.objective == "cost" else figures.iteration_s


BATCH = 12


def make_problem(draw: Random, num_layers: int) -> Problem:
    degree, rows = draw.choice((1, 1, 2)), draw.choice((1, 2, 4))
    options = range(draw.choice((2, 3)))
    layers = range(num_layers)
    shapes = draw.sample([(1, 0), (2, 0), (0, 1), (0, 2), (1, 1)], len(options))
    send = draw.choice((0.0, 0.2, 1.0))
    return Problem(
        degree,
        rows,
        TableCosts(
            uses=tuple((a * degree, b * degree) for a, b in shapes),
            num_microbatches=ceil(BATCH / (degree * rows)),
            seconds=tuple(tuple(draw.uniform(0.2, 1.5) for _ in layers) for _ in options),
            sends=tuple(tuple(draw.uniform(0.0, send) for _ in options) for _ in options),
            weights=tuple(draw.choice((0.5, 1.0, 3.0)) for _ in layers),
            sync=tuple(draw.choice((0.0, 1.0, 6.0)) * draw.random() for _ in options),
            memory=tuple(draw.choice((6.0, 12.0, 100.0, 100.0)) for _ in options),
            egress=draw.choice((0.0, 0.02, 0.2)),
        ),
    )


def make_case(seed: int) -> tuple[list[Problem], list[Pool]]:
    """By plain chance: drawn by hypothesis most cases are so simple that anything is right."""
    draw = Random(seed)
    num_layers = draw.randint(2, 5)
    problems = [make_problem(draw, num_layers) for _ in range(draw.choice((1, 1, 2)))]
    pools = [
        Pool(
            num_devices=draw.randint(2, 10),
            dollars_per_device_s=draw.choice((0.0, 0.1, 0.25, 1.0)),
            devices_per_node=draw.choice((1, 4)),
        )
        for _ in range(2)
    ]
    return problems, pools


def tight_goals(problems: Sequence[Problem], pools: Sequence[Pool], share: float) -> list[AllocationGoal]:
    """Both objectives, and both with a constraint somewhere between what the two reach."""
    fast, cheap = AllocationGoal(), AllocationGoal(objective="cost")
    fastest, cheapest = find_allocation(problems, pools, fast), find_allocation(problems, pools, cheap)
    if fastest is None or cheapest is None:
        return [fast, cheap]
    dollars = cheapest.figures.dollars + share * (fastest.figures.dollars - cheapest.figures.dollars)
    slower_s = fastest.figures.iteration_s + share * (
        cheapest.figures.iteration_s - fastest.figures.iteration_s
    )
    return [
        fast,
        cheap,
        AllocationGoal(max_cost_per_iteration=max(dollars, 1e-9) * (1 + 1e-6)),
        AllocationGoal(objective="cost", min_throughput=(1 - 1e-6) / slower_s),
    ]


@volume.parametrize("seed", range(160))
def test_nothing_is_better_than_what_is_found(seed: int) -> None:
    problems, pools = make_case(seed)
    draw = Random(seed + 1)
    bill_idle, max_devices, share = (
        draw.random() < 0.5,
        draw.choice((None, None, 4)),
        draw.choice((0.0, 0.3, 0.8)),
    )
    for plain in tight_goals(problems, pools, share):
        goal = replace(plain, bill_idle=bill_idle, max_devices=max_devices)
        best = best_of_all(problems, pools, goal)
        found = find_allocation(problems, pools, goal)
        assert (found is None) == (best is None)
        if found is None or best is None:
            continue
        assert measure(found.figures, goal) == pytest.approx(best, rel=1e-6, abs=1e-12)
        own = evaluate(found.problem.costs, found.stages, Rent(tuple(pools), bill_idle))
        assert own == found.figures
        assert found.figures in list(every_pipeline(found.problem, pools, goal))


@volume.parametrize("seed", range(80))
def test_no_pipeline_is_under_a_bound(seed: int) -> None:
    problems, pools = make_case(seed)
    for problem in problems:
        bounds = Bounds(problem.costs, pools)
        rough = bounds.rough()
        every = list(every_pipeline(problem, pools, AllocationGoal(bill_idle=False)))
        if rough is None:
            assert not every
            continue
        longest_s = max((f.iteration_s for f in every), default=1e3)
        tight = bounds.tight(rough.slowest_straggler_s(longest_s))
        for figures in every:
            assert tight is not None
            assert rough.iteration_s <= figures.iteration_s * (1 + 1e-9)
            assert tight.iteration_s <= figures.iteration_s * (1 + 1e-9)
            assert rough.device_dollars <= figures.dollars * (1 + 1e-9)


def find(
    problems: Sequence[Problem], pools: Sequence[Pool] = POOLS, goal: AllocationGoal | None = None
) -> Allocation:
    found = find_allocation(problems, pools, goal or AllocationGoal())
    assert found is not None
    return found


def test_the_slow_device_gets_what_it_keeps_up_with() -> None:
    found = find([Problem(1, 1, chain())])
    assert sorted(stage.stop - stage.start for stage in found.stages) == [1, 3]
    assert found.figures.iteration_s == 11 * 3 + (3 + 2) + 3 / 16


def test_a_device_that_only_slows_is_left_out() -> None:
    found = find([Problem(1, 1, chain(num_microbatches=1))])
    assert found.figures.used == (1, 0)


def test_idle_devices_of_a_rented_node_are_billed_unless_told_otherwise() -> None:
    problem = Problem(1, 1, chain(num_microbatches=1))
    billed = find([problem]).figures
    unbilled = find([problem], goal=AllocationGoal(bill_idle=False)).figures
    assert billed.dollars == 4 * unbilled.dollars == 4 * unbilled.iteration_s


def test_microbatches_round_up_and_a_lower_degree_may_be_faster() -> None:
    """12 rows on 7 replicas take 2 microbatches, as on 6: the seventh replica adds only its sync."""
    pools = [Pool(num_devices=7)]
    problems = [
        Problem(d, 1, chain(uses=((d,), (d,)), num_microbatches=ceil(12 / d), sync=(d / 100, d / 100)))
        for d in range(1, 8)
    ]
    assert find(problems, pools).problem.degree == 6
