"""Benchmarks of the runtime, on ranks that sleep instead of computing; no GPU is needed.

    python tools/bench_runtime.py --json figures.json     # everything, under 20 minutes on 2 cores
    python tools/bench_runtime.py --quick                 # under 4 minutes
    python tools/bench_runtime.py --only hand_tuned

Layers sleep `rows * seconds of that device` in forward and twice that in backward, so that a dozen
unequal ranks fit two cores. Every figure stands beside its target, every run beside the bound
that a discrete simulation of the same actions gives.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Before torch is imported, here and in every rank forked from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.bench.contest import Bench, format_runs
from tools.bench.contests import (
    run_equal_devices,
    run_even_share,
    run_expert_single,
    run_hand_tuned,
    run_unequal,
)
from tools.bench.overhead import run_cycles, run_growth, run_overhead
from tools.report import conclude, make_parser

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "unequal": run_unequal,
    "even_share": run_even_share,
    "expert_single": run_expert_single,
    "equal_devices": run_equal_devices,
    "hand_tuned": run_hand_tuned,
    "overhead": run_overhead,
    "growth": run_growth,
    "cycles": run_cycles,
}


def main() -> int:
    """Runs the sections asked for; the exit status says whether every target was met."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, one step each")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {', '.join(SECTIONS)}"
    )
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    bench = Bench(is_quick=arguments.quick, say=lambda line: print(line, flush=True))
    for name in arguments.only or SECTIONS:
        bench.say(f"{name} ({time.monotonic() - begin_s:.0f} s so far)")
        SECTIONS[name](bench)
    seconds = time.monotonic() - begin_s
    if bench.runs:
        print("\n" + format_runs(bench.runs))
    note = f"{seconds:.0f} s" + (" (quick: one step each)" if arguments.quick else "")
    return conclude(
        arguments.json, bench.figures, note, runs=bench.runs, seconds=seconds, quick=arguments.quick
    )


if __name__ == "__main__":
    raise SystemExit(main())
