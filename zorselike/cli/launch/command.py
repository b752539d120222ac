"""`zorselike launch`: what starts a plan that is there already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zorselike.cli.launch.launchers import Launcher
from zorselike.cli.options import check_outputs
from zorselike.errors import ConfigError

_File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """Write what starts a plan on the nodes that it names: torchrun's commands, or a job file.

    The file has one component for each kind of node: a Slurm heterogeneous job, a Kubernetes JobSet with a
    replicated job each, a SkyPilot job group with a task each, a Ray driver with a bundle for each node.
    """

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.toml")]
    """Plan to start, with [[devices]]."""

    launcher: Annotated[Launcher, tyro.conf.arg(aliases=["--to"])] = "torchrun"
    """What starts the processes."""

    config: Annotated[_File, tyro.conf.arg(help_behavior_hint="(default: by the plan's model)")] = None
    """Recipe of the run; its plan is replaced by this one."""

    cluster: Annotated[_File, tyro.conf.arg(help_behavior_hint="(default: zones are not known)")] = None
    """Cluster file, for the zones of nodes: those of different zones are then different kinds."""

    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"] | None,
        tyro.conf.arg(help_behavior_hint="(default: the plan's where it tells, else auto)"),
    ] = None
    """Without --config: dtype in which layers compute; with float16 updates wait for the end of the step."""

    defer_updates: bool = False
    """Without --config: clip by the norm of all gradients, so that updates wait for the end of the step."""

    output: Annotated[
        _File, tyro.conf.arg(aliases=["-o"], help_behavior_hint="(default: here, by the plan's name)")
    ] = None
    """File to write."""

    def run(self) -> None:
        from zorselike.cli.launch.job import Job, Program
        from zorselike.cli.launch.launchers import name_file, write_launch
        from zorselike.cli.model_choice import ModelOptions, find_dtype
        from zorselike.plan.cluster.cluster import Cluster
        from zorselike.plan.plan import Plan

        if self.launcher == "torchrun" and self.output is not None:
            raise ConfigError("launch: torchrun's commands are printed; leave out --output")
        output = self.output or name_file(self.launcher, plan=self.plan)
        check_outputs("launch", {"--output": output}, inputs=(self.plan, self.config, self.cluster))
        if self.config is not None and (self.dtype is not None or self.defer_updates):
            flag = "--dtype" if self.dtype is not None else "--defer-updates"
            raise ConfigError(
                f"launch: --config says everything but the plan; say {flag} there, or leave it out"
            )
        if self.config is not None and not Path(self.config).is_file():
            raise ConfigError(f"launch: --config is {self.config}: there is no such file; check its path")
        plan = Plan.load(self.plan).validate()
        dtype = self.dtype or find_dtype(plan) or "auto"
        program = Program(
            config=self.config,
            model=ModelOptions().list_options(plan.model or ""),
            dtype=dtype,
            defer_updates=self.defer_updates or dtype == "float16",
        )
        cluster = None if self.cluster is None else Cluster.load(self.cluster)
        job = Job(plan=plan, path=self.plan, program=program, cluster=cluster)
        print("\n".join(write_launch(job, self.launcher, output=output)))
