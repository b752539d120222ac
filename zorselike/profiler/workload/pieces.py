"""Into how many parts tensor parallelism can cut a model's layers, by what the runtime can run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zorselike.cost.sizes import is_layer
from zorselike.errors import ConfigError
from zorselike.runtime.tensor_parallel.cut_plan import find_dropout
from zorselike.runtime.tensor_parallel.styles import find_blocks


def count_pieces(model: nn.Module, layers: Sequence[str]) -> int:
    """As `Workload.max_tensor_parallel`, of a model with these layers, by its own `tp_plan`; 1 where it has
    none, or has what replicas are refused for (mixtures of experts, dropout inside attention)."""
    try:
        blocks = find_blocks(model)
    except ConfigError:
        return 1
    numbered = [name for name in layers if is_layer(name)]
    if not numbered or not {*numbered} <= {*blocks}:
        return 1
    if next(find_dropout(model, {name: blocks[name] for name in numbered}), None) is not None:
        return 1
    return min(block.num_units for name in numbered for block in blocks[name])
