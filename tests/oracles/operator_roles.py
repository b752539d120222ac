"""What an operator does with memory, from its schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Role(Enum):
    """How an operator treats the bytes of its arguments."""

    METADATA = "looks at none: views, shapes"
    ALLOCATION = "new memory, not written"
    FACTORY = "new memory, written, its arguments not read"
    HOST_READ = "gives the host a number"
    COLLECTIVE = "exchanges them with other ranks"
    COMPUTE = "reads those that it does not write"


_UNWRITTEN = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_FACTORIES = re.compile(r"(zeros|ones|full|rand|randn|randint)_like|new_(zeros|ones|full)")


@cache
def role_of(operator: Any) -> Role:
    """What an `OpOverload` does; any other operator computes."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return Role.COMPUTE
    space, _, name = schema.name.partition("::")
    if space == "c10d":
        return Role.METADATA if "barrier" in name else Role.COLLECTIVE
    aliases = [value.alias_info for value in schema.returns]
    is_view = bool(aliases) and all(aliases) and not schema.is_mutable
    if is_view or torch.Tag.inplace_view in operator.tags or space in ("prim", "profiler"):
        return Role.METADATA
    if name in _UNWRITTEN:
        return Role.ALLOCATION
    if name == "_local_scalar_dense":
        return Role.HOST_READ
    return Role.FACTORY if _FACTORIES.fullmatch(name) else Role.COMPUTE


def split_arguments(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads and those that it writes."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return tensors_in((args, kwargs)), []
    read: list[Tensor] = []
    written: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        (written if _is_written(operator, argument) else read).extend(tensors_in(value))
    return read, written


def name_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = [argument.name for argument in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _is_written(operator: Any, argument: Any) -> bool:
    if role_of(operator) is Role.COLLECTIVE:  # Their schemas do not say.
        is_both_ways = argument.name in ("tensor", "tensors") and operator._schema.name != "c10d::send"
        return argument.name.startswith("output") or is_both_ways
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def flatten(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and mappings."""
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from flatten(entry)
    elif isinstance(value, Mapping):
        yield from flatten(list(value.values()))
    else:
        yield value


def tensors_in(value: Any) -> list[Tensor]:
    """Plain tensors with bytes: neither meta, nor fake, nor distributed."""
    found = (entry for entry in flatten(value) if type(entry) in (Tensor, torch.nn.Parameter))
    return [tensor for tensor in found if tensor.device.type == "cpu"]
