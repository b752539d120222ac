"""Offloading on one GPU: what it costs, what it saves, how large a model it trains.

    python tools/bench_offload.py --json figures.json                 # everything
    python tools/bench_offload.py --layers 8 --seconds 500            # what fits that time, in this order
    python tools/bench_offload.py --only throughput exposed --layers 20
    python tools/bench_offload.py --device cpu --quick                # tiny, to see that it runs

A Llama of h = 4096 on one rank, in 8 ministages, bf16, recomputation by layer, fused AdamW:
(a) all resident, (b) parameters and activations offloaded, (c) everything offloaded, (d) FSDP2 with
CPUOffloadPolicy, (e) plain FSDP2. Every variant runs in a fresh process, repetitions interleaved.
One rank issues no collective: this measures copies and streams only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.bench.forked import RankFailedError, run_forked
from tools.bench.report import Figure, describe_machine, format_figures
from tools.offload_bench.child import do
from tools.offload_bench.figures import find_ratios
from tools.offload_bench.job import Job, Outcome, Shape
from tools.offload_bench.launch import hand_back, spawn
from tools.offload_bench.sections import SECTIONS, OffloadBench

QUICK_CPU = Shape(
    num_layers=4, dim=64, num_heads=4, ffn_hidden=192, vocab_size=256, sequence=16, microbatch_rows=2
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections asked for; the exit status says whether every target was met."""
    options = parse(arguments)
    if options.job is not None:
        hand_back(do(Job.from_json(options.job)), options.result_fd)
    bench = OffloadBench(
        shape_of(options),
        run=run_forked_job if options.device == "cpu" else run_spawned_job,
        device=options.device,
        tokens=tuple(options.tokens),
        num_ministages=options.ministages,
        init=options.init,
        rounds=options.rounds,
        num_steps=options.steps,
        is_quick=options.quick,
        max_layers=options.max_layers,
        trace_file=str(options.trace.resolve()) if options.trace else "",
        seconds=options.seconds,
    )
    bench.say("one rank issues no collective: this measures copies and streams only")
    if options.device == "cpu":
        bench.say("on a CPU the copies are immediate: speeds mean nothing, bytes are counted")
    try:
        for name in options.only or SECTIONS:
            bench.say(f"\n{name} ({bench.elapsed_s:.0f} s so far)")
            SECTIONS[name](bench)
    except KeyboardInterrupt:
        bench.say("stopped; what was measured until now:")
    return report(bench, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="one repetition, few steps; on a CPU tiny")
    parser.add_argument("--seconds", type=float, help="start nothing new after so long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, help="of the Llama (default 16)")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step (default 32768 65536)")
    parser.add_argument("--sequence", type=int, help="tokens of a row (default 4096)")
    parser.add_argument("--microbatch-rows", type=int, help="rows of a microbatch (default 1)")
    parser.add_argument("--ministages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="interleaved repetitions (default 2)")
    parser.add_argument("--steps", type=int, default=5, help="timed in each (default 5)")
    parser.add_argument("--max-layers", type=int, default=128, help="of the search for the largest")
    parser.add_argument(
        "--init", choices=("tile", "random"), default="tile", help="tile: a million random numbers, repeated"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the Chrome trace of `exposed`")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result-fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    is_tiny = options.device == "cpu" and options.quick
    options.tokens = options.tokens or ([128, 256] if is_tiny else [32_768, 65_536])
    if is_tiny:
        options.max_layers = min(options.max_layers, 5)
        options.ministages = min(options.ministages, 4)
    if options.quick:
        options.rounds, options.steps = 1, min(options.steps, 2)
    return options


def shape_of(options: argparse.Namespace) -> Shape:
    """The Llama that the options ask for."""
    shape = QUICK_CPU if options.device == "cpu" and options.quick else Shape()
    given = {
        "num_layers": options.layers,
        "sequence": options.sequence,
        "microbatch_rows": options.microbatch_rows,
    }
    return Shape(**asdict(shape) | {key: value for key, value in given.items() if value is not None})


def run_spawned_job(job: Job, timeout_s: float) -> Outcome:
    """In a process that starts from nothing."""
    return spawn(job, Path(__file__).resolve(), timeout_s)


def run_forked_job(job: Job, timeout_s: float) -> Outcome:
    """In a fork of this process, which is fresh enough without a GPU and starts at once."""
    try:
        return run_forked(_do_forked, 1, job, timeout_s=timeout_s)[0]
    except RankFailedError as error:
        return Outcome(None, "other", str(error))


def _do_forked(rank: int, job: Job) -> Outcome:
    return do(job)


def report(bench: OffloadBench, options: argparse.Namespace) -> int:
    """Prints all figures and writes them to `--json`."""
    ratios = find_ratios(bench.measured, has_targets=options.device == "cuda")
    figures = [Figure(r.name, r.value, r.target, r.at_most, r.note) for r in ratios]
    figures += [Figure(name, value, note=note) for name, value, note in bench.extra_figures]
    if figures:
        print("\n" + format_figures(figures))
    machine = describe_machine() | {"device": bench.device_name or options.device}
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{bench.elapsed_s:.0f} s" + (" (quick)" if options.quick else ""))
    if options.json:
        values = {figure.name: figure.value for figure in figures}
        content = {
            **values,
            "device": bench.device_name or options.device,
            "versions": bench.machine.get("versions", {"torch": machine["torch"]}),
            "figures": values,
            "targets": {f.name: {"target": f.target_text, "met": f.is_met, "note": f.note} for f in figures},
            **bench.to_json(),
            "machine": machine,
            "quick": options.quick,
            "seconds": bench.elapsed_s,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(figure.is_met is False for figure in figures) or not bench.is_sound)


if __name__ == "__main__":
    raise SystemExit(main())
