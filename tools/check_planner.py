"""Random questions to the planner: every answer must be right, whatever is asked.

    python tools/check_planner.py --json result.json             # 10,000 questions, about two hours a core
    python tools/check_planner.py --runs 300 --budget 0.1
    python tools/check_planner.py --seed 4711                    # one again, at length

Clusters of 1 to 64 devices, 1 to 6 types, ragged nodes, up to three regions, some in parts that nothing
joins; models from a thousandth of the memory to more than there is, whose layers can be cut in most;
constraints and things fixed in some.
Every plan is validated, its schedule built and checked, its step simulated anew: it must fit every device and
host, promise what it does, keep what is asked for, and say what limits it where it reaches less than 70 % of
what its devices could compute. Where nothing is said to fit and the question is tiny, all plans are tried.
Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.report import make_parser, positive, positive_s, to_plain, write_json

from planner_oracle.trials import Trial, map_seeds, try_seed

NUM_RUNS = 10_000
BUDGET_S = 0.5
BINS = 10
"""Bars of the histogram of shares."""
NUM_SLOWEST = 5
MOST_SHOWN = 20
"""Failures that are printed at the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all seeds; the exit status says whether every answer was right."""
    options = parse(arguments)
    if options.seed is not None:
        trial = try_seed(options.seed, budget_s=options.budget)
        print(json.dumps(to_plain(trial), indent=1))
        write_json(options.json, trial)
        return int(bool(trial.faults))
    begin_s = time.monotonic()
    trials: list[Trial] = []
    seeds = range(options.first, options.first + options.runs)
    for trial in map_seeds(partial(try_seed, budget_s=options.budget), seeds, options.workers):
        trials.append(trial)
        if trial.faults:
            print(format_failure(trial), flush=True)
        if len(trials) % 100 == 0:
            failed = sum(bool(own.faults) for own in trials)
            print(
                f"... {len(trials)} questions, {failed} wrong, {time.monotonic() - begin_s:.0f} s", flush=True
            )
    print(format_summary(trials, time.monotonic() - begin_s))
    wrong = [trial.seed for trial in trials if trial.faults]
    write_json(options.json, {"budget_s": options.budget, "wrong": wrong, "trials": trials})
    return int(any(trial.faults for trial in trials))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=positive, default=NUM_RUNS, metavar="N", help=f"default {NUM_RUNS}")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, metavar="N", help="only this one")
    parser.add_argument(
        "--budget", type=positive_s, default=BUDGET_S, metavar="S", help=f"default {BUDGET_S} s"
    )
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes (default 1)")
    return parser.parse_args(arguments)


def format_failure(trial: Trial) -> str:
    """A wrong answer, with the option that reproduces it."""
    faults = "".join(f"\n    {fault}" for fault in trial.faults)
    return f"WRONG, --seed {trial.seed}: {trial.what}{faults}"


def format_summary(trials: Sequence[Trial], seconds: float) -> str:
    """Outcomes, shares of the ideal, times, and the failures again."""
    outcomes = Counter(trial.outcome for trial in trials)
    planned = [trial for trial in trials if trial.outcome == "planned"]
    nothing = [trial for trial in trials if trial.outcome == "nothing fits"]
    wrong = [trial for trial in trials if trial.faults]
    lines = [
        "",
        f"{len(trials)} questions in {seconds:.0f} s: " + ", ".join(f"{n} {k}" for k, n in outcomes.items()),
    ]
    if nothing:
        proven = sum(bool(trial.nothing_is_proven) for trial in nothing)
        lines.append(f"nothing fits: {len(nothing)} times, of which all plans were tried {proven} times")
    if planned:
        lines += _format_shares(planned)
        replicas = Counter(trial.degree for trial in planned if trial.degree > 1)
        degrees = ", ".join(f"{number} of {degree}" for degree, number in sorted(replicas.items()))
        lines.append(f"{replicas.total()} plans with tensor-parallel replicas: {degrees or 'none'}")
        endings = Counter(trial.ending for trial in planned)
        lines += _format_times(trials)
        lines.append("; ".join(f"{number} by {ending}" for ending, number in endings.items()))
    lines.append(f"{len(wrong)} wrong")
    lines += [format_failure(trial) for trial in wrong[:MOST_SHOWN]]
    return "\n".join(lines)


def _format_shares(planned: Sequence[Trial]) -> list[str]:
    shares = [trial.share_of_ideal or 0.0 for trial in planned]
    counts = Counter(min(BINS - 1, int(share * BINS)) for share in shares)
    lines = [f"share of what the plan's devices could compute: mean {fmean(shares):.0%}"]
    for n in reversed(range(BINS)):
        bar = "#" * round(50 * counts[n] / len(shares))
        lines.append(f"  {n / BINS:4.0%} to {(n + 1) / BINS:4.0%} {counts[n]:6} {bar}")
    causes = Counter(_first_words(trial.causes[0]) for trial in planned if trial.causes)
    lines.append(f"below 70 %: {sum(causes.values())}, which say")
    return lines + [f"  {number:6} {cause}" for cause, number in causes.most_common(8)]


def _format_times(trials: Sequence[Trial]) -> list[str]:
    """Search times by the clock and by the processor, and the longest searches."""
    ended = [trial for trial in trials if trial.outcome != "failed"]
    lines = []
    for name, seconds in (
        ("clock", sorted(trial.search_s for trial in ended)),
        ("processor", sorted(trial.search_cpu_s for trial in ended)),
    ):
        lines.append(
            f"searches by the {name}: median {seconds[len(seconds) // 2]:.2f} s, 99 % within "
            f"{seconds[int(len(seconds) * 0.99)]:.2f} s, longest {seconds[-1]:.2f} s"
        )
    slowest = sorted(ended, key=lambda trial: -trial.search_cpu_s)[:NUM_SLOWEST]
    return [*lines, *(f"  --seed {own.seed}: {own.search_cpu_s:.1f} s; {own.what}" for own in slowest)]


def _first_words(cause: str) -> str:
    """Without the numbers and names that differ from plan to plan."""
    words = [word for word in cause.split(":")[0].split() if not any(c.isdigit() for c in word)]
    return " ".join(words[:8])


if __name__ == "__main__":
    raise SystemExit(main())
