"""The model of a command: by family, flavor and overrides, by its name, or by a workload file.

The name of a model in workloads, plans and profiles contains the first three: `llama 7b num_layers=8`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from zorselike.cli.folder_choice import PREFIX, FolderOptions
from zorselike.cli.options import one_of
from zorselike.cost.catalogue import find_device
from zorselike.errors import ClusterError, ConfigError, ProfileError
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload
from zorselike.text.assignments import name_model, read_assignments, write_assignments

if TYPE_CHECKING:
    from zorselike.cost.profile import Profile
    from zorselike.models import Decoder, DecoderConfig

Dtype = Literal["bfloat16", "float16", "float32"]

OVERRIDES = tyro.conf.arg(metavar="KEY=VALUE ...", help_behavior_hint="(default: none)")
_NAMED = "(default: from the plan or profile)"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(FolderOptions):
    """The model; needed if neither plan nor profile name it."""

    workload: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: made from family and flavor)")
    ] = None
    """The model's layers as numbers (JSON), for a model of your own."""

    family: Annotated[
        str | None, tyro.conf.arg(aliases=["--model"], metavar="NAME", help_behavior_hint=_NAMED)
    ] = None
    """Family of a built-in model: llama or gpt."""

    flavor: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint=_NAMED)] = None
    """Size within the family, such as 7b."""

    override: Annotated[tuple[str, ...], OVERRIDES] = ()
    """Changed settings of the model, such as num_layers=8."""

    seq_len: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_NAMED)] = None
    """Tokens per row."""

    dtype: Annotated[
        Dtype | None,
        one_of(*get_args(Dtype)),
        tyro.conf.arg(
            help_behavior_hint="(default: the profile's, else bfloat16 if all devices have it, else float16)",
        ),
    ] = None
    """Dtype in which layers compute; with float16 updates wait for the end of the step."""

    def load_workload(
        self,
        command: str,
        *,
        source: str,
        devices: Iterable[str],
        model: str | None = None,
        sequence_length: int | None = None,
        profile: Profile | None = None,
        profile_file: str | Path | None = None,
    ) -> Workload:
        """Loads the workload file, or makes the workload of the model that options, plan or profile name.

        Args:
            command: the command's name, for messages.
            source: the file that could name the model and the sequence length, for messages.
            devices: device types; one without bfloat16 makes float16 the default.
            model: the model's name, if a plan has it.
            sequence_length: the sequence length, if a plan has it.
            profile: the profile, whose layers limit sequence lengths and dtypes.
            profile_file: its file, for messages.

        Raises:
            ConfigError: model or sequence length are missing or invalid, or not those of the profile.
            ProfileError: the profile is of another model.
        """
        if self.seq_len is not None and self.seq_len < 1:
            raise ConfigError(f"{command}: --seq-len is {self.seq_len}; it must be at least 1")
        if self.workload is not None:
            if self != ModelOptions(workload=self.workload):
                raise ConfigError(
                    f"{command}: --workload describes the model completely; leave out other model options"
                )
            return Workload.load(self.workload)

        folder = self.choose_folder(command)
        if folder is not None and (self.family or self.flavor or self.override):
            raise ConfigError(f"{command}: --hf is the model; leave out --family, --flavor and --override")
        known = model or (profile.model if profile is not None else None)
        choice = folder or self._choose(command, source, known)
        if profile is not None and isinstance(choice, ModelChoice):
            # Of another model its layers say nothing of what is missing.
            try:
                profile.check_model(choice.name)
            except ProfileError as error:
                raise ProfileError(f"{profile_file}: {error}") from None
        asked = self.seq_len or sequence_length
        length, dtype = self._choose_length_and_dtype(f"{command}: {profile_file}", profile, asked)
        if length is None:
            named = source if folder is None else f"--hf {self.hf}"
            raise ConfigError(f"{command}: {named} has no sequence length; give --seq-len 2048")
        return choice.measure(sequence_length=length, dtype=dtype or choose_dtype(devices))

    def list_options(self, name: str) -> tuple[str, ...]:
        """Options of the trainer for a workload of that name; empty for a workload file, whose model a script
        must name."""
        folder = self.choose_folder("plan")
        if folder is not None:
            return folder.list_options()
        with suppress(ConfigError):
            choice = parse_model(name)
            if self.workload is None:
                overrides = write_assignments(choice.overrides)
                named = ("--model.name", choice.family, "--model.flavor", choice.flavor)
                return (*named, "--model.override", *overrides) if overrides else named
        return ()

    def _choose_length_and_dtype(
        self, where: str, profile: Profile | None, length: int | None
    ) -> tuple[int | None, str | None]:
        """Sequence length and dtype, as far as options and the profile's layers determine them."""
        if profile is None or not profile.layers:
            return length, self.dtype
        measured = sorted({(times.sequence_length, times.dtype) for times in profile.layers})
        fitting = [each for each in measured if length in (None, each[0]) and self.dtype in (None, each[1])]
        if len(fitting) == 1:
            return fitting[0]
        known = ", ".join(f"{dtype} at {length} tokens" for length, dtype in measured)
        if fitting:
            raise ConfigError(f"{where}: has layers for {known}; choose with --dtype and --seq-len")
        given = [flag for flag, value in (("--dtype", self.dtype), ("--seq-len", self.seq_len)) if value]
        wanted = " at ".join([*filter(None, [self.dtype]), *([f"{length} tokens"] if length else [])])
        mend = f"leave {' and '.join(given)} out, or measure for that" if given else "measure for that"
        raise ConfigError(f"{where}: has no layers for {wanted}, only for {known}; {mend}")

    def _choose(self, command: str, source: str, named: str | None) -> ModelChoice:
        if self.family is not None and self.flavor is not None:
            return choose_model(self.family, self.flavor, self.override)
        if self.family or self.flavor or self.override:
            raise ConfigError(
                f"{command}: --family and --flavor go together, as in --family llama --flavor 7b"
            )
        if named is None:
            raise ConfigError(
                f"{command}: {source} names no model; give --family llama --flavor 7b, --hf DIR, or "
                "--workload FILE"
            )
        if named.startswith(PREFIX):
            raise ConfigError(
                f"{command}: {source} is for '{named}', of Hugging Face; give {_name_options(named)}, "
                "with the path of that folder"
            )
        return parse_model(named)


def _name_options(name: str) -> str:
    """`--hf DIR --lora-rank 16`, of the folder of that name."""
    folder, lora, rank = name.removeprefix(PREFIX).rpartition(" lora ")
    return f"--hf {folder} --lora-rank {rank}" if lora and rank.isdigit() else f"--hf {rank}"


@dataclass(frozen=True)
class ModelChoice:
    """A model of `zorselike/models`."""

    family: str
    flavor: str
    overrides: tuple[tuple[str, Any], ...] = ()
    """Settings that differ from the flavor's."""

    @property
    def name(self) -> str:
        return name_model(self.family, self.flavor, self.overrides)

    def config(self) -> DecoderConfig:
        """The model's configuration; raises `ConfigError` for names that do not exist."""
        from zorselike.models import get_config

        return get_config(self.family, self.flavor, **dict(self.overrides))

    @property
    def num_tokens(self) -> int:
        """Size of its vocabulary."""
        return self.config().vocab_size

    def measure(self, *, sequence_length: int, dtype: str) -> Workload:
        """Its workload, from its configuration; raises `ConfigError` where it does not take such rows."""
        from zorselike.models.workload import make_workload

        return make_workload(self.config(), sequence_length=sequence_length, dtype=dtype, model=self.name)

    def build(self) -> Decoder:
        """The model on the meta device."""
        import torch

        from zorselike.models import build_model

        with torch.device("meta"):
            return build_model(self.family, self.flavor, **dict(self.overrides))


def choose_model(family: str, flavor: str, overrides: Sequence[str]) -> ModelChoice:
    """The model that a command line names; `overrides` are `key=value`, else `ConfigError` is raised."""
    return ModelChoice(family, flavor, read_assignments(overrides, "model"))


def parse_model(name: str) -> ModelChoice:
    """The inverse of `ModelChoice.name`; raises `ConfigError` for other names."""
    words = name.split()
    if len(words) < 2:
        raise ConfigError(f"'{name}' is not a built-in model, such as 'llama 7b'; give --workload FILE")
    choice = choose_model(words[0], words[1], words[2:])
    try:
        choice.config()
    except ConfigError as error:
        raise ConfigError(f"'{name}' is not a built-in model ({error}); give --workload FILE") from None
    return choice


def find_dtype(plan: Plan) -> Dtype | None:
    """What layers were to compute in when a plan was made, by its workload's fingerprint; None where the plan
    does not tell."""
    if plan.sequence_length is not None and plan.workload_fingerprint is not None:
        with suppress(ConfigError):
            choice = parse_model(plan.model or "")
            for dtype in get_args(Dtype):
                workload = choice.measure(sequence_length=plan.sequence_length, dtype=dtype)
                if workload.fingerprint == plan.workload_fingerprint:
                    found: Dtype = dtype
                    return found
    return None


def choose_dtype(devices: Iterable[str]) -> Dtype:
    """`float16` if any of these device types lacks bfloat16 (V100, T4), as with a recipe's `auto`."""
    return "bfloat16" if all(map(_has_bfloat16, devices)) else "float16"


def _has_bfloat16(device: str) -> bool:
    try:
        peaks = find_device(device).peak_flops
    except ClusterError:
        return True  # It was measured, or is refused when its speed is needed.
    return not peaks or "bfloat16" in peaks
