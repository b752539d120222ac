"""Linear layers that are cut: an `nn.Linear`, or one beside which peft's LoRA has its adapters.

An adapter adds `B A x`. Where the layer is cut by what it gives, its B is cut alike and every rank computes
all of `A x`; where it is cut by what it takes, its A is, and every rank has all of B. Either way a rank
computes a part of one sum, which is linear, so gradients of what is whole are sums over ranks as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from zorselike.errors import ConfigError

Side = Literal["columns", "rows"]
"""What a layer is cut by: what it gives, or what it takes."""


class CutTensor(NamedTuple):
    """A parameter that is cut."""

    linear: str
    """Global name of the `nn.Linear` that has it."""
    kind: str
    """Its name there."""
    dim: int
    """Along which it is cut."""


@dataclass(frozen=True)
class CutLinear:
    """A linear layer that is cut, by global names."""

    name: str
    """What its block calls."""
    base: str
    """The `nn.Linear` itself: that, or inside it."""
    adapters: tuple[str, ...]
    """Which of peft's it has: their names inside `lora_A` and `lora_B`."""

    def cut_tensors(self, modules: Mapping[str, nn.Module], side: Side) -> Iterator[CutTensor]:
        """Its parameters that are cut."""
        dim = 0 if side == "columns" else 1
        yield CutTensor(self.base, "weight", dim)
        if side == "columns" and _linear(modules, self.base).bias is not None:
            yield CutTensor(self.base, "bias", 0)
        for linear in self.cut_adapters(side):
            yield CutTensor(linear, "weight", dim)

    def cut_adapters(self, side: Side) -> Iterator[str]:
        """The matrices of its adapters that are cut."""
        matrix = "lora_B" if side == "columns" else "lora_A"
        yield from (f"{self.name}.{matrix}.{adapter}" for adapter in self.adapters)

    def whole_adapters(self, side: Side) -> Iterator[str]:
        """Those that are not, nor need be."""
        matrix = "lora_A" if side == "columns" else "lora_B"
        yield from (f"{self.name}.{matrix}.{adapter}" for adapter in self.adapters)

    @property
    def dropouts(self) -> tuple[str, ...]:
        """What drops inputs of its adapters."""
        return tuple(f"{self.name}.lora_dropout.{adapter}" for adapter in self.adapters)

    def width(self, modules: Mapping[str, nn.Module], side: Side) -> int:
        """Of what is cut."""
        base = _linear(modules, self.base)
        return base.out_features if side == "columns" else base.in_features


def find_linear(modules: Mapping[str, nn.Module], name: str) -> CutLinear:
    """The layer of that name; raises `ConfigError` for one that cannot be cut."""
    module: Any = modules[name]
    if _is_plain(module):
        return CutLinear(name, name, ())
    base, where = getattr(module, "base_layer", None), f"tp_plan: '{name}' is a {type(module).__name__}"
    if not _is_plain(base) or not isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
        raise ConfigError(
            f"{where}, and only an nn.Linear can be cut, alone or with adapters of peft's LoRA beside it; "
            "leave it out, or use single ranks in the plan"
        )
    matrices = [*module.lora_A.values(), *module.lora_B.values()]
    if getattr(module, "lora_variant", None) or not all(map(_is_plain, matrices)):
        raise ConfigError(
            f"{where} whose adapters are a variant of LoRA's, such as DoRA, which cannot be cut; use plain "
            "LoRA, or single ranks in the plan"
        )
    if any(matrix.bias is not None for matrix in matrices):
        raise ConfigError(
            f"{where} whose adapters have a bias, which every rank of a replica would add; leave lora_bias "
            "out, or use single ranks in the plan"
        )
    return CutLinear(name, f"{name}.base_layer", tuple(module.lora_A))


def _is_plain(module: Any) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _linear(modules: Mapping[str, nn.Module], name: str) -> nn.Linear:
    module = modules[name]
    assert isinstance(module, nn.Linear)
    return module
