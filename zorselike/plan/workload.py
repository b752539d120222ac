"""The workload: what a model's layers cost to hold and to compute, with no model at hand.

Plain data, immutable and free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of an element of each dtype that layers compute in."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are alike. Per row means: of one sample of the workload's sequence length."""

    name: str
    """`embedding`, `layer`, `norm`, `head`, or a module's class."""
    num_parameters: int
    num_trainable: int | None = None
    """None: all."""
    num_borrowed: int = 0
    """Parameters that it shares with the owner of a tie; not in `num_parameters`."""
    forward_flops_per_row: float
    backward_flops_per_row: float | None = None
    """None: twice the forward; recomputation is not in it."""
    input_elements_per_row: int = 0
    """Elements that enter, in the compute dtype: what crosses a boundary before this layer."""
    output_elements_per_row: int = 0
    activation_bytes_per_row: int = 0
    """What autograd keeps from the forward until the backward, without recomputation."""
    working_bytes_per_row: int = 0
    """What else comes and goes while it computes."""

    @property
    def trainable(self) -> int:
        return self.num_parameters if self.num_trainable is None else self.num_trainable

    @property
    def trains(self) -> bool:
        """Whether it has weights that train, its own or borrowed ones."""
        return bool(self.trainable or self.num_borrowed)

    @property
    def backward_flops(self) -> float:
        """Per row."""
        given = self.backward_flops_per_row
        return 2 * self.forward_flops_per_row if given is None else given


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The layers of a model in model order, at one sequence length and compute dtype."""

    model: str
    """For people and for matching with plans and profiles: `llama 7b`."""
    sequence_length: int
    dtype: str
    """What layers compute in, one of `ITEMSIZES`."""
    layers: tuple[tuple[str, str], ...]
    """`(module, kind)`: global module names as plans list them; each is one FSDP unit."""
    kinds: Mapping[str, LayerKind]
    ties: tuple[tuple[str, str], ...] = ()
    """Modules that share a weight: `(owner, borrower)`, in model order."""
    num_moments: int = 2
    """Averages that the optimizer keeps of each parameter, in fp32 (AdamW: 2)."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype."""
        return ITEMSIZES[self.dtype]

    @property
    def masters(self) -> bool:
        """Whether the optimizer updates fp32 master weights beside shards in the compute dtype."""
        return self.itemsize < 4

    @cached_property
    def kind_of(self) -> dict[str, LayerKind]:
        """The kind of each module."""
        return {module: self.kinds[kind] for module, kind in self.layers}

    @property
    def num_parameters(self) -> int:
        """Of the whole model, tied ones counted once: a borrower's kind does not count them."""
        return sum(self.kinds[kind].num_parameters for _, kind in self.layers)

    def flops_per_row(self, *, recompute: bool = False) -> float:
        """Forward and backward of the whole model; with `recompute` the forwards of `layer` twice."""
        total = 0.0
        for _, name in self.layers:
            kind = self.kinds[name]
            again = recompute and name == "layer"
            total += kind.forward_flops_per_row * (1 + again) + kind.backward_flops
        return total

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Reads a workload file (JSON); raises `ProfileError` naming file, key and mend."""
        from zorselike.plan.workload_json import load_workload

        return load_workload(path)

    def save(self, path: str | Path) -> None:
        """Writes the workload as JSON that `Workload.load` reads back equal."""
        from zorselike.plan.workload_json import save_workload

        save_workload(self, path)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with anything in it."""
        from zorselike.plan.workload_json import fingerprint

        return fingerprint(self)
