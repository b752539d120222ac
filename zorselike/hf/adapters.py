"""Folders of adapters as `peft` writes them, to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import nn

from zorselike.checkpoint.adapters import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, FILE_PREFIX
from zorselike.errors import ConfigError
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.text.document import parse_text
from zorselike.text.wording import list_few, show_value

_UNKNOWN_SETTINGS = (
    *("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    *("monteclora_config", "lora_bias", "target_parameters", "trainable_token_indices"),
)
"""Of `adapter_config.json`: by these more is trained, or it computes otherwise."""
_KEEP_THE_MODEL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Of `init_lora_weights`; by others, such as "pissa", the model's own weights are changed before training."""


def load_adapters(pipe: HeteroPipeline, model: nn.Module, folder: str | Path) -> None:
    """Takes over adapters that `peft` has saved. Collective.

    Args:
        pipe: of `model`, whose own weights are loaded.
        model: what `build_on_meta` gave with `lora`.
        folder: with `adapter_config.json`, on every node.

    Raises:
        ConfigError: The model's adapters are others than those of the folder.
        CheckpointError: On every rank: files are missing or damaged, or of adapters of another model.
    """
    check_same_adapters(model, Path(folder))
    take_adapters(pipe, Path(folder))


def take_adapters(pipe: HeteroPipeline, folder: Path) -> None:
    """The same, where it is known that they are the model's."""
    weights = folder / ADAPTER_WEIGHTS
    # The folder may be that of the model too, or have other files beside.
    pipe.load_pretrained(weights if weights.is_file() else folder, name_of=name_in_model, only_trained=True)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """What `adapter_config.json` of a folder says; raises `ConfigError` where there is none."""
    path = folder / ADAPTER_CONFIG
    try:
        return dict(parse_text(path.read_text(), "JSON"))
    except OSError as error:
        raise ConfigError(f"lora: {path}: {error.strerror}; give a folder that peft wrote") from None
    except ValueError as error:
        raise ConfigError(f"lora: {path}: {error}; give a folder that peft wrote") from None


def check_same_adapters(model: nn.Module, folder: Path) -> None:
    """Raises `ConfigError` unless the adapters of a folder compute as those of a model do; their weights are
    not looked at."""
    there, (here,) = read_adapter_config(folder), cast(Any, model).peft_config.values()
    odd = [key for key in _UNKNOWN_SETTINGS if there.get(key)]
    if there.get("init_lora_weights") not in _KEEP_THE_MODEL:
        odd.append(f'init_lora_weights = "{there["init_lora_weights"]}"')
    if there.get("bias", "none") != "none" and any(n.endswith(".bias") for n, _ in model.named_parameters()):
        odd.append(f'bias = "{there["bias"]}"')
    if there.get("peft_type") != "LORA" or odd:
        raise ConfigError(
            f"lora: {folder}: {ADAPTER_CONFIG} asks for {list_few(odd) or there.get('peft_type')}, which is "
            "not trained here; load them with peft and give that model to HeteroPipeline"
        )
    numbers = {"r": here.r, "lora_alpha": here.lora_alpha}
    if any(there.get(key) != value for key, value in numbers.items()):
        raise ConfigError(
            f"lora: the adapters of {folder} have rank {show_value(there.get('r'))} and alpha "
            f"{show_value(there.get('lora_alpha'))}, "
            f"and these have {here.r} and {here.lora_alpha}; set rank and alpha as they were"
        )


def name_in_model(name: str) -> str:
    """What the model calls what `peft` calls so in its files."""
    return name.removeprefix(FILE_PREFIX).removesuffix(".weight") + f"{ADAPTER}weight"
