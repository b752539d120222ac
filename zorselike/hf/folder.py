"""From a folder that `save_pretrained` wrote to a model on the meta device, and to a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn

from zorselike.checkpoint.adapters import ADAPTER_CONFIG
from zorselike.checkpoint.export import Part, list_parts
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.safetensors_file import open_folder
from zorselike.errors import CheckpointError, ConfigError
from zorselike.hf.adapters import read_adapter_config
from zorselike.hf.lora import Lora, add_lora, describe_adapter
from zorselike.hf.names import make_namer
from zorselike.plan.plan import Plan
from zorselike.runtime.loss import CountFn, LossFn
from zorselike.runtime.ministage.updates import Clip, OptimizerFactory
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.device import ParamDtype
from zorselike.runtime.state.dtypes import named_dtype
from zorselike.text.wording import first_line

_HALF_BYTES = 2
"""Of one number in half precision; of smaller ones several share a scale, which plain layers do not know."""

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Of a configuration, by the names that `transformers` has for them in all."""

_ONCE_SAVED = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
"""By how the names of buffers end of which files of older models have some: patterns of the names there."""


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
    lora: Lora | None = None,
    frozen_dtype: torch.dtype | None = None,
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
        lora: train adapters of this kind, and freeze the weights of the folder. Checkpoints then hold the
            adapters alone.
        frozen_dtype: of weights that are frozen; None: that of the files. Without `param_dtype` layers
            compute in it.
        options: those of `HeteroPipeline`.

    Raises:
        ConfigError: `transformers` or `peft` is missing, or knows no causal LM of this folder.
        CheckpointError: The files are damaged, or hold other weights than the model has.
        PlanError: The plan's modules are not the model's.
    """
    model = build_on_meta(folder, dtype=dtype, attention=attention, lora=lora, frozen_dtype=frozen_dtype)
    pipe = HeteroPipeline(model, plan, skip_init=True, **options)
    try:
        load_weights(pipe, model, folder)
    except CheckpointError:  # The same on every rank.
        pipe.close()
        raise
    return pipe


def load_weights(pipe: HeteroPipeline, model: nn.Module, folder: str | Path) -> None:
    """Takes over the weights of a folder, which may have its own names for them; adapters of the model are
    what they are. Collective.

    Args:
        pipe: of `model`, made with `skip_init`.
        model: what `build_on_meta` gave for this folder.
        folder: on every node.

    Raises:
        CheckpointError: On every rank: files are missing or damaged, or of another model.
    """
    own: Any = model
    adapter = describe_adapter(own, folder)
    pipe.load_pretrained(folder, name_of=make_namer(own), ignored=_list_ignored(own), adapter=adapter)


def _list_ignored(model: Any) -> list[str]:
    """Patterns of names in files that `transformers` passes over: buffers that were saved once."""
    buffers = [name for name, _ in model.named_buffers()]
    told = [str(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return told + [
        pattern for end, pattern in _ONCE_SAVED.items() if any(name.endswith(end) for name in buffers)
    ]


def find_parts(manifest: Manifest, folder: Path) -> dict[str, Part] | None:
    """A checkpoint's tensors by the names that the folder has for them from which the model came, for
    `checkpoint.export`; None where the folder has no weights.

    Raises:
        CheckpointError: It is of another model.
        ConfigError: It has names of its own, and `transformers` is missing, or knows no causal LM of it.
    """
    try:
        return list_parts(manifest, folder)
    except CheckpointError:
        model = build_on_meta(folder)
    return list_parts(manifest, folder, make_namer(model))


def count_positions(config: Any) -> int:
    """Of a model's configuration: how many tokens a row may have. Some models, such as BLOOM (which says
    nothing) and XLNet (which says -1), have no limit."""
    most: int = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return most if most > 0 else 2**31


def build_on_meta(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    lora: Lora | None = None,
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The causal LM of a folder's `config.json`, on the meta device and in training mode.

    With `lora` it has adapters in `dtype`, and what is frozen is in `frozen_dtype`, by default that of the
    folder's weights.

    Raises `ConfigError` where `transformers` or `peft` is missing, or knows no causal LM of this folder.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"hf: transformers cannot be imported ({first_line(error)}); pip install 'zorselike[hf]'"
        ) from error
    try:
        if not (Path(folder) / "config.json").is_file():
            raise ConfigError(_describe_missing_config(Path(folder)))
    except OSError as error:
        raise ConfigError(f"hf: {error.filename}: cannot be read: {error.strerror}") from error
    built_in = dtype
    if lora is not None:
        built_in = frozen_dtype or _find_dtype(Path(folder))
    try:
        # Code of the folder's own is not run, nor is a terminal asked whether to.
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        _refuse_sizes(config, folder)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=built_in, attn_implementation=attention, trust_remote_code=False
            )
    except ConfigError:
        raise
    except Exception as error:  # What is wrong with a config it says by errors of any kind.
        raise ConfigError(f"hf: transformers builds no causal LM of {folder}: {first_line(error)}") from error
    _refuse_quantized(config, folder)
    _refuse_encoder(model.config, folder)
    if lora is not None:
        add_lora(model, lora, dtype=dtype)
    trained: nn.Module = model.train()
    return trained


def _refuse_sizes(config: Any, folder: str | Path) -> None:
    """Raises `ConfigError` for a model of no layers, or fewer: `transformers` would make it."""
    text = config.get_text_config()
    sizes = text.to_dict()  # An attribute may be one of each layer, and raise.
    for key in _SIZES:
        named = text.attribute_map.get(key, key)
        size = sizes.get(named)
        if isinstance(size, int) and size < 1:
            raise ConfigError(f"hf: {Path(folder) / 'config.json'}: {named} is {size}; it must be at least 1")


def _refuse_encoder(config: Any, folder: str | Path) -> None:
    """Raises `ConfigError` where tokens see those after them, as in BERT: what may be either has two keys, or
    one that says it. Files that transformers 4 wrote may have the two for any model."""
    may_be_either = all(hasattr(type(config), key) for key in ("is_decoder", "add_cross_attention"))
    is_not_causal = hasattr(type(config), "causal") and not config.causal  # As XLM and FlauBERT call it.
    if is_not_causal or (may_be_either and not config.is_decoder):
        key = "causal" if is_not_causal else "is_decoder"
        raise ConfigError(
            f"hf: {Path(folder) / 'config.json'}: {config.model_type} is an encoder, in which tokens see the "
            f'next ones that a causal LM learns to predict; write "{key}": true there, or take a decoder'
        )


def _refuse_quantized(config: Any, folder: str | Path) -> None:
    """Layers of a model that is made from its configuration alone are plain, whatever its files hold."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    raise ConfigError(
        f"hf: {folder}: its weights are quantized ({method or type(quantization).__name__}); take the model "
        "in bfloat16, float16 or float32"
    )


def _describe_missing_config(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_adapter_config(folder).get("base_model_name_or_path")
        return (
            f"hf: {folder} holds adapters of peft and no model; give the folder of their model ({base}), and "
            f'begin with them by load_adapters (in a recipe: [lora] initial_load_path = "{folder}")'
        )
    return f"hf: {folder} has no config.json; give a folder that save_pretrained wrote"


def _find_dtype(folder: Path) -> torch.dtype:
    """In which most of a folder's weights are."""
    num_bytes: Counter[torch.dtype] = Counter()
    for file in open_folder(folder):
        for one in file.slices:
            num_bytes[named_dtype(one.dtype)] += one.num_bytes
    floats = {dtype: size for dtype, size in num_bytes.items() if dtype.is_floating_point}
    if not floats or min(dtype.itemsize for dtype in floats) < _HALF_BYTES:
        raise ConfigError(
            f"lora: {folder}: weights in {', '.join(map(str, num_bytes)) or 'no dtype'} cannot be trained "
            "beside; take the model in bfloat16, float16 or float32"
        )
    return max(floats, key=lambda dtype: floats[dtype])
