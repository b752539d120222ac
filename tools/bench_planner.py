"""How long the search takes on one core, from 20 GPUs to 1,024.

    python tools/bench_planner.py --json figures.json
    python tools/bench_planner.py --only "Llama 65b"
    python tools/bench_planner.py --budgets --clusters 4 --reference-seconds 120
    python tools/bench_planner.py --growth --budget 200

The clusters of Zorse's paper with all four Llamas, by the layer times that its authors published (left out,
with a word, where `--data` has none); two and three types of GPUs in machines of four, as in Sailor's
experiments; 1,024 GPUs of four types. Each search is a process of its own on one core, and its budget seven
tenths of the most that it may take. Published times of other planners stand beside them: Zorse's with the
profiling, Sailor's as measured on a machine of this class (128 + 384) and as in its paper (3 x 256).

With `--degrees` five clusters of nodes of eight cards on slow networks are planned with tensor-parallel
replicas and without.

With `--budgets` twelve questions of 2 to 128 cards are each searched for 10, 30 and 600 s on all cores, as
`zorselike plan` does: how much worse is the plan found in little time than the best, and is one ever worse
with more time? With `--desks` besides, ten questions of one or two machines with 2 to 5 unlike cards in their
place. With `--growth` one question is asked of 100 to 10,000 cards of eight types in ten regions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# One core, also for what numpy does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.bench.budgets import (
    REFERENCE_S,
    Course,
    follow,
    format_course,
    list_questions,
    summarize,
)
from tools.bench.budgets import (
    list_misses as list_budget_misses,
)
from tools.bench.degrees import HEADING, QUESTIONS, find_worths, format_worth
from tools.bench.degrees import list_misses as list_degree_misses
from tools.bench.desks import list_desk_questions
from tools.bench.growth import (
    HEADER as GROWTH_HEADER,
)
from tools.bench.growth import (
    MOST_S as MOST_GROWTH_S,
)
from tools.bench.growth import (
    NUM_CARDS,
    format_growth,
    list_growth_misses,
    measure_growth,
)
from tools.papers.data import report_errors
from tools.papers.zorse.paper import CONTEXT_BYTES, make_clusters
from tools.papers.zorse.runs import make_setup
from tools.papers.zorse.times import find_folder, read_workload
from tools.report import choose_named, describe_machine, make_parser, positive, positive_s, write_json
from zorselike.cost.curves import CurveWarning
from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.errors import ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.answer import NothingFitsError, Progress
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.helpers import count_cores
from zorselike.planner.search.search import search_plans

from planner_oracle.workloads import REAL_DECODERS, make_workload

BUDGET_SHARE = 0.7
"""Share of the most that a search may take."""
DEGREES_S = 20.0
"""Of each search with `--degrees`."""
MAX_BYTES = 2e9
NEAR = 0.01
"""So near to the end's best, the search had found nearly all that it finds."""
ZORSE_PLANNING_S = 180.0
"""What the paper's planner takes at most, profiling included (section 6.4, Fig. 12)."""
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Scale:
    """One question, how long it may take, and how long others took for one of that size."""

    name: str
    target_s: float
    published_s: float | None
    """Seconds of another planner; None where none was published."""
    make: Callable[[], PlanProblem]


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


def main() -> int:
    """Times all; the exit status says whether every target was met."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="with github.com/benson-guo/zorse, a clone")
    parser.add_argument("--only", metavar="TEXT", help="those whose names hold this")
    parser.add_argument(
        "--budget", type=positive_s, metavar="S", help="of each search, in place of seven tenths"
    )
    parser.add_argument(
        "--budgets", action="store_true", help="what is found in 10 and 30 s, beside the best"
    )
    parser.add_argument("--desks", action="store_true", help="a few unlike cards each, with --budgets")
    parser.add_argument("--growth", action="store_true", help="100 to 10,000 cards in ten regions")
    parser.add_argument(
        "--clusters", type=positive, default=12, metavar="N", help="of the twelve, with --budgets"
    )
    parser.add_argument(
        "--reference-seconds", type=positive_s, default=REFERENCE_S, metavar="S", help="of the longest search"
    )
    parser.add_argument(
        "--by-processor", action="store_true", help="budgets are seconds of the processor, on a busy machine"
    )
    workers_help = "processes of a search with --budgets (default: a core each; one with --by-processor)"
    parser.add_argument("--workers", type=positive, metavar="N", help=workers_help)
    parser.add_argument("--degrees", action="store_true", help="what tensor-parallel degrees are worth")
    options = parser.parse_args()
    if options.desks and not options.budgets:
        parser.error("--desks is for --budgets; give that too")
    if options.degrees:
        return compare_degrees(options)
    if options.budgets:
        return follow_budgets(options)
    if options.growth:
        return follow_growth(options)
    if options.data is None:
        print("note: no --data with Zorse's layer times (github.com/benson-guo/zorse). Left out: A, B, C")
    scales = choose_named(
        list_scales(None if options.data is None else find_folder(options.data)), options.only
    )
    print(
        f"{'cluster':<22}{'GPUs':>6}{'used':>6}{'search s':>10}{'most':>6}{'near s':>8}{'CPU s':>8}"
        f"{'published':>10}{'ratio':>7}{'simulated':>10}{'step s':>9}{'gap':>7}{'ideal':>7}{'MB':>7}"
        "  ended by"
    )
    results: dict[str, Timing | str] = {}
    misses: list[str] = []
    for scale in scales:
        try:
            result = results[scale.name] = time_search(
                scale.make, options.budget or BUDGET_SHARE * scale.target_s
            )
            line, missed = format_line(scale, result), list_misses(scale, result)
        except NothingFitsError as error:
            line, missed = f"{scale.name:<22}nothing fits: {error}", [f"nothing fits: {error}"]
            results[scale.name] = missed[0]
        print(line, flush=True)
        misses += [f"{scale.name}: {miss}" for miss in missed]
    print("\n".join(["", *(f"MISSED: {miss}" for miss in misses)]) if misses else "\nall targets met")
    write_json(options.json, {"misses": misses, "cases": results, "machine": describe_machine()})
    return int(bool(misses))


def compare_degrees(options: argparse.Namespace) -> int:
    """Searches with and without tensor parallelism; the exit status says whether it wins where it should, and
    loses nowhere."""
    questions = choose_named(QUESTIONS, options.only)
    print(HEADING)
    worths = []
    for worth in find_worths(questions, options.budget or DEGREES_S):
        worths.append(worth)
        print(format_worth(worth), flush=True)
    misses = list_degree_misses(worths)
    print(*(f"MISSED: {miss}" for miss in misses), sep="\n")
    write_json(options.json, {"misses": misses, "worths": worths, "machine": describe_machine()})
    return int(bool(misses))


def follow_budgets(options: argparse.Namespace) -> int:
    """Searches with several budgets; the exit status says whether plans were near the best in little time,
    and never worse with more."""
    zorse = None if options.data is None else partial(make_zorse, find_folder(options.data))
    workers = options.workers or (1 if options.by_processor else count_cores())
    asked = list_desk_questions() if options.desks else list_questions(zorse)
    questions = choose_named(asked, options.only)[: options.clusters]
    courses: list[Course] = []
    print(
        f"{'question':<28}{'GPUs':>5}{'used':>6}{'budget':>9}{'step s':>10}{'money':>10}{'ratio':>8}"
        f"{'estim.':>8}{'simul.':>7}  ended by"
    )
    for question in questions:
        try:
            courses.append(
                follow(
                    question, options.reference_seconds, workers=workers, by_processor=options.by_processor
                )
            )
        except ProfileError as error:
            print(f"{question.name:<28} left out: {error}")
            continue
        print(*format_course(courses[-1]), sep="\n", flush=True)
    misses = list_budget_misses(courses)
    summary = summarize(courses)
    print("", *(f"{name}: {value:g}" for name, value in summary.items()), sep="\n")
    print(*(f"MISSED: {miss}" for miss in misses), sep="\n")
    found = {"misses": misses, **summary, "courses": courses, "machine": describe_machine()}
    write_json(options.json, found)
    return int(bool(misses))


def follow_growth(options: argparse.Namespace) -> int:
    """Searches on ever more cards; the exit status says whether the most took little enough, and nothing grew
    faster than n log n."""
    print(GROWTH_HEADER)
    found = []
    for num_cards in NUM_CARDS:
        budget_s = options.budget or BUDGET_SHARE * MOST_GROWTH_S
        found.append(measure_growth(num_cards, budget_s, by_processor=options.by_processor))
        print(format_growth(found[-1]), flush=True)
    misses = [*list_growth_misses(found)]
    print("", *(f"MISSED: {miss}" for miss in misses), sep="\n")
    write_json(options.json, {"misses": misses, "growth": found, "machine": describe_machine()})
    return int(bool(misses))


def format_line(scale: Scale, own: Timing) -> str:
    others_s = scale.published_s
    published, ratio = ("-", "-") if others_s is None else (f"{others_s:g}", f"{others_s / own.wall_s:.1f}x")
    return (
        f"{scale.name:<22}{own.num_devices:>6}{own.num_used:>6}{own.wall_s:>10.2f}{scale.target_s:>6g}"
        f"{own.near_s:>8.2f}{own.cpu_s:>8.2f}{published:>10}{ratio:>7}{own.num_simulated:>10}"
        f"{own.step_s:>9.3f}{own.gap:>7.1%}{own.share_of_ideal:>7.1%}{own.peak_bytes / 1e6:>7.0f}"
        f"  {own.ending}"
    )


def list_misses(scale: Scale, own: Timing) -> list[str]:
    """What is not as it should be, a line each."""
    misses = []
    if own.wall_s > scale.target_s:
        misses.append(f"{own.wall_s:.2f} s, not at most {scale.target_s:g}")
    if own.peak_bytes > MAX_BYTES:
        misses.append(f"{own.peak_bytes / 1e6:.0f} MB, not at most {MAX_BYTES / 1e6:.0f}")
    return misses


# -- questions --------------------------------------------------------------------------


def list_scales(data: Path | None) -> list[Scale]:
    """All; those from Zorse's layer times only with the folder that holds them."""
    scales = []
    if data is not None:
        scales += [
            Scale(f"{name}, Llama {model}", 10.0, ZORSE_PLANNING_S, partial(make_zorse, data, name, model))
            for name in ("A", "B", "C")
            for model in ("7b", "13b", "33b", "65b")
        ]
    two = partial(make_rented, {"A100-40": 128, "V100-16": 384}, "opt 350m", 2048, 1024, "float32")
    three = partial(
        make_rented, {"A100-40": 256, "V100-16": 256, "T4": 256}, "opt 350m", 2048, 1024, "float32"
    )
    types = ("H100-SXM", "A100-80", "A100-40", "V100-32")
    four = partial(make_rented, dict.fromkeys(types, 256), "llama 13b", 1024, 4096, "float16")
    return [
        *scales,
        Scale("128 + 384, OPT-350M", 7.0, 7.1, two),
        Scale("3 x 256, OPT-350M", 60.0, 4900.0, three),
        Scale("4 x 256, Llama 13B", 60.0, None, four),
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
    counts: dict[str, int], model: str, sequence_length: int, global_batch: int, dtype: str
) -> PlanProblem:
    """Machines of 4 GPUs in one zone, so many GPUs of each type, with the catalogue's times."""
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
        for device, number in counts.items()
        for i in range(number // 4)
    )
    return PlanProblem(
        workload=make_workload(shape, sequence_length=sequence_length, dtype=dtype),
        cluster=Cluster(nodes=nodes, default_link=Link(100 * GIGABIT, 2e-5), name="rented"),
        profile=Profile(model=shape.name),
        global_batch=global_batch,
    )


# -- how long a search takes ------------------------------------------------------------


def time_search(make: Callable[[], PlanProblem], budget_s: float) -> Timing:
    """Times a search in a fresh process on one core, without torch; raises what the search raises."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
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


if __name__ == "__main__":
    raise SystemExit(report_errors(main))
