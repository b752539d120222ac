"""What copies and mirrors of real ranks take is what the planner counts for them."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks

from tools.elastic.faults import make_plan
from tools.elastic.ranks import Job, build_model, make_optimizer, read_rows
from zorselike import HeteroPipeline
from zorselike.cost.mirrors import host_copies, list_states
from zorselike.elastic.replicas import FROZEN, MIRRORS, OWN, Replicas
from zorselike.plan.workload import LayerKind, Workload

NODES = ("a", "b", "a", "c")
FROZEN_LAYER = "layers.1"


def make_job(seed: int, dtype: torch.dtype | None) -> Job:
    plan, num_layers = make_plan(random.Random(seed), ((2, 2), (1, 3), (4,))[seed % 3])
    return Job(plan, max(num_layers, 2), 1, tied=bool(seed % 2), param_dtype=dtype, seed=seed)


def train_and_measure(rank: int, world_size: int, job: Job) -> tuple[int, int]:
    """Bytes that this rank held at most of its own state, and of others'."""
    model = build_model(job).float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN_LAYER))
    pipe = HeteroPipeline(model, job.plan, optimizer=make_optimizer, param_dtype=job.param_dtype, seed=1)
    replicas = Replicas(pipe, 1, NODES, share=0.1, interval=1)
    for _ in range(2):
        pipe.step_global(*read_rows(job, pipe.rows_seen))
        replicas.take({})
    peaks = {purpose: replicas.ledger.peak(purpose, "host") for purpose in (OWN, FROZEN, MIRRORS)}
    replicas.close()
    replicas.forget()
    pipe.close()
    dist.barrier()
    return peaks[OWN] + peaks[FROZEN], peaks[MIRRORS]


def describe(job: Job) -> Workload:
    """The model's layers, as a profiler would."""
    model = build_model(job)
    kinds, layers = {}, []
    for name in (module for ministage in job.plan.ministages for module in ministage.modules):
        number = sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
        if job.tied and name == "output":
            number = 0
        kinds[name] = LayerKind(
            name=name,
            num_parameters=number,
            num_trainable=0 if name == FROZEN_LAYER else number,
            forward_flops_per_row=1.0,
            input_elements_per_row=1,
            output_elements_per_row=1,
            activation_bytes_per_row=1,
        )
        layers.append((name, name))
    dtype = "float32" if job.param_dtype is None else "bfloat16"
    return Workload(model="m", sequence_length=4, dtype=dtype, layers=tuple(layers), kinds=kinds)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_the_hosts_hold_what_is_counted(seed: int, dtype: torch.dtype | None, run_ranks: RunRanks) -> None:
    job = make_job(seed, dtype)
    found = run_ranks(train_and_measure, 4, job)
    states = list_states(job.plan, describe(job))
    own, mirrors = (sum(each[i] for each in found) for i in range(2))
    expected = sum(state.held for state in states)
    # Beside them each parameter's state has its count of steps, four bytes.
    assert expected <= own <= 1.1 * expected
    assert own == mirrors
    assert sum(host_copies(states, NODES)) == pytest.approx(2 * expected)
