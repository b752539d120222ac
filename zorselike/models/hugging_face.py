"""A causal LM of Hugging Face's `transformers`, built without memory from a folder on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from zorselike.errors import ConfigError, describe_missing_package
from zorselike.text.wording import first_line


def read_config(folder: Path) -> Any:
    """The config of the model in a folder, as `transformers` reads it; nothing is downloaded, and no code of
    the folder runs.

    Raises:
        ConfigError: There is no such folder, it holds no model that this `transformers` knows, or the package
            is missing.
    """
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ConfigError(describe_missing_package(error, "models of Hugging Face's transformers")) from None
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: has no config.json; name the folder of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Each kind of model has errors of its own.
        raise ConfigError(f"{folder}: transformers cannot read the config: {first_line(error)}") from error


def build_causal_lm(folder: Path) -> nn.Module:
    """The causal LM of a folder, in fp32 on the `meta` device; `ConfigError` as `read_config`, and where the
    model is of another kind."""
    config = read_config(folder)
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except Exception as error:  # As above.
        raise ConfigError(f"{folder}: holds no causal LM that can be built: {first_line(error)}") from error
    return model
