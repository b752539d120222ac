"""Plans of the planner for emulated clusters, run by the real runtime: what it promises must come true.

    python tools/check_planned.py --json result.json       # two clusters, ten plans each, about 15 minutes
    python tools/check_planned.py --only "two nodes" --plans 5

Ranks are processes that sleep instead of computing, over links that are slept in the transport
(tools/emulation); what this machine itself adds is measured first. The planner is asked for the same work
under different wishes, so that its plans spread over a factor of two in predicted time. Run and prediction
may differ by 5 % on average; their ranks must agree (Spearman 0.9); and the plan predicted to be the fastest
must be within 3 % of the fastest run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

# Before torch is imported, here and in every rank forked from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.emulation.constants import measure_constants
from tools.emulation.emulation import run
from tools.emulation.noise import Moment, is_busy
from tools.emulation.planned import CLUSTERS, SPREAD, Candidate, choose, make_machines, propose
from tools.report import describe_machine, make_parser, write_json

NUM_PLANS = 10
NUM_STEPS = 3
BUDGET_S = 4.0
MAX_MEAN_ERROR = 0.05
MIN_SPEARMAN = 0.9
MAX_REGRET = 0.03


@dataclass(frozen=True)
class PlanRun:
    """One plan that was run."""

    candidate: Candidate
    step_s: tuple[float, ...]
    measured_s: float
    """The median step."""
    others_share: float | None
    """Share of the cores that other processes used meanwhile."""

    @property
    def error(self) -> float:
        return self.candidate.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Score:
    """What the runs on one cluster come to."""

    mean_error: float
    spearman: float
    regret: float
    """How much slower the plan predicted best was than the best run."""
    spread: float
    """The slowest prediction over the fastest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans and runs; the exit status says whether every target was met."""
    options = parse(arguments)
    begin_s = time.monotonic()
    print("measuring what this machine adds ...", flush=True)
    constants = measure_constants()
    results: dict[str, list[PlanRun]] = {}
    misses: list[str] = []
    for scenario in CLUSTERS:
        if options.only is not None and options.only not in scenario.name:
            continue
        machines = make_machines(scenario, constants, options.steps)
        proposed = propose(machines, budget_s=options.budget)
        chosen = choose(proposed, options.plans)
        print(f"{scenario.name}: {len(proposed)} different plans, {len(chosen)} of them are run", flush=True)
        runs = results[scenario.name] = [run_plan(candidate) for candidate in chosen]
        score = find_score(runs)
        print(format_score(score), flush=True)
        misses += [f"{scenario.name}: {miss}" for miss in list_misses(score)]
    shares = [own.others_share for runs in results.values() for own in runs]
    if is_busy(shares):
        print("note: other processes used the cores during most runs: measured times are too long")
    print("\n".join([f"{time.monotonic() - begin_s:.0f} s", *(f"MISSED: {miss}" for miss in misses)]))
    plans = {own.candidate.name: own.candidate.plan.explain() for runs in results.values() for own in runs}
    report = {"misses": misses, "clusters": results, "plans": plans, "machine": describe_machine()}
    write_json(options.json, report)
    return int(bool(misses))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--plans", type=int, default=NUM_PLANS, metavar="N", help=f"default {NUM_PLANS}")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, metavar="N", help="timed steps of each")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="of each search")
    parser.add_argument("--only", metavar="TEXT", help="clusters whose names hold this")
    return parser.parse_args(arguments)


def run_plan(candidate: Candidate) -> PlanRun:
    """Runs one, and prints it beside its prediction."""
    before = Moment.now()
    measured = run(candidate.emulation)
    own = PlanRun(candidate, measured.step_s, measured.median_s, Moment.now().others_share(before))
    others = "" if own.others_share is None else f", others {own.others_share:.0%}"
    plan = candidate.plan
    print(
        f"  {candidate.name:28} {plan.num_ranks} ranks, {len(plan.groups)} groups, {plan.num_ministages} "
        f"ministages: predicted {candidate.predicted_s:6.3f} s, run {own.measured_s:6.3f} s {own.error:+6.1%}"
        f"{others}",
        flush=True,
    )
    return own


def find_score(runs: Sequence[PlanRun]) -> Score:
    """The score of several runs on one cluster."""
    from scipy.stats import spearmanr

    predicted = [own.candidate.predicted_s for own in runs]
    measured = [own.measured_s for own in runs]
    best = min(runs, key=lambda own: own.candidate.predicted_s)
    return Score(
        mean_error=fmean(abs(own.error) for own in runs),
        spearman=float(spearmanr(predicted, measured).statistic),
        regret=best.measured_s / min(measured) - 1,
        spread=max(predicted) / min(predicted),
    )


def list_misses(score: Score) -> list[str]:
    """What is not as it should be, a line each."""
    misses = []
    if score.mean_error > MAX_MEAN_ERROR:
        misses.append(f"mean error {score.mean_error:.1%}, not at most {MAX_MEAN_ERROR:.0%}")
    if not score.spearman >= MIN_SPEARMAN:
        misses.append(f"Spearman {score.spearman:.3f}, not at least {MIN_SPEARMAN:g}")
    if score.regret > MAX_REGRET:
        misses.append(f"the plan predicted best is {score.regret:.1%} slower than the best run")
    if score.spread < SPREAD:
        misses.append(f"predictions spread over a factor of {score.spread:.2f}, not at least {SPREAD:g}")
    return misses


def format_score(score: Score) -> str:
    return (
        f"  mean error {score.mean_error:.1%}, Spearman {score.spearman:.3f}, the plan predicted best is "
        f"{score.regret:.1%} slower than the best run, predictions spread over a factor of {score.spread:.2f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
