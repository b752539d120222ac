"""Questions to the planner of many sizes, and how good its plan is after ten and thirty seconds."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from zorselike.cli.assumed_profile import assume_profile
from zorselike.cost.curves import CurveWarning
from zorselike.errors import ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.problem import Objective, PlanProblem
from zorselike.planner.search import budget as search_budget
from zorselike.planner.search.search import search_plans

from planner_oracle.workloads import REAL_DECODERS, make_workload

BUDGETS_S = (10.0, 30.0)
REFERENCE_S = 600.0
MOST_ABOVE = {10.0: 1.03, 30.0: 1.01}
"""Times the best found in the reference time that a plan may take, by budget."""
_SAME = 1e-9
GIGABIT = 1e9 / 8
Kind = tuple[str, int, float]
"""Type, cards and price by the hour of a node."""
Regions = Mapping[str, Sequence[tuple[Kind, int]]]
"""Kinds of nodes, and how many, by region."""
TWO_REGIONS = Path(__file__).parents[2] / "recipes/clusters/two_regions.toml"


@dataclass(frozen=True)
class Question:
    """One question."""

    name: str
    make: Callable[[], PlanProblem]


@dataclass(frozen=True)
class Found:
    """The answer to a question with one budget."""

    budget_s: float
    wanted: float
    """Seconds of a step, or money where that is the objective."""
    iteration_s: float
    cost: float
    num_used: int
    num_estimated: int
    num_simulated: int
    ending: str


@dataclass(frozen=True)
class Course:
    """One question with all budgets, the last of them the reference."""

    name: str
    num_devices: int
    objective: Objective
    found: tuple[Found, ...]

    @property
    def best(self) -> float:
        return min(own.wanted for own in self.found)

    def ratio(self, budget_s: float) -> float:
        """What was found with a budget, in the best of all."""
        return next(own.wanted for own in self.found if own.budget_s == budget_s) / self.best

    @property
    def num_worse(self) -> int:
        """Longer budgets that found something worse than the one before."""
        pairs = zip(self.found, self.found[1:], strict=False)
        return sum(later.wanted > earlier.wanted * (1 + _SAME) for earlier, later in pairs)


def list_questions(zorse: Callable[[str, str], PlanProblem] | None) -> list[Question]:
    """Twelve, of 2 to 128 cards; `zorse` makes those of the paper's clusters with measured times, without
    which their data sheets have to do."""
    a100, v100, t4 = ("A100-40", 4, 14.69), ("V100-16", 4, 11.44), ("T4", 4, 1.9)
    h100, a80 = ("H100-SXM", 4, 30.0), ("A100-80", 4, 18.0)
    two: Regions = {"x": [(("A100-40", 1, 3.7), 1), (("T4", 1, 0.5), 1)]}
    switch_22: Regions = {"x": [(a100, 2), (v100, 2), (("T4", 3, 1.5), 2)]}
    switch_19: Regions = {"x": [(("H100-NVL", 3, 10.0), 1), (a100, 4)]}
    five: Regions = {"x": [(h100, 2), (a80, 4), (a100, 4), (v100, 4), (t4, 2)]}
    regions: Regions = {"east": [(a100, 3), (t4, 4)], "west": [(v100, 6)], "south": [(a80, 2)]}
    paper = partial(_make_paper, zorse)
    return [
        Question("two regions, Llama 7B", partial(make_two_regions, "throughput")),
        Question("A, Llama 33B", partial(paper, "A", "33b")),
        Question("22 on one switch, Llama 7B", partial(make, switch_22, "llama 7b", 128)),
        Question("two regions, cost", partial(make_two_regions, "cost")),
        Question("2 cards, OPT-350M", partial(make, two, "opt 350m", 32)),
        Question("three regions, Llama 13B", partial(make, regions, "llama 13b", 256)),
        Question("B, Llama 13B", partial(paper, "B", "13b")),
        Question("19 on one switch, Llama 7B", partial(make, switch_19, "llama 7b", 256)),
        Question("C, Llama 7B", partial(paper, "C", "7b")),
        Question("A, Llama 65B", partial(paper, "A", "65b")),
        Question("five types, Llama 33B", partial(make, five, "llama 33b", 256)),
        Question("three regions, cost", partial(make, regions, "llama 7b", 256, "cost")),
    ]


def make(
    regions: Regions,
    model: str,
    global_batch: int,
    objective: Objective = "throughput",
) -> PlanProblem:
    """Nodes of some kinds in some regions, each on a switch of 50 Gb/s, with the catalogue's times."""
    nodes = tuple(
        Node(
            name=f"{region}-{device.lower()}-{i}",
            devices=(device,) * number,
            zone=region,
            region=region,
            fabric=Link(10e9 if device == "T4" else 100e9, 1e-5),
            nic=Link(50 * GIGABIT),
            price_per_hour=price,
            host_memory_bytes=2**38,
        )
        for region, kinds in regions.items()
        for (device, number, price), copies in kinds
        for i in range(copies)
    )
    names = sorted(regions)
    between = {(a, b): Link(5 * GIGABIT, 0.03) for i, a in enumerate(names) for b in names[i + 1 :]}
    shape = next(own for own in REAL_DECODERS if own.name == model)
    workload = make_workload(shape, sequence_length=2048, dtype="float16")
    return PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=nodes, default_link=Link(50 * GIGABIT, 4e-5), region_links=between),
        profile=assume_profile(workload),
        global_batch=global_batch,
        objective=objective,
        defer_updates=True,
    )


def make_two_regions(objective: Objective) -> PlanProblem:
    """The recipe's cluster of 56 cards."""
    shape = next(own for own in REAL_DECODERS if own.name == "llama 7b")
    workload = make_workload(shape, sequence_length=2048, dtype="float16")
    return PlanProblem(
        workload=workload,
        cluster=Cluster.load(TWO_REGIONS),
        profile=assume_profile(workload),
        global_batch=256,
        objective=objective,
        defer_updates=True,
    )


def _make_paper(zorse: Callable[[str, str], PlanProblem] | None, cluster: str, model: str) -> PlanProblem:
    if zorse is None:
        raise ProfileError(f"cluster {cluster} of Zorse's paper needs --data")
    return zorse(cluster, model)


# -- with all budgets ---------------------------------------------------------------------


def follow(question: Question, reference_s: float, *, workers: int, by_processor: bool) -> Course:
    """Searches with each budget in a fresh process.

    Args:
        workers: processes of a search, this one included.
        by_processor: whether budgets are seconds of the processor, for a machine that others use as well;
            of one process.
    """
    found = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for budget_s in (*BUDGETS_S, reference_s):
            found.append(pool.submit(_search, question.make, budget_s, workers, by_processor).result())
    _, num_devices, objective = found[0]
    return Course(question.name, num_devices, objective, tuple(own for own, *_ in found))


def count_processor_time() -> None:
    """Searches of this process count seconds of the processor from now on."""
    clock = SimpleNamespace(monotonic=time.process_time, process_time=time.process_time)
    search_budget.time = clock  # type: ignore[assignment, attr-defined]


def _search(
    make: Callable[[], PlanProblem], budget_s: float, workers: int, by_processor: bool
) -> tuple[Found, int, Objective]:
    warnings.simplefilter("ignore", CurveWarning)
    if by_processor:
        count_processor_time()
    problem = make()
    answer = search_plans(problem, budget_s=budget_s, top=1, all_devices=True, workers=workers)
    simulation = answer.best.case.simulation
    wanted = simulation.cost if problem.objective == "cost" else simulation.iteration_s
    found = Found(
        budget_s=budget_s,
        wanted=wanted,
        iteration_s=simulation.iteration_s,
        cost=simulation.cost,
        num_used=answer.best.case.plan.num_ranks,
        num_estimated=answer.progress.num_estimated,
        num_simulated=answer.progress.num_simulated,
        ending=answer.ending,
    )
    return found, len(problem.usable), problem.objective


def format_course(course: Course) -> Iterator[str]:
    """A line for each budget."""
    for own in course.found:
        yield (
            f"{course.name:<28}{course.num_devices:>5}{own.num_used:>6}{own.budget_s:>7g} s"
            f"{own.iteration_s:>10.4f}{own.cost:>10.4f}{own.wanted / course.best:>8.3f}"
            f"{own.num_estimated:>8}{own.num_simulated:>7}  {own.ending}"
        )


def summarize(courses: Sequence[Course]) -> dict[str, float]:
    """The worst ratios, and how often more time found something worse."""
    worst = {
        f"worst_ratio_{budget_s:g}s": max(course.ratio(budget_s) for course in courses)
        for budget_s in BUDGETS_S
    }
    return {**worst, "num_worse_with_more_time": float(sum(course.num_worse for course in courses))}


def list_misses(courses: Sequence[Course]) -> list[str]:
    """What is not as it should be, a line each."""
    misses = [
        f"{course.name}: {course.ratio(budget_s):.3f} x the best after {budget_s:g} s, not at most {most:g}"
        for course in courses
        for budget_s, most in MOST_ABOVE.items()
        if course.ratio(budget_s) > most
    ]
    return misses + [f"{course.name}: worse with more time" for course in courses if course.num_worse]
