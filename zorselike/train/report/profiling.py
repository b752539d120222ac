"""Chrome traces of every rank at intervals, with the keys of TorchTitan's `[profiling]`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from zorselike.runtime.result import StepResult
from zorselike.text.wording import count
from zorselike.train.config.config import Profiling
from zorselike.train.report.trace import write_readable

logger = logging.getLogger("zorselike")

_SILENT = "6"
"""Above every kind of message of torch's profiler; those on begin and end (USDT) are the highest, 5."""


@contextmanager
def profiler(
    config: Profiling, *, folder: Path, rank: int, first_step: int = 0
) -> Iterator[Callable[[StepResult], None]]:
    """Yields a function to call after each step; it does nothing unless `[profiling]` is enabled.

    No Gloo operation may be running when a trace ends: torch would record its end in memory that is freed
    with the trace. So the caller must have waited for its own operations, and the step's sums are waited for.

    `first_step`: that from which the numbers of steps in names of traces are counted.

    Traces are `folder/<save_traces_folder>/iteration_N/rankR_trace.json.gz`; one that cannot be
    written, as on a full disk, is a warning, and training goes on. torch's profiler is silent unless the
    environment variable `KINETO_LOG_LEVEL` says otherwise: 4 shows errors, and where traces begin.
    """
    if not config.enable_profiling:
        yield lambda result: None
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")

    num_written = 0

    def write(finished: profile) -> None:
        nonlocal num_written
        num_written += 1
        target = folder / config.save_traces_folder / f"iteration_{first_step + finished.step_num}"
        raw = target / f"rank{rank}_trace.json"
        try:
            target.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(raw))
            write_readable(raw, raw.with_name(f"{raw.name}.gz"), rank=rank)
        except (OSError, ValueError, RuntimeError) as error:
            with suppress(OSError):
                raw.with_name(f"{raw.name}.gz").unlink(missing_ok=True)
            # On a full disk torch leaves half a file, or none, and does not say so.
            is_torn = isinstance(error, FileNotFoundError | ValueError)
            reason = "torch's profiler left no whole file; is the disk full?" if is_torn else error
            logger.warning("no trace is written to %s: %s", target, reason)
        else:
            logger.info("trace written to %s", target)
        finally:
            with suppress(OSError):
                raw.unlink(missing_ok=True)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    wait = config.profile_freq - config.profiler_active - config.profiler_warmup
    phases = schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active)
    # Without shapes, which TorchTitan records: they would double the size of a trace.
    with profile(activities=activities, schedule=phases, on_trace_ready=write) as running:
        last: StepResult | None = None

        def end_step(result: StepResult) -> None:
            nonlocal last
            last = result
            if phases(running.step_num) is ProfilerAction.RECORD_AND_SAVE:
                _wait(result)
            running.step()

        yield end_step
        if last is not None:
            _wait(last)
    if last is not None and not num_written:
        logger.info(
            "no trace is written of %s: the first would be after [profiling] profile_freq = %d",
            count(running.step_num, "step"),
            config.profile_freq,
        )


def _wait(result: StepResult) -> None:
    _ = result.loss
