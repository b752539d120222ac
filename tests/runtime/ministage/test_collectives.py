"""Collectives are counted, not trusted (Zorse's Table 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import volume
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime.ministage.unit import Unit

pytestmark = pytest.mark.pooled

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
FIRST = NAMES[:3]
"""The modules of the first of two ministages."""
L, L_FIRST, L_SECOND = len(NAMES), len(FIRST), len(NAMES) - len(FIRST)
COUNTS = (3, 1, 0)
"""Microbatches of the three ranks; the most is max M."""
MAX_M = max(COUNTS)

# torch 2.13 renamed what FSDP2 calls; both names are patched where they exist.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
Counts = tuple[int, int, int]


def one_group(
    zero: int, grad_reduce: str = "once", recompute: str = "none", offload: tuple[str, ...] = ()
) -> Plan:
    """Three ranks with 3, 1 and 0 microbatches, two ministages."""
    microbatches = tuple(Microbatch(*m) for m in ((0, 0, 1), (1, 1, 4), (0, 4, 5), (0, 5, 6)))
    group = Group((0, 1, 2), microbatches, zero=zero, offload=offload)
    group = replace(group, grad_reduce=grad_reduce, recompute=recompute)  # type: ignore[arg-type]
    ministages = (Ministage(0, tuple(FIRST)), Ministage(0, tuple(NAMES[len(FIRST) :])))
    return Plan(6, (group,), ministages)


def count_steps(
    rank: int, world_size: int, plans: Sequence[Plan], frozen: tuple[str, ...]
) -> list[list[Counts]]:
    """By plan: all-gathers, reduce-scatters and all-reduces of device groups in steps 0 and 1, in an
    evaluation, and in step 2."""
    counter: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in (*GATHERS, *SCATTERS, "all_reduce"):
            count(patch, name, counter)
        return [count_steps_of(Case(plan, NUM_LAYERS, frozen=frozen), counter) for plan in plans]


def count_steps_of(case: Case, counter: Counter[str]) -> list[Counts]:
    pipe = HeteroPipeline(case.model(), case.plan, optimizer=adamw)
    counts = []
    for call in (pipe.step_global, pipe.step_global, pipe.evaluate_global, pipe.step_global):
        counter.clear()
        call(*case.batch(len(counts)))
        counts.append(summarise(counter))
    pipe.close()
    return counts


def count(patch: pytest.MonkeyPatch, name: str, counter: Counter[str]) -> None:
    original = getattr(dist, name, None)
    if original is None:
        return

    def counted(*args: object, **kwargs: object) -> object:
        tensor = args[0] if args else None
        # Outside of FSDP, loss, counts and norms are summed as at most three numbers, and what hosts
        # have left as integers.
        is_other = isinstance(tensor, Tensor) and (tensor.numel() <= 3 or not tensor.is_floating_point())
        if name != "all_reduce" or not is_other:
            counter[name] += 1
        return original(*args, **kwargs)

    patch.setattr(dist, name, counted)


def summarise(counter: Counter[str]) -> Counts:
    return (
        max(counter[name] for name in GATHERS),
        max(counter[name] for name in SCATTERS),
        counter["all_reduce"],
    )


@pytest.mark.parametrize(
    ("zero", "grad_reduce", "step", "evaluation"),
    [
        (0, "once", (0, 0, L), (0, 0, 0)),
        (1, "once", (L, L, 0), (L, 0, 0)),
        (2, "once", (L + L_FIRST, L, 0), (L, 0, 0)),
        (2, "microbatch", (L + L_FIRST, L * MAX_M, 0), (L, 0, 0)),
        (3, "once", (2 * L * MAX_M, L * MAX_M, 0), (L * MAX_M, 0, 0)),
    ],
)
def test_collectives_of_a_step(
    zero: int, grad_reduce: str, step: Counts, evaluation: Counts, run_ranks: RunRanks
) -> None:
    """As many with offload and recomputation as without either. With ZeRO 2 the last ministage, which goes
    forward and backward by turns, is gathered once."""
    plans = [one_group(zero, grad_reduce), one_group(zero, grad_reduce, "layer", OFFLOAD_KINDS)]
    for found in run_ranks(count_steps, 3, plans, ()):
        for plan, counts in zip(plans, found, strict=True):
            assert counts == [step, step, evaluation, step], plan.groups[0]


@volume.parametrize(
    ("zero", "grad_reduce", "step", "evaluation"),
    [
        (0, "once", (0, 0, L), (0, 0, 0)),
        (1, "once", (L, L, 0), (L, 0, 0)),
        (2, "once", (L, L, 0), (L, 0, 0)),
        (2, "microbatch", (L, L * MAX_M, 0), (L, 0, 0)),
        (3, "once", (2 * L * MAX_M, L * MAX_M, 0), (L * MAX_M, 0, 0)),
    ],
    least=2,
)
def test_a_single_ministage_is_gathered_once(
    zero: int, grad_reduce: str, step: Counts, evaluation: Counts, run_ranks: RunRanks
) -> None:
    """With ZeRO 1 and 2, since nothing is freed between a forward and its backward."""
    plans = [one_group(zero, grad_reduce), one_group(zero, grad_reduce, "layer", OFFLOAD_KINDS)]
    plans = [replace(plan, ministages=(Ministage(0, tuple(NAMES)),)) for plan in plans]
    for found in run_ranks(count_steps, 3, plans, ()):
        for plan, counts in zip(plans, found, strict=True):
            assert counts == [step, step, evaluation, step], plan.groups[0]


@pytest.mark.parametrize(
    ("zero", "step"),
    [
        (1, (L, L_SECOND, 0)),
        (2, (L, L_SECOND, 0)),
        (3, ((L + L_SECOND) * MAX_M, L_SECOND * MAX_M, 0)),
    ],
)
def test_a_frozen_first_ministage_neither_gathers_for_backward_nor_reduces(
    zero: int, step: Counts, run_ranks: RunRanks
) -> None:
    frozen = tuple(f"{name}." for name in FIRST)
    for (counts,) in run_ranks(count_steps, 3, [one_group(zero)], frozen):
        assert counts[0] == counts[1] == counts[3] == step


def gather_at_the_start(rank: int, world_size: int, plan: Plan) -> int:
    """The most layers that are whole at a time while the pipeline is made."""
    case = Case(plan, NUM_LAYERS)
    model = case.model()
    most = 0

    def count() -> None:
        nonlocal most
        layers = [model.get_submodule(name) for name in NAMES]
        most = max(most, sum(not isinstance(next(layer.parameters()), DTensor) for layer in sharded(layers)))

    def sharded(layers: Sequence[nn.Module]) -> list[nn.Module]:
        return [layer for layer in layers if isinstance(layer, FSDPModule)]

    anchor = Unit._anchor  # Hooks of modules are called for microbatches alone.

    def count_first(*args: Any, **kwargs: Any) -> Any:
        count()
        return anchor(*args, **kwargs)

    with mock.patch.object(Unit, "_anchor", count_first):
        HeteroPipeline(model, plan, optimizer=adamw).close()
    return most


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_pipeline_that_is_made_gathers_one_layer_at_a_time(zero: int, run_ranks: RunRanks) -> None:
    assert run_ranks(gather_at_the_start, 3, one_group(zero)) == [1, 1, 1]
