"""Watches a model's forward, layer by layer: FLOPs, what crosses, what autograd keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from zorselike.runtime._compat import cpu_attention, grouped_products
from zorselike.runtime.model.nested import tensors_in


@dataclass
class LayerRecord:
    """What one layer's forward did, for all rows at once."""

    flops: int = 0
    backward_flops: float = 0
    """Of each product in the forward as much again for each of its two factors that needs a gradient."""
    input_elements: int = 0
    gradient_elements: int = 0
    """Of these, those that carry a gradient."""
    output_elements: int = 0
    saved_bytes: int = 0
    """Storages that autograd keeps, each counted where it is kept first; parameters and buffers not."""
    has_backward: bool = False
    """Whether what it returns carries a gradient."""
    working_bytes: int = 0
    """Gradients that one operation's backward has at once: of what enters it and leaves it, and of what
    enters and leaves the layer. The most of all operations."""


@contextmanager
def watch_layers(model: nn.Module, names: Sequence[str]) -> Iterator[LayerWatch]:
    """Watches what runs inside. What is computed outside the layers counts to the one before."""
    layers = {name: model.get_submodule(name) for name in names}
    watch = LayerWatch(model, names[0])
    hooks = []
    for name, layer in layers.items():
        hooks.append(layer.register_forward_pre_hook(watch.make_enter(name), with_kwargs=True))
        hooks.append(layer.register_forward_hook(watch.leave))
    saved = torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor)
    try:
        with watch.counter, saved, watch:
            yield watch
        watch.settle()
    finally:
        for hook in hooks:
            hook.remove()


class LayerWatch(TorchFunctionMode):
    """Keeps one `LayerRecord` for each layer that ran."""

    def __init__(self, model: nn.Module, first: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: dict[str, LayerRecord] = {}
        self.order: dict[str, None] = {}
        """Layers as they were called first, by others than layers."""
        self.counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
        self._holder = first
        """The layer that what happens counts to: the last that was entered."""
        self._depth = 0
        self._is_fused = False
        """Whether what autograd keeps now is booked otherwise."""
        self._counted: int = 0
        """FLOPs that are in records."""
        self._inputs: dict[int, Tensor] = {}
        self._calls: list[dict[int, Tensor]] = []
        """Of the layer that runs: the tensors of each operation whose gradients meet in its backward."""
        self._passed: dict[int, Tensor] = {}
        """All that layers returned, alive so that no identity is used twice."""
        own = [*model.parameters(), *model.buffers()]
        self._own = {id(s): s for s in (tensor.untyped_storage() for tensor in own)}
        """Storages of the model itself."""
        self._storages = dict(self._own)
        """Those that are counted already, or are not to be."""

    def make_enter(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1
            if self._depth > 1:
                return
            self.order.setdefault(name)
            self.settle()
            self._holder = name
            self._inputs = {
                id(tensor): tensor
                for tensor in _floating((args, kwargs))
                if tensor.requires_grad or id(tensor) in self._passed
            }
            self._calls = []
            inputs = self._inputs.values()
            self._record.input_elements += sum(tensor.numel() for tensor in inputs)
            self._record.gradient_elements += sum(tensor.numel() for tensor in inputs if tensor.requires_grad)

        return enter

    def leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self.settle()
        outputs = {id(tensor): tensor for tensor in _floating(output)}
        self._passed |= outputs
        record = self._record
        record.output_elements += sum(tensor.numel() for tensor in outputs.values())
        record.has_backward |= any(tensor.requires_grad for tensor in outputs.values())
        outside = self._inputs | outputs
        most = max((_sum_bytes(outside | call) for call in self._calls), default=0)
        record.working_bytes = max(record.working_bytes, most)
        self._calls = []

    def settle(self) -> int:
        """Books the FLOPs since it was called last, and returns them."""
        total: int = self.counter.get_total_flops()
        flops = total - self._counted
        self._record.flops += flops
        self._counted = total
        return flops

    def keep(self, tensor: Tensor) -> Tensor:
        """Books a tensor that autograd keeps."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages and not self._is_fused:
            self._storages[id(storage)] = storage
            self._record.saved_bytes += storage.nbytes()
        return tensor

    def _note_call(self, func: Any, entered: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Notes the gradients that meet in the backward of one operation."""
        storages = {id(tensor.untyped_storage()) for tensor in outputs}
        if storages & {id(tensor.untyped_storage()) for tensor in entered}:
            return  # The gradient of a view is a view itself.
        call = {
            id(tensor): tensor
            for tensor in [*entered, *outputs]
            if id(tensor.untyped_storage()) not in self._own
        }
        if func is nn.functional.cross_entropy:
            logarithms = torch.empty_like(entered[0])  # Of which it has the gradient inside.
            call[id(logarithms)] = logarithms
        if self._depth:
            self._calls.append(call)
        else:
            self._record.working_bytes = max(self._record.working_bytes, _sum_bytes(call))

    def _keep_norm(self, tensor: Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> None:
        """Books what a GPU's kernel keeps of it: the input, and one fp32 number for each norm."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            self.keep(tensor)
            self._record.saved_bytes += 4 * tensor.numel() // math.prod(normalized_shape)

    @property
    def _record(self) -> LayerRecord:
        return self.records.setdefault(self._holder, LayerRecord())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._is_fused = func in _FUSED
        self.settle()
        result = func(*args, **(kwargs or {}))
        if (flops := self.settle()) and torch.is_grad_enabled():
            self._record.backward_flops += flops * _count_gradients(args, kwargs or {})
        if self._is_fused:
            self._is_fused = False
            self._keep_norm(*args, **(kwargs or {}))
        outputs = [tensor for tensor in _floating(result) if tensor.requires_grad]
        if outputs:
            self._note_call(func, [t for t in _floating((args, kwargs or {})) if t.requires_grad], outputs)
        return result


def _floating(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def _count_gradients(args: Any, kwargs: Mapping[str, Any]) -> float:
    """How many factors of a product need a gradient: of 0, 1 or 2, or about, where several products are one
    operation. A bias and a mask are no factors."""
    factors = [t for t in _floating((args, {**kwargs, "attn_mask": None})) if t.dim() > 1]
    return 2 * sum(t.requires_grad for t in factors) / max(1, len(factors))


def _sum_bytes(tensors: Mapping[int, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _count_cpu_attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    # Heads of keys that several of queries share count for each of them; torch 2.11 takes none such.
    heads = query[:2]
    shapes = query, (*heads, *key[2:]), (*heads, *value[2:])
    count: int = sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return count


_FUSED = (nn.functional.rms_norm, torch.rms_norm)
"""One kernel on a GPU; on a CPU torch computes it in steps that keep several times its input."""


def _count_grouped_product(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Rows `[rows, k]`, each by one of the matrices `[groups, k, n]`."""
    return 2 * math.prod(left) * right[-1]


_FORMULAS = {
    **dict.fromkeys(cpu_attention(), _count_cpu_attention),
    **dict.fromkeys(grouped_products(), _count_grouped_product),
}
"""What torch does not count: attention on a CPU, where fake tensors are, and products of experts."""
