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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import ZORSE, make_data_parser, report_errors, say_progress
from tools.papers.zorse.comparison import (
    CELLS,
    Comparison,
    compare,
    format_comparison,
    format_header,
    format_summary,
)
from tools.papers.zorse.study import Study
from tools.papers.zorse.times import find_folder
from tools.report import write_json


def main() -> int:
    parser = make_data_parser(__doc__, ZORSE)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each search (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    cells_help = "such as A:7b C:33b (default: all 10)"
    parser.add_argument("--cells", type=_read_cell, nargs="+", default=CELLS, help=cells_help)
    args = parser.parse_args()
    study = Study(find_folder(args.data), say=say_progress)
    found: list[Comparison] = []
    print(format_header(), flush=True)
    for cluster, model in args.cells:
        found.append(compare(study, cluster, model, budget_s=args.budget, seed=args.seed))
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
