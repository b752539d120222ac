"""The most rows of the whole model on every rank, and their times: Poplar's profiling phase.

All ranks search at once and in step. Before each trial they tell each other what they will try, and after
it how it went; computing needs nobody else (`profiler/largest_batch/step.py`), and collectives are entered
only when all have said that their part fits and nothing is held any more. So a rank that runs out of memory
strands nobody. If one row does not fit on some rank, all go to the next ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zorselike.cost.parameter_bytes import ParameterBytes, count_shards, largest_shard
from zorselike.cost.profile import Source, ZeroBatch
from zorselike.errors import ClusterError
from zorselike.plan.plan import Recompute
from zorselike.profiler.largest_batch.step import ZeroStep
from zorselike.profiler.layers.probes import ModelFactory
from zorselike.profiler.layers.row_search import MaxRows, RowSearch, TrialResult
from zorselike.profiler.machine.collective_timing import Collectives, unit_parameters
from zorselike.profiler.machine.device_memory import DeviceMemory
from zorselike.runtime.loss import LossFn
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.processes.processes import Processes
from zorselike.text.wording import first_line

STAGES = (0, 1, 2, 3)

_MOMENTS = 2


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """The whole model, as it is to be trained."""

    build: ModelFactory
    modules: tuple[str, ...]
    """Its FSDP units in model order."""
    dtype: torch.dtype
    tokens_per_row: int
    recompute: Recompute
    loss_fn: LossFn
    most_rows: int
    repeats: int


@dataclass(frozen=True)
class Search:
    """What one rank found under one ZeRO stage."""

    zero: int
    found: MaxRows
    collective_s: float
    """Of one step of one microbatch; 0 for a rank alone."""


class StepTrials:
    """Tries numbers of rows on this rank; what fails is given back whole."""

    def __init__(self, job: StepJob, processes: Processes, memory: DeviceMemory, *, zero: int) -> None:
        self._job = job
        self._processes = processes
        self._memory = memory
        self._zero = zero
        self._step: ZeroStep | None = None
        num_parameters = sum(p.numel() for p in job.build().parameters())
        self._least_bytes = least_bytes(
            num_parameters, itemsize=job.dtype.itemsize, zero=zero, num_ranks=processes.size
        )

    def __call__(self, rows: int) -> TrialResult:
        limit = self._memory.limit_bytes
        if self._least_bytes > limit:
            # Known without trying, which on a CPU might end the machine's other work.
            return TrialResult(fits=False, peak_bytes=self._least_bytes, limit_bytes=limit)
        try:
            return self._run(rows)
        except Exception as error:
            if not self._memory.is_refusal(error):
                raise
        # Out here, where the traceback and what it held are gone.
        self.close()
        return TrialResult(fits=False, limit_bytes=limit)

    def _run(self, rows: int) -> TrialResult:
        job = self._job
        if self._step is None:
            self._step = ZeroStep(
                job.build,
                job.modules,
                zero=self._zero,
                group=self._processes.everyone,
                alone=self._processes.alone,
                dtype=job.dtype,
                device=self._processes.device,
                recompute=job.recompute,
                loss_fn=job.loss_fn,
            )
        return self._step.run(
            rows, memory=self._memory, tokens_per_row=job.tokens_per_row, repeats=job.repeats
        )

    @property
    def step(self) -> ZeroStep | None:
        """What computes, from the first trial that fits to the next that does not."""
        return self._step

    def close(self) -> None:
        """Gives back all memory."""
        self._step = None
        self._memory.release()


def least_bytes(num_parameters: int, *, itemsize: int, zero: int, num_ranks: int) -> int:
    """What a rank holds of parameters, gradients and optimizer state whatever its rows, at least: shards
    with AdamW's state, and beside them, up to ZeRO 2, whole gathered parameters and gradients."""
    each = ParameterBytes(itemsize, _MOMENTS)
    held = largest_shard(num_parameters, count_shards(zero, num_ranks)) * (
        each.weight + each.gradient + each.state
    )
    if 1 <= zero <= 2 and num_ranks > 1:
        held += num_parameters * each.weight
    return held


def search_together(
    trial: Callable[[int], TrialResult],
    *,
    agree: Callable[[Any], list[Any]],
    most_rows: int,
    told: Callable[[list[int | None], list[bool]], None] = lambda tried, fitted: None,
) -> MaxRows | None:
    """`find_max_rows` on all ranks in step; collective.

    Args:
        trial: tries rows on this rank, waiting for nobody.
        agree: brings a value of every rank to all.
        told: hears after each round what every rank tried and whether it fitted.

    Returns the outcome of this rank, or None, on all ranks alike, as soon as one row does not fit on one of
    them.

    Raises:
        ClusterError: On all ranks, naming the one whose trial raised something else than a refusal.
    """
    search = RowSearch(most_rows)
    while True:
        rows = search.next_rows()
        tried = agree(rows)
        if all(entry is None for entry in tried):
            return search.outcome()
        result, failure = _try(trial, rows)
        said = agree((result is None or result.fits, failure))
        for rank, (_, text) in enumerate(said):
            if text:
                raise ClusterError(f"rank {rank} failed with {tried[rank]} rows: {text}")
        fitted = [fits for fits, _ in said]
        told(tried, fitted)
        if any(rows == 1 and not fits for rows, fits in zip(tried, fitted, strict=True)):
            return None
        if result is not None:
            search.tell(result)


def _try(trial: Callable[[int], TrialResult], rows: int | None) -> tuple[TrialResult | None, str]:
    """The result of a trial, or what it raised in words: the others are told before anybody ends."""
    if rows is None:
        return None, ""
    try:
        return trial(rows), ""
    except Exception as error:
        return None, first_line(error)


def search_stages(
    job: StepJob,
    processes: Processes,
    memory: DeviceMemory,
    *,
    stages: Sequence[int] = STAGES,
    told: Callable[[int, list[int | None], list[bool]], None] = lambda zero, tried, fitted: None,
) -> Search | None:
    """The first of `stages` under which every rank computes at least one row, and how many this one
    does; None, on all ranks, if there is no such stage. Collective."""
    for zero in stages:
        trials = StepTrials(job, processes, memory, zero=zero)
        collectives = Collectives(processes.everyone, processes.device)
        collectives.connect()  # What its library takes of the device is no longer there for trials.
        found = search_together(
            trials,
            agree=processes.gather,
            most_rows=job.most_rows,
            told=lambda tried, fitted, zero=zero: told(zero, tried, fitted),  # type: ignore[misc]
        )
        trials.close()
        if found is not None:
            return Search(zero, found, _time_collectives(collectives, job, zero))
    return None


def _time_collectives(collectives: Collectives, job: StepJob, zero: int) -> float:
    """Seconds of the collectives of one step of one microbatch, the median of several."""
    sizes = unit_parameters(job.build(), job.modules)
    reduced = torch.float32 if job.dtype in HALF else job.dtype
    return collectives.time_step(sizes, zero=zero, gathered=job.dtype, reduced=reduced, repeats=job.repeats)


def make_batches(searches: Sequence[tuple[str, Search]], source: Source) -> tuple[ZeroBatch, ...]:
    """One entry a device type from `(type, search)` of every rank: the rank of that type on which the
    fewest rows fit speaks for all."""
    least: dict[str, Search] = {}
    for device, search in searches:
        if device not in least or search.found.max_rows < least[device].found.max_rows:
            least[device] = search
    return tuple(
        ZeroBatch(
            device=device,
            zero=search.zero,
            max_rows=search.found.max_rows,
            rows=tuple(rows for rows, _ in search.found.measured),
            compute_s=tuple(result.forward_s + result.backward_s for _, result in search.found.measured),
            collective_s=(search.collective_s,) * len(search.found.measured),
            source=source,
        )
        for device, search in least.items()
    )
