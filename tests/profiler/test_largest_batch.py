"""The most rows of a whole model on several ranks: agreement, stages, and what is written of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import volume
from hypothesis import given
from hypothesis import strategies as st
from profiled import TOKENS, join, measured_model
from ranks import RunRanks, free_port
from torch.distributed.fsdp import FSDPModule

from zorselike import HeteroPipeline
from zorselike.cost.profile import Source
from zorselike.errors import ClusterError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.profiler.largest_batch.bracket import MAX_TRIALS, BracketSearch
from zorselike.profiler.largest_batch.search import (
    STAGES,
    StageResult,
    StepTrials,
    count_rows,
    least_bytes,
    make_entries,
    search_stages,
    search_together,
)
from zorselike.profiler.layers.row_search import MaxRows, TrialResult
from zorselike.profiler.machine.device_memory import HostMemory

LEDGER = ("gathered parameters", "parameter shards", "gradient shards", "optimizer state")
"""What the runtime enters into its ledger; activations are autograd's affair."""

SOURCE = Source("measured", "2026-11-21", "a test")


def gather(value: Any) -> list[Any]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- in step ---------------------------------------------------------------------------------


def limited(limit: int, *, row_bytes: int = 10, start: int = 0) -> Callable[[int], TrialResult]:
    """Trials of a device with room for so many rows."""
    return lambda rows: TrialResult(
        fits=rows <= limit,
        peak_bytes=start + row_bytes * rows,
        limit_bytes=start + row_bytes * limit + row_bytes - 1,
    )


def search_with_limits(rank: int, size: int, limits: tuple[int, ...], expected: tuple[int, ...]) -> Any:
    rounds: list[Any] = []
    found = search_together(
        limited(limits[rank]),
        BracketSearch(expected[rank], 12, most_rows=64),
        agree=gather,
        told=lambda tried, fitted: rounds.append((tried, fitted)),
    )
    dist.barrier()  # Hangs, and so fails the test, unless every rank comes out of the search.
    return found, rounds


def test_ranks_of_different_memory_search_in_step(run_ranks: RunRanks) -> None:
    limits = (3, 0, 21, 64)
    results = run_ranks(search_with_limits, 4, limits, (4, 9, 18, 64))
    for rank, (found, rounds) in enumerate(results):
        assert found.max_rows == limits[rank]
        assert found.refused_rows == (limits[rank] + 1 if limits[rank] < 64 else None)
        # Everybody knows of every trial of everybody.
        assert rounds == results[0][1] and len(rounds) <= MAX_TRIALS
        assert any(not all(fitted) for _, fitted in rounds)


def fail_on_one_rank(rank: int, size: int) -> str:
    def trial(rows: int) -> TrialResult:
        if rank == 1 and rows == 4:
            raise ZeroDivisionError("a bug")
        return TrialResult(fits=True)

    with pytest.raises(ClusterError) as raised:
        search_together(trial, BracketSearch(4, 1, most_rows=64), agree=gather)
    return str(raised.value)


def test_another_error_is_told_to_all_before_anybody_ends(run_ranks: RunRanks) -> None:
    messages = run_ranks(fail_on_one_rank, 3)
    assert set(messages) == {"rank 1 failed with 4 rows: ZeroDivisionError: a bug"}


# -- a real model under an injected limit ----------------------------------------------------


def search_model(
    rank: int, size: int, port: int, limits: tuple[int, ...], settings: dict[str, Any], stages: Any = STAGES
) -> list[StageResult]:
    with join(port) as processes:
        return search_stages(measured_model(**settings), processes, HostMemory(limits[rank]), stages=stages)


def measure_steps(rank: int, size: int, port: int, cases: tuple[tuple[int, int], ...], family: str) -> Any:
    """The bytes of one step for each (ZeRO stage, rows)."""
    peaks = []
    with join(port) as processes:
        for zero, rows in cases:
            trials = StepTrials(measured_model(family), processes, HostMemory(), zero=zero)
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
    for own, limit, rows in zip(
        run_ranks(search_model, 2, free_port(), limits, {}, (0,), init=False), limits, (5, 10), strict=True
    ):
        ((stage),) = own
        assert (stage.zero, stage.limit_bytes) == (0, limit)
        assert (stage.found.max_rows, stage.found.refused_rows) == (rows, rows + 1)
        assert all(0 < result.peak_bytes <= limit for _, result in stage.found.measured)


def test_each_stage_is_searched_in_a_handful_of_trials(run_ranks: RunRanks) -> None:
    family = "gpt"  # With tied embeddings, which ZeRO 3 keeps with the root.
    whole, shared, sharded = measure_peaks(run_ranks, (0, 1), (1, 1), (3, 1), family=family)
    assert sharded < shared < whole
    # One rank has room for the whole and one has not; the other lacks room for whole gradients, too.
    for limit, fitting in (((shared + whole) // 2, {1, 2, 3}), ((sharded + shared) // 2, {3})):
        found = run_ranks(search_model, 2, free_port(), (limit, 2 * whole), {"family": family}, init=False)
        small, large = ({stage.zero: stage.found for stage in own} for own in found)
        assert small.keys() == large.keys() and 0 in small
        assert {zero for zero, own in small.items() if own.max_rows} == fitting & small.keys()
        assert fitting & small.keys()
        assert all(own.max_rows for own in large.values())
        for own in (*small.values(), *large.values()):
            assert len(own.trials) <= MAX_TRIALS and own.refused_rows == own.max_rows + 1


def test_stages_that_hold_as_many_rows_are_searched_once(run_ranks: RunRanks) -> None:
    for own in run_ranks(search_model, 2, free_port(), (10**10,) * 2, {"most_rows": 3}, init=False):
        (stage,) = own
        assert stage.zero == 0 and stage.found.refused_rows is None
        assert [rows for rows, _ in stage.found.trials] == [3]


def count_and_search(rank: int, size: int, port: int, limit: int, most: int) -> tuple[int, int]:
    """The rows that a search is announced to compute, and those that it computes."""
    with join(port) as processes:
        model, memory = measured_model(most_rows=most), HostMemory(limit)
        counted = count_rows(model, processes, memory, recompute="none", kept_bytes={}, stages=STAGES)
        computed = 0
        for stage in search_stages(model, processes, memory):
            has_state = False
            for rows, result in stage.found.trials:
                computed += (1 + rows) * (1 if has_state else 2)
                has_state = result.fits
        return counted, computed


def test_as_many_rows_are_announced_as_are_computed(run_ranks: RunRanks) -> None:
    for counted, computed in run_ranks(count_and_search, 2, free_port(), 10**10, 40, init=False):
        assert counted == computed == 2 * 41
    (peak,) = measure_peaks(run_ranks, (0, 6))
    for counted, computed in run_ranks(count_and_search, 2, free_port(), peak, 64, init=False):
        assert computed / 2 < counted < 3 * computed


def test_where_nothing_fits_all_ranks_know(run_ranks: RunRanks) -> None:
    for own in run_ranks(search_model, 2, free_port(), (10**5, 10**5), {}, init=False):
        assert [(stage.zero, stage.found.max_rows, stage.found.refused_rows) for stage in own] == [
            (zero, 0, 1) for zero in STAGES
        ]


@pytest.mark.nightly
def test_recomputation_leaves_less(run_ranks: RunRanks) -> None:
    stages = volume.part(range(4))
    for own in run_ranks(compare_recompute, 2, free_port(), stages, init=False):
        assert len(own) == len(stages) and all(0 < again < kept for kept, again in own)


def compare_recompute(rank: int, size: int, port: int, stages: list[int]) -> list[tuple[int, ...]]:
    """What the forward keeps without and with recomputation, for each ZeRO stage."""
    found = []
    with join(port) as processes:
        for zero in stages:
            kept = []
            for recompute in get_args(Recompute):
                model = measured_model(dtype="bfloat16")
                trials = StepTrials(model, processes, HostMemory(), zero=zero, recompute=recompute)
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
        trials = StepTrials(measured_model(), processes, memory, zero=zero)
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


def compare_with_training(rank: int, size: int, port: int, dtype: str) -> list[tuple[Any, Any]]:
    """What a trial and what training hold at most, by purpose, for each ZeRO stage."""
    found = []
    with join(port) as processes:
        for zero in range(4):
            model = measured_model(dtype=dtype)
            trials = StepTrials(model, processes, HostMemory(), zero=zero)
            trials(2)
            assert trials.step is not None
            tried = {purpose: trials.step.ledger.peak(purpose, "device") for purpose in LEDGER}
            trials.close()
            rows = (Microbatch(0, 0, 2), Microbatch(1, 2, 4))
            modules = tuple(module for module, _ in model.workload.layers)
            plan = Plan(4, (Group(ranks=(0, 1), microbatches=rows, zero=zero),), (Ministage(0, modules),))
            optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
            tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
            with HeteroPipeline(
                model.build(), plan, optimizer=optimizer, device="cpu", param_dtype=model.dtype
            ) as pipe:
                for _ in range(2):
                    pipe.step(tokens, tokens)
                lines = {line.purpose: line.device_peak for line in pipe.memory_report().lines}
            found.append((tried, {purpose: lines[purpose] for purpose in LEDGER}))
    return found


@volume.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trial_holds_what_training_holds(run_ranks: RunRanks, dtype: str) -> None:
    for own in run_ranks(compare_with_training, 2, free_port(), dtype, init=False):
        for tried, trained in own:
            assert tried == trained and all(tried.values())


# -- pure ------------------------------------------------------------------------------------


def found(zero: int, rows: int, limit_bytes: int = 100) -> StageResult:
    trials = tuple((n, TrialResult(fits=n <= rows)) for n in (rows, rows + 1))
    return StageResult(zero, 2, MaxRows(trials), limit_bytes)


def test_the_rank_with_the_least_room_speaks_for_its_type() -> None:
    results = [("T4", [found(0, 4)]), ("A100-40", [found(0, 8), found(2, 9)]), ("T4", [found(0, 2, 90)])]
    entries = make_entries(results, "none", SOURCE)
    assert [(own.device, own.zero, own.max_rows, own.refused_rows, own.limit_bytes) for own in entries] == [
        ("T4", 0, 2, 3, 90),
        ("A100-40", 0, 8, 9, 100),
        ("A100-40", 2, 9, 10, 100),
    ]


@given(
    limit=st.integers(0, 300),
    expected=st.integers(-5, 400),
    most=st.integers(1, 256),
    row_bytes=st.integers(1, 1000),
    expected_bytes=st.integers(0, 2000),
)
def test_a_search_ends_in_a_handful_of_trials_with_what_they_say(
    limit: int, expected: int, most: int, row_bytes: int, expected_bytes: int
) -> None:
    search, trial = (
        BracketSearch(expected, expected_bytes, most),
        limited(limit, row_bytes=row_bytes, start=500),
    )
    while (rows := search.next_rows()) is not None:
        assert 1 <= rows <= most
        search.tell(rows, trial(rows))
    outcome = search.outcome()
    assert 1 <= len(outcome.trials) <= MAX_TRIALS
    assert len({rows for rows, _ in outcome.trials}) == len(outcome.trials)
    assert outcome.max_rows <= limit
    assert outcome.refused_rows is None or outcome.refused_rows > limit
    is_near = abs(expected - min(limit, most)) <= 1 and row_bytes <= 2 * expected_bytes <= 4 * row_bytes
    if expected_bytes == row_bytes or is_near:  # As memory models are.
        assert outcome.max_rows == min(limit, most)
        assert outcome.refused_rows == (limit + 1 if limit < most else None)


@given(
    num_parameters=st.integers(1, 10**9),
    num_ranks=st.integers(2, 64),
    itemsize=st.sampled_from([2, 4]),
)
def test_a_higher_stage_holds_no_more(num_parameters: int, num_ranks: int, itemsize: int) -> None:
    held = [
        least_bytes(
            num_parameters,
            num_trainable=num_parameters,
            itemsize=itemsize,
            zero=zero,
            num_ranks=num_ranks,
        )
        for zero in range(4)
    ]
    assert held[1] == held[2] > held[3]
    assert held[3] >= held[0] // num_ranks
