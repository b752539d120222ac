"""What one plan has in memory another goes on from, as members come and go: the same bits."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import make_case, other_plan, with_offload
from ranks import RunRanks
from saved import contents
from tiny import Case
from torch import nn
from volume import parametrize

from zorselike import HeteroPipeline
from zorselike.elastic.replicas import Replicas
from zorselike.elastic.switch import fill
from zorselike.elastic.wire import Wire

NUM_PAIRS = 60
MAX_RANKS = 4
STEPS_BEFORE, STEPS_AFTER = 1, 2
PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Switch:
    """A run that goes over from one plan and some members to another and others."""

    before: Case
    after: Case
    members_before: tuple[int, ...]
    """Processes by rank."""
    members_after: tuple[int, ...]
    param_dtype: torch.dtype | None
    adapters: bool
    """Whether most of the model is frozen."""

    @property
    def num_processes(self) -> int:
        return max(*self.members_before, *self.members_after) + 1


def make_switch(seed: int) -> Switch:
    rng = random.Random(seed)
    case = make_case(seed, max_ranks=MAX_RANKS)
    other = replace(case, plan=other_plan(case, rng, max_ranks=MAX_RANKS))
    if rng.random() < 0.5:
        case, other = with_offload(case, rng), with_offload(other, rng)
    processes = list(range(max(case.plan.num_ranks, other.plan.num_ranks) + rng.randint(0, 1)))
    before, after = (tuple(rng.sample(processes, each.plan.num_ranks)) for each in (case, other))
    adapters = rng.random() < 0.3
    if adapters:
        frozen = ("tok_embeddings", "output", "norm", *(f"layers.{i}.up" for i in range(case.num_layers)))
        case, other = replace(case, frozen=frozen), replace(other, frozen=frozen)
    dtype = rng.choice((None, None, None, torch.bfloat16, torch.float16))
    return Switch(case, other, before, after, dtype, adapters)


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def build(case: Case, switch: Switch, rank: int, store: dist.Store, **options: Any) -> HeteroPipeline:
    size = case.plan.num_ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return HeteroPipeline(
        case.model() if switch.param_dtype is None else case.model().float(),
        case.plan,
        optimizer=optimizer,
        max_norm=case.max_norm,
        seed=case.seed,
        param_dtype=switch.param_dtype,
        **options,
    )


def run(process: int, size: int, switch: Switch, folder: Path) -> list[float] | None:
    """Trains, switches, trains on; the losses after the switch, of processes that are there."""
    before, after = switch.members_before, switch.members_after
    replicas, held = None, []
    if process in before:
        pipe = build(switch.before, switch, before.index(process), dist.FileStore(str(folder / "a")))
        schedulers = pipe.lr_schedulers(halve)
        for step in range(STEPS_BEFORE):
            pipe.step_global(*switch.before.batch(step))
            schedulers.step()
        pipe.save(folder / "before", extra={"at": STEPS_BEFORE})
        replicas = Replicas(pipe, 0, [""] * pipe.plan.num_ranks, share=0.1)
        replicas.take({"at": STEPS_BEFORE}, mirrors=False)
        held = replicas.held
        replicas.close()
        pipe.close()
        del pipe, schedulers
        dist.destroy_process_group()
        gc.collect()
    taking_part = [*after, *(other for other in before if other not in after)]
    if process not in taking_part:
        return None
    new = None
    if process in after:
        store = dist.FileStore(str(folder / "b"))
        new = build(switch.after, switch, after.index(process), store, skip_init=True)
        schedulers = new.lr_schedulers(halve)
    store = dist.FileStore(str(folder / "fill"))
    wire = Wire(store, taking_part.index(process), len(taking_part), timeout=PATIENCE)
    arrived = fill(new, held, wire)
    if replicas is not None:
        replicas.forget()
    assert (arrived.step, arrived.extra) == (STEPS_BEFORE, {"at": STEPS_BEFORE})
    if new is None:
        return None
    assert new.rows_seen == STEPS_BEFORE * switch.after.plan.global_batch
    new.save(folder / "after", extra=arrived.extra)
    losses = []
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        losses.append(new.step_global(*switch.after.batch(step)).loss)
        schedulers.step()
    whole = new.full_state_dict()
    new.close()
    dist.destroy_process_group()
    return losses, whole  # type: ignore[return-value]


def run_unbroken(process: int, size: int, switch: Switch, folder: Path) -> Any:
    pipe = build(switch.before, switch, process, dist.FileStore(str(folder / "unbroken")))
    schedulers = pipe.lr_schedulers(halve)
    losses = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        losses.append(pipe.step_global(*switch.before.batch(step)).loss)
        schedulers.step()
    whole = pipe.full_state_dict()
    pipe.close()
    dist.destroy_process_group()
    return losses[STEPS_BEFORE:], whole


def test_the_switches_cover_what_they_should() -> None:
    switches = list(map(make_switch, range(NUM_PAIRS)))
    zeros = {
        group.zero
        for switch in switches
        for case in (switch.before, switch.after)
        for group in case.plan.groups
    }
    assert zeros == {0, 1, 2, 3}
    assert sum(switch.members_before[0] not in switch.members_after for switch in switches) >= 10
    assert sum(bool(set(switch.members_after) - set(switch.members_before)) for switch in switches) >= 20
    assert sum(switch.before.tied for switch in switches) >= 15
    assert sum(switch.adapters for switch in switches) >= 10
    assert sum(switch.param_dtype is not None for switch in switches) >= 15


@parametrize("seed", range(NUM_PAIRS), share=60)
def test_a_planned_switch_is_exact(seed: int, run_ranks: RunRanks, tmp_path: Path) -> None:
    switch = make_switch(seed)
    found = run_ranks(run, switch.num_processes, switch, tmp_path, init=False, timeout=100)
    assert contents(tmp_path / "after") == contents(tmp_path / "before")
    expected, whole = run_ranks(
        run_unbroken, switch.before.plan.num_ranks, switch, tmp_path, init=False, timeout=100
    )[0]
    if switch.param_dtype is None:
        losses, state = found[switch.members_after[0]]
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, tensor in whole.items():
            assert (state[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-30) <= 1e-10, name
