"""The workload of a causal LM of `transformers` as it is trained: on token ids, with its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zorselike.plan.workload import Workload
from zorselike.profiler.workload.module_workload import measure_workload
from zorselike.runtime.loss import token_cross_entropy

_ROWS = 2


def measure_causal_lm(model: nn.Module, *, sequence_length: int, dtype: str, name: str) -> Workload:
    """The workload of a model, as a rule on the meta device; it is not changed. What is frozen is counted so.

    Args:
        dtype: what layers compute in.
        name: for plans and profiles.

    Raises:
        ConfigError: The model does not run on rows of so many tokens.
    """

    def find_loss(output: Any) -> Tensor:
        return token_cross_entropy(output.logits, torch.zeros(_ROWS, sequence_length, dtype=torch.int64))

    tokens = torch.zeros(_ROWS, sequence_length, dtype=torch.int64, device="meta")
    return measure_workload(model, tokens, dtype=dtype, name=name, loss_fn=find_loss)
