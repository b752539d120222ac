"""One GPU: what offloading, compiling and deferred updates cost and save, and how large a model trains.

    python tools/bench_gpu.py --json figures.json                 # everything
    python tools/bench_gpu.py --layers 8 --seconds 500            # what fits that time, in this order
    python tools/bench_gpu.py --only throughput largest --layers 20
    python tools/bench_gpu.py --device cpu --quick                # tiny, to see that it runs

A Llama of h = 4096 on one rank, in 8 ministages, bf16, recomputation by layer, fused AdamW: (a) all resident,
(b) parameters and activations offloaded, (c) everything offloaded, (d) FSDP2 with CPUOffloadPolicy, (e) plain
FSDP2. Sections: `throughput` (a to e, and their memory), `ministages` (c in 1, 2, 4, 8), `compile` (a and c
with each layer compiled; on a CPU only if asked for), `defer` (updates at the end of the step against updates
at once, resident and offloaded), `largest` (the most layers that train). Each variant runs in a fresh
process, repetitions interleaved. One rank issues no collective: this measures computing, copies and streams
only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.gpu.child import run_job
from tools.gpu.job import TINY_SHAPE, Shape
from tools.gpu.sections import SECTIONS, GpuBench, find_ratios
from tools.report import conclude, make_parser, positive, positive_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections asked for; the exit status says whether every target was met."""
    options = parse(arguments)
    bench = GpuBench(
        options.shape,
        run=run_job,
        device=options.device,
        tokens=tuple(options.tokens),
        num_ministages=options.ministages,
        is_quick=options.quick,
        max_layers=options.max_layers,
        seconds=options.seconds,
    )
    if options.device == "cpu":
        bench.say("on a CPU the copies are immediate: speeds mean nothing, bytes are counted")
    try:
        for name in options.only:
            bench.say(f"\n{name} ({bench.elapsed_s:.0f} s so far)")
            SECTIONS[name](bench)
    except KeyboardInterrupt:
        bench.say("stopped; what was measured until now:")
    figures = find_ratios(bench.measured, has_targets=options.device == "cuda") + bench.figures
    note = f"{bench.device_name}, {bench.elapsed_s:.0f} s" + (" (quick)" if options.quick else "")
    missed = conclude(options.json, figures, note, device=bench.device_name, bench=bench)
    return int(bool(missed) or not bench.is_sound)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="one repetition, few steps; on a CPU tiny")
    parser.add_argument("--seconds", type=positive_s, help="start nothing new after so long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=positive, help="of the Llama (default 16)")
    parser.add_argument("--tokens", type=positive, nargs="+", help="of a step (default 32768 65536)")
    parser.add_argument("--ministages", type=positive, default=8)
    options = parser.parse_args(arguments)
    is_cpu = options.device == "cpu"
    if not is_cpu and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --device cpu --quick shows that it runs")
    is_tiny = is_cpu and options.quick
    options.only = options.only or [name for name in SECTIONS if not (is_cpu and name == "compile")]
    options.tokens = options.tokens or ([128, 256] if is_tiny else [32_768, 65_536])
    options.ministages = min(options.ministages, 4) if is_tiny else options.ministages
    options.max_layers = 5 if is_tiny else 128
    shape = TINY_SHAPE if is_tiny else Shape()
    options.shape = replace(shape, num_layers=options.layers or shape.num_layers)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
