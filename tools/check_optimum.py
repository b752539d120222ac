"""The search against all plans there are, on small cases.

    python tools/check_optimum.py --json result.json         # 200 cases, under half an hour of one core
    python tools/check_optimum.py --runs 20 --max-plans 200
    python tools/check_optimum.py --seed 17                  # one again, with both plans

At most 4 devices, 6 layers and 8 rows; ZeRO stage, `grad_reduce`, recomputation, what is offloaded and the
most rows of a microbatch are fixed for each case. Then all plans are tried by the simulator: every subset of
the devices, every partition into groups, every order, every number of ministages in turn, every cut of the
layers, every division of the rows and every size of microbatches. The search, with the same things fixed,
must come within 0.1 % of the best on average and 3 % at worst.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.report import make_parser, positive, positive_s, write_json

from planner_oracle.small_cases import MAX_PLANS, Comparison, compare
from planner_oracle.trials import describe, map_seeds

NUM_RUNS = 200
BUDGET_S = 5.0
MAX_MEAN = 0.001
MAX_WORST = 0.03
NUM_SHOWN = 3
"""Worst cases that are shown with both plans."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all cases; the exit status says whether the search came near enough."""
    options = parse(arguments)
    begin_s = time.monotonic()
    found: list[Comparison] = []
    seeds = range(options.runs) if options.seed is None else [options.seed]
    work = partial(compare, budget_s=options.budget, max_plans=options.max_plans)
    for own in map_seeds(work, seeds, options.workers):
        found.append(own)
        print(format_line(own), flush=True)
    worst = sorted((own for own in found if own.excess is not None), key=lambda own: -(own.excess or 0.0))
    print("".join(f"\n{format_both(own)}\n" for own in worst[:NUM_SHOWN]))
    misses = list_misses(found)
    print(format_summary(found, misses, time.monotonic() - begin_s))
    write_json(options.json, {"misses": misses, "cases": found})
    return int(bool(misses))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=positive, default=NUM_RUNS, metavar="N", help=f"default {NUM_RUNS}")
    parser.add_argument("--seed", type=int, metavar="N", help="only this one")
    parser.add_argument(
        "--budget", type=positive_s, default=BUDGET_S, metavar="S", help=f"default {BUDGET_S} s"
    )
    parser.add_argument(
        "--max-plans", type=positive, default=MAX_PLANS, metavar="N", help=f"of a case (default {MAX_PLANS})"
    )
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes (default 1)")
    return parser.parse_args(arguments)


def list_misses(found: Sequence[Comparison]) -> list[str]:
    """What is not as it should be, a line each."""
    misses = [f"--seed {own.seed}: {own.fault}" for own in found if own.fault]
    excesses = [max(0.0, own.excess) for own in found if own.excess is not None]
    if not excesses:
        return [*misses, "no case has a plan"]
    if fmean(excesses) > MAX_MEAN:
        misses.append(f"{fmean(excesses):.2%} above the best on average, not at most {MAX_MEAN:.1%}")
    misses += [
        f"--seed {own.seed}: {own.excess:.1%} above the best, not at most {MAX_WORST:.0%}"
        for own in found
        if own.excess is not None and own.excess > MAX_WORST
    ]
    return misses


def format_line(own: Comparison) -> str:
    if own.excess is None:
        verdict = own.fault or ("nothing fits" if own.found is None else "better than all that were tried")
    else:
        verdict = f"{own.excess:+.2%}"
    return (
        f"{own.seed:5} {own.optimum.num_plans:6} plans, {own.optimum.num_simulated:5} simulated; search "
        f"{own.search_s:5.2f} s {'' if own.answer is None else own.answer.ending:8} {verdict}"
    )


def format_both(own: Comparison) -> str:
    """The case, the plan that the search found, and the best of all."""
    assert own.found is not None and own.optimum.case is not None
    return "\n".join(
        (
            f"--seed {own.seed}: {own.excess:+.2%}; {describe(own.case.problem)}",
            f"the search's, {own.score:.6g}:",
            own.found.plan.explain(),
            f"the best of all, {own.best_score:.6g}:",
            own.optimum.case.plan.explain(),
        )
    )


def format_summary(found: Sequence[Comparison], misses: Sequence[str], seconds: float) -> str:
    excesses = [max(0.0, own.excess) for own in found if own.excess is not None]
    beyond = sum(own.excess is not None and own.excess < -1e-9 for own in found)
    lines = [
        f"{len(found)} cases in {seconds:.0f} s, {len(found) - len(excesses)} of them fit nothing; "
        f"{sum(own.optimum.num_plans for own in found)} plans"
    ]
    if excesses:
        same = sum(excess < 1e-6 for excess in excesses)
        lines.append(
            f"above the best: mean {fmean(excesses):.2%}, worst {max(excesses):.2%}; the best itself in "
            f"{same} cases, better than all plans tried in {beyond}"
        )
    return "\n".join([*lines, *(f"MISSED: {miss}" for miss in misses)])


if __name__ == "__main__":
    raise SystemExit(main())
