"""FLOPs of one step: of the model (for MFU) and of the hardware (for HFU)."""

from __future__ import annotations

from dataclasses import dataclass

from zorselike.models import DecoderConfig, flops_per_token, forward_flops_by_module
from zorselike.plan.plan import Plan


@dataclass(frozen=True)
class StepWork:
    """One optimizer step over the global batch, over all ranks."""

    num_tokens: int
    model_flops: int
    """FLOPs without recomputation."""
    hardware_flops: int
    """FLOPs with the plan's recomputation."""


def work_of_step(model: DecoderConfig, plan: Plan, *, seq_len: int) -> StepWork:
    """The work of a step of `plan.global_batch` rows of `seq_len` tokens."""
    num_tokens = plan.global_batch * seq_len
    forward = forward_flops_by_module(model, seq_len)
    again = sum(
        forward[name]
        for ministage in plan.ministages
        if plan.groups[ministage.group].recompute == "layer"
        for name in ministage.modules
        if name.startswith("layers.")
    )
    once = flops_per_token(model, seq_len)
    return StepWork(num_tokens, num_tokens * once, num_tokens * (once + again))
