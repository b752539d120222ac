"""The most rows of the whole model on every rank under each ZeRO stage (Poplar, Algorithm 1).

All ranks search at once and in step. Before each trial they tell each other what they will try, and after it
how it went; computing needs nobody else (`profiler/largest_batch/step.py`), so a rank that runs out of memory
strands nobody. The memory model says where to begin, and which stages would give the same answer again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from zorselike.cost.largest_batch import ADAMW_MOMENTS, WholeModelStep
from zorselike.cost.parameter_bytes import ParameterBytes, count_shards, largest_shard
from zorselike.cost.profile import LargestBatch, Source
from zorselike.cost.sizes import KeptBytes
from zorselike.errors import ClusterError
from zorselike.plan.plan import Recompute
from zorselike.profiler.largest_batch.bracket import MAX_TRIALS, BracketSearch
from zorselike.profiler.largest_batch.step import ZeroStep
from zorselike.profiler.layers.probes import MeasuredModel
from zorselike.profiler.layers.row_search import MaxRows, TrialResult
from zorselike.profiler.machine.collective_timing import Collectives
from zorselike.profiler.machine.device_memory import DeviceMemory
from zorselike.runtime.processes.processes import Processes
from zorselike.text.wording import first_line

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class StageResult:
    """What one rank found under one ZeRO stage."""

    zero: int
    num_ranks: int
    found: MaxRows
    limit_bytes: int


class StepTrials:
    """Tries numbers of rows on this rank; what fails is given back whole."""

    def __init__(
        self,
        model: MeasuredModel,
        processes: Processes,
        memory: DeviceMemory,
        *,
        zero: int,
        recompute: Recompute = "none",
    ) -> None:
        self._make_step = partial(ZeroStep, model, processes, zero=zero, recompute=recompute)
        self._memory = memory
        self.step: ZeroStep | None = None
        """What computes, from the first trial that fits to the next that does not."""
        self._least_bytes = least_bytes(
            model.workload.num_parameters,
            num_trainable=model.workload.num_trainable,
            itemsize=model.dtype.itemsize,
            zero=zero,
            num_ranks=processes.size,
        )

    def __call__(self, rows: int) -> TrialResult:
        limit = self._memory.limit_bytes
        if self._least_bytes > limit:
            # Known without trying, which on a CPU might end the machine's other work.
            return TrialResult(fits=False, peak_bytes=self._least_bytes, limit_bytes=limit)
        try:
            self.step = self.step or self._make_step()
            return self.step.run(rows, self._memory)
        except Exception as error:
            if not self._memory.is_refusal(error):
                raise
        # Out here, where the traceback and what it held are gone.
        self.close()
        return TrialResult(fits=False, limit_bytes=limit)

    def close(self) -> None:
        """Gives back all memory."""
        self.step = None
        self._memory.release()


def least_bytes(num_parameters: int, *, num_trainable: int, itemsize: int, zero: int, num_ranks: int) -> int:
    """What a rank holds of parameters, gradients and optimizer state whatever its rows, at least: shards
    with AdamW's state, and beside them, up to ZeRO 2, whole gathered parameters and gradients."""
    each = ParameterBytes(itemsize, ADAMW_MOMENTS)
    num_shards = count_shards(zero, num_ranks)
    held = largest_shard(num_parameters, num_shards) * each.weight
    held += largest_shard(num_trainable, num_shards) * (each.gradient + each.state)
    if 1 <= zero <= 2 and num_ranks > 1:
        held += num_parameters * each.weight
    return held


def search_together(
    trial: Callable[[int], TrialResult],
    search: BracketSearch,
    *,
    agree: Callable[[Any], list[Any]],
    told: Callable[[list[int | None], list[bool]], None] = lambda tried, fitted: None,
) -> MaxRows:
    """The outcome of this rank's search, on all ranks in step; collective.

    Args:
        trial: tries rows on this rank, waiting for nobody.
        agree: brings a value of every rank to all.
        told: hears after each round what every rank tried and whether it fitted.

    Raises:
        ClusterError: On all ranks, naming the one whose trial raised something else than a refusal.
    """
    while True:
        rows = search.next_rows()
        tried = agree(rows)
        if all(entry is None for entry in tried):
            return search.outcome()
        result, failure = None, ""
        if rows is not None:
            try:
                result = trial(rows)
            except Exception as error:  # The others are told before anybody ends.
                failure = first_line(error)
        said = agree((result is None or result.fits, failure))
        for rank, (_, text) in enumerate(said):
            if text:
                raise ClusterError(f"rank {rank} failed with {tried[rank]} rows: {text}")
        told(tried, [fits for fits, _ in said])
        if rows is not None and result is not None:
            search.tell(rows, result)


def search_stages(
    model: MeasuredModel,
    processes: Processes,
    memory: DeviceMemory,
    *,
    recompute: Recompute = "none",
    kept_bytes: KeptBytes = MappingProxyType({}),
    stages: Sequence[int] = STAGES,
    told: Callable[[int, list[int | None], list[bool]], None] = lambda zero, tried, fitted: None,
) -> list[StageResult]:
    """What this rank found under each of `stages`, but for those under which every rank is expected to
    compute as many rows as were expected or found under one before. Collective.

    `kept_bytes`: activations as measured (`LayerTimeModel.kept_bytes`).
    """
    Collectives(processes.everyone, processes.device).connect()  # What its library takes is gone for trials.
    limit = memory.limit_bytes
    results: list[StageResult] = []
    searched: set[tuple[int, ...]] = set()
    beside_bytes = 0  # What trials found taken beside what the memory model counts; below 0: it counts more.
    for zero in stages:
        estimate = _estimate_step(model, processes, zero, recompute, kept_bytes)
        expected = estimate.most_rows(limit - beside_bytes, model.most_rows)
        everyone = tuple(processes.gather(expected))
        if everyone in searched and all(everyone):  # Where nothing should fit, a row may all the same.
            continue
        searched.add(everyone)
        trials = StepTrials(model, processes, memory, zero=zero, recompute=recompute)
        found = search_together(
            trials,
            BracketSearch(expected, estimate.row_bytes, model.most_rows),
            agree=processes.gather,
            told=partial(told, zero),
        )
        trials.close()
        searched.add(tuple(processes.gather(found.max_rows)))
        results.append(StageResult(zero, estimate.num_ranks, found, limit))
        if found.refused_rows is not None:
            beside_bytes = max(beside_bytes, limit - estimate.peak_bytes(found.refused_rows) + 1)
        if found.max_rows:
            beside_bytes = min(beside_bytes, limit - estimate.peak_bytes(found.max_rows))
    return results


def count_rows(
    model: MeasuredModel,
    processes: Processes,
    memory: DeviceMemory,
    *,
    recompute: Recompute,
    kept_bytes: KeptBytes,
    stages: Sequence[int],
) -> int:
    """About how many rows `search_stages` computes on this rank."""
    steps = (_estimate_step(model, processes, zero, recompute, kept_bytes) for zero in stages)
    expected = {step.most_rows(memory.limit_bytes, model.most_rows) for step in steps}
    # All that are asked for are tried once, in two steps; to find out how many fit takes more trials.
    return sum(2 * (1 + rows) if rows == model.most_rows else MAX_TRIALS * (1 + rows) for rows in expected)


def _estimate_step(
    model: MeasuredModel, processes: Processes, zero: int, recompute: Recompute, kept_bytes: KeptBytes
) -> WholeModelStep:
    return WholeModelStep(
        workload=model.workload,
        device=processes.type,
        zero=zero,
        num_ranks=processes.size if zero else 1,  # With ZeRO 0 a rank holds what it would hold alone.
        recompute=recompute,
        kept_bytes=kept_bytes,
    )


def make_entries(
    results: Sequence[tuple[str, Sequence[StageResult]]], recompute: Recompute, source: Source
) -> tuple[LargestBatch, ...]:
    """One entry a device type and stage, from type and results of every rank: the rank of that type on which
    the fewest rows fit speaks for all."""
    least: dict[tuple[str, int], StageResult] = {}
    for device, own in results:
        for result in own:
            known = least.get((device, result.zero))
            if known is None or result.found.max_rows < known.found.max_rows:
                least[device, result.zero] = result
    return tuple(
        LargestBatch(
            device=device,
            zero=zero,
            num_ranks=result.num_ranks,
            recompute=recompute,
            max_rows=result.found.max_rows,
            refused_rows=result.found.refused_rows,
            limit_bytes=result.limit_bytes,
            source=source,
        )
        for (device, zero), result in least.items()
    )
