"""The most rows of a whole model on several ranks: agreement, stages, and what is written of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from profiled import TOKENS, free_port, join, step_job
from ranks import RunRanks
from torch.distributed.fsdp import FSDPModule

from zorselike import HeteroPipeline
from zorselike.cost.profile import Source
from zorselike.errors import ClusterError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.profiler.largest_batch.search import (
    Search,
    StepTrials,
    least_bytes,
    make_batches,
    search_stages,
    search_together,
)
from zorselike.profiler.layers.row_search import MaxRows, TrialResult, find_max_rows
from zorselike.profiler.machine.device_memory import HostMemory

LEDGER = ("gathered parameters", "parameter shards", "gradient shards", "optimizer state")
"""What the runtime enters into its ledger; activations are autograd's affair."""

SOURCE = Source("measured", "2026-11-21", "a test")


def gather(value: Any) -> list[Any]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- in step ---------------------------------------------------------------------------------


def search_with_limits(rank: int, size: int, limits: tuple[int, ...]) -> Any:
    rounds: list[Any] = []
    found = search_together(
        lambda rows: TrialResult(fits=rows <= limits[rank], forward_s=rows),
        agree=gather,
        most_rows=64,
        told=lambda tried, fitted: rounds.append((tried, fitted)),
    )
    dist.barrier()  # Hangs, and so fails the test, unless every rank comes out of the search.
    return found, rounds


def test_ranks_of_different_memory_search_in_step(run_ranks: RunRanks) -> None:
    limits = (3, 21, 64)
    results = run_ranks(search_with_limits, 3, limits)
    for rank, (found, rounds) in enumerate(results):
        alone = find_max_rows(lambda rows, m=limits[rank]: TrialResult(fits=rows <= m), most_rows=64)
        assert found.max_rows == limits[rank] == alone.max_rows
        assert [rows for rows, _ in found.trials] == [rows for rows, _ in alone.trials]
        # Everybody knows of every trial of everybody.
        assert rounds == results[0][1]
        assert any(not all(fitted) for _, fitted in rounds)


def test_one_row_that_does_not_fit_ends_the_stage_for_all(run_ranks: RunRanks) -> None:
    for found, rounds in run_ranks(search_with_limits, 3, (0, 5, 64)):
        assert found is None and len(rounds) == 1


def fail_on_one_rank(rank: int, size: int) -> str:
    def trial(rows: int) -> TrialResult:
        if rank == 1 and rows == 4:
            raise ZeroDivisionError("a bug")
        return TrialResult(fits=True)

    with pytest.raises(ClusterError) as raised:
        search_together(trial, agree=gather, most_rows=64)
    return str(raised.value)


def test_another_error_is_told_to_all_before_anybody_ends(run_ranks: RunRanks) -> None:
    messages = run_ranks(fail_on_one_rank, 3)
    assert set(messages) == {"rank 1 failed with 4 rows: ZeroDivisionError: a bug"}


# -- a real model under an injected limit ----------------------------------------------------


def search_model(
    rank: int, size: int, port: int, limits: tuple[int, ...], settings: dict[str, Any]
) -> Search | None:
    with join(port) as processes:
        memory = HostMemory(limits[rank])
        return search_stages(step_job(**settings), processes, memory)


def measure_steps(rank: int, size: int, port: int, cases: tuple[tuple[int, int], ...], family: str) -> Any:
    """The bytes of one step for each (ZeRO stage, rows)."""
    peaks = []
    with join(port) as processes:
        for zero, rows in cases:
            trials = StepTrials(step_job(family), processes, HostMemory(), zero=zero)
            peaks.append(trials(rows).peak_bytes)
            trials.close()
    return peaks


def measure_peaks(run_ranks: RunRanks, *cases: tuple[int, int], family: str = "llama") -> list[int]:
    """The same, of the rank that holds more."""
    measured = run_ranks(measure_steps, 2, free_port(), cases, family, init=False)
    return list(map(max, zip(*measured, strict=True)))


def test_the_most_rows_fill_the_limit_of_each_rank(run_ranks: RunRanks) -> None:
    least, more = measure_peaks(run_ranks, (0, 1), (0, 2))
    per_row = more - least
    limits = (least + 4 * per_row + per_row // 2, least + 9 * per_row + per_row // 2)
    found = run_ranks(search_model, 2, free_port(), limits, {}, init=False)
    assert [search.zero for search in found] == [0, 0]
    assert [search.found.max_rows for search in found] == [5, 10]
    for search, limit in zip(found, limits, strict=True):
        assert search.found.is_limit and search.collective_s > 0
        assert all(0 < result.peak_bytes <= limit for _, result in search.found.measured)
        assert all(result.forward_s > 0 and result.backward_s > 0 for _, result in search.found.measured)


def test_the_stage_rises_until_one_row_fits_everywhere(run_ranks: RunRanks) -> None:
    family = "gpt"  # With tied embeddings, which ZeRO 3 keeps with the root.
    whole, shared, sharded = measure_peaks(run_ranks, (0, 1), (1, 1), (3, 1), family=family)
    assert sharded < shared < whole
    settings = {"family": family, "most_rows": 2}
    # One rank has room for the whole and one has not.
    for limit, zero in (((shared + whole) // 2, 1), ((sharded + shared) // 2, 3)):
        found = run_ranks(search_model, 2, free_port(), (limit, 2 * whole), settings, init=False)
        assert [search.zero for search in found] == [zero, zero]
        assert all(search.found.max_rows >= 1 for search in found)


def test_where_nothing_fits_all_ranks_know(run_ranks: RunRanks) -> None:
    found = run_ranks(search_model, 2, free_port(), (10**5, 10**9), {}, init=False)
    assert found == [None, None]


def test_recomputation_leaves_less(run_ranks: RunRanks) -> None:
    for own in run_ranks(compare_recompute, 2, free_port(), init=False):
        assert len(own) == 4 and all(0 < again < kept for kept, again in own)


def compare_recompute(rank: int, size: int, port: int) -> list[tuple[int, ...]]:
    """What the forward keeps without and with recomputation, for each ZeRO stage."""
    found = []
    with join(port) as processes:
        for zero in range(4):
            kept = []
            for recompute in ("none", "layer"):
                job = step_job(dtype=torch.bfloat16, recompute=recompute)
                trials = StepTrials(job, processes, HostMemory(), zero=zero)
                first, second = trials(3), trials(3)
                # Nothing is left behind from one trial to the next.
                assert first.fits and first.peak_bytes == second.peak_bytes
                kept.append(first.kept_bytes)
                trials.close()
            found.append(tuple(kept))
    return found


def recover(rank: int, size: int, port: int, zero: int) -> tuple[bool, ...]:
    """Fails on rank 1 alone, then goes on with fewer rows: the failure left nothing behind."""
    with join(port) as processes:
        memory = HostMemory()
        trials = StepTrials(step_job(), processes, memory, zero=zero)
        before = trials(2)
        if rank == 1:
            memory.limit_bytes = before.peak_bytes
        refused = trials(8)
        # After a failure nothing of the model is left, in its traceback or in what autograd had saved.
        left = [one for one in gc.get_objects() if isinstance(one, FSDPModule)]
        assert bool(left) == refused.fits
        del left
        after = trials(2)
        assert after.peak_bytes == before.peak_bytes
        processes.gather(None)
        return before.fits, refused.fits, after.fits


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_that_fails_strands_nobody(run_ranks: RunRanks, zero: int) -> None:
    assert run_ranks(recover, 2, free_port(), zero, init=False) == [(True, True, True), (True, False, True)]


def compare_with_training(rank: int, size: int, port: int, dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """What a trial and what training hold at most, by purpose, for each ZeRO stage."""
    found = []
    with join(port) as processes:
        for zero in range(4):
            job = step_job(dtype=dtype)
            trials = StepTrials(job, processes, HostMemory(), zero=zero)
            trials(2)
            assert trials.step is not None
            tried = {purpose: trials.step.ledger.peak(purpose, "device") for purpose in LEDGER}
            trials.close()
            rows = (Microbatch(0, 0, 2), Microbatch(1, 2, 4))
            plan = Plan(4, (Group(ranks=(0, 1), microbatches=rows, zero=zero),), (Ministage(0, job.modules),))
            optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
            tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
            with HeteroPipeline(
                job.build(), plan, optimizer=optimizer, device="cpu", param_dtype=dtype
            ) as pipe:
                for _ in range(2):
                    pipe.step(tokens, tokens)
                lines = {line.purpose: line.device_peak for line in pipe.memory_report().lines}
            found.append((tried, {purpose: lines[purpose] for purpose in LEDGER}))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_holds_what_training_holds(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    for own in run_ranks(compare_with_training, 2, free_port(), dtype, init=False):
        for tried, trained in own:
            assert tried == trained and all(tried.values())


# -- pure ------------------------------------------------------------------------------------


def found(rows: int) -> Callable[[int], Search]:
    results = tuple(
        (n, TrialResult(fits=n <= rows, forward_s=n, backward_s=2 * n)) for n in (1, 2, 4, 8) if n <= 2 * rows
    )
    return lambda zero: Search(zero, MaxRows(rows, True, results), 0.25)


def test_the_rank_with_the_least_room_speaks_for_its_type() -> None:
    batches = make_batches([("T4", found(4)(2)), ("A100-40", found(8)(2)), ("T4", found(2)(2))], SOURCE)
    assert [(batch.device, batch.zero, batch.max_rows) for batch in batches] == [
        ("T4", 2, 2),
        ("A100-40", 2, 8),
    ]
    assert batches[0].rows == (1, 2)  # 4 failed there and has no times.
    assert batches[0].compute_s == (3, 6) and batches[0].collective_s == (0.25, 0.25)


@given(
    num_parameters=st.integers(1, 10**9),
    num_ranks=st.integers(2, 64),
    itemsize=st.sampled_from([2, 4]),
)
def test_a_higher_stage_holds_no_more(num_parameters: int, num_ranks: int, itemsize: int) -> None:
    held = [
        least_bytes(num_parameters, itemsize=itemsize, zero=zero, num_ranks=num_ranks) for zero in range(4)
    ]
    assert held[1] == held[2] > held[3]
    assert held[3] >= held[0] // num_ranks
