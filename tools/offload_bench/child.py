"""Does one job in this process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zorselike.errors import ConfigError

from .exposure import find_exposure, read_trace
from .job import Job, Measurement, Outcome
from .llama import count_parameters
from .machine import measure_machine
from .trainers import Trainer, make_trainer


def do(job: Job) -> Outcome:
    """The job's values, or why there are none."""
    try:
        _prepare(job)
        match job.kind:
            case "machine":
                return Outcome(measure_machine(job))
            case "trace":
                return Outcome(_trace(job))
            case _:
                return Outcome(_train(job).to_json())
    except Exception as error:
        failure = classify(error)
        if failure == "other":
            traceback.print_exc()
        return Outcome(None, failure, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def classify(error: Exception) -> str:
    """Which of `FAILURES` an error is."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device memory"
    text = str(error)
    is_host = isinstance(error, MemoryError) or "can't allocate memory" in text
    if is_host or (isinstance(error, ConfigError) and ("host memory" in text or "locked-memory" in text)):
        return "host memory"
    # What pinning says where the driver can lock no more; the device's own shortage is another class.
    return "host memory" if "CUDA error: out of memory" in text else "other"


def _prepare(job: Job) -> None:
    os.environ["LOCAL_RANK"] = "0"
    _offer_to_the_killer()
    if job.device == "cuda":
        torch.cuda.set_device(0)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _offer_to_the_killer() -> None:
    """Where host memory runs out, the system ends this process and not its parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _train(job: Job) -> Measurement:
    begin_s = time.perf_counter()
    trainer = make_trainer(job)
    for _ in range(job.num_warm_up):
        trainer.step()
    set_up_s = time.perf_counter() - begin_s
    is_cuda = job.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    step_s, wall_s = _time_steps_on_gpu(trainer, job) if is_cuda else _time_steps_on_cpu(trainer, job)
    counted, host_bytes = trainer.counted_bytes()
    return Measurement(
        variant=job.variant,
        num_tokens=job.num_tokens,
        num_ministages=job.num_ministages,
        num_layers=job.shape.num_layers,
        num_parameters=count_parameters(job.shape),
        step_s=step_s,
        wall_s=wall_s,
        loss=trainer.loss(),
        device_bytes=torch.cuda.max_memory_allocated() if is_cuda else counted,
        reserved_bytes=torch.cuda.max_memory_reserved() if is_cuda else None,
        host_bytes=host_bytes,
        set_up_s=set_up_s,
        device_name=torch.cuda.get_device_name() if is_cuda else "CPU",
        memory=trainer.memory(),
    )


def _time_steps_on_gpu(trainer: Trainer, job: Job) -> tuple[tuple[float, ...], float]:
    """Between two steps nothing waits: what a step leaves to be copied runs beside the next."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(job.num_steps + 1)]
    events[0].record()
    events[0].synchronize()
    begin_s = time.perf_counter()
    for event in events[1:]:
        trainer.step()
        event.record()
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - begin_s
    return tuple(begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)), wall_s


def _time_steps_on_cpu(trainer: Trainer, job: Job) -> tuple[tuple[float, ...], float]:
    times = [time.perf_counter()]
    for _ in range(job.num_steps):
        trainer.step()
        times.append(time.perf_counter())
    steps = tuple(end - begin for begin, end in pairwise(times))
    return steps, times[-1] - times[0]


def _trace(job: Job) -> dict[str, Any]:
    """`Exposure` of some steps, and how many events it was found in."""
    trainer = make_trainer(job)
    for _ in range(job.num_warm_up):
        trainer.step()
    is_cuda = job.device == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        for _ in range(job.num_steps):
            trainer.step()
        if is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(job.trace_file or f"{folder}/trace.json")
        profiler.export_chrome_trace(str(path))
        events = read_trace(path)
    exposure = find_exposure(events, job.num_steps)
    return {"exposure": exposure.to_json() if exposure else None, "num_events": len(events)}
