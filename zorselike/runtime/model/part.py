"""One ministage of a model, as any way of cutting gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zorselike.runtime.model.tracing import Skeleton


class Keywords(Collection[str]):
    """The keyword arguments that a forward takes: all, if it ends in `**kwargs`."""

    def __init__(self, names: Sequence[str], *, takes_any: bool = False) -> None:
        self._names = dict.fromkeys(names)
        self._takes_any = takes_any

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Keywords:
        """What a forward names, its first argument left out: that is what enters."""
        parameters = list(inspect.signature(forward).parameters.values())
        named = [p.name for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)] + [
            p.name for p in parameters[:1] if p.kind is p.KEYWORD_ONLY
        ]
        return cls(named, takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters))

    def __contains__(self, name: object) -> bool:
        return self._takes_any or name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Keywords({', '.join([*self._names, *(['**'] if self._takes_any else [])])})"


@dataclass(frozen=True)
class ModelPart:
    """One ministage of a model."""

    index: int
    module: nn.Module
    """`forward(*tensors, **kwargs)` takes what enters the ministage and returns what leaves it: a
    tensor or a tuple; that of the last ministage, what `unpack` makes of the model's output."""
    units: tuple[str, ...]
    """Submodules, in order, that become FSDP units; none if the whole part is one."""
    accepts: Keywords
    """Keyword arguments that `forward` takes."""
    name: str = ""
    """For messages."""
    skeleton: Skeleton = field(default_factory=Skeleton, repr=False, compare=False)
    """Copies on fake tensors, one for all parts of a model."""
