"""Runs one job in a process of its own: CUDA keeps memory, streams and kernels of whatever ran before."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections import Counter, defaultdict
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from zorselike.errors import ConfigError
from zorselike.models.flops import num_parameters
from zorselike.profiler.program.action_costs import ActionClock
from zorselike.runtime.memory.streams import Streams

from .job import Failure, Job, Measurement, Outcome
from .trainers import OurTrainer, Trainer, config_of, make_trainer


def run_job(job: Job, timeout_s: float, *, is_fresh: bool = False) -> Outcome:
    """Runs a job in a fork of this process, which starts at once; this one must not have touched CUDA. With
    `is_fresh` a new interpreter imports torch anew, which reads some variables only then."""
    context = multiprocessing.get_context("spawn" if is_fresh else "fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_live, args=(job, sending))  # type: ignore[attr-defined]
    child.start()
    sending.close()
    try:
        if not receiving.poll(timeout_s):
            if child.pid is not None:
                os.kill(child.pid, signal.SIGUSR1)  # Its stacks, see `prepare`.
                child.join(1.0)
            return Outcome(failure="time", reason=f"not over after {timeout_s:.0f} s")
        outcome: Outcome = receiving.recv()
        return outcome
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGKILL:
            return Outcome(failure="host memory", reason="ended by the system (SIGKILL)")
        return Outcome(failure="other", reason=f"ended with code {child.exitcode} and without a result")
    finally:
        child.kill()
        child.join()


def _live(job: Job, sending: Connection) -> None:
    """Does not return: a process that only ends need not first unlock what it locked."""
    sending.send(do(job))
    os._exit(0)


def do(job: Job) -> Outcome:
    """The job's values, or why there are none."""
    try:
        prepare(job)
        return Outcome(_train(job))
    except Exception as error:
        failure = classify(error)
        if failure == "other":
            traceback.print_exc()
        return Outcome(failure=failure, reason=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def classify(error: Exception) -> Failure:
    """What ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device memory"
    text = str(error)
    is_host = isinstance(error, MemoryError) or "can't allocate memory" in text
    if is_host or (isinstance(error, ConfigError) and ("host memory" in text or "locked-memory" in text)):
        return "host memory"
    # What pinning says where the driver can lock no more; the device's own shortage is another class.
    return "host memory" if "CUDA error: out of memory" in text else "other"


def prepare(job: Job) -> None:
    """Makes this process the job's only rank."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["LOCAL_RANK"] = "0"
    # Where host memory runs out, the system is to end this process and not its parent.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if job.is_deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if job.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _train(job: Job) -> Measurement:
    begin_s = time.perf_counter()
    trainer = make_trainer(job)
    for _ in range(job.num_warm_up):
        trainer.step()
    set_up_s = time.perf_counter() - begin_s
    is_cuda = job.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    step_s = time_steps(trainer, job)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if is_cuda else (None, None)
    loss = trainer.loss()
    host_us = _time_actions(trainer) if isinstance(trainer, OurTrainer) else {}
    report = trainer.pipe.memory_report() if isinstance(trainer, OurTrainer) else None
    planned_bytes = None if report is None else report.device_planned_bytes
    return Measurement(
        variant=job.variant,
        num_tokens=job.num_tokens,
        num_ministages=job.num_ministages,
        num_layers=job.shape.num_layers,
        num_parameters=num_parameters(config_of(job.shape)),
        step_s=step_s,
        loss=loss,
        device_bytes=peaks[0] if is_cuda else planned_bytes,
        reserved_bytes=peaks[1],
        host_bytes=None if report is None else report.host_peak_bytes,
        set_up_s=set_up_s,
        device_name=torch.cuda.get_device_name() if is_cuda else "CPU",
        memory=str(report or ""),
        planned_bytes=planned_bytes,
        bytes_by_stream=_count_by_stream(trainer) if is_cuda else {},
        num_retries=torch.cuda.memory_stats().get("num_alloc_retries", 0) if is_cuda else 0,
        host_us=host_us,
    )


def time_steps(trainer: Trainer, job: Job) -> tuple[float, ...]:
    """Seconds of each timed step."""
    return _time_on_gpu(trainer, job) if job.device == "cuda" else _time_on_cpu(trainer, job)


def _time_actions(trainer: OurTrainer) -> dict[str, float]:
    """Microseconds that the host takes for an action in one more step, by kind, and how many there are."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    clock = ActionClock()
    with clock.running(trainer.pipe):
        trainer.step()
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for each in clock.times:
        samples[each.action.kind.value].append(1e6 * (each.end_s - each.begin_s))
    everything = [us for own in samples.values() for us in own]
    found = {kind: round(statistics.fmean(own), 1) for kind, own in sorted(samples.items())}
    return found | {"mean": round(statistics.fmean(everything), 1), "number": len(everything)}


def _count_by_stream(trainer: Trainer) -> dict[str, int]:
    """What the allocator keeps, by the stream in whose pool it is; ours have their names."""
    names = {torch.cuda.default_stream().cuda_stream: "default"}
    if isinstance(trainer, OurTrainer):
        streams = trainer.pipe._assembly.resources.memory.streams  # Nobody else asks which is which.
        for name, kind in Streams.__annotations__.items():
            if kind == "Stream":
                with getattr(streams, name).use():
                    names.setdefault(torch.cuda.current_stream().cuda_stream, name)
    found: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        found[names.get(segment["stream"], f"other {segment['stream']:#x}")] += segment["total_size"]
    return dict(found.most_common())


def _time_on_gpu(trainer: Trainer, job: Job) -> tuple[float, ...]:
    """Between two steps nothing waits: what a step leaves to be copied runs beside the next."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(job.num_steps + 1)]
    events[0].record()
    events[0].synchronize()
    for event in events[1:]:
        trainer.step()
        event.record()
    torch.cuda.synchronize()
    return tuple(begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events))


def _time_on_cpu(trainer: Trainer, job: Job) -> tuple[float, ...]:
    """Processor time: all work is this process's, on cores that others may use too."""
    times = [time.process_time()]
    for _ in range(job.num_steps):
        trainer.step()
        times.append(time.process_time())
    return tuple(end - begin for begin, end in pairwise(times))
