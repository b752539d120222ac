"""Our plans against those of Zorse's paper: the ten cells of its Table 5, both simulated.

    python tools/papers/compare_zorse.py --budget 10 --json figures.json
    python tools/papers/compare_zorse.py --cells A:7b B:33b

`--data` is the folder of other people's data (or its `zorse/`), with the layer times that Zorse's authors
published; links and memory are assumed as `reproduce_zorse.py` says. The paper's plan has its groups
(section 6.2), layers and rows by speed, and the best ministages and microbatches of those that
`reproduce_zorse.py` searches; all of its layers are recomputed. Ours is what `search_plans` finds, once with
the same recomputation and once without being told. No cell may be worse; the exit code says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.zorse.comparison import (
    CELLS,
    Comparison,
    compare,
    format_comparison,
    format_header,
    format_summary,
)
from tools.papers.zorse.study import Study
from tools.papers.zorse.times import TIMES_FILE
from zorselike.cost.curves import CurveWarning
from zorselike.errors import ClusterError, PlanError, ProfileError

DATA = Path(__file__).parents[2] / "shared" / "data"


def main() -> int:
    args = _read_arguments()
    folder = next((f for f in (args.data / "zorse", args.data) if (f / TIMES_FILE).is_file()), None)
    if folder is None:
        print(f"{args.data}: no {TIMES_FILE} in it or its zorse/; give --data that folder", file=sys.stderr)
        return 2
    # Of the authors' times some fall by a few percent where more is computed; curves repair them.
    warnings.simplefilter("ignore", CurveWarning)
    found: list[Comparison] = []
    print(format_header(), flush=True)
    study = Study(folder, say=lambda line: print(f"... {line}", file=sys.stderr, flush=True))
    try:
        for cluster, model in args.cells:
            found.append(compare(study, cluster, model, budget_s=args.budget, seed=args.seed))
            print("\n".join(format_comparison(found[-1])), flush=True)
    except (ClusterError, PlanError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(format_summary(found)))
    if args.json is not None:
        lines = [own.to_json() for own in found]
        args.json.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    return int(any(own.is_worse(search) for own in found for search in (own.recomputed, own.free)))


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help=f"default: {DATA}")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each search (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cells", type=_read_cell, nargs="+", default=CELLS, help="such as A:7b C:33b (default: all 10)"
    )
    parser.add_argument("--json", type=Path, help="where figures are written")
    return parser.parse_args()


def _read_cell(text: str) -> tuple[str, str]:
    cluster, _, model = text.partition(":")
    if (cluster, model) not in CELLS:
        raise argparse.ArgumentTypeError(f"{text}: give cluster and model, such as A:7b or C:33b")
    return cluster, model


if __name__ == "__main__":
    sys.exit(main())
