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
from tools.papers.sailor.cases import CASES, Answer, answer
from tools.papers.sailor.library import Library
from tools.papers.sailor.planning import format_plan
from tools.report import write_json


def main() -> int:
    parser = make_data_parser(__doc__, SAILOR)
    parser.add_argument("--only", choices=("same", "mixed", "money"), help="one group of cases")
    mixed_help = "also stages with replicas of two kinds, by quarters; takes several times as long"
    parser.add_argument("--mixed-stages", action="store_true", help=mixed_help)
    args = parser.parse_args()
    library = Library(args.data)
    answers = []
    print(_HEADER)
    for case in CASES:
        if args.only in (None, case.group):
            answers.append(answer(case, library, mixed=args.mixed_stages))
            print("\n".join(format_answer(answers[-1])), flush=True)
    write_json(args.json, {"answers": answers, "plans": [own.searched.plan.to_json() for own in answers]})
    missed = [own.case.name for own in answers if not own.reached]
    print(
        f"\nreached {len(answers) - len(missed)} of {len(answers)}" + "".join(f"; not: {m}" for m in missed)
    )
    return 1 if missed else 0


_HEADER = f"{'case':<46} {'ours it/s':>9} {'reach':>7} {'Sailor':>7} {'$/it':>7} {'seconds':>8}"


def format_answer(given: Answer) -> list[str]:
    """A row of the table, and the plan under it."""
    case, sailor, searched = given.case, given.case.sailor, given.searched
    row = (
        f"{case.name:<46} {searched.figures.throughput:>9.4f} {case.reach:>7.4f} "
        f"{'-' if sailor is None else format(sailor, '.4f'):>7} {searched.dollars:>7.4f} "
        f"{searched.search_s:>8.1f}"
    )
    verdict = "" if given.reached else "  NOT REACHED"
    return [row + verdict, f"    {format_plan(searched.plan)}"]


if __name__ == "__main__":
    sys.exit(report_errors(main))
