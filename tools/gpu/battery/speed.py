"""Is it fast and small: the offload benchmark, what of the copies shows, what can be switched, and a peer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from zorselike.models.flops import flops_per_token, num_parameters
from zorselike.runtime.memory.host_room import find_host_room

from ...report import Figure
from ..child import prepare, run_job
from ..job import TINY_SHAPE, VARIANTS, Job, Measurement, Shape, spell_bytes
from ..sections import GpuBench, count_flops, find_losses, find_ratios
from ..trainers import config_of, make_trainer
from .gaps import describe_gaps, find_gaps
from .part import Record
from .trace import find_exposure, record_step

_ORDER = ("a", "c", "b", "e", "p", "s", "d")
"""What targets ask for first; CPUOffloadPolicy, which is slowest, last."""
_LAST_COMPARED = "b"
"""Until then all losses are there that are compared."""
_PEER_TFLOPS = 272.0
_PEER = "MegaTrain (arXiv 2604.05091), Qwen2.5-7B, its README's figure of 2026-04-17, one H100; not run here"
_PEER_FACTOR = 1.3
_H200_TFLOPS = 400.0
_HOST_BYTES = 14.2
"""Host memory of a parameter, everything offloaded."""


def make_bench(record: Record, *, layers: int = 8, tokens: int = 65_536) -> GpuBench:
    """The benchmark's jobs within this part's limit."""
    small = record.is_small
    shape = replace(TINY_SHAPE, num_layers=2) if small else Shape(num_layers=layers)
    return GpuBench(
        shape,
        run=run_job,
        device=record.settings.device,
        tokens=(64 if small else tokens,),
        num_ministages=2 if small else layers,
        is_quick=True,
        seconds=record.left_s + (20.0 if small else -5.0),
        say=record.say,
    )


def measure(bench: GpuBench, job: Job) -> Measurement | None:
    """With as many steps as fit a short sitting."""
    warm_up, steps = (1, 1) if bench.device == "cpu" else (2, 3)
    return bench.measure(replace(job, num_warm_up=warm_up, num_steps=steps))


def run_offload(record: Record) -> None:
    """Resident, parameters, activations, both, everything, CPUOffloadPolicy and plain FSDP2."""
    bench = make_bench(record)
    for variant in (name for name in _ORDER if not (record.is_small and name in "ps")):
        found = measure(bench, bench.job(variant))
        if found is None:
            record.leave_out(VARIANTS[variant], bench.failures[-1] if bench.failures else "no time left")
        else:
            bench.measured[variant, max(bench.tokens)] = found
            record.put(variant, found)
            for line in describe_memory(found):
                record.say(f"    {line}")
        if variant == _LAST_COMPARED:
            _compare_losses(record, bench)
    for figure in find_ratios(bench.measured, has_targets=not record.is_small):
        record.figure(figure)
    record.check("no job failed for a reason of its own", bench.is_sound, "; ".join(bench.failures))


def _compare_losses(record: Record, bench: GpuBench) -> None:
    """Bit for bit, with kernels that can be compared so."""
    losses = find_losses(bench, {variant for variant, _ in bench.measured})
    record.put("losses", losses)
    told = ", ".join(f"{name} {loss!r}" for name, loss in losses.items())
    if len(losses) < 2:
        record.leave_out("losses with and without offloading", "too few were measured")
        return
    same = len({*losses.values()}) == 1
    record.check("losses with and without offloading are equal, bit for bit", same, told)


def describe_memory(found: Measurement) -> Iterator[str]:
    """Planned beside found, and whose the reserved memory is."""
    sizes = (found.planned_bytes, found.device_bytes, found.reserved_bytes)
    planned, allocated, reserved = map(spell_bytes, sizes)
    retries = f"{found.num_retries} allocator retries"
    yield f"planned {planned}, allocated {allocated}, reserved {reserved}, {retries}"
    if found.bytes_by_stream:
        yield "kept by stream: " + ", ".join(
            f"{k} {spell_bytes(v)}" for k, v in found.bytes_by_stream.items()
        )
    if found.host_us:
        yield "host microseconds: " + ", ".join(f"{kind} {us:g}" for kind, us in found.host_us.items())


def run_exposure(record: Record) -> None:
    """How much of the copies no kernel hides, resident and with everything offloaded."""
    bench = make_bench(record)
    # In this very process, which nobody forks from any more.
    job = replace(bench.job("c"), num_warm_up=1 if record.is_small else 2)
    prepare(job)
    trainer = make_trainer(job)
    for _ in range(job.num_warm_up):
        trainer.step()
    events = record_step(trainer.step, record.settings.work / "exposure", job.device)
    found = find_exposure(events, on_gpu=job.device == "cuda")
    record.put("exposure", found)
    record.say(found.describe())
    if job.device == "cuda":
        for line in describe_gaps(find_gaps(events)):
            record.say(line)
    record.check(
        "the trace has computations and copies", bool(found.compute_s and found.copies), found.describe()
    )


SWITCHES: Mapping[str, Mapping[str, str]] = {
    "without expandable segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
    "with 8 hardware queues": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "without huge pages": {"THP_MEM_ALLOC_ENABLE": "0"},
}
"""What the environment can turn off."""


def run_switches(record: Record) -> None:
    """Everything offloaded, with one thing turned off or on at a time."""
    bench = make_bench(record, layers=4, tokens=32_768)
    base = bench.job("c")
    jobs: dict[str, tuple[Job, Mapping[str, str]]] = {"as it is": (base, {})}
    jobs |= {name: (base, changes) for name, changes in SWITCHES.items()}
    jobs["AdamW not fused"] = replace(base, is_fused=False), {}
    jobs["each layer compiled"] = replace(base, compiles=True), {}
    if record.is_small:  # Compiling for a CPU takes long and says nothing.
        record.leave_out("each layer compiled", "not on a CPU")
        jobs = {name: jobs[name] for name in ("as it is", "with 8 hardware queues", "AdamW not fused")}
    found: dict[str, Measurement] = {}
    for name, (job, changes) in jobs.items():
        record.say(f"{name}:")
        bench.run = partial(run_job, is_fresh=bool(changes))
        with environment(changes):
            measured = measure(bench, job)
        if measured is None:
            record.leave_out(name, bench.failures[-1] if bench.failures else "no time left")
            continue
        found[name] = measured
        for line in describe_memory(measured):
            record.say(f"    {line}")
        record.put(name, measured)
        note = f"{measured.set_up_s:.0f} s to set up, reserved {spell_bytes(measured.reserved_bytes)}"
        if name != "as it is" and "as it is" in found:
            record.figure(Figure(f"{name}: speed", found["as it is"].median_s / measured.median_s, note=note))
    record.check("some were measured", bool(found), "; ".join(bench.failures))


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Inside, new processes find these variables."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_peer(record: Record) -> None:
    """A 7B model with everything offloaded, beside the figure of a system made for that."""
    bench = make_bench(record, layers=32)
    if not record.is_small:
        bench.shape = replace(bench.shape, num_layers=_fit_layers(record, bench.shape, max(bench.tokens)))
        bench.num_ministages = bench.shape.num_layers // 2
    job = replace(bench.job("c"), num_warm_up=1, num_steps=1 if record.is_small else 2)
    found = bench.measure(job)
    if found is None:
        record.leave_out(
            "a model of 7 billion parameters", bench.failures[-1] if bench.failures else "no time left"
        )
        return
    record.put("measured", found)
    for line in describe_memory(found):
        record.say(f"    {line}")
    per_token = flops_per_token(config_of(job.shape), job.shape.sequence)
    tflops = per_token * found.tokens_per_s / 1e12
    again = count_flops(job.shape) * found.tokens_per_s / 1e12
    billions = found.num_parameters / 1e9
    note = f"{billions:.2f} billion parameters; {again:.0f} with what is computed twice"
    record.say(f"the peer: {_PEER_TFLOPS:.0f} TFLOP/s, {_PEER}")
    is_h200 = "H200" in found.device_name
    has_target = not record.is_small and ("H100" in found.device_name or is_h200)
    record.figure(Figure("7b_tflops", tflops, _H200_TFLOPS if is_h200 else None, note=note))
    target = _PEER_FACTOR if has_target else None
    record.figure(Figure("7b_over_megatrain_h100", tflops / _PEER_TFLOPS, target, note=_PEER))


def _fit_layers(record: Record, shape: Shape, num_tokens: int) -> int:
    """Of 32, as many as host memory holds."""
    room = find_host_room()
    for layers in range(shape.num_layers, 0, -1):
        needed = _HOST_BYTES * num_parameters(config_of(replace(shape, num_layers=layers)))
        needed += 2 * layers * num_tokens * shape.dim  # Inputs of layers, in bf16.
        if needed < 0.92 * room.num_bytes:
            break
    if layers < shape.num_layers:
        record.say(f"{layers} of {shape.num_layers} layers: the host has {room}")
    return layers
