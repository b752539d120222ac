"""Large questions to the planner, and how long a search takes on one core: the clusters of Zorse's paper, and
of Sailor's size and beyond."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zorselike.cost.curves import CurveWarning
from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.errors import ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.answer import Progress
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.search import search_plans

from ..papers.zorse.paper import CONTEXT_BYTES, make_clusters
from ..papers.zorse.runs import make_setup
from ..papers.zorse.times import read_workload
from .workloads import REAL_DECODERS, make_workload

ZORSE_PLANNING_S = 180.0
"""What the paper's planner takes at most, profiling included (section 6.4, Fig. 12)."""
LLAMAS = ("7b", "13b", "33b", "65b")
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Scale:
    """One question, how long it may take, and how long others took for one of that size."""

    name: str
    target_s: float
    published_s: float | None
    """Seconds of another planner; None where none was published."""
    make: Callable[[], PlanProblem]


def list_scales(data: Path | None) -> list[Scale]:
    """All; those from Zorse's layer times only with the folder that holds them."""
    scales = []
    if data is not None:
        scales += [
            Scale(f"{name}, Llama {model}", 10.0, ZORSE_PLANNING_S, partial(make_zorse, data, name, model))
            for name in ("A", "B", "C")
            for model in LLAMAS
        ]
    two, three = (("A100-40", 128), ("V100-16", 384)), (("A100-40", 256), ("V100-16", 256), ("T4", 256))
    four = (("H100-SXM", 256), ("A100-80", 256), ("A100-40", 256), ("V100-32", 256))
    return [
        *scales,
        Scale("128 + 384, OPT-350M", 7.0, 7.1, partial(make_rented, two, "opt 350m", 2048, 1024, "float32")),
        Scale(
            "3 x 256, OPT-350M", 60.0, 4900.0, partial(make_rented, three, "opt 350m", 2048, 1024, "float32")
        ),
        Scale(
            "4 x 256, Llama 13B", 60.0, None, partial(make_rented, four, "llama 13b", 1024, 4096, "float16")
        ),
    ]


def make_zorse(folder: Path, cluster: str, model: str) -> PlanProblem:
    """A cell of the paper's Table 5, with the layer times that its authors published; where they published
    none (65B on B and C), with the catalogue's."""
    paper = make_clusters()[cluster]
    workload = read_workload(folder, model, paper.sequence_length)
    try:
        profile = make_setup(folder, model, paper).profile
    except ProfileError:
        overheads = Overheads(context_bytes=CONTEXT_BYTES, source=Source("given", note="assumed"))
        profile = Profile(model=workload.model, overheads=overheads)
    return PlanProblem(
        workload=workload, cluster=paper.cluster, profile=profile, global_batch=paper.global_batch
    )


def make_rented(
    kinds: Sequence[tuple[str, int]], model: str, sequence_length: int, global_batch: int, dtype: str
) -> PlanProblem:
    """Machines of 4 GPUs in one zone, `(type, GPUs)` of each kind, with the catalogue's times."""
    shape = next(shape for shape in REAL_DECODERS if shape.name == model)
    nodes = tuple(
        Node(
            name=f"{device.lower()}-{i}",
            devices=(device,) * 4,
            zone="zone-a",
            region="region",
            fabric=Link(10e9 if device == "T4" else 150e9),
            nic=Link((100 if device.startswith(("A", "H")) else 32) * GIGABIT),
        )
        for device, number in kinds
        for i in range(number // 4)
    )
    return PlanProblem(
        workload=make_workload(shape, sequence_length=sequence_length, dtype=dtype),
        cluster=Cluster(nodes=nodes, default_link=Link(100 * GIGABIT, 2e-5), name="rented"),
        profile=Profile(model=shape.name),
        global_batch=global_batch,
    )


# -- how long a search takes ------------------------------------------------------------

NEAR = 0.01
"""So near to the end's best, the search had found nearly all that it finds."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One search."""

    wall_s: float
    cpu_s: float
    near_s: float
    """Until a plan within `NEAR` of the last best was known."""
    num_estimated: int
    num_simulated: int
    step_s: float
    gap: float
    share_of_ideal: float
    ending: str
    peak_bytes: int
    """Resident at most, of the whole process."""
    num_devices: int
    num_used: int
    grouping: str
    plan: str


def time_search(make: Callable[[], PlanProblem], budget_s: float) -> Timing:
    """Times a search in a fresh process on one core, without torch; raises what the search raises."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_run, (make, budget_s))


def _run(make: Callable[[], PlanProblem], budget_s: float) -> Timing:
    if hasattr(os, "sched_setaffinity"):  # Linux.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    # Of the authors' times some fall by a few percent where more is computed; curves repair them.
    warnings.simplefilter("ignore", CurveWarning)
    problem = make()
    seen: list[Progress] = []
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    answer = search_plans(problem, budget_s=budget_s, on_progress=seen.append)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    best = answer.best
    step_s = best.case.simulation.iteration_s
    near = (own.elapsed_s for own in seen if own.best_s is not None and own.best_s <= step_s * (1 + NEAR))
    return Timing(
        wall_s=wall_s,
        cpu_s=cpu_s,
        near_s=next(near, wall_s),
        num_estimated=answer.progress.num_estimated,
        num_simulated=answer.progress.num_simulated,
        step_s=step_s,
        gap=answer.gap,
        share_of_ideal=best.share_of_ideal,
        ending=answer.ending,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        num_devices=problem.cluster.num_devices,
        num_used=best.case.plan.num_ranks,
        grouping=best.grouping,
        plan=best.case.plan.explain(),
    )
