"""One rank fails in the middle of a step: every rank ends soon, with its reason."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankExit, RunRanks
from tiny import Case, Decoder, adamw, module_names
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.errors import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule.actions import Action, Kind

NAMES = module_names(4)
LIMIT_S = 10.0


def plan_of(num_ranks: int) -> Plan:
    """A group of all ranks but the last, and the last; two ministages each."""
    last = num_ranks - 1
    rows = [Microbatch(rank, rank, rank + 1) for rank in range(last)]
    groups = (Group(tuple(range(last)), tuple(rows)), Group((last,), (Microbatch(last, 0, last),)))
    cuts = (NAMES[:2], NAMES[2:3], NAMES[3:5], NAMES[5:])
    return Plan(last, groups, tuple(Ministage(i % 2, tuple(names)) for i, names in enumerate(cuts)))


PLAN = plan_of(4)
FAILING = (0, 2, 3)
"""The rank that hosts the alarm, another of its group (1 is like 2), and one of the other group."""


def fail(how: str) -> None:
    if how == "raise":
        raise torch.OutOfMemoryError("CUDA out of memory, as it were")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def train_until(rank: int, world_size: int, failing: int, how: str) -> None:
    """Rank `failing` fails in a forward of the third step, in its second ministage."""
    case = Case(PLAN, 4)
    pipe = HeteroPipeline(case.model(), PLAN, optimizer=adamw, silence_s=3.0)
    ministage = 2 if rank < 3 else 3
    module = pipe._assembly.ministages[ministage].module
    calls = 0

    def before(_: Any, inputs: tuple[Tensor, ...]) -> None:
        nonlocal calls
        # A ministage is called once to warm up, and per step for its forward and its reduction.
        calls += 1
        if rank == failing and calls == 5:
            fail(how)

    module.register_forward_pre_hook(before)
    for step in range(50):
        pipe.step_global(*case.batch(step))
    pipe.close()


def check_ends(exits: list[RankExit], failing: int, how: str, reason: str) -> None:
    ended = sorted(end.ended_s for end in exits if not end.was_stopped)
    assert ended[-1] - ended[0] < LIMIT_S
    for end in exits:
        assert end.code != 0
        if end.rank != failing or how == "raise":
            line = end.last_line
            assert f"rank {failing} failed first" in line, end.stderr[-3000:]
            assert reason in line, line
            assert f"ministage {2 if failing < 3 else 3}" in line, line
            assert "microbatch 0" in line, line


@pytest.mark.parametrize("failing", FAILING)
def test_an_exception_ends_every_rank_with_its_reason(failing: int, run_ranks: RunRanks) -> None:
    exits = run_ranks(train_until, 4, failing, "raise", allow_exit=True, timeout=90)
    check_ends(exits, failing, "raise", "OutOfMemoryError: CUDA out of memory, as it were")


@pytest.mark.parametrize("failing", FAILING)
def test_a_killed_rank_ends_every_rank(failing: int, run_ranks: RunRanks) -> None:
    exits = run_ranks(train_until, 4, failing, "kill", allow_exit=True, timeout=90)
    check_ends(exits, failing, "kill", "")


@pytest.mark.parametrize("failing", FAILING)
def test_a_stopped_rank_ends_every_rank(failing: int, run_ranks: RunRanks) -> None:
    exits = run_ranks(train_until, 4, failing, "stop", allow_exit=True, timeout=90)
    check_ends(exits, failing, "stop", "")


def train_to_infinity(rank: int, world_size: int) -> None:
    case = Case(PLAN, 4)

    def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum() * float("inf")

    pipe = HeteroPipeline(case.model(), PLAN, loss_fn=infinite, forbid_nonfinite_loss=True)
    pipe.step_global(*case.batch(0))


def test_a_forbidden_nonfinite_loss_ends_every_rank(run_ranks: RunRanks) -> None:
    for end in run_ranks(train_to_infinity, 4, allow_exit=True, timeout=90):
        assert end.code != 0
        assert "rank 3 failed first" in end.last_line, end.stderr[-3000:]
        assert "the loss is" in end.last_line


def train_model_of_other_names(rank: int, world_size: int) -> None:
    HeteroPipeline(Decoder(3), PLAN)


def test_a_plan_for_another_model_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    for end in run_ranks(train_model_of_other_names, 4, allow_exit=True, timeout=90):
        assert end.code != 0
        assert "PlanError" in end.stderr
        assert "layers.3" in end.stderr


def interrupt_all(rank: int, world_size: int, folder: Path) -> list[str]:
    """What calls after a step say that Ctrl-C has interrupted on every rank, after some updates."""
    case = Case(PLAN, 4)
    pipe = HeteroPipeline(case.model(), PLAN, optimizer=adamw)
    actions = pipe._assembly.compiled.step_actions[pipe.rank]
    first_update = next(action for action in actions if action.kind is Kind.STEP)

    def stop(action: Action) -> None:
        if action == first_update:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pipe.watching(lambda _: None, stop):
        pipe.step_global(*case.batch(0))
    said = []
    for call in (lambda: pipe.save(folder), lambda: pipe.step_global(*case.batch(1)), pipe.full_state_dict):
        with pytest.raises(ConfigError) as refused:
            call()
        said.append(str(refused.value))
    dist.barrier()  # The others may still wait for what this rank has begun to send.
    pipe.abandon()
    return said


def test_what_was_interrupted_is_not_saved(tmp_path: Path, run_ranks: RunRanks) -> None:
    for said in run_ranks(interrupt_all, 4, tmp_path):
        assert len(said) == 3 and all("broken off in the middle of a step" in one for one in said)
    assert not list(tmp_path.iterdir())
