"""Our search against Sailor's planner, both scored by Sailor's published simulator.

    python tools/papers/compare_sailor.py --data DIR --json figures.json
    python tools/papers/compare_sailor.py --data DIR --only money
    python tools/papers/compare_sailor.py --data DIR --simulated   # by our simulator too: 4 minutes

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1. Plans are such as
both can express: one machine a replica, as many replicas in every stage, one microbatch size. Money is the
rent of the GPUs that are used, as in theirs, and egress. Sailor's figures come from running its public
planner; `reach` is what our search must reach. Seconds are of one core, search alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import SAILOR, make_data_parser, report_errors
from tools.papers.sailor.cases import CASES, Case, Planned, answer, format_plan
from tools.papers.sailor.library import Library
from tools.papers.sailor.simulated import Both, ask_both, make_problem
from tools.report import positive_s, write_json
from zorselike.planner.explain.plans import describe_groups

EVEN = 1.001
"""Times theirs, up to which ours is no worse."""


def main() -> int:
    parser = make_data_parser(__doc__, SAILOR)
    parser.add_argument("--only", choices=("same", "mixed", "money"), help="one group of cases")
    parser.add_argument("--simulated", action="store_true", help="by our simulator, too")
    parser.add_argument(
        "--budget", type=positive_s, default=20.0, metavar="S", help="of each of these searches"
    )
    args = parser.parse_args()
    library = Library(args.data)
    answers, missed = [], []
    print(f"{'case':<46} {'ours it/s':>9} {'reach':>7} {'Sailor':>7} {'$/it':>7} {'seconds':>8}")
    for case in CASES:
        if args.only in (None, case.group):
            planned = answer(case, library)
            missed += [] if case.is_reached(planned) else [case.name]
            print("\n".join(format_answer(case, planned)), flush=True)
            answers.append({"case": case, "answer": planned, "plan": planned.plan.to_json()})
    print(
        f"\nreached {len(answers) - len(missed)} of {len(answers)}" + "".join(f"; not: {m}" for m in missed)
    )
    simulated = compare_simulated(answers, library, args.budget) if args.simulated else []
    write_json(args.json, {"answers": answers, "simulated": simulated})
    worse = [own for own in simulated if own.ratio > EVEN]
    return 1 if missed or worse else 0


def compare_simulated(answers: Sequence[Mapping[str, Any]], library: Library, budget_s: float) -> list[Both]:
    """Prints a row for each."""
    print(f"\n{'by our simulator':<46} {'theirs s':>9} {'$/it':>7} {'ours s':>9} {'$/it':>7} {'ratio':>6}")
    found = []
    for own in answers:
        problem = make_problem(own["case"], library)
        both = ask_both(own["case"], own["answer"].plan, problem, budget_s)
        found.append(both)
        print("\n".join(format_both(both)), flush=True)
    print(f"\nnot worse in {sum(both.ratio <= EVEN for both in found)} of {len(found)}")
    return found


def format_both(both: Both) -> list[str]:
    """A row, and our plan under it."""
    theirs, ours = both.theirs.simulation, both.ours.case.simulation
    row = f"{both.case.name:<46} {theirs.iteration_s:>9.3f} {theirs.cost:>7.4f} {ours.iteration_s:>9.3f} "
    row += f"{ours.cost:>7.4f} {both.ratio:>6.3f}"
    return [row + ("  WORSE" if both.ratio > EVEN else ""), f"    {describe_groups(both.ours)}"]


def format_answer(case: Case, planned: Planned) -> list[str]:
    """A row of the table, and the plan under it."""
    sailor = "-" if case.sailor is None else f"{case.sailor:.4f}"
    row = f"{case.name:<46} {planned.figures.throughput:>9.4f} {case.reach:>7.4f} {sailor:>7} "
    row += f"{planned.dollars:>7.4f} {planned.search_s:>8.1f}"
    return [row + ("" if case.is_reached(planned) else "  NOT REACHED"), f"    {format_plan(planned.plan)}"]


if __name__ == "__main__":
    sys.exit(report_errors(main))
