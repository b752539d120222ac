"""What a model calls what its files call so, by the rules of `transformers`.

Files may have experts one by one, and gates beside what they gate, where a model has all in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from zorselike.errors import CheckpointError
from zorselike.hf.lora import base_name, is_adapter
from zorselike.plan.holdings import VALUE, Box
from zorselike.runtime.tensor_parallel.pieces import whole_shapes


def make_namer(model: Any) -> Callable[[str], str | Box]:
    """The model's name of a file's tensor, or the part of a tensor that it is there.

    The function raises `CheckpointError` for what is put together otherwise than side by side.
    """
    loading = import_module("transformers.core_model_loading")
    rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    known = {name: shape for name, shape in whole_shapes(model).items() if not is_adapter(name)}
    names = {base_name(name): name for name in known}
    state = {base_name(name): shape for name, shape in known.items()}

    def rename(name: str, *rules: Any) -> tuple[str, str | None]:
        found: tuple[str, str | None] = loading.rename_source_key(
            name, *rules, model.base_model_prefix, state
        )
        return found

    def name_of(name: str) -> str | Box:
        found, pattern = rename(name, renamings, converters)
        if found not in state and name in state:
            found, pattern = rename(name, [], [])
        own: str = names.get(found, found)
        if pattern is None or found not in state:
            return own
        (rule,) = (rule for rule in converters if pattern in rule.source_patterns)
        box = _find_part(own, state[found], rule, pattern, rename(name, renamings, [])[0])
        if box is None:
            raise CheckpointError(
                f"hf: {name} is a part of {found} in the model, and parts are put together here only where "
                "they lie side by side; load the model with from_pretrained and give that to HeteroPipeline"
            )
        return box

    return name_of


def _find_part(name: str, shape: tuple[int, ...], rule: Any, pattern: str, source: str) -> Box | None:
    """Where a rule puts a file's tensor; None where that is no box.

    Args:
        name: of the tensor in the model.
        shape: of that.
        rule: a `WeightConverter`.
        pattern: the one of its sources that this is.
        source: what the file's tensor is called, renamed.
    """
    starts, stops = [0] * len(shape), [*shape]
    kinds: list[tuple[str, Any]] = [
        (type(one).__name__, getattr(one, "dim", None)) for one in rule.operations
    ]
    if kinds[:1] == [("MergeModulelist", 0)]:
        number = re.search(pattern.replace(".*.", r"\.(\d+)\."), source)
        if number is None:
            return None
        starts[0] = int(number[1])
        stops[0] = starts[0] + 1
        kinds = kinds[1:]
    if kinds:
        (kind, dim), *others = kinds
        num_parts = len(rule.source_patterns)
        if kind != "Concatenate" or others or shape[dim] % num_parts or stops[dim] != shape[dim]:
            return None
        size = shape[dim] // num_parts
        starts[dim] = rule.source_patterns.index(pattern) * size
        stops[dim] = starts[dim] + size
    return Box(name, VALUE, tuple(starts), tuple(stops))
