"""Our plans against those of Zorse's paper: the ten cells of its Table 5, both simulated.

    python tools/papers/compare_zorse.py --data DIR --budget 10 --json figures.json
    python tools/papers/compare_zorse.py --data DIR --cells A:7b B:33b

Layer times are those that Zorse's authors published; links and memory are assumed as `reproduce_zorse.py`
says. The paper's plan has its groups (section 6.2), layers and rows by speed, and the best ministages and
microbatches of those that `reproduce_zorse.py` searches; all of its layers are recomputed. Ours is what
`search_plans` finds, once with the same recomputation and once without being told. No cell may be worse; the
exit code says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import ZORSE, make_data_parser, report_errors, say_progress
from tools.papers.zorse.baselines import make_problem
from tools.papers.zorse.paper import ASSUMPTIONS, TABLE_5
from tools.papers.zorse.runs import Outcome, Setup, compute_bound_tflops, count_layers, make_setup
from tools.papers.zorse.study import Study
from tools.papers.zorse.times import find_folder
from tools.report import positive, positive_s, write_json
from zorselike.planner.answer import NothingFitsError, PlanAnswer
from zorselike.planner.problem import Fixed
from zorselike.planner.search.helpers import count_cores
from zorselike.planner.search.search import search_plans
from zorselike.simulator.simulated_plan import SimulatedPlan
from zorselike.text.wording import count

CELLS = tuple(TABLE_5)
"""The authors published no times of 65B at the sequence lengths of B and C."""
AIMS = {"A": 0.95, "B": 0.90, "C": 0.85}
"""Shares of the compute-bound limit with recomputation."""
EVEN = 1.001
"""A step up to this much longer is no worse: events of the simulator fall in another order."""


@dataclass(frozen=True)
class Search:
    """What our search found for one question."""

    answer: PlanAnswer | None = field(repr=False)
    """None: nothing fits."""
    seconds: float
    reason: str = ""

    @property
    def case(self) -> SimulatedPlan | None:
        return None if self.answer is None else self.answer.best.case

    @property
    def step_s(self) -> float | None:
        return None if self.case is None else self.case.simulation.iteration_s


@dataclass(frozen=True)
class Comparison:
    """One cluster and model."""

    cluster: str
    model: str
    setup: Setup = field(repr=False)
    paper: Outcome | None
    """The paper's plan; None: none fits."""
    recomputed: Search
    """Ours with all layers recomputed."""
    free: Search
    """Ours, recomputed or not."""

    @property
    def paper_s(self) -> float | None:
        return None if self.paper is None else self.paper.simulation.iteration_s

    def is_worse(self, own: Search) -> bool:
        """Whether the paper's plan is faster, or fits where none of ours does."""
        if self.paper_s is None:
            return False
        return own.step_s is None or own.step_s > EVEN * self.paper_s

    @property
    def is_free_search_behind(self) -> bool:
        """Whether a search that may recompute found less than one that must."""
        told, free = self.recomputed.step_s, self.free.step_s
        return told is not None and (free is None or free > EVEN * told)

    def share_of_limit(self, step_s: float | None) -> float | None:
        """Share of what all devices do if they compute all the time, every layer recomputed."""
        if step_s is None:
            return None
        flops = self.setup.workload.flops_per_row(recompute=True) * self.setup.global_batch
        return flops / step_s / 1e12 / compute_bound_tflops(self.setup)


def compare(
    study: Study, cluster: str, model: str, *, budget_s: float, seed: int, workers: int = 1
) -> Comparison:
    """The paper's plan and ours for one cell."""
    paper = study.clusters[cluster]
    setup = make_setup(study.folder, model, paper)
    return Comparison(
        cluster,
        model,
        setup,
        study.fitting(paper, model),
        _search(setup, recompute=True, budget_s=budget_s, seed=seed, workers=workers),
        _search(setup, recompute=False, budget_s=budget_s, seed=seed, workers=workers),
    )


def _search(setup: Setup, *, recompute: bool, budget_s: float, seed: int, workers: int) -> Search:
    problem = make_problem(setup)
    if not recompute:
        problem = replace(problem, fixed=Fixed())
    start = time.perf_counter()
    try:
        answer = search_plans(problem, budget_s=budget_s, top=1, seed=seed, workers=workers)
    except NothingFitsError as error:
        return Search(None, time.perf_counter() - start, str(error))
    return Search(answer, time.perf_counter() - start)


# -- words -------------------------------------------------------------------------------------


def format_header() -> str:
    return (
        "Seconds of a step, and its share of the compute-bound limit: what all devices take if they compute\n"
        "all the time, for the first two with every layer recomputed, for the last with none.\n"
        f"{'':<12}{'the paper':>16}{'ours, recomputed':>28}{'ours, free':>24}"
    )


def format_comparison(own: Comparison) -> list[str]:
    """A line of numbers, and one for each plan."""
    paper = "OOM" if own.paper_s is None else _show(own.paper_s, own.share_of_limit(own.paper_s))
    first, second = own.recomputed, own.free
    shares = (
        own.share_of_limit(first.step_s),
        None if second.answer is None else second.answer.best.share_of_ideal,
    )
    columns = [
        f"{_show(search.step_s, share)}{_show_ratio(own, search)}"
        for search, share in zip((first, second), shares, strict=True)
    ]
    lines = [f"{own.cluster} {own.model:<10}{paper:>16}{columns[0]:>28}{columns[1]:>24}"]
    if own.paper is not None:
        options = own.paper.options
        lines.append(
            f"    the paper: layers {' '.join(map(str, own.paper.layers))}, {options.ministages} ministages "
            f"a group, {options.rows_per_microbatch} rows a microbatch, offloads {' '.join(options.offload)}"
        )
    for name, search in (("recomputed", first), ("free", second)):
        said = search.reason if search.case is None else describe(search.case)
        lines.append(f"    {name} ({search.seconds:.1f} s of search): {said}")
    return lines


def _show(step_s: float | None, share: float | None) -> str:
    return "OOM" if step_s is None or share is None else f"{step_s:.2f} s {share:.0%}"


def _show_ratio(own: Comparison, search: Search) -> str:
    if own.is_worse(search):
        return " WORSE"
    if own.paper_s is None or search.step_s is None:
        return ""
    return f" x {own.paper_s / search.step_s:.2f}"


def describe(case: SimulatedPlan) -> str:
    """Groups of a plan with their devices, layers and modes, on a line."""
    plan = case.plan
    parts = []
    for g, group in enumerate(plan.groups):
        types = [case.device_types[rank] for rank in group.flat_ranks]
        devices = " + ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types))
        again = ", recomputed" if group.recompute == "layer" else ""
        away = f", offloads {' '.join(group.offload)}" if group.offload else ""
        parts.append(f"{devices}: {count_layers(plan, g)} layers, ZeRO {group.zero}{again}{away}")
    return f"{count(plan.num_ministages, 'ministage')}; " + "; ".join(parts)


def format_summary(found: Sequence[Comparison]) -> list[str]:
    worse = [
        f"{own.cluster} {own.model} {name}"
        for own in found
        for name, search in (("recomputed", own.recomputed), ("free", own.free))
        if own.is_worse(search)
    ]
    lines = ["no cell is worse than the paper's plan" if not worse else f"worse: {', '.join(worse)}"]
    if missed := [f"{own.cluster} {own.model}" for own in found if own.is_free_search_behind]:
        lines.append(f"not told to recompute, the search found less than told to: {', '.join(missed)}")
    for cluster, aim in AIMS.items():
        shares = [
            share
            for own in found
            if own.cluster == cluster and (share := own.share_of_limit(own.recomputed.step_s)) is not None
        ]
        if shares:
            reached = ", ".join(f"{share:.0%}" for share in shares)
            lines.append(f"{cluster}: {reached} of the limit with recomputation; aimed at {aim:.0%}")
    return [*lines, "assumed:", *(f"  {line}" for line in ASSUMPTIONS)]


def main() -> int:
    parser = make_data_parser(__doc__, ZORSE)
    parser.add_argument(
        "--budget", type=positive_s, default=10.0, help="seconds of each search (default: 10)"
    )
    parser.add_argument("--seed", type=int, default=0)
    workers_help = "processes of each search (default: as `zorselike plan`, a core each)"
    parser.add_argument("--workers", type=positive, default=count_cores(), metavar="N", help=workers_help)
    cells_help = "such as A:7b C:33b (default: all 10)"
    parser.add_argument("--cells", type=_read_cell, nargs="+", default=CELLS, help=cells_help)
    args = parser.parse_args()
    study = Study(find_folder(args.data), say=say_progress)
    found: list[Comparison] = []
    print(format_header(), flush=True)
    for cluster, model in args.cells:
        found.append(
            compare(study, cluster, model, budget_s=args.budget, seed=args.seed, workers=args.workers)
        )
        print("\n".join(format_comparison(found[-1])), flush=True)
    print("\n".join(format_summary(found)))
    write_json(args.json, found)
    return int(any(own.is_worse(search) for own in found for search in (own.recomputed, own.free)))


def _read_cell(text: str) -> tuple[str, str]:
    cluster, _, model = text.partition(":")
    if (cluster, model) not in CELLS:
        raise argparse.ArgumentTypeError(f"{text}: give cluster and model, such as A:7b or C:33b")
    return cluster, model


if __name__ == "__main__":
    sys.exit(report_errors(main))
