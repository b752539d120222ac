"""`zorselike plan`: a plan from a profile and a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from zorselike.plan.cluster import Cluster
from zorselike.plan.errors import ConfigError
from zorselike.plan.workload import Workload

if TYPE_CHECKING:
    from zorselike.cost.profile import Profile

T = TypeVar("T")

_Path = Annotated[str | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Make a plan from a profile and a cluster; with --shares layers and rows in proportion to speed."""

    shares: bool = False
    """Layers and rows in proportion to speed: one group for each type of device or each node, no search."""

    profile: _Path = None
    """What `zorselike profile` measured."""

    cluster: _Path = None
    """The machines, as `zorselike profile` found them or written by hand."""

    workload: _Path = None
    """The model's layers, if it is none of ours or is not to be the profile's."""

    global_batch: int = 0
    """Rows per optimizer step; needed."""

    seq_len: int | None = None
    """Tokens per row; that of the profile, if it has only one."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """What layers compute in; that of the profile, if it has only one."""

    group_by: Literal["type", "node"] = "type"
    """What makes a group: devices of one type, or of one node."""

    ministages: int = 1
    """Ministages of each group."""

    rows_per_microbatch: int = 1
    """Rows that a rank computes at once, at most."""

    zero: Literal[0, 1, 2, 3] = 2
    """ZeRO stage of every group."""

    recompute: Literal["none", "layer"] = "none"
    """Whether layers are recomputed in the backward."""

    offload: tuple[Literal["params", "optimizer", "activations"], ...] = ()
    """What goes to host memory between its uses."""

    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "plan.toml"
    """The plan."""

    def run(self) -> None:
        if not self.shares:
            raise ConfigError(
                "plan: the search for the best plan is not there yet; give --shares for a plan whose layers "
                "and rows are in proportion to speed"
            )
        for flag in ("profile", "cluster"):
            if getattr(self, flag) is None:
                raise ConfigError(
                    f"plan: --{flag} is missing; `zorselike profile` writes profile.json and cluster.toml"
                )
        if self.global_batch < 1:
            raise ConfigError(f"plan: --global-batch is {self.global_batch}; say how many rows a step has")
        if self.seq_len is not None and self.seq_len < 1:
            raise ConfigError(f"plan: --seq-len is {self.seq_len}; it must be at least 1")

        from zorselike.cost.layer_times import LayerClock
        from zorselike.cost.profile import Profile
        from zorselike.planner.shares_plan import SharesJob, plan_shares

        assert self.profile is not None and self.cluster is not None
        profile, cluster = Profile.load(self.profile), Cluster.load(self.cluster)
        workload = self._find_workload(profile)
        clock = LayerClock(profile, workload)
        job = SharesJob(
            global_batch=self.global_batch,
            group_by=self.group_by,
            ministages=self.ministages,
            rows_per_microbatch=self.rows_per_microbatch,
            zero=self.zero,
            recompute=self.recompute,
            offload=self.offload,
        )
        plan = plan_shares(workload, cluster, clock, job)
        plan.save(self.output)
        print(plan.explain())
        for line in clock.assumptions:
            print(f"assumed: {line}")
        print(f"wrote {self.output}; memory was not looked at")

    def _find_workload(self, profile: Profile) -> Workload:
        """The workload that is given, or that of the profile's model."""
        if self.workload is not None:
            return Workload.load(Path(self.workload))

        from zorselike.cli.model_choice import parse_model
        from zorselike.models.workload import make_workload

        measured = {(times.dtype, times.sequence_length) for times in profile.layers}
        fitting = {
            (dtype, length)
            for dtype, length in measured
            if self.dtype in (None, dtype) and self.seq_len in (None, length)
        }
        if measured and not fitting:
            known = ", ".join(f"{dtype} at {length} tokens" for dtype, length in sorted(measured))
            raise ConfigError(
                f"plan: {self.profile} has no layers for this --dtype and --seq-len, only for {known}; leave "
                "them out, or measure for them"
            )
        return make_workload(
            parse_model(profile.model).config(),
            sequence_length=self.seq_len or _only({length for _, length in fitting}, "--seq-len"),
            dtype=self.dtype or _only({dtype for dtype, _ in fitting}, "--dtype"),
            model=profile.model,
        )


def _only(values: set[T], flag: str) -> T:
    if not values:
        raise ConfigError(f"plan: the profile has no layers, which would say {flag}; give it")
    if len(values) > 1:
        known = ", ".join(sorted(map(str, values)))
        raise ConfigError(f"plan: the profile has layers for {flag} {known}; give one of them")
    return next(iter(values))
