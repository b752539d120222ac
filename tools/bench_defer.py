"""What deferring all updates to the end of a step costs, against stepping each ministage at once.

    python tools/bench_defer.py --json figures.json              # one GPU
    python tools/bench_defer.py --device cpu                     # small, in processor time of one core

A Llama on one rank, in ministages, bf16, recomputation by layer, fused AdamW; resident, and with the
optimizer's state offloaded. Updates wait for the end of the step where gradients are clipped by their
global norm, and with fp16 always, since a step that overflows must change nothing. The same plan runs

    at once           without clipping: a ministage steps beside the backward of the next
    at once, clipped  by the norm of each ministage, for which the host waits
    deferred          clipped by the global norm, known after the last backward

Every variant runs in a fresh process, repetitions interleaved; medians are compared. The alternative to
deferring in fp16, to step early and to undo what an overflow spoils, needs a second copy of all state:
the bytes of both ways are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.bench.forked import RankFailedError, run_forked
from tools.bench.report import Figure, describe_machine, format_figures
from tools.offload_bench.job import Job, Outcome, Shape, spell_bytes
from tools.offload_bench.launch import hand_back, spawn
from tools.offload_bench.llama import build_model, count_parameters, make_batch, make_plan
from zorselike import HeteroPipeline
from zorselike.runtime.ministage.updates import Clip

CPU_SHAPE = Shape(
    num_layers=8, dim=128, num_heads=4, ffn_hidden=352, vocab_size=512, sequence=64, microbatch_rows=2
)
MAX_NORM = 1.0
MASTER_AND_MOMENTS = 12
GRADIENT = 4
"""Bytes a parameter: fp32 master and AdamW's moments; an fp32 gradient."""
TIMEOUT_S = 600.0

MODES: dict[str, tuple[float | None, Clip]] = {
    "at once": (None, "global"),
    "at once, clipped": (MAX_NORM, "ministage"),
    "deferred": (MAX_NORM, "global"),
}
PLACES: dict[str, tuple[str, ...]] = {
    "resident": (),
    "optimizer offloaded": ("optimizer",),
    "everything offloaded": ("params", "optimizer", "activations"),
}


@dataclass(frozen=True)
class DeferJob(Job):
    """One variant in one process."""

    mode: str = "at once"
    place: str = "resident"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all variants and prints their ratios."""
    options = parse(arguments)
    if options.job is not None:
        hand_back(do(DeferJob.from_json(options.job)), options.result_fd)
    begin_s = time.perf_counter()
    jobs = {(place, mode): job_of(options, place, mode) for place in PLACES for mode in MODES}
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in jobs}
    for number in range(options.rounds):
        for (place, mode), job in jobs.items():
            outcome = run(job)
            if outcome.values is None:
                print(f"{place}, {mode}: {outcome.failure}: {outcome.reason}")
                return 1
            measured[place, mode].append(outcome.values)
            print(f"round {number}: {place}, {mode}: {outcome.values['step_s']:.3f} s a step", flush=True)
    print("\n" + format_table(measured))
    figures = find_figures(measured)
    print("\n" + format_figures(figures))
    num_parameters = count_parameters(next(iter(jobs.values())).shape)
    print("\n" + explain_bytes(measured, num_parameters))
    machine = describe_machine() | {"device": measured["resident", "deferred"][0]["device"]}
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine.items()))
    if options.json:
        content = {
            "figures": {figure.name: figure.value for figure in figures},
            "measured": {f"{place}, {mode}": values for (place, mode), values in measured.items()},
            "num_parameters": num_parameters,
            "machine": machine,
            "seconds": time.perf_counter() - begin_s,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, help="of the Llama (default 12; 8 on a CPU)")
    parser.add_argument("--tokens", type=int, help="of a step (default 32768; 1024 on a CPU)")
    parser.add_argument("--ministages", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions (default 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed in each (default 5)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result-fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def job_of(options: argparse.Namespace, place: str, mode: str) -> DeferJob:
    """One variant as the options ask for it."""
    is_cpu = options.device == "cpu"
    shape = CPU_SHAPE if is_cpu else replace(Shape(), num_layers=12)
    return DeferJob(
        "train",
        shape=replace(shape, num_layers=options.layers or shape.num_layers),
        device=options.device,
        num_tokens=options.tokens or (1024 if is_cpu else 32_768),
        num_ministages=options.ministages,
        num_steps=options.steps,
        mode=mode,
        place=place,
    )


# -- one variant -----------------------------------------------------------------------------------


def run(job: DeferJob) -> Outcome:
    """In a process that starts from nothing; without a GPU a fork of this one does."""
    if job.device == "cuda":
        return spawn(job, Path(__file__).resolve(), TIMEOUT_S)
    try:
        return run_forked(_do_forked, 1, job, timeout_s=TIMEOUT_S)[0]
    except RankFailedError as error:
        return Outcome(None, "other", str(error))


def _do_forked(rank: int, job: DeferJob) -> Outcome:
    return do(job)


def do(job: DeferJob) -> Outcome:
    """Seconds of a step (of processor time on a CPU), and the bytes that the pipeline counts."""
    is_cuda = job.device == "cuda"
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    wait: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
    pipe = make_pipeline(job)
    batch = make_batch(job)
    for _ in range(job.num_warm_up):
        pipe.step(*batch)
    wait()
    # Without a GPU all work is this process's own, on cores that others may use too.
    clock = time.perf_counter if is_cuda else time.process_time
    begin_s = clock()
    for _ in range(job.num_steps):
        result = pipe.step(*batch)
    wait()
    step_s = (clock() - begin_s) / job.num_steps
    report = pipe.memory_report()
    found = {
        "step_s": step_s,
        "loss": result.loss,
        "device": torch.cuda.get_device_name() if is_cuda else "CPU",
        "device_bytes": report.device_peak_bytes or report.device_planned_bytes,
        "host_bytes": report.host_peak_bytes,
        "lines": {line.purpose: asdict(line) for line in report.lines},
    }
    pipe.close()
    return Outcome(found)


def make_pipeline(job: DeferJob) -> HeteroPipeline:
    """The job's variant, set up."""
    plan = make_plan(job)
    group = replace(plan.groups[0], offload=PLACES[job.place])
    max_norm, clip = MODES[job.mode]
    return HeteroPipeline(
        build_model(job),
        replace(plan, groups=(group,)),
        optimizer=partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.1, fused=True),
        param_dtype=torch.bfloat16,
        device=torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu"),
        max_norm=max_norm,
        clip=clip,
        silence_s=None,
    )


# -- what it says ----------------------------------------------------------------------------------


Measured = dict[tuple[str, str], list[dict[str, Any]]]


def median_s(measured: Measured, place: str, mode: str) -> float:
    return statistics.median(values["step_s"] for values in measured[place, mode])


def peak_bytes(measured: Measured, place: str, mode: str, purpose: str, where: str) -> int:
    """The most that was there of one purpose."""
    return max(values["lines"][purpose][f"{where}_peak"] or 0 for values in measured[place, mode])


def format_table(measured: Measured) -> str:
    """Every variant: steps a second, their spread, and what memory holds."""
    lines = [f"{'':22}{'':20}{'steps/s':>9}{'spread':>8}{'device':>14}{'host':>14}{'loss':>9}"]
    for (place, mode), repeated in measured.items():
        seconds = [values["step_s"] for values in repeated]
        spread = (max(seconds) - min(seconds)) / min(seconds)
        lines.append(
            f"{place:22}{mode:20}{1 / statistics.median(seconds):9.3f}{spread:8.1%}"
            f"{spell_bytes(repeated[0]['device_bytes']):>14}{spell_bytes(repeated[0]['host_bytes']):>14}"
            f"{repeated[0]['loss']:9.4f}"
        )
    return "\n".join(lines)


def find_figures(measured: Measured) -> list[Figure]:
    """The speed of deferred updates as a share of that of updates at once."""
    return [
        Figure(
            f"deferred_over_{mode.replace(', ', '_').replace(' ', '_')}_{place.replace(' ', '_')}",
            median_s(measured, place, mode) / median_s(measured, place, "deferred"),
        )
        for place in PLACES
        for mode in MODES
        if mode != "deferred"
    ]


def explain_bytes(measured: Measured, num_parameters: int) -> str:
    """What deferring keeps, as counted, and what undoing would keep, from the number of parameters."""
    resident = peak_bytes(measured, "resident", "deferred", "gradient shards", "device")
    at_once = peak_bytes(measured, "resident", "at once", "gradient shards", "device")
    on_host = peak_bytes(measured, "optimizer offloaded", "deferred", "gradient shards", "host")
    on_device = peak_bytes(measured, "optimizer offloaded", "deferred", "gradient shards", "device")
    state = peak_bytes(measured, "optimizer offloaded", "deferred", "optimizer state", "host")
    copy_bytes = MASTER_AND_MOMENTS * num_parameters
    return "\n".join(
        [
            f"{num_parameters / 1e6:.1f} M parameters; fp32 gradients of all are "
            f"{spell_bytes(GRADIENT * num_parameters)}, masters and moments {spell_bytes(copy_bytes)}",
            f"deferring, resident:  {spell_bytes(resident)} of gradients on the device "
            f"(at once: {spell_bytes(at_once)})",
            f"deferring, offloaded: {spell_bytes(on_device)} of gradients on the device and "
            f"{spell_bytes(on_host)} on the host, beside {spell_bytes(state)} of state; "
            f"{GRADIENT} bytes a parameter more move each way in a step",
            f"undoing, resident:    {spell_bytes(copy_bytes)} more: all state as it was before the step, "
            f"of which {MASTER_AND_MOMENTS} bytes a parameter are made anew in each",
            f"undoing, offloaded:   {spell_bytes(copy_bytes)} more on the host: a step writes beside what "
            "it read; nothing more moves unless a step is undone",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
