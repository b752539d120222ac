"""`zorselike profile`: measures this machine, or all machines on which torchrun starts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

from zorselike.cli.folder_choice import FolderChoice, FolderOptions
from zorselike.cli.model_choice import OVERRIDES, ModelChoice, choose_model
from zorselike.cli.options import check_at_least, check_outputs, read_size
from zorselike.errors import ConfigError
from zorselike.text.wording import list_few

if TYPE_CHECKING:
    from zorselike.plan.plan import Recompute
    from zorselike.plan.workload import Workload
    from zorselike.profiler.tasks import Job

_Part = Literal["layers", "update", "host_link", "links", "collectives", "largest_batch", "program"]
_PARTS: tuple[_Part, ...] = get_args(_Part)


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(FolderOptions):
    """Measure layers, largest batches, memory, links and the program; write a profile and a cluster file.

    One process measures one device. For several devices and the links between them start it like a training
    job, on every node: torchrun --nproc-per-node gpu ... -m zorselike.cli profile ... It says how long it
    will take, adds to a profile that exists, and works without a GPU (with a number of CPU ranks in place of
    gpu). A machine that does other work meanwhile is slower than its profile says.
    """

    family: Annotated[
        str | None,
        tyro.conf.arg(aliases=["--model"], metavar="NAME", help_behavior_hint="(default: llama)"),
    ] = None
    """Family of the built-in model whose layers are measured."""

    flavor: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: debug)")] = None
    """Size within the family, such as 7b."""

    override: Annotated[tuple[str, ...], OVERRIDES] = ()
    """Changed settings of the model, such as num_layers=8."""

    seq_len: int = 2048
    """Tokens per row."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype in which layers compute; in half precision the optimizer updates fp32 master weights."""

    recompute: Literal["none", "layer", "both"] = "none"
    """Whether layers are recomputed in the backward pass; for the largest batches only with `layer`."""

    tensor_parallel: tuple[int, ...] = (1,)
    """Tensor-parallel degrees at which layers are measured, such as 1 2 4: a rank's part of a layer on one
    device. Collectives inside replicas are counted by the links."""

    most_rows: int = 64
    """Largest microbatch that is tried: sizes are 1, 2, 4, ... rows up to this, as far as they fit."""

    repeats: int = 5
    """Number of repetitions, of which the median is taken."""

    zero: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    """ZeRO stages under which the largest batch of the whole model is looked for."""

    only: tuple[_Part, ...] = _PARTS
    """Parts to measure."""

    output: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = "profile.json"
    """Profile to write; an existing one is continued."""

    cluster: Annotated[str, tyro.conf.arg(metavar="FILE")] = "cluster.toml"
    """Cluster file to write; an existing one with the same nodes is kept."""

    again: bool = False
    """Also measure again what the profile has already."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure; `auto`: CUDA where torch finds a GPU, else CPU."""

    memory: Annotated[
        str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="(default: all of it)")
    ] = None
    """Memory to assume for every device, such as 16GiB, if less than it has."""

    largest_message: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "64MiB"
    """Largest message and collective with which links are measured; smaller on slow links."""

    timeout: float = 300.0
    """Seconds that ranks wait for each other at the start."""

    def run(self) -> None:
        self._check()
        memory_bytes = read_size("profile", "--memory", self.memory)
        folder = self.choose_folder("profile")
        if folder is not None and (self.family or self.flavor or self.override):
            raise ConfigError("profile: --hf is the model; leave out --family, --flavor and --override")
        model = folder or choose_model(self.family or "llama", self.flavor or "debug", self.override)
        workload = model.measure(sequence_length=self.seq_len, dtype=self.dtype)
        self._check_degrees(workload)
        job = self._make_job(model, workload)

        from zorselike.profiler.processes import read_timeout
        from zorselike.profiler.session import measure
        from zorselike.runtime.processes.device import find_device, lacks_bf16
        from zorselike.runtime.processes.world import check_world
        from zorselike.runtime.watched import join_watched

        device = find_device(
            self.device,
            without_gpu="--device cuda: torch finds no GPU here; leave it out, or give --device cpu",
        )
        with join_watched(device, timeout=read_timeout(self.timeout)) as processes:
            processes.gather_or_raise(lambda: check_world(processes.infos))
            slow = sorted({info.device_name for info in processes.infos if lacks_bf16(info)})
            if slow and self.dtype == "bfloat16" and processes.rank == 0:
                print(
                    f"{list_few(slow)} {'compute' if len(slow) > 1 else 'computes'} bfloat16 slowly: give "
                    '--dtype float16, which a recipe\'s mixed_precision_param = "auto" is there, too',
                    flush=True,
                )
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
                has_cluster = Path(self.cluster).exists()
                print(f"wrote {self.output} and {self.cluster}" if has_cluster else f"wrote {self.output}")

    def _check(self) -> None:
        counts = {f"--tensor-parallel {degree}": degree for degree in self.tensor_parallel}
        counts |= {"--seq-len": self.seq_len, "--most-rows": self.most_rows, "--repeats": self.repeats}
        check_at_least("profile", 1, counts)
        for flag, values in (("zero", self.zero), ("only", self.only)):
            if not values:
                raise ConfigError(f"profile: --{flag} is empty; give at least one value, or leave it out")
        check_outputs("profile", {"--output": self.output, "--cluster": self.cluster}, writes=False)

    def _check_degrees(self, workload: Workload) -> None:
        most = min(workload.max_tensor_parallel, self.seq_len)
        if (wanted := max(self.tensor_parallel, default=1)) > most:
            can = f"can be cut into {most} at most" if most > 1 else "cannot be cut"
            raise ConfigError(
                f"profile: --tensor-parallel {wanted}: layers of {workload.model} {can}; leave it out"
            )

    def _make_job(self, model: FolderChoice | ModelChoice, workload: Workload) -> Job:
        from zorselike.profiler.layers.probes import find_probes
        from zorselike.profiler.tasks import Job
        from zorselike.runtime.loss import token_cross_entropy
        from zorselike.train.data.loader import loading_rows

        largest_message_bytes = read_size("profile", "--largest-message", self.largest_message)
        assert largest_message_bytes is not None
        settings: dict[str, tuple[Recompute, ...]] = {
            "none": ("none",),
            "layer": ("layer",),
            "both": ("none", "layer"),
        }
        return Job(
            workload=workload,
            build=model.build,
            num_tokens=model.num_tokens,
            probes=find_probes(model.build, workload),
            recompute=settings[self.recompute],
            degrees=self.tensor_parallel,
            loss_fn=token_cross_entropy,
            most_rows=self.most_rows,
            repeats=self.repeats,
            stages=self.zero,
            parts=frozenset(self.only),
            largest_message_bytes=largest_message_bytes,
            again=self.again,
            between_steps=lambda: loading_rows(self.seq_len),
        )
