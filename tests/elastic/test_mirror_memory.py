"""What copies and mirrors of real ranks take is what the planner counts for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import volume
from ranks import RunRanks
from torch import nn

from tools.elastic.faults import make_plan
from zorselike import HeteroPipeline
from zorselike.elastic.replicas import FROZEN, MIRRORS, OWN, Replicas
from zorselike.models import build_model
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.simulator.mirrors import host_copies, list_states

pytestmark = pytest.mark.pooled

NODES = ("a", "b", "a", "c")
FROZEN_LAYER = "layers.1"


SEQUENCE, NUM_LAYERS = 8, 5


@dataclass(frozen=True)
class Case:
    """A model large enough that what goes with each tensor does not count."""

    plan: Plan
    dtype: torch.dtype | None

    def make_model(self) -> nn.Module:
        with torch.device("meta"):
            model = build_model("llama", "debug", num_layers=NUM_LAYERS)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN_LAYER))
        return model

    def describe(self) -> Workload:
        """Its layers, as a profiler would."""
        model = self.make_model()
        kinds = {}
        names = [name for ministage in self.plan.ministages for name in ministage.modules]
        for name in names:
            number = sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
            kinds[name] = LayerKind(
                name=name,
                num_parameters=number,
                num_trainable=0 if name == FROZEN_LAYER else number,
                forward_flops_per_row=1.0,
                input_elements_per_row=1,
                output_elements_per_row=1,
                activation_bytes_per_row=1,
            )
        return Workload(
            model="m",
            sequence_length=SEQUENCE,
            dtype="float32" if self.dtype is None else "bfloat16",
            layers=tuple((name, name) for name in names),
            kinds=kinds,
        )


def make_case(seed: int, dtype: torch.dtype | None) -> Case:
    rng = random.Random(seed)
    while True:
        plan, num_layers = make_plan(rng, ((2, 2), (1, 3), (4,))[seed % 3])
        if num_layers == NUM_LAYERS or len(plan.ministages) == 1:
            modules = plan.ministages
            if len(modules) == 1:
                names = ["tok_embeddings", *(f"layers.{i}" for i in range(NUM_LAYERS)), "norm", "output"]
                modules = (replace(modules[0], modules=tuple(names)),)
            return Case(replace(plan, ministages=modules).validate(), dtype)


def train_and_measure(rank: int, world_size: int, case: Case) -> tuple[int, int]:
    """Bytes that this rank held at most of its own state, and of others'."""
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    pipe = HeteroPipeline(case.make_model(), case.plan, optimizer=optimizer, param_dtype=case.dtype, seed=1)
    replicas = Replicas(pipe, 1, NODES, share=0.1, interval=1)
    for _ in range(2):
        rows = torch.arange(case.plan.global_batch * SEQUENCE).view(-1, SEQUENCE) % 256
        pipe.step_global(rows, rows)
        replicas.take({})
    peaks = {purpose: replicas.ledger.peak(purpose, "host") for purpose in (OWN, FROZEN, MIRRORS)}
    replicas.close()
    replicas.forget()
    pipe.close()
    dist.barrier()
    return peaks[OWN] + peaks[FROZEN], peaks[MIRRORS]


@volume.parametrize(("seed", "dtype"), [*product(range(3), [None, torch.bfloat16])], least=2)
def test_the_hosts_hold_what_is_counted(seed: int, dtype: torch.dtype | None, run_ranks: RunRanks) -> None:
    case = make_case(seed, dtype)
    found = run_ranks(train_and_measure, 4, case)
    states = list_states(case.plan, case.describe())
    own, mirrors = (sum(each[i] for each in found) for i in range(2))
    expected = sum(state.held for state in states)
    assert expected <= own <= 1.05 * expected  # Buffers begin at round addresses.
    assert own == mirrors
    assert sum(host_copies(states, NODES)) == pytest.approx(2 * expected)
