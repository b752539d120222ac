"""LoRA: small trained matrices beside the frozen linear layers of a model (Hu et al., 2021), as `peft` has
them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from zorselike.errors import ConfigError
from zorselike.runtime.model.causal_lm import find_decoder
from zorselike.text.wording import first_line, list_few, suggest

_PREFIX = "lora_"
"""How `peft` begins the names of what an adapter adds to a layer."""
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class Lora:
    """The adapters of a model: a linear layer of weight W computes with W + B A · alpha / rank.

    Raises `ConfigError` for numbers that are none of an adapter.
    """

    rank: int
    """Rows of A, columns of B."""
    alpha: float | None = None
    """Weight of what is added, times the rank; None: twice the rank, so that the scale is 2 whatever the
    rank."""
    dropout: float = 0.0
    """Share of A's inputs that are dropped in training."""
    target_modules: tuple[str, ...] = ()
    """Names of linear layers, or how such names end, such as `q_proj`; empty: all in decoder layers, but for
    those that `peft` does not tell from experts."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, Integral) or self.rank < 1:
            raise ConfigError(
                f"lora: rank is {self.rank!r}; it is a whole number, at least 1 (8 and 16 are usual)"
            )
        if self.alpha is not None and not (isinstance(self.alpha, Real) and 0 < self.alpha < math.inf):
            raise ConfigError(
                f"lora: alpha is {self.alpha!r}; it is a finite number above 0 (twice the rank is usual)"
            )
        if not (isinstance(self.dropout, Real) and 0 <= self.dropout < 1):
            raise ConfigError(f"lora: dropout is {self.dropout!r}; it is a number, at least 0 and below 1")
        targets = self.target_modules
        if not isinstance(targets, tuple | list) or not all(isinstance(name, str) for name in targets):
            raise ConfigError(
                f"lora: target_modules is {targets!r}; it is names of linear layers, such as ('q_proj',)"
            )


def add_lora(model: nn.Module, lora: Lora, *, dtype: torch.dtype | None = None) -> None:
    """Gives a model adapters, in place and on its device (`meta` too), and freezes all else.

    The model keeps its class, and its modules their names; the layers get `lora_A`, `lora_B` and, for what
    they were, `base_layer`. `dtype`: of the adapters; None: fp32, or fp64 if their layer is.

    Raises `ConfigError` where `peft` is missing, or where a target is no linear layer of the model, or shares
    its weight with another module, or has its weight transposed and another has not.
    """
    if not isinstance(lora, Lora):
        raise ConfigError(
            f"lora: it is {lora!r}; give zorselike.hf.Lora(rank=...), and begin with the adapters of a "
            "folder by load_adapters"
        )
    peft = _import_peft()
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    config = peft_config(model, lora)
    try:
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        raise ConfigError(f"lora: peft cannot add adapters to this model: {first_line(error)}") from error
    _check_targets(model)
    for layer in lora_layers(model).values():
        own = dtype or torch.promote_types(layer.base_layer.weight.dtype, torch.float32)
        for matrices in (layer.lora_A, layer.lora_B):
            matrices.to(own)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = is_adapter(name)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Modules with an adapter, by name; `peft.tuners.lora.Linear`."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return any(part.startswith(_PREFIX) for part in name.split("."))


def base_name(name: str) -> str:
    """What a frozen tensor of a model with adapters is called without them."""
    return name.replace(_BASE_LAYER, ".")


def describe_adapter(model: nn.Module, folder: str | Path) -> dict[str, Any] | None:
    """What `peft` writes into `adapter_config.json`, None for a model without adapters.

    `folder`: where the model's own weights are.
    """
    if not lora_layers(model):
        return None
    (config,) = cast(Any, model).peft_config.values()
    known: dict[str, Any] = config.to_dict()
    known |= {"base_model_name_or_path": str(Path(folder).absolute()), "inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in sorted(known.items())}


def peft_config(model: nn.Module, lora: Lora) -> Any:
    """A `peft.LoraConfig` with explicit targets; `model` has no adapters yet.

    Raises `ConfigError` where `peft` is missing, or the model has no linear layers.
    """
    linear = _linear_layers(model)
    _refuse_unknown(lora.target_modules, model, linear)
    alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
    make = partial(
        _import_peft().LoraConfig,
        r=int(lora.rank),  # Of numpy's numbers JSON knows nothing.
        lora_alpha=int(alpha) if alpha == int(alpha) else float(alpha),
        lora_dropout=float(lora.dropout),
        fan_in_fan_out=any(_is_transposed(layer) for layer in linear.values()),
        task_type="CAUSAL_LM",
    )
    targets = set(lora.target_modules)
    if not targets:
        targets = _without_names_of_experts(
            make(target_modules={name.rpartition(".")[2] for name in linear}), model
        )
    if not targets:
        raise ConfigError(f"lora: {type(model).__name__} has no linear layers in its decoder layers")
    return make(target_modules=targets)


def _refuse_unknown(targets: Sequence[str], model: nn.Module, linear: Collection[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for target in targets:  # peft passes over those that fit nothing while another fits
        if not any(name == target or name.endswith(f".{target}") for name in names):
            valid = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"lora: target_modules: no module of the model is called '{target}'; its linear layers are "
                f"{', '.join(valid)}{suggest(target, valid)}"
            )


def _without_names_of_experts(config: Any, model: nn.Module) -> set[str]:
    """The targets of a config whose names `peft` does not take for those of experts (`gate_proj` of DeepSeek
    3, which its shared experts have too)."""
    try:
        conversion = import_module("peft.utils.transformers_weight_conversion")
    except ImportError:  # An older peft, or transformers: names are what they are.
        return set(config.target_modules)
    conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
    return set(config.target_modules)


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Of the decoder layers, by name; of a model without such, all but the head."""
    decoder = find_decoder(model)
    layers = () if isinstance(decoder, str) else tuple(f"{name}." for name in decoder.layers)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and (name.startswith(layers) if layers else module is not head)
    }


def _is_linear(module: nn.Module) -> bool:
    """Whether it gives its product with its weight, to which an adapter adds: a router may be a subclass and
    give something else."""
    if not isinstance(module, nn.Linear):
        return _is_transposed(module)
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        with torch.no_grad():
            given = module(module.weight.new_zeros(1, module.in_features))
    except Exception:
        return False
    return isinstance(given, torch.Tensor) and given.shape == (1, module.out_features)


def _is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is `[inputs, outputs]`, as in GPT-2."""
    return type(module).__name__ == "Conv1D"


def _check_targets(model: nn.Module) -> None:
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    layers = lora_layers(model)
    for name, layer in layers.items():
        base = layer.base_layer
        if not _is_linear(base):
            raise ConfigError(
                f"lora: target_modules: '{name}' is of class {type(base).__name__}; name linear layers only, "
                "such as q_proj"
            )
        shared = [n for n in names_of[id(base.weight)] if not n.startswith(f"{name}.")]
        if shared:
            raise ConfigError(
                f"lora: target_modules: '{name}' shares its weight with {list_few(shared)}, which an adapter "
                "would leave as it is; leave it out"
            )
    by_kind = {_is_transposed(layer.base_layer): name for name, layer in layers.items()}
    if len(by_kind) > 1:  # `peft` has one `fan_in_fan_out` for all.
        raise ConfigError(
            f"lora: target_modules: the weight of '{by_kind[True]}' is transposed and that of "
            f"'{by_kind[False]}' is not; name layers of one kind only"
        )


def _import_peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"lora: peft cannot be imported ({first_line(error)}); pip install 'zorselike[hf]'"
        ) from error
