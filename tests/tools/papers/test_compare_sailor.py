"""Sailor's published arithmetic worked out by hand, and plans of our search scored by it."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from made_up_sailor import (
    ACTIVATION,
    EGRESS,
    ELEMENTS,
    FAR,
    NEAR,
    NUM_LAYERS,
    PARAMETERS,
    SECONDS,
    write_library,
)
from paper_data import DATA, needs_data

from tools.papers.sailor.arithmetic import SailorArithmetic, SailorPlan, SailorStage
from tools.papers.sailor.cases import CASES, Case, answer, format_plan, search_quotas
from tools.papers.sailor.library import Library
from tools.papers.sailor.links import Place
from tools.papers.sailor.pipelines import Quotas, make_problems, to_sailor_plan
from tools.papers.sailor.simulated import ask_both, make_problem, to_own_plan
from zorselike.errors import ClusterError, PlanError
from zorselike.planner.pipelines.allocation import AllocationGoal, find_allocation

ROOT = Path(__file__).parents[3]


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return write_library(tmp_path, zones=("a", "b"))


@pytest.fixture
def arithmetic(library: Library) -> SailorArithmetic:
    return SailorArithmetic(library, "Tiny", tuple(SECONDS))


FAST, SLOW = Place("A100-40", "a", 1), Place("V100-16", "a", 1)
SEND = 4 * ELEMENTS / 1e9
"""Seconds that a row takes between two GPUs in a zone."""


def test_two_stages(arithmetic: SailorArithmetic) -> None:
    """8 rows, 2 replicas, microbatches of 2: two a replica. The last stage holds the head alone, whose
    gradient counts four times and twice; its update is that of its own first layer."""
    stages = (SailorStage(0, 4, (FAST, FAST)), SailorStage(4, 5, (SLOW, SLOW)))
    figures = arithmetic.score(SailorPlan(rows=2, global_batch=8, stages=stages))
    first, last = 4 * 2 * 0.03 + 2 * SEND, 2 * 0.09 + 2 * 2 * 4 * SEND
    reduced = 4 * PARAMETERS * 4 / 1e9 / NEAR
    assert figures.iteration_s == pytest.approx(max(first, last) + first + last + 0.05 + reduced)
    assert figures.egress == 0
    rent = 2 * (3.673385 + 2.859998) / 3600
    assert figures.rent == pytest.approx(rent * figures.iteration_s)


def test_middle_stages_send_both_ways_and_of_four_the_first_twice(arithmetic: SailorArithmetic) -> None:
    """One microbatch, so that all sends add up: first, two in the middle, last (the head's gradient)."""
    for cuts, sends in (((2, 4), 1 + 2 + 2 * 4), ((1, 2, 4), 2 + 2 + 2 + 2 * 4)):
        edges = (0, *cuts, NUM_LAYERS)
        stages = tuple(SailorStage(a, b, (FAST,)) for a, b in pairwise(edges))
        figures = arithmetic.score(SailorPlan(rows=1, global_batch=1, stages=stages))
        update = 0.01 * (edges[-2] + 1)
        assert figures.iteration_s == pytest.approx(NUM_LAYERS * 0.03 + sends * SEND + update)


def test_tensor_parallel_parts_share_links_but_not_the_ring(arithmetic: SailorArithmetic) -> None:
    """A stage of mixed degrees reduces parts of the least degree, in buckets, over one GPU's link."""
    mixed = (Place("A100-40", "a", 2), Place("V100-16", "a", 1))
    figures = arithmetic.score(SailorPlan(1, 2, (SailorStage(0, NUM_LAYERS, mixed),)))
    reduced = 4 * PARAMETERS * NUM_LAYERS / 1e9 / NEAR
    assert figures.iteration_s == pytest.approx(NUM_LAYERS * 0.09 + 0.01 + reduced)
    pair = (Place("A100-40", "a", 2), Place("A100-40", "b", 2))
    assert arithmetic.send_s(*pair, 1e9) == pytest.approx(1 / (2 * FAR))


def test_egress_is_paid_there_and_back_and_around_the_ring(arithmetic: SailorArithmetic) -> None:
    near, far = FAST, Place("A100-40", "b", 1)
    stages = (SailorStage(0, 2, (near, near)), SailorStage(2, NUM_LAYERS, (near, far)))
    figures = arithmetic.score(SailorPlan(rows=1, global_batch=6, stages=stages))
    boundary = 3 * 2 * 4 * ELEMENTS
    ring = 2 * (4 * PARAMETERS * 3 / 2 * 2)
    assert figures.egress == pytest.approx(EGRESS * (boundary + ring) / 1e9)


def test_memory_is_parameters_held_microbatches_and_a_fixed_part(arithmetic: SailorArithmetic) -> None:
    held = arithmetic.memory_bytes(Place("V100-16", "a", 2), 2, 0, 3, 4)
    assert held == 3 * (24 * PARAMETERS // 2 + ACTIVATION // 2 * 2 * 4) + 3e9
    assert arithmetic.fits(FAST, 1, 0, NUM_LAYERS, 1)
    assert not arithmetic.fits(SLOW, 2, 0, NUM_LAYERS, 10)


def test_a_pair_of_machines_that_was_not_measured_is_named(arithmetic: SailorArithmetic) -> None:
    with pytest.raises(ClusterError, match=r"multizone_bandwidths_het\.json: no 'c'"):
        arithmetic.send_s(FAST, Place("A100-40", "c", 1), 1e6)


@pytest.mark.parametrize(
    "goal",
    [
        AllocationGoal(bill_idle=False),
        AllocationGoal(objective="cost", bill_idle=False),
        AllocationGoal(objective="cost", min_throughput=0.5, bill_idle=False),
    ],
)
def test_the_search_counts_as_the_arithmetic_does(arithmetic: SailorArithmetic, goal: AllocationGoal) -> None:
    quotas = Quotas({("A100-40", "a"): 4, ("V100-16", "a"): 4, ("A100-40", "b"): 2})
    found = find_allocation(tuple(make_problems(arithmetic, quotas, 16)), quotas.pools, goal)
    assert found is not None
    plan = to_sailor_plan(found, 16)
    figures = arithmetic.score(plan)
    assert figures.fits
    assert figures.iteration_s == pytest.approx(found.figures.iteration_s)
    assert figures.rent + figures.egress == pytest.approx(found.figures.dollars)
    assert all(plan.used.get(f"{gpu}_{zone}", 0) <= n for (gpu, zone), n in quotas.of.items())
    layers = [layer for part in plan.to_json()["pipeline_list"][0]["layers_per_stage"] for layer in part]
    assert layers == list(range(NUM_LAYERS))


def test_no_degree_is_left_for_no_gpus(arithmetic: SailorArithmetic) -> None:
    quotas = Quotas({("A100-40", "a"): 0})
    with pytest.raises(PlanError, match="no pipeline"):
        search_quotas(arithmetic, quotas, AllocationGoal(), 16)


def test_a_plan_is_spelled_in_a_line() -> None:
    stages = (SailorStage(0, 4, (FAST, FAST)), SailorStage(4, 5, (FAST, SLOW)))
    assert format_plan(SailorPlan(2, 8, stages)) == (
        "D 2, mbs 2: 4 layers on 2 A100-40 tp 1 a | 1 layers on 1 A100-40 tp 1 a and 1 V100-16 tp 1 a"
    )


@needs_data
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4]], ids=lambda case: case.name)
def test_what_must_be_reached_is(case: Case) -> None:
    found = answer(case, Library(DATA))
    assert case.is_reached(found)
    assert found.figures.throughput > (case.sailor or inf)


def test_a_plan_of_theirs_runs_as_one_of_ours_and_ours_is_not_worse(library: Library) -> None:
    case = Case(name="tiny", group="mixed", a100=8, v100=8, num_zones=2, reach=0.0)
    problem = make_problem(case, library, model="Tiny", zones=("a", "b"), global_batch=8)
    assert problem.cluster.num_devices == 32 and not [*problem._list_faults()]
    far = Place("A100-40", "b", 2)
    stages = (
        SailorStage(0, 3, (Place("A100-40", "a", 2), Place("A100-40", "a", 2), far, far)),
        SailorStage(3, NUM_LAYERS, (SLOW,) * 4),
    )
    plan = to_own_plan(SailorPlan(1, 8, stages), problem)
    assert [[replica.degree for replica in group.replicas] for group in plan.groups] == [[2] * 4, [1] * 4]
    places = problem.cluster.place_ranks(plan)
    assert len({*places}) == plan.num_ranks == 12
    nodes = {rank: problem.cluster.nodes[place.node].name for rank, place in enumerate(places)}
    assert [nodes[rank] for rank in (0, 1, 4, 5, 8)] == [
        "a-a100-40-0",
        "a-a100-40-0",
        "b-a100-40-0",
        "b-a100-40-0",
        "a-v100-16-0",
    ]
    both = ask_both(case, SailorPlan(1, 8, stages), problem, budget_s=1.0)
    # Two rows through three layers of a replica forward and backward, or through two on a slow card.
    assert both.theirs.simulation.iteration_s > 2 * max(3 * 0.03 / 2, 2 * 0.09)
    assert 0 < both.ratio <= 1.0


def test_without_the_data_the_tool_says_so(tmp_path: Path) -> None:
    given = [sys.executable, ROOT / "tools" / "papers" / "compare_sailor.py", "--data", tmp_path / "none"]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no sailor/Planner/llm_info.json of github.com/eth-easl/sailor" in done.stderr
