"""The model of a command in a Hugging Face folder, with or without adapters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorselike.errors import ConfigError
from zorselike.plan.workload import Workload

if TYPE_CHECKING:
    from torch import nn

PREFIX = "hf "
"""How the names of such models begin."""


@dataclass(frozen=True)
class FolderChoice:
    """A causal LM; of its folder `config.json` is read."""

    folder: Path
    lora_rank: int | None = None
    """None: all of it trains."""
    lora_targets: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Size of its vocabulary."""
        model: Any = self._model
        number: int = model.config.get_text_config().vocab_size
        return number

    def list_options(self) -> tuple[str, ...]:
        """Options of the trainer that name it."""
        options = ["--model.name", "hf", "--model.path", str(self.folder)]
        options += [] if self.lora_rank is None else ["--lora.enable", "--lora.rank", str(self.lora_rank)]
        options += ["--lora.target_modules", *self.lora_targets] if self.lora_targets else []
        return tuple(options)

    def build(self) -> nn.Module:
        """A model of one's own, on the meta device. Raises `ConfigError` where `transformers` builds none."""
        return copy.deepcopy(self._model)

    def measure(self, *, sequence_length: int, dtype: str) -> Workload:
        """Its workload; raises `ConfigError` where it does not run on such rows."""
        from zorselike.profiler.workload.module_workload import measure_causal_lm

        name = f"{PREFIX}{self.folder.resolve().name}"
        return measure_causal_lm(self._model, sequence_length=sequence_length, dtype=dtype, name=name)

    @cached_property
    def _model(self) -> nn.Module:
        from zorselike.hf import build_on_meta

        model = build_on_meta(self.folder)
        if self.lora_rank is not None:
            from zorselike.hf.lora import Lora, add_lora

            add_lora(model, Lora(self.lora_rank, target_modules=self.lora_targets))
        return model


def choose_folder(
    command: str, folder: str | None, lora_rank: int | None, lora_targets: Sequence[str]
) -> FolderChoice | None:
    """What the options name; None without a folder. Raises `ConfigError` for options that do not fit."""
    if lora_rank is not None and lora_rank < 1:
        raise ConfigError(
            f"{command}: --lora-rank is {lora_rank}; it must be at least 1 (8 and 16 are usual)"
        )
    if lora_targets and lora_rank is None:
        raise ConfigError(
            f"{command}: --lora-targets has no adapters to name layers for; give --lora-rank 16"
        )
    if folder is None:
        if lora_rank is not None:
            raise ConfigError(
                f"{command}: --lora-rank is for a model of Hugging Face; give its folder by --hf"
            )
        return None
    return FolderChoice(Path(folder).expanduser(), lora_rank, tuple(lora_targets))
