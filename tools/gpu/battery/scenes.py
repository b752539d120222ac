"""One device equals the CPU, whatever the plan: alone, shared by ranks, beside CPU ranks, in every dtype.

The tests of `tests/runtime/gpu` ask the same and more, where the machine has pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from zorselike.plan.plan import OFFLOAD_KINDS, Plan

from ...bench.forked import run_forked
from .packages import is_there
from .part import Record
from .training import (
    TINY,
    Outcome,
    Training,
    be_deterministic,
    device_of,
    in_line,
    name_devices,
    one_group,
    train,
    train_alone,
)

_LARGE = Training(dtype=torch.bfloat16, dim=1024, num_layers=12)
_MOST_LEFT = 0.7
"""Share of the resident run's memory that a large model takes with everything offloaded."""


def run_scenes(record: Record) -> None:
    """The likeliest to teach first."""
    kind, small = record.settings.device, record.is_small
    exact = replace(
        TINY if small else Training(dim=64, num_layers=4, sequence=32), is_double=True, max_norm=0.1
    )
    _compare_dtypes(record)
    (expected,) = run_forked(_train_alone, 1, exact, timeout_s=record.patience_s)
    zeros, offloads = ((3,), (OFFLOAD_KINDS,)) if small else (range(4), ((), OFFLOAD_KINDS))
    plans = {f"one {kind} rank, ZeRO {zero}": one_group(exact, zero=zero) for zero in zeros}
    (found,) = run_forked(_train_all, 1, kind, exact, list(plans.values()), timeout_s=record.patience_s)
    for name, outcome in zip(plans, found, strict=True):
        record.check(f"{name}, equals the CPU", not (missed := outcome.misses(expected)), missed)
    shared = {
        f"three ranks share a {kind}, ZeRO {zero}, offloaded: {' '.join(offload) or 'nothing'}": (
            in_line(exact, (2, 1), zero=zero, offload=offload),
            (kind,) * 3,
        )
        for zero in zeros
        for offload in offloads
    }
    beside = {
        f"a {kind} beside two CPU ranks, offloaded: {' '.join(offload) or 'nothing'}": (
            in_line(exact, (1, 2), offload=offload),
            (kind, "cpu", "cpu"),
        )
        for offload in offloads
    }
    for name, (plan, kinds) in (shared | beside).items():
        outcome, *_ = run_forked(_train_mixed, 3, kinds, exact, plan, timeout_s=record.patience_s)
        record.check(f"{name}, equals the CPU", not (missed := outcome.misses(expected)), missed)
    _compare_memory(record)


def _train_alone(rank: int, training: Training) -> Outcome:
    return train_alone(training)


def _train_all(rank: int, kind: str, training: Training, plans: list[Plan]) -> list[Outcome]:
    return [train(training, plan, device_of(kind)) for plan in plans]


def _train_mixed(rank: int, kinds: tuple[str, ...], training: Training, plan: Plan) -> Outcome:
    if len(set(kinds)) > 1:
        plan = name_devices(plan, kinds)
    return train(training, plan, device_of(kinds[rank]))


def _compare_dtypes(record: Record) -> None:
    """Everything offloaded against everything resident, bit for bit."""
    base = TINY if record.is_small else Training(num_layers=4)
    dtypes = (torch.bfloat16,) if record.is_small else (torch.bfloat16, None, torch.float16)
    cases = [(dtype, zero) for dtype in dtypes for zero in ((2,) if record.is_small else range(4))]
    (found,) = run_forked(
        _find_differences, 1, record.settings.device, base, cases, timeout_s=record.patience_s
    )
    for (dtype, zero), difference in zip(cases, found, strict=True):
        record.check(
            f"offloading changes no bit: {dtype or torch.float32}, ZeRO {zero}", not difference, difference
        )


def _find_differences(
    rank: int, kind: str, base: Training, cases: list[tuple[torch.dtype | None, int]]
) -> list[str]:
    be_deterministic()
    device, found = device_of(kind), []
    for dtype, zero in cases:
        training = replace(base, dtype=dtype)
        resident, offloaded = (
            train(training, one_group(training, zero=zero, offload=offload), device)
            for offload in ((), OFFLOAD_KINDS)
        )
        found.append(offloaded.differs_from(resident))
    return found


def _compare_memory(record: Record) -> None:
    name = f"offloading everything leaves less than {_MOST_LEFT} of the device's memory in use"
    if record.is_small:
        record.leave_out(name, "a CPU's allocator does not count")
        return
    plans = [one_group(_LARGE, offload=offload, num_ministages=6) for offload in ((), OFFLOAD_KINDS)]
    # Apart, so that the allocator of one is not the other's.
    peaks = [
        run_forked(_train_all, 1, record.settings.device, _LARGE, [plan], timeout_s=record.patience_s)[0][
            0
        ].peak_bytes
        for plan in plans
    ]
    detail = f"{peaks[1] / 2**30:.2f} of {peaks[0] / 2**30:.2f} GiB"
    record.check(name, peaks[1] < _MOST_LEFT * peaks[0], detail)


# -- the project's own tests ----------------------------------------------------------------

_WORKERS = 6
_TESTS = (
    "test_cuda.py::test_offloading_changes_no_bit",
    "test_cuda.py::test_one_gpu_equals_the_cpu",
    "test_cuda_shared.py::test_ranks_that_share_a_gpu_equal_the_cpu",
    "test_cuda_shared.py::test_a_gpu_and_two_cpus_equal_the_cpu",
    "test_cuda_shared.py::test_one_gpu_plays_three_unequal_ones",
    "test_cuda.py::test_half_precision_follows_the_cpu",
    "test_cuda.py::test_offloading_without_recomputation_changes_no_bit",
    "test_cuda.py::test_offloading_frees_what_the_device_held",
)
"""The likeliest to teach first; the rest of the folder comes after them."""
_TOLD = re.compile(
    r"(PASSED|FAILED|SKIPPED|ERROR)\s+(tests/\S+::\S+)|(tests/\S+::\S+)\s+(PASSED|FAILED|SKIPPED|ERROR)"
)


def run_tests(record: Record) -> None:
    """The tests that need a GPU, six beside each other, each told as soon as it is over."""
    root, folder = Path(__file__).parents[3], "tests/runtime/gpu"
    command = [sys.executable, "-m", "pytest", "-vv", "-rfEs", "-p", "no:cacheprovider", "--tb=short"]
    # Tells where a test that takes longer is.
    command += ["-o", "faulthandler_timeout=100"]
    if record.is_small:
        command += ["-k", "one_gpu_equals or nccl_is_for"]
    elif is_there("xdist"):
        command += ["-n", str(_WORKERS), "--maxschedchunk", "1"]
    command += [*(f"{folder}/{test}" for test in _TESTS), folder]
    tests = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )
    assert tests.stdout is not None
    told: set[str] = set()
    reasons = []
    for line in tests.stdout:
        print(line, end="", flush=True)
        if (match := _TOLD.search(line)) and " - " not in line:
            state, name = match[1] or match[4], match[2] or match[3]
            if name not in told:
                told.add(name)
                _note(record, name.removeprefix(f"{folder}/"), state)
        elif line.startswith(("FAILED", "ERROR", "SKIPPED")):
            reasons.append(line.rstrip())
    code = tests.wait()
    record.say("\n".join(reasons))
    if code not in (0, 1) or not told:
        raise RuntimeError(f"pytest ended with code {code} after {len(told)} tests")


def _note(record: Record, name: str, state: str) -> None:
    if state == "SKIPPED":
        record.leave_out(name, "it needs what is not here")
    else:
        record.check(name, state == "PASSED", state.lower())
