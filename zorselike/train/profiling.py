"""Chrome traces of every rank at intervals, as TorchTitan's `[profiling]` has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from zorselike.train.config import Profiling

logger = logging.getLogger("zorselike")


@contextmanager
def profiler(config: Profiling, *, folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """What to call after each step; nothing happens then unless `[profiling]` wants traces.

    Traces are `folder/<save_traces_folder>/iteration_N/rankR_trace.json`.
    """
    if not config.enable_profiling:
        yield lambda: None
        return

    def write(finished: profile) -> None:
        target = folder / config.save_traces_folder / f"iteration_{finished.step_num}"
        target.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(target / f"rank{rank}_trace.json"))
        logger.info("trace written to %s", target)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    wait = config.profile_freq - config.profiler_active - config.profiler_warmup
    phases = schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active)
    with profile(activities=activities, schedule=phases, on_trace_ready=write, record_shapes=True) as running:
        yield running.step
