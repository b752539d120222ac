"""From a Hugging Face folder to a fine-tuned one on unequal ranks: loading, the first step, and LoRA's steps.

    python tools/bench_finetune.py --json figures.json       # a folder of 2 GB
    python tools/bench_finetune.py --hidden 128 --layers 4 --rounds 1 --step 2     # shows that it runs

Three CPU ranks in two unequal groups load a folder: in how many seconds, beside those of reading as many
bytes of its files without putting them anywhere (nothing is found in memory), and what a rank holds on the
way above its part. The first step is of 32 layers that cost nothing: what comes before the second is ours.

Then a LoRA job runs on two unequal cards: layers of a small model sleep as long as a large one's would
compute there by data sheets. Ours runs the plan of `zorselike plan`; beside it what people do today: layers
split over the cards as `accelerate` does it for `device_map="auto"`, one card at a time; even data
parallelism, where the weights fit both cards; and, without a target, the faster card alone.
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
from tools.finetune.cards import Pair
from tools.finetune.contest import EVEN, OURS, SPLIT, Contest, hold_contest
from tools.finetune.folders import Shape, write_folder
from tools.finetune.loading import NUM_RANKS, FirstStep, Loading, load_folder, step_first
from tools.report import Figure, conclude, make_parser, positive, positive_s

TARGET_LOAD_OVER_READ = 0.8
TARGET_EXCESS_MIB = 300
TARGET_FIRST_STEP_S = 3
TARGET_RATIO = 1.5
PAIRS = (
    Pair("7B, RTX 3090 and 3070", ("RTX3090", "RTX3070"), (24, 8), hidden=4096, num_layers=32),
    Pair("1B, RTX 4090 and 3070", ("RTX4090", "RTX3070"), (24, 8), hidden=2048, num_layers=24),
)
SMALL = Shape(hidden=64, num_layers=32, vocab_size=256)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; the exit status says whether every target was met."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--hidden", type=positive, default=1024, help="size of the loaded model (%(default)s)"
    )
    parser.add_argument("--layers", type=positive, default=34, help="of that model (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="repetitions (%(default)s)")
    parser.add_argument("--step", type=positive_s, default=20.0, help="seconds of a LoRA step (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where models are written; by default a temporary one")
    options = parser.parse_args(arguments)
    shape = Shape(options.hidden, options.layers)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        large, small = Path(scratch) / "large", Path(scratch) / "small"
        (num_bytes,) = run_forked(write_folder, 1, shape, large)
        loadings = run_forked(load_folder, NUM_RANKS, shape, large, options.rounds)
        print(format_loadings(loadings, num_bytes), flush=True)
        run_forked(write_folder, 1, SMALL, small)
        first_steps = run_forked(step_first, NUM_RANKS, SMALL, small)
        contests = []
        for number, pair in enumerate(PAIRS):
            (own := Path(scratch) / f"pair-{number}").mkdir()
            contests.append(hold_contest(pair, own, options.step))
            print(format_contest(contests[-1]), flush=True)
    seconds = time.monotonic() - begin_s
    return conclude(
        options.json,
        list_figures(loadings, first_steps, contests),
        f"{seconds:.0f} s, a folder of {num_bytes / 1e9:.2f} GB, {options.rounds} rounds",
        loadings=loadings,
        first_steps=first_steps,
        contests=contests,
        seconds=seconds,
    )


def format_loadings(ranks: Sequence[Loading], num_bytes: int) -> str:
    """What each rank held, and the seconds of all."""
    lines = ["rank  part MiB  peak MiB above the start"]
    for rank, loading in enumerate(ranks):
        peak = "n/a" if loading.peak_bytes is None else f"{loading.peak_bytes / 2**20:.0f}"
        lines.append(f"{rank:4} {loading.part_bytes / 2**20:9.0f} {peak:>9}")
    for name, seconds in (("load", ranks[0].load_s), ("read", ranks[0].read_s)):
        speeds = ", ".join(f"{num_bytes / one / 1e9:.2f}" for one in seconds)
        lines.append(f"{name} GB/s: {speeds}")
    return "\n".join(lines)


def format_contest(contest: Contest) -> str:
    """Seconds of a step, ours first."""
    lines = [f"\n{contest.pair}: {contest.plan}", f"{'':36} s per step"]
    for name, step_s in contest.step_s.items():
        what = f"{name} ({contest.split})" if name == SPLIT else name
        lines.append(f"{what:36} " + ("does not fit" if step_s is None else f"{step_s:10.2f}"))
    return "\n".join(lines)


def list_figures(
    loadings: Sequence[Loading], first_steps: Sequence[FirstStep], contests: Sequence[Contest]
) -> list[Figure]:
    """Against the targets."""
    first = loadings[0]
    ratio = statistics.median(read / load for load, read in zip(first.load_s, first.read_s, strict=True))
    excess = [loading.excess_mib for loading in loadings if loading.excess_mib is not None]
    figures = [Figure("load_over_read", ratio, TARGET_LOAD_OVER_READ)]
    if excess:
        figures.append(Figure("load_excess_mib", max(excess), TARGET_EXCESS_MIB, at_most=True))
    extra_s = max(step.extra_s for step in first_steps)
    figures.append(Figure("before_second_step_s", extra_s, TARGET_FIRST_STEP_S, at_most=True))
    ratio = min(contest.over(SPLIT, EVEN) for contest in contests)
    figures.append(Figure("ratio_finetune", ratio, TARGET_RATIO, note="the least of the pairs"))
    for contest in contests:
        figures += [
            Figure(f"  {contest.pair}, over {name}", contest.over(name))
            for name, step_s in contest.step_s.items()
            if name != OURS and step_s is not None
        ]
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
