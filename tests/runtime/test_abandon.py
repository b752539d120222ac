"""A pipeline can be left at any moment without the others, and the same processes build another."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import volume
from cases import make_case, other_plan, with_offload
from ranks import RunRanks
from tiny import Case, adamw

from zorselike import HeteroPipeline
from zorselike.runtime.alarm.failure import Failure
from zorselike.runtime.assembly import compile_plan
from zorselike.runtime.comm.connections import Connections

CYCLES = range(12)
"""By whom each fails, and under which plan."""
LIMIT_S = 20.0


class Broken(Exception):
    """What a rank fails with."""


class Run:
    """One generation of one process."""

    def __init__(self, rank: int, size: int, case: Case, store: Path) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ["LOCAL_WORLD_SIZE"] = str(size)
        self.losses: tuple[Failure, ...] = ()
        self.heard = threading.Event()
        self.connections = Connections()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        self.pipe = HeteroPipeline(
            case.model(),
            case.plan,
            optimizer=adamw,
            max_norm=case.max_norm,
            seed=case.seed,
            silence_s=1.5,
            on_loss=self.note,
        )

    def note(self, losses: tuple[Failure, ...]) -> None:
        self.losses = losses
        self.heard.set()
        self.connections.shut()

    def fail_at(self, number: int, fail: Any) -> None:
        enter, count = self.pipe._executor.enter, -1

        def count_actions(action: Any) -> None:
            nonlocal count
            count += 1
            enter(action)
            if count == number:
                fail()

        self.pipe._executor.enter = count_actions

    def abandon(self, error: BaseException | None, *, is_own: bool) -> None:
        self.connections.shut()  # And kept, until all have joined the next generation.
        self.pipe.abandon(error, is_own=is_own)
        del self.pipe
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def count_actions(case: Case, rank: int) -> int:
    return len(
        compile_plan(case.model(), case.plan, defer_steps=case.max_norm is not None).step_actions[rank]
    )


def fail() -> None:
    raise Broken


def break_again_and_again(rank: int, size: int, cases: list[Case], folder: Path) -> list[tuple[int, int]]:
    """In each cycle one rank raises in the middle of its second step; how many sockets and threads remain."""
    usage = []
    for cycle in volume.part(CYCLES, least=6):
        case = cases[cycle % len(cases)]
        victim = cycle % size
        run = Run(rank, size, case, folder / f"store{cycle}")
        try:
            run.pipe.step_global(*case.batch(0))
            if rank == victim:  # While others may still be in their first step.
                run.fail_at(random.Random(cycle).randrange(count_actions(case, rank)), fail)
            result = run.pipe.step_global(*case.batch(1))
            result.loss  # noqa: B018  # Waits for the others, at the latest.
            run.pipe.step_global(*case.batch(2)).loss  # noqa: B018
            raise AssertionError("this step was not interrupted")
        except AssertionError:
            raise
        except Exception as error:
            assert isinstance(error, Broken) == (rank == victim), repr(error)
            found = error
        if rank != victim:
            assert run.heard.wait(LIMIT_S)
            assert [(loss.rank, loss.kind) for loss in run.losses] == [(victim, "error")], run.losses
            assert "Broken" in run.losses[0].reason
        run.abandon(found, is_own=rank == victim)
        wait_for_threads()
        usage.append(
            (len(list(Path("/dev/fd").iterdir())) - run.connections.num_held, threading.active_count())
        )
    return usage


def wait_for_threads() -> None:
    """The alarm's says goodbye by itself."""
    until_s = time.monotonic() + LIMIT_S
    while threading.active_count() > 1 and time.monotonic() < until_s:
        time.sleep(0.01)


def three_ranks(seed: int) -> Case:
    while (case := make_case(seed, max_ranks=3, max_ministages=4)).plan.num_ranks != 3:
        seed += 1000
    return with_offload(case, random.Random(seed))


@pytest.mark.nightly
def test_nothing_remains_of_what_was_abandoned(run_ranks: RunRanks, tmp_path: Path) -> None:
    cases = [three_ranks(seed) for seed in range(4)]
    for usage in run_ranks(break_again_and_again, 3, cases, tmp_path, init=False):
        assert len(set(usage[1:])) == 1, usage


def lose_one(rank: int, size: int, case: Case, folder: Path, victim: int, stops: bool) -> Any:
    run = Run(rank, size, case, folder / "store")
    run.pipe.step_global(*case.batch(0)).loss  # noqa: B018
    if rank == victim:
        run.fail_at(3, lambda: os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL))
    try:
        for step in (1, 2):
            run.pipe.step_global(*case.batch(step)).loss  # noqa: B018
    except Exception as error:
        found = error
    assert run.heard.wait(LIMIT_S)
    run.abandon(found, is_own=False)
    losses = [(loss.rank, loss.kind) for loss in run.losses]
    other = other_plan(case, random.Random(0), max_ranks=size - 1, min_ranks=size - 1)
    case = replace(case, plan=other)
    run = Run(rank - (rank > victim), size - 1, case, folder / "next")
    loss = run.pipe.step_global(*case.batch(0)).loss
    run.pipe.close()
    dist.destroy_process_group()
    return losses, loss


@pytest.mark.parametrize(("victim", "stops"), [(0, False), (2, False), (1, True)])
def test_the_others_go_on_under_another_plan(
    run_ranks: RunRanks, tmp_path: Path, victim: int, stops: bool
) -> None:
    exits = run_ranks(
        lose_one, 3, three_ranks(1), tmp_path, victim, stops, init=False, allow_exit=True, timeout=60
    )
    found = [ended.value for ended in exits if ended.rank != victim]
    assert all(found), [ended.stderr[-2000:] for ended in exits]
    assert {tuple(losses) for losses, _ in found} == {((victim, "silent" if stops else "dead"),)}
    assert len({loss for _, loss in found}) == 1
