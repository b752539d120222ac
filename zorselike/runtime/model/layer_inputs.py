"""How large the inputs of numbered layers are: what recomputation keeps of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zorselike.cost.sizes import is_layer
from zorselike.runtime.model.tracing import Recorder


@dataclass(frozen=True)
class InputBytes:
    """Size of a tensor that depends on a microbatch's rows."""

    fixed: int
    per_row: int

    def at(self, rows: int) -> int:
        return self.fixed + rows * self.per_row


def measure_layer_inputs(
    few: Sequence[Recorder], more: Sequence[Recorder], *, rows: tuple[int, int]
) -> tuple[tuple[InputBytes, ...], ...]:
    """Of each ministage, from records of its calls with two row counts; each tensor once."""
    found = []
    for one, other in zip(few, more, strict=True):
        sizes: dict[int, InputBytes] = {}
        for call, larger in zip(one.calls, other.calls, strict=True):
            if is_layer(call.name):
                for (identity, low), (_, high) in zip(call.input_bytes, larger.input_bytes, strict=True):
                    per_row = (high - low) // (rows[1] - rows[0])
                    sizes[identity] = InputBytes(low - rows[0] * per_row, per_row)
        found.append(tuple(sizes.values()))
    return tuple(found)
