"""Runs the parts of a model one after the other in one process, as a plan's ranks would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.model.boundaries import Trace, trace_boundaries, trainable_ministages
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.signature import Signature


def plan_over(*modules: Sequence[str], rows: Sequence[int] = (2, 3)) -> Plan:
    """One rank that has all ministages, with a microbatch of each number of rows."""
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    microbatches = tuple(Microbatch(0, end - n, end) for n, end in zip(rows, ends, strict=True))
    ministages = tuple(Ministage(0, tuple(names)) for names in modules)
    return Plan(sum(rows), (Group((0,), microbatches),), ministages).validate()


def trace(
    parts: Sequence[ModelPart],
    plan: Plan,
    *inputs: Tensor,
    param_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Trace:
    return trace_boundaries(
        parts,
        plan,
        Signature.of(inputs),
        kwargs,
        trainable=trainable_ministages(parts),
        param_dtype=param_dtype,
    )


def run_chain(parts: Sequence[ModelPart], *inputs: Tensor, **kwargs: Any) -> Any:
    """What the last part returns; no gradients."""
    with torch.no_grad():
        value: Any = inputs
        for part in parts:
            entering = value if isinstance(value, tuple) else (value,)
            value = part.module(*entering, **{k: v for k, v in kwargs.items() if k in part.accepts})
        return value


def train_chain(
    parts: Sequence[ModelPart], found: Trace, loss_fn: Any, *inputs: Tensor, **kwargs: Any
) -> Tensor:
    """The loss of one microbatch, with gradients passed back through boundaries as ranks do."""
    entering: list[tuple[Tensor, ...]] = []
    leaving: list[tuple[Tensor, ...]] = []
    value: Any = inputs
    for part, boundary in zip(parts, found.boundaries, strict=False):
        value = value if isinstance(value, tuple) else (value,)
        leaves = tuple(
            t.detach().requires_grad_(spec.requires_grad)
            for t, spec in zip(value, boundary.tensors, strict=True)
        )
        value = part.module(*leaves, **{k: v for k, v in kwargs.items() if k in part.accepts})
        entering.append(leaves)
        leaving.append(value if isinstance(value, tuple) else (value,))
    loss: Tensor = loss_fn(value)
    leaving[-1] = (loss,)
    grads: list[Tensor | None] = [torch.ones_like(loss)]
    for tensors, leaves in zip(reversed(leaving), reversed(entering), strict=True):
        due = [(t, g) for t, g in zip(tensors, grads, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward([t for t, _ in due], [g for _, g in due])
        grads = [leaf.grad for leaf in leaves]
    return loss


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


__all__ = ["grads_of", "plan_over", "run_chain", "trace", "train_chain"]
