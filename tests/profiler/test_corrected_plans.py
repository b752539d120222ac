"""What the largest batch that was found keeps the planner from: a plan that does not fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiled import join
from ranks import RankError, RunRanks, free_port
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zorselike import HeteroPipeline
from zorselike.cost.largest_batch import WholeModelStep, find_corrections
from zorselike.cost.profile import LargestBatch, LayerTimes, Profile, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans
from zorselike.profiler.largest_batch.search import StageResult, make_entries, search_stages
from zorselike.profiler.layers.probes import MeasuredModel
from zorselike.profiler.machine.device_memory import HostMemory
from zorselike.runtime.loss import token_cross_entropy
from zorselike.simulator.report.page import format_report

SOURCE = Source("given")
WORDS, WIDTH, LENGTH, ROWS = 32, 128, 8, 20
NAMES = tuple(map(str, range(6)))


class PositiveLinear(nn.Linear):
    """Its weights are positive, of what is trained: autograd keeps them too, whatever the rows."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, torch.exp(self.weight))


def build() -> nn.Module:
    with torch.device("meta"):
        layers = [PositiveLinear(WIDTH, WIDTH, bias=False) for _ in NAMES[1:-1]]
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS, bias=False))


HIDDEN = LENGTH * WIDTH
WORKLOAD = Workload(
    model="positive",
    sequence_length=LENGTH,
    dtype="float32",
    layers=(("0", "embedding"), *((name, "layer") for name in NAMES[1:-1]), ("5", "head")),
    kinds={
        "embedding": LayerKind(
            name="embedding",
            num_parameters=WORDS * WIDTH,
            forward_flops_per_row=0,
            input_elements_per_row=LENGTH,
            output_elements_per_row=HIDDEN,
            activation_bytes_per_row=8 * LENGTH,
        ),
        "layer": LayerKind(
            name="layer",
            num_parameters=WIDTH**2,
            forward_flops_per_row=2 * LENGTH * WIDTH**2,
            input_elements_per_row=HIDDEN,
            output_elements_per_row=HIDDEN,
            activation_bytes_per_row=4 * HIDDEN,
        ),
        "head": LayerKind(
            name="head",
            num_parameters=WORDS * WIDTH,
            forward_flops_per_row=2 * LENGTH * WIDTH * WORDS,
            input_elements_per_row=HIDDEN,
            output_elements_per_row=LENGTH * WORDS,
            activation_bytes_per_row=4 * HIDDEN + 2 * 4 * LENGTH * WORDS,
        ),
    },
)
MODEL = WholeModelStep(workload=WORKLOAD, device="CPU", zero=2, num_ranks=2, recompute="none", kept_bytes={})
LIMIT = MODEL.peak_bytes(ROWS)
PROFILE = Profile(
    model=WORKLOAD.model,
    workload_fingerprint=WORKLOAD.fingerprint,
    layers=tuple(
        LayerTimes(
            kind=kind,
            device="CPU",
            dtype="float32",
            sequence_length=LENGTH,
            rows=(1, 64),
            forward_s=(1e-3, 2e-3),  # So that large microbatches are worth their memory.
            backward_s=(2e-3, 4e-3),
            source=SOURCE,
        )
        for kind in WORKLOAD.kinds
    ),
)


def plan_with(profile: Profile) -> tuple[Plan, str]:
    """The plan for two CPU ranks with the limit each, and its page."""
    node = Node(name="a", devices=("CPU", "CPU"), host_memory_bytes=2 * LIMIT, fabric=Link(1e9, 1e-5))
    problem = PlanProblem(
        workload=WORKLOAD,
        cluster=Cluster(nodes=(node,)),
        profile=profile,
        global_batch=4 * ROWS,
        fixed=Fixed(groups=((0, 1),), ministages=1, zero=2, recompute="none", offload=()),
    )
    case = search_plans(problem, budget_s=10, top=1).best.case
    return case.plan, format_report(case, (), ideal_s=1.0)


def search(rank: int, size: int, port: int) -> list[StageResult]:
    model = MeasuredModel(
        build=build,
        workload=WORKLOAD,
        loss_fn=token_cross_entropy,
        num_tokens=WORDS,
        most_rows=64,
        repeats=1,
    )
    with join(port) as processes:
        return search_stages(model, processes, HostMemory(LIMIT), stages=(2,))


def train(rank: int, size: int, port: int, plan: Plan) -> str:
    """What two steps end with under the limit."""
    with join(port):
        memory, model = HostMemory(LIMIT), build()
        optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
        with HeteroPipeline(model, replace(plan, devices=()), optimizer=optimizer, device="cpu") as pipe:
            assembly: Any = pipe._assembly
            module = assembly.ministages[0].module

            def held() -> int:
                whole = [p.grad for p in module.parameters() if not isinstance(p.grad, DTensor | None)]
                return assembly.resources.memory.ledger.device_bytes + sum(g.nbytes for g in whole)

            tokens = torch.zeros(len(pipe.rows), LENGTH, dtype=torch.int64)
            for is_watched in (False, True):  # The first step makes the optimizer's state.
                with memory.watching(module, held) if is_watched else nullcontext():
                    pipe.step(tokens, tokens)
            return f"{memory.peak_bytes <= LIMIT}"


def test_a_plan_that_does_not_fit_is_made_no_longer_once_the_largest_batch_is_known(
    run_ranks: RunRanks,
) -> None:
    before, page = plan_with(PROFILE)
    assert max(m.num_rows for m in before.groups[0].microbatches) == ROWS and "Memory" not in page
    results = run_ranks(search, 2, free_port(), init=False)
    entries = make_entries([("CPU", own) for own in results], "none", SOURCE)
    assert entries[0].max_rows + 1 == entries[0].refused_rows and entries[0].refused_rows <= ROWS
    after, page = plan_with(replace(PROFILE, largest_batches=entries))
    assert max(m.num_rows for m in after.groups[0].microbatches) <= entries[0].max_rows
    page = " ".join(page.split())
    assert "Memory as measured: CPU: 0." in page
    assert f"with ZeRO 2 {entries[0].max_rows} rows fitted and {entries[0].refused_rows} did not" in page
    assert set(run_ranks(train, 2, free_port(), after, init=False)) == {"True"}
    with pytest.raises(RankError, match="MemoryLimitError"):
        run_ranks(train, 2, free_port(), before, init=False)


# -- the correction --------------------------------------------------------------------------

FOUND = LargestBatch(
    device="CPU", zero=2, num_ranks=2, max_rows=7, refused_rows=8, limit_bytes=LIMIT, source=SOURCE
)


def correct(*found: LargestBatch, workload: Workload = WORKLOAD) -> dict[str, int]:
    profile = replace(PROFILE, largest_batches=found)
    return {device: own.num_bytes for device, own in find_corrections(profile, workload, {}).items()}


def test_the_correction_is_the_least_with_which_what_was_refused_does_not_fit() -> None:
    beside = correct(FOUND)["CPU"]
    assert MODEL.most_rows(LIMIT - beside, 64) == 7 and MODEL.most_rows(LIMIT - beside + 1, 64) == 8
    # Of several the one that asks for most counts.
    assert correct(replace(FOUND, zero=1), FOUND, replace(FOUND, zero=3, refused_rows=12))["CPU"] >= beside


def test_nothing_is_corrected_where_the_model_refuses_as_much() -> None:
    exact = replace(FOUND, max_rows=ROWS, refused_rows=ROWS + 1)
    assert MODEL.most_rows(LIMIT, 64) == ROWS and not correct(exact)
    # What is counted too much stays counted, and what was not refused says nothing.
    assert not correct(replace(exact, max_rows=30, refused_rows=31))
    assert not correct(replace(FOUND, refused_rows=None))


def test_another_workload_is_not_corrected() -> None:
    assert not correct(FOUND, workload=replace(WORKLOAD, dtype="bfloat16"))
