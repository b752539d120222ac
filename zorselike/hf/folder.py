"""From a folder that `save_pretrained` wrote to a model on the meta device, and to a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn

from zorselike.errors import CheckpointError, ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime.loss import CountFn, LossFn
from zorselike.runtime.ministage.updates import Clip, OptimizerFactory
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.device import ParamDtype
from zorselike.text.wording import first_line


class PipelineOptions(TypedDict, total=False):
    """What `HeteroPipeline` takes besides model and plan; what each means is said there."""

    optimizer: OptimizerFactory | None
    loss_fn: LossFn | None
    count_fn: CountFn | None
    unpack: Callable[[Any], Any] | None
    device: torch.device | str | None
    param_dtype: ParamDtype
    compile: bool
    max_norm: float | None
    clip: Clip
    seed: int
    forbid_nonfinite_loss: bool
    silence_s: float | Literal["auto"] | None


def pipeline(
    folder: str | Path,
    plan: Plan | str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    **options: Unpack[PipelineOptions],
) -> HeteroPipeline:
    """A pipeline that goes on training the causal LM of a folder. Collective.

    Every rank builds the model without memory and reads the bytes of its own part from the folder.

    Args:
        folder: with `config.json` and safetensors files, on every node.
        plan: its `modules` are those that `zorselike.list_modules(build_on_meta(folder))` gives.
        dtype: of the weights that are updated, whatever the files have; `param_dtype` is what layers compute
            in.
        attention: how attention is computed: `"sdpa"`, `"eager"`, ...; None: what `transformers` chooses.
        options: those of `HeteroPipeline`.

    Raises:
        ConfigError: `transformers` is missing, or knows no causal LM of this folder.
        CheckpointError: The files are damaged, or hold other weights than the model has.
        PlanError: The plan's modules are not the model's.
    """
    model = build_on_meta(folder, dtype=dtype, attention=attention)
    pipe = HeteroPipeline(model, plan, skip_init=True, **options)
    try:
        load_weights(pipe, model, folder)
    except CheckpointError:  # The same on every rank.
        pipe.close()
        raise
    return pipe


def load_weights(pipe: HeteroPipeline, model: nn.Module, folder: str | Path) -> None:
    """Takes over the weights of a folder, which may have its own names for them. Collective.

    Args:
        pipe: of `model`, made with `skip_init`.
        model: what `build_on_meta` gave for this folder.
        folder: on every node.

    Raises:
        CheckpointError: On every rank: files are missing or damaged, or of another model.
    """
    own: Any = model
    ignored = [str(pattern) for pattern in own._keys_to_ignore_on_load_unexpected or ()]
    pipe.load_pretrained(folder, name_of=_namer(own), ignored=ignored)


def _namer(model: Any) -> Callable[[str], str]:
    """What a model calls what its files call so, by the rules of `transformers`."""
    loading = import_module("transformers.core_model_loading")
    rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    state = model.state_dict()

    def rename(name: str, *rules: Any) -> tuple[str, str | None]:
        found: tuple[str, str | None] = loading.rename_source_key(
            name, *rules, model.base_model_prefix, state
        )
        return found

    def name_of(name: str) -> str:
        found, converted = rename(name, renamings, converters)
        if found not in state and name in state:
            found, converted = rename(name, [], [])
        if converted is not None and found in state:
            raise CheckpointError(
                f"hf: {name} is a part of {found} in the model, and parts are not put together here; load "
                "the model with from_pretrained and give that to HeteroPipeline"
            )
        return found

    return name_of


def build_on_meta(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> nn.Module:
    """The causal LM of a folder's `config.json`, on the meta device and in training mode.

    Raises `ConfigError` where `transformers` is missing, or knows no causal LM of this folder.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"hf: transformers cannot be imported ({first_line(error)}); pip install 'zorselike[hf]'"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"hf: {folder} has no config.json; give a folder that save_pretrained wrote")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ConfigError(f"hf: transformers builds no causal LM of {folder}: {first_line(error)}") from error
    return model.train()
