"""How the time and memory of a search grow with the cluster: eight types of GPUs in ten regions."""

from __future__ import annotations

import math
import multiprocessing
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from tools.bench.budgets import count_processor_time
from zorselike.cli.assumed_profile import assume_profile
from zorselike.cost.curves import CurveWarning
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.answer import Progress
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.search import search_plans

from planner_oracle.workloads import REAL_DECODERS, make_workload

NUM_CARDS = (100, 300, 1_000, 3_000, 10_000)
MOST_S, MOST_BYTES = 300.0, 4e9
"""What 10,000 cards may take at most."""
FROM = 1_000
"""From so many cards on nothing grows faster than n log n."""
SLACK = 1.25
"""Times n log n, as one search is not like another."""
_GIGABIT = 1e9 / 8
_NUM_REGIONS, _CARDS_PER_NODE = 10, 8
_TYPES = ("H100-SXM", "A100-80", "A100-40", "H100-NVL", "V100-32", "A10G", "V100-16", "T4")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A search on so many cards."""

    num_cards: int
    num_used: int
    first_s: float
    """Until there was a plan."""
    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Resident at most, of the whole process."""
    iteration_s: float
    num_estimated: int
    num_simulated: int
    num_classes: int
    """Ranks that were simulated of the plan that was found."""


def make_world(num_cards: int) -> PlanProblem:
    """About so many cards in machines of eight, of eight types in ten regions, as many of each type; a row
    for each card."""
    num_nodes = max(_NUM_REGIONS, round(num_cards / _CARDS_PER_NODE))
    nodes = []
    for i in range(num_nodes):
        # Every region has nodes of two types or more, each type some regions.
        region, device = i % _NUM_REGIONS, _TYPES[(i % _NUM_REGIONS + i // _NUM_REGIONS) % len(_TYPES)]
        is_fast = device.startswith(("H100", "A100"))
        nodes.append(
            Node(
                name=f"{device.lower()}-{i}",
                devices=(device,) * _CARDS_PER_NODE,
                zone=f"zone-{region}",
                region=f"region-{region}",
                fabric=Link(150e9 if is_fast else 10e9),
                nic=Link((100 if is_fast else 25) * _GIGABIT),
            )
        )
    names = [f"region-{region}" for region in range(_NUM_REGIONS)]
    between = {(a, b): Link(10 * _GIGABIT, 0.03) for i, a in enumerate(names) for b in names[i + 1 :]}
    shape = next(own for own in REAL_DECODERS if own.name == "llama 33b")
    workload = make_workload(shape, sequence_length=2048, dtype="bfloat16")
    return PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=tuple(nodes), default_link=Link(100 * _GIGABIT, 2e-5), region_links=between),
        profile=assume_profile(workload),
        global_batch=num_nodes * _CARDS_PER_NODE,
        defer_updates=True,
    )


def measure_growth(num_cards: int, budget_s: float, *, by_processor: bool) -> Growth:
    """In a fresh process on one core; `by_processor` as for `budgets.follow`."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (partial(make_world, num_cards), budget_s, by_processor))


def _measure(make: partial[PlanProblem], budget_s: float, by_processor: bool) -> Growth:
    warnings.simplefilter("ignore", CurveWarning)
    if by_processor:
        count_processor_time()
    problem = make()
    seen: list[Progress] = []
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    answer = search_plans(problem, budget_s=budget_s, top=1, on_progress=seen.append)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    case = answer.best.case
    classes = problem.setting.find_classes(case.plan, case.costs)
    return Growth(
        num_cards=problem.cluster.num_devices,
        num_used=case.plan.num_ranks,
        first_s=next((own.elapsed_s for own in seen if own.best_s is not None), wall_s),
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        iteration_s=case.simulation.iteration_s,
        num_estimated=answer.progress.num_estimated,
        num_simulated=answer.progress.num_simulated,
        num_classes=case.plan.num_ranks if classes is None else len(classes.members),
    )


HEADER = (
    f"{'cards':>7}{'used':>7}{'first plan s':>14}{'search s':>10}{'CPU s':>9}{'MB':>8}{'step s':>10}"
    f"{'estimated':>11}{'simulated':>11}{'classes':>9}"
)


def format_growth(own: Growth) -> str:
    return (
        f"{own.num_cards:>7}{own.num_used:>7}{own.first_s:>14.2f}{own.wall_s:>10.2f}{own.cpu_s:>9.2f}"
        f"{own.peak_bytes / 1e6:>8.0f}{own.iteration_s:>10.3f}{own.num_estimated:>11}{own.num_simulated:>11}"
        f"{own.num_classes:>9}"
    )


def list_growth_misses(found: Sequence[Growth]) -> Iterator[str]:
    """What is not as it should be, a line each."""
    for own in found:
        if own.cpu_s > MOST_S:
            yield f"{own.num_cards} cards: {own.cpu_s:.0f} s, not at most {MOST_S:g}"
        if own.peak_bytes > MOST_BYTES:
            yield f"{own.num_cards} cards: {own.peak_bytes / 1e6:.0f} MB, not at most {MOST_BYTES / 1e6:.0f}"
    large = [own for own in found if own.num_cards >= FROM]
    for few, many in pairwise(large):
        least, most = (own.num_cards * math.log(own.num_cards) for own in (few, many))
        for name, a, b in (
            ("seconds until there is a plan", few.first_s, many.first_s),
            ("bytes", few.peak_bytes, many.peak_bytes),
        ):
            if b > SLACK * a * most / least:
                yield (
                    f"{few.num_cards} to {many.num_cards} cards: {b / a:.1f} times the {name}, n log n is "
                    f"{most / least:.1f}"
                )
