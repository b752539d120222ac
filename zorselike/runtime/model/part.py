"""One ministage of a model, as any way of cutting gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zorselike.runtime.model.tracing import Skeleton


class Keywords(frozenset[str]):
    """The keyword arguments that a forward takes: all, if it ends in `**kwargs`: ask with `in` only."""

    takes_any = False

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Keywords:
        """What a forward names, its first argument left out: that is what enters."""
        parameters = list(inspect.signature(forward).parameters.values())
        named = [p.name for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        found = cls(named + [p.name for p in parameters[:1] if p.kind is p.KEYWORD_ONLY])
        found.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return found

    def __contains__(self, name: object) -> bool:
        return self.takes_any or super().__contains__(name)


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
