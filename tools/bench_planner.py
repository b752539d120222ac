"""How long the search takes on one core, from 20 GPUs to 1,024.

    python tools/bench_planner.py --json figures.json
    python tools/bench_planner.py --only "Llama 65b"

The clusters of Zorse's paper with all four Llamas, by the layer times that its authors published (left out,
with a word, where `--data` has none); two and three types of GPUs in machines of four, as in Sailor's
experiments; 1,024 GPUs of four types. Each search is a process of its own on one core, and its budget seven
tenths of the most that it may take. Published times of other planners stand beside them: Zorse's with the
profiling, Sailor's as measured on a machine of this class (128 + 384) and as in its paper (3 x 256).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# One core, also for what numpy does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.papers.zorse.times import find_folder
from tools.planning.scale import Scale, Timing, list_scales, time_search
from tools.report import describe_machine, make_parser, write_json
from zorselike.planner.answer import NothingFitsError

BUDGET_SHARE = 0.7
"""Share of the most that a search may take."""
MAX_BYTES = 2e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Times all; the exit status says whether every target was met."""
    options = parse(arguments)
    folder = None if options.data is None else find_folder(options.data)
    if folder is None:
        print("note: no --data with Zorse's layer times (github.com/benson-guo/zorse). Left out: A, B, C")
    scales = [own for own in list_scales(folder) if options.only is None or options.only in own.name]
    print(HEADER)
    results: dict[str, Timing | str] = {}
    for scale in scales:
        budget_s = BUDGET_SHARE * scale.target_s if options.budget is None else options.budget
        try:
            results[scale.name] = time_search(scale.make, budget_s)
        except NothingFitsError as error:
            results[scale.name] = f"nothing fits: {error}"
        print(format_line(scale, results[scale.name]), flush=True)
    misses = [miss for scale in scales for miss in list_misses(scale, results[scale.name])]
    print("\n".join(["", *(f"MISSED: {miss}" for miss in misses)]) if misses else "\nall targets met")
    report = {"misses": misses, "cases": results, "machine": describe_machine()}
    write_json(options.json, report)
    return int(bool(misses))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="with github.com/benson-guo/zorse, a clone")
    parser.add_argument("--only", metavar="TEXT", help="those whose names hold this")
    parser.add_argument("--budget", type=float, metavar="S", help="of each search, in place of four fifths")
    return parser.parse_args(arguments)


HEADER = (
    f"{'cluster':<22}{'GPUs':>6}{'used':>6}{'search s':>10}{'most':>6}{'near s':>8}{'CPU s':>8}"
    f"{'published':>10}{'ratio':>7}{'simulated':>10}{'step s':>9}{'gap':>7}{'ideal':>7}{'MB':>7}  ended by"
)


def format_line(scale: Scale, result: Timing | str) -> str:
    if isinstance(result, str):
        return f"{scale.name:<22}{result}"
    published = "-" if scale.published_s is None else f"{scale.published_s:g}"
    ratio = "-" if scale.published_s is None else f"{scale.published_s / result.wall_s:.1f}x"
    return (
        f"{scale.name:<22}{result.num_devices:>6}{result.num_used:>6}{result.wall_s:>10.2f}{scale.target_s:>6g}"
        f"{result.near_s:>8.2f}{result.cpu_s:>8.2f}{published:>10}{ratio:>7}{result.num_simulated:>10}"
        f"{result.step_s:>9.3f}{result.gap:>7.1%}{result.share_of_ideal:>7.1%}{result.peak_bytes / 1e6:>7.0f}"
        f"  {result.ending}"
    )


def list_misses(scale: Scale, result: Timing | str) -> list[str]:
    """What is not as it should be, a line each."""
    if isinstance(result, str):
        return [f"{scale.name}: {result}"]
    misses = []
    if result.wall_s > scale.target_s:
        misses.append(f"{scale.name}: {result.wall_s:.2f} s, not at most {scale.target_s:g}")
    if result.peak_bytes > MAX_BYTES:
        misses.append(f"{scale.name}: {result.peak_bytes / 1e6:.0f} MB, not at most {MAX_BYTES / 1e6:.0f}")
    return misses


if __name__ == "__main__":
    raise SystemExit(main())
