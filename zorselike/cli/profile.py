"""`zorselike profile`: measures this machine, or all that torchrun starts it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

from zorselike.cli.model_choice import ModelChoice, choose_model
from zorselike.errors import ConfigError
from zorselike.text.units import parse_size

if TYPE_CHECKING:
    from zorselike.plan.plan import Recompute
    from zorselike.plan.workload import Workload
    from zorselike.profiler.tasks import Job

_Part = Literal["layers", "update", "host_link", "links", "collectives", "max_rows", "program"]
_PARTS: tuple[_Part, ...] = get_args(_Part)


@dataclass(frozen=True, kw_only=True)
class ProfileCommand:
    """Measure layers, the largest rows, memory, links and the program; write a profile and a cluster file.

    One process measures one device. For several devices and the links between them start one process a
    device, on every node: torchrun --nproc-per-node gpu ... -m zorselike.cli profile ...
    """

    family: str = "llama"
    """Whose layers are measured."""

    flavor: str = "debug"
    """Which size of that family."""

    override: tuple[str, ...] = ()
    """Single settings of the model, such as num_layers=8."""

    seq_len: int = 2048
    """Tokens per row."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What layers compute in; in half precision the optimizer updates fp32 master weights."""

    recompute: Literal["none", "layer", "both"] = "none"
    """Whether layers are recomputed in the backward; the largest rows are found without, unless `layer`."""

    most_rows: int = 64
    """Rows at once, at most: sizes are 1, 2, 4, ... up to this or to the most that fit."""

    repeats: int = 5
    """Steps of which the median is taken."""

    zero: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    """ZeRO stages tried for the largest rows of the whole model, until every rank can compute one row."""

    only: tuple[_Part, ...] = _PARTS
    """What is measured."""

    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "profile.json"
    """The profile; one that is there is continued."""

    cluster: str = "cluster.toml"
    """The cluster that was found; one that is there, with the same nodes, is kept."""

    again: bool = False
    """Measure also what the profile has already."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure; `auto`: CUDA where torch finds a GPU, else CPU."""

    memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """As if devices had no more, such as 16GiB."""

    largest_message: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "64MiB"
    """Largest message and collective that links are measured with; smaller where they are slow."""

    timeout: float = 300.0
    """Seconds that ranks wait for each other at the start."""

    def run(self) -> None:
        self._check()
        memory_bytes = None if self.memory is None else _read_size("memory", self.memory)
        model = choose_model(self.family, self.flavor, self.override)
        config = model.config()

        from zorselike.models.workload import make_workload

        workload = make_workload(config, sequence_length=self.seq_len, dtype=self.dtype, model=model.name)
        job = self._make_job(model, workload, num_tokens=config.vocab_size)

        from zorselike.profiler.processes import find_device, join_processes
        from zorselike.profiler.session import measure

        with join_processes(find_device(self.device), timeout_s=self.timeout) as processes:
            profile = measure(
                job,
                processes,
                path=Path(self.output),
                cluster_path=Path(self.cluster),
                memory_bytes=memory_bytes,
            )
            if processes.rank == 0:
                from zorselike.profiler.summary import describe_profile

                print(describe_profile(profile))
                print(f"wrote {self.output} and {self.cluster}")

    def _check(self) -> None:
        for flag, number in (
            ("seq-len", self.seq_len),
            ("most-rows", self.most_rows),
            ("repeats", self.repeats),
        ):
            if number < 1:
                raise ConfigError(f"profile: --{flag} is {number}; it must be at least 1")
        for flag, values in (("zero", self.zero), ("only", self.only)):
            if not values:
                raise ConfigError(f"profile: --{flag} names nothing; give one or more, or leave it out")
        for flag, path in (("output", self.output), ("cluster", self.cluster)):
            if not Path(path).absolute().parent.is_dir():
                raise ConfigError(
                    f"profile: --{flag} is {path}, in a folder that does not exist; make it first"
                )

    def _make_job(self, model: ModelChoice, workload: Workload, *, num_tokens: int) -> Job:
        from zorselike.profiler.layers.probes import find_probes
        from zorselike.profiler.tasks import Job
        from zorselike.runtime.loss import token_cross_entropy
        from zorselike.train.data.loading_work import loading_rows

        settings: dict[str, tuple[Recompute, ...]] = {
            "none": ("none",),
            "layer": ("layer",),
            "both": ("none", "layer"),
        }
        return Job(
            workload=workload,
            build=model.build,
            num_tokens=num_tokens,
            probes=find_probes(model.build, workload, self.seq_len),
            recompute=settings[self.recompute],
            loss_fn=token_cross_entropy,
            most_rows=self.most_rows,
            repeats=self.repeats,
            stages=self.zero,
            parts=frozenset(self.only),
            largest_message_bytes=_read_size("largest-message", self.largest_message),
            again=self.again,
            between_steps=lambda: loading_rows(self.seq_len),
        )


def _read_size(flag: str, text: str) -> int:
    """Bytes of `16GiB`."""
    num_bytes = parse_size(text)
    if num_bytes is None or num_bytes <= 0:
        raise ConfigError(f"profile: --{flag} is '{text}'; write it as 16GiB or 80GB")
    return int(num_bytes)
