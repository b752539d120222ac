"""Our search against Sailor's planner, both scored by Sailor's published simulator.

    python tools/papers/compare_sailor.py --data DIR --json figures.json
    python tools/papers/compare_sailor.py --data DIR --only money

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1. Plans are such as
both can express: one machine a replica, as many replicas in every stage, one microbatch size. Money is the
rent of the GPUs that are used, as in theirs, and egress. Sailor's figures come from running its public
planner; `reach` is what our search must reach. Seconds are of one core, search alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import SAILOR, make_data_parser, report_errors
from tools.papers.sailor.cases import CASES, Case, Planned, answer, format_plan
from tools.papers.sailor.library import Library
from tools.report import write_json


def main() -> int:
    parser = make_data_parser(__doc__, SAILOR)
    parser.add_argument("--only", choices=("same", "mixed", "money"), help="one group of cases")
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
    write_json(args.json, {"answers": answers})
    print(
        f"\nreached {len(answers) - len(missed)} of {len(answers)}" + "".join(f"; not: {m}" for m in missed)
    )
    return 1 if missed else 0


def format_answer(case: Case, planned: Planned) -> list[str]:
    """A row of the table, and the plan under it."""
    sailor = "-" if case.sailor is None else f"{case.sailor:.4f}"
    row = f"{case.name:<46} {planned.figures.throughput:>9.4f} {case.reach:>7.4f} {sailor:>7} "
    row += f"{planned.dollars:>7.4f} {planned.search_s:>8.1f}"
    return [row + ("" if case.is_reached(planned) else "  NOT REACHED"), f"    {format_plan(planned.plan)}"]


if __name__ == "__main__":
    sys.exit(report_errors(main))
