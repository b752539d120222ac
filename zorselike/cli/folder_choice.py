"""The model of a command in a Hugging Face folder, with or without adapters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

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
        from zorselike.hf.folder import count_positions
        from zorselike.profiler.workload.module_workload import measure_causal_lm

        model: Any = self._model
        most = count_positions(model.config)
        if sequence_length > most:
            raise ConfigError(
                f"--seq-len {sequence_length}: {self.folder} has {most} positions; give that or less"
            )
        name = f"{PREFIX}{self.folder.resolve().name}"
        return measure_causal_lm(self._model, sequence_length=sequence_length, dtype=dtype, name=name)

    @cached_property
    def _model(self) -> nn.Module:
        import torch

        from zorselike.hf import Lora, build_on_meta

        rank = self.lora_rank
        lora = None if rank is None else Lora(rank, target_modules=self.lora_targets)
        return build_on_meta(self.folder, lora=lora, frozen_dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """A model of Hugging Face."""

    hf: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: no such model)")] = (
        None
    )
    """Folder of a Hugging Face causal LM, of which config.json is read; give --seq-len too."""

    lora_rank: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all of it trains)")
    ] = None
    """With --hf: rank of LoRA adapters; only they train, the model itself is frozen."""

    lora_targets: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="NAME ...", help_behavior_hint="(default: all in decoder layers)"),
    ] = ()
    """With --lora-rank: linear layers with adapters, such as q_proj v_proj."""

    def choose_folder(self, command: str) -> FolderChoice | None:
        """What the options name; None without a folder. Raises `ConfigError` for options that do not fit."""
        rank = self.lora_rank
        if rank is not None and rank < 1:
            raise ConfigError(f"{command}: --lora-rank is {rank}; it must be at least 1 (8 and 16 are usual)")
        if self.lora_targets and rank is None:
            raise ConfigError(
                f"{command}: --lora-targets has no adapters to name layers for; give --lora-rank 16"
            )
        if self.hf is None:
            if rank is not None:
                raise ConfigError(
                    f"{command}: --lora-rank is for a model of Hugging Face; give its folder by --hf"
                )
            return None
        return FolderChoice(Path(self.hf).expanduser(), rank, self.lora_targets)
