"""Speed of checkpoints on two CPU ranks, beside torch.distributed.checkpoint (DCP); no GPU is needed.

    python tools/bench_checkpoint.py --json figures.json          # about 1 GB of state
    python tools/bench_checkpoint.py --megabytes 2 --layers 2 --rounds 1     # shows that it runs

A Llama trains with AdamW in fp32, 12 bytes a parameter. First it is saved in the background while it trains
under one plan (each rank a group): what the main thread waits for and what the copies take, as a share of a
step, and by how much that step is longer. Then it goes on under another plan (both ranks in one group), is
saved and loaded, and the same tensors by DCP in its own format and in safetensors, in turn: all sync their
files to the disk, ours have checksums, and no load finds its files in memory. Memory and bytes read are of
the loads under both plans. Ratios are medians over rounds in which contestants followed each other closely.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported, here and in every rank forked from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.bench.forked import run_forked
from tools.checkpoint.contest import NATIVE, SAFETENSORS, Contest, hold_contest
from tools.checkpoint.stall import Stall, find_slowdown, find_stall_share, measure_stall
from tools.checkpoint.timed import NUM_RANKS, Subject
from tools.report import Figure, conclude, make_parser, positive

TARGET_OVER_DCP = 0.9
TARGET_STALL_SHARE = 0.05
TARGET_EXCESS_MIB = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; the exit status says whether every target was met."""
    parser = make_parser(__doc__)
    parser.add_argument("--megabytes", type=positive, default=1000, help="of state, about (%(default)s)")
    parser.add_argument("--layers", type=positive, default=10, help="of the model (%(default)s)")
    parser.add_argument("--rows", type=positive, default=3, help="of a step, at least 2 (%(default)s)")
    parser.add_argument("--sequence", type=positive, default=256, help="tokens of a row (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="repetitions that count (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; by default a temporary one"
    )
    options = parser.parse_args(arguments)
    subject = Subject(options.megabytes, options.layers, options.rows, options.sequence)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        stalls = run_forked(measure_stall, NUM_RANKS, subject, Path(scratch), options.rounds)
        print(format_stalls(stalls), flush=True)
        contests = run_forked(hold_contest, NUM_RANKS, subject, Path(scratch), options.rounds)
        print(format_contest(contests[0]))
    seconds = time.monotonic() - begin_s
    return conclude(
        options.json,
        list_figures(stalls, contests),
        f"{seconds:.0f} s, {contests[0].num_bytes / 1e9:.2f} GB of state, {options.rounds} rounds",
        stalls=stalls,
        contests=contests,
        seconds=seconds,
    )


def format_stalls(ranks: Sequence[Stall]) -> str:
    """Of each save, on each rank, in seconds."""
    lines = [f"{'rank':>4} {'start':>7} {'waits':>7} {'copies':>7} {'on disk':>8} {'step':>7} {'before':>7}"]
    for rank, stall in enumerate(ranks):
        for save in stall.saves:
            lines.append(
                f"{rank:4} {save.start_s:7.3f} {save.wait_s:7.3f} {save.stage_s:7.3f} {save.save_s:8.3f} "
                f"{save.step_s:7.3f} {save.plain_s:7.3f}"
            )
    return "\n".join(lines)


def format_contest(contest: Contest) -> str:
    """Medians and ranges, in seconds and GB/s."""
    lines = [f"\n{'':18} {'save s':>22} {'GB/s':>6} {'load s':>22} {'GB/s':>6}"]
    for name, times in contest.times.items():
        cells = []
        for seconds in (times.save_s, times.load_s):
            median = statistics.median(seconds)
            cells.append(f"{median:6.2f} ({min(seconds):5.2f} to {max(seconds):5.2f})")
            cells.append(f"{contest.num_bytes / median / 1e9:6.2f}")
        lines.append(f"{name:18} " + " ".join(cells))
    return "\n".join(lines)


def list_figures(stalls: Sequence[Stall], contests: Sequence[Contest]) -> list[Figure]:
    contest = contests[0]
    figures = [
        Figure("save_over_dcp", contest.over(NATIVE, "save_s"), TARGET_OVER_DCP),
        Figure("load_over_dcp", contest.over(NATIVE, "load_s"), TARGET_OVER_DCP),
        Figure("save_over_dcp_safetensors", contest.over(SAFETENSORS, "save_s")),
        Figure("load_over_dcp_safetensors", contest.over(SAFETENSORS, "load_s")),
        Figure("stall_share", find_stall_share(stalls), TARGET_STALL_SHARE, at_most=True),
        Figure("step_slowdown", find_slowdown(stalls)),
        Figure("first_save_s", max(stall.first_s for stall in stalls)),
    ]
    costs = [*(stall.load_cost for stall in stalls), *(own.load_cost for own in contests)]
    peaks = [cost.peak_ministages for cost in costs if cost.peak_ministages is not None]
    if peaks:
        figures.append(Figure("load_memory_ministages", max(peaks), 1, at_most=True))
    excess = max(cost.excess_mib for cost in costs)
    figures.append(Figure("read_excess_mib_per_slice", excess, TARGET_EXCESS_MIB, at_most=True))
    return figures


if __name__ == "__main__":
    sys.exit(main())
