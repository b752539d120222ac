"""The model that a recipe names, and the dtype in which its layers compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zorselike.checkpoint.safetensors_file import holds_weights
from zorselike.errors import ConfigError
from zorselike.hf import Lora, build_on_meta
from zorselike.hf.adapters import check_same_adapters
from zorselike.hf.folder import count_positions
from zorselike.models import build_model, forward_flops_by_module, get_config, model_names, num_parameters
from zorselike.models.decoder import DecoderConfig
from zorselike.profiler.workload.model_layers import find_layers
from zorselike.runtime.model.causal_lm import find_decoder
from zorselike.runtime.processes.device import ParamDtype
from zorselike.text.assignments import name_model, read_assignments
from zorselike.train.config.config import HUGGING_FACE, Config


@dataclass(frozen=True)
class TrainedModel:
    """What a run trains."""

    name: str
    """For people and checkpoints."""
    vocab_size: int
    max_seq_len: int
    num_parameters: int
    """Tied ones counted once."""
    forward_flops: Callable[[int], Mapping[str, int]]
    """FLOPs per token of each module that a plan lists, in sequences of so many tokens."""
    layers: frozenset[str]
    """Modules that `recompute = "layer"` computes again."""
    build: Callable[[], nn.Module]
    """Without memory, on the `meta` device, in fp32 but for what is frozen."""
    shape: DecoderConfig | None = None
    """Of a model of ours."""
    folder: Path | None = None
    """Where a Hugging Face model is from."""
    num_trained: int | None = None
    """Parameters of its adapters, if it has some and all else is frozen."""
    frozen_flops: int = 0
    """FLOPs per token of products with frozen weights: their gradients would cost as many."""

    @property
    def size(self) -> str:
        """Its parameters, in words."""
        if self.num_trained is None:
            return f"{self.num_parameters:,} parameters"
        share = self.num_trained / self.num_parameters
        return f"{self.num_parameters:,} parameters, {self.num_trained:,} of them trained ({share:.2%})"

    @property
    def weights(self) -> Path | None:
        """The folder whose weights a run begins with, where it does not begin at random."""
        return self.folder if self.folder is not None and holds_weights(self.folder) else None


def find_model(config: Config) -> TrainedModel:
    """The model of `[model]`; raises `ConfigError` where there is none."""
    if config.model.name == HUGGING_FACE:
        return _find_hugging_face(config)
    named = config.model
    if named.name not in model_names():
        raise ConfigError(
            f"[model] name: there is no model '{named.name}'; it is one of ours, {', '.join(model_names())}, "
            f"or {HUGGING_FACE}: any causal LM of Hugging Face, whose folder [model] path names"
        )
    overrides = dict(read_assignments(named.override, "[model] override"))
    shape = get_config(named.name, named.flavor, **overrides)
    return TrainedModel(
        name=name_model(named.name, named.flavor, overrides.items()),
        vocab_size=shape.vocab_size,
        max_seq_len=shape.max_seq_len,
        num_parameters=num_parameters(shape),
        forward_flops=partial(forward_flops_by_module, shape),
        layers=frozenset(f"layers.{i}" for i in range(shape.num_layers)),
        build=partial(_build_ours, named.name, named.flavor, overrides),
        shape=shape,
    )


def _build_ours(name: str, flavor: str, overrides: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, flavor, **overrides)


def _find_hugging_face(config: Config) -> TrainedModel:
    folder, own = Path(config.model.path).expanduser(), config.lora
    lora = Lora(own.rank, own.alpha or None, own.dropout, own.target_modules) if own.enable else None
    # What is frozen has the dtype in which it computes, and where that is half precision there is no other.
    frozen_dtype = torch.float32 if find_param_dtype(config) is None else None
    model: Any = build_on_meta(folder, lora=lora, frozen_dtype=frozen_dtype)
    if own.enable and not holds_weights(folder):
        raise ConfigError(
            f"[lora] enable = true: {folder} holds no weights, beside which adapters train; train all of the "
            "model, or name the folder of one that is trained"
        )
    if own.initial_load_path:
        check_same_adapters(model, Path(own.initial_load_path).expanduser())
    text = model.config.get_text_config()
    decoder = find_decoder(model)
    layers = frozenset() if isinstance(decoder, str) else frozenset(decoder.layers)
    multiplied = {}
    """Parameters that a token meets in a product; of experts all, though it meets only some."""
    num_frozen = 0
    """How many of these are frozen."""
    for name in find_layers(model):
        module = model.get_submodule(name)
        parameters = [] if isinstance(module, nn.Embedding) else list(module.parameters())
        multiplied[name] = sum(parameter.numel() for parameter in parameters)
        num_frozen += sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)

    def count_flops(seq_len: int) -> dict[str, int]:
        """As `forward_flops_by_module`."""
        attention = 4 * seq_len * text.hidden_size
        return {name: 2 * number + attention * (name in layers) for name, number in multiplied.items()}

    return TrainedModel(
        name=f"{HUGGING_FACE} {folder.resolve().name}",
        vocab_size=text.vocab_size,
        max_seq_len=count_positions(model.config),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad) if lora else None,
        frozen_flops=2 * num_frozen,
        forward_flops=count_flops,
        layers=layers,
        build=lambda: model,  # Once: it takes seconds, and a run needs one.
        folder=folder,
    )


def find_param_dtype(config: Config) -> ParamDtype:
    """`[training] mixed_precision_param` as `HeteroPipeline` takes it; None for fp32, in which models are
    built."""
    name = config.training.mixed_precision_param
    if name in ("auto", "float32"):
        return "auto" if name == "auto" else None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
