"""`zorselike plan`: the best plan for a cluster, found by search, or a quick one by proportion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from zorselike.cli.model_choice import ModelOptions
from zorselike.cli.outputs import check_outputs
from zorselike.errors import ConfigError

_Words = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
"""Words of an option that may be given several times."""


@dataclass(frozen=True, kw_only=True)
class WantedOptions:
    """What is wanted, within what, and what is decided already."""

    objective: Literal["throughput", "cost"] = "throughput"
    """The least time of a step, or the least money."""

    max_cost_per_iteration: Annotated[
        float | None, tyro.conf.arg(metavar="MONEY", help_behavior_hint="(default: no limit)")
    ] = None
    """The most that a step may cost, in the cluster's currency."""

    min_throughput: Annotated[
        float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="(default: any)")
    ] = None
    """The least steps per second."""

    min_tokens_per_s: Annotated[
        float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="(default: any)")
    ] = None
    """The same in tokens per second."""

    max_devices: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all)")] = (
        None
    )
    """The most devices that a plan may use."""

    quota: Annotated[
        _Words, tyro.conf.arg(metavar="[PLACE/]TYPE=INT ...", help_behavior_hint="(default: all devices)")
    ] = ()
    """The most devices of a type that may be used, such as T4=4, in a zone or region: us-east/A100-40=16."""

    span_regions: bool = False
    """Groups, which exchange most, may have devices of several regions."""

    defer_updates: bool = False
    """Updates wait for all gradients of a step, as a recipe's max_norm has it with clip = "global"."""

    fix: Annotated[
        _Words, tyro.conf.arg(metavar="KEY=VALUE ...", help_behavior_hint="(default: all is planned)")
    ] = ()
    """What is decided already: groups=type, node, zone or nodes with local ranks in the pipeline's order
    (groups=a:0-3,b/c), zero=2, recompute=layer, offload=params,optimizer (or none), ministages=8,
    rows_per_microbatch=2, grad_reduce=once, in_flight=bounded (or unbounded: forward first)."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How long is searched, and what is printed and written."""

    budget: Annotated[str, tyro.conf.arg(metavar="TIME")] = "30s"
    """Time for the search; Ctrl-C ends it early, with the best so far."""

    seed: int = 0
    """The same seed gives the same plan where the search ends before its time does."""

    top: int = 5
    """Plans that are shown, of different structure each."""

    explain: bool = False
    """Also a page: what limits, memory, bubble, what each kind of device adds, what the next best would
    trade."""

    compare: bool = False
    """Also what others would do with the same devices: even shares (FSDP) and its kin."""

    launch: bool = False
    """Also the torchrun line of each node."""

    output: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = "plan.toml"
    """The plan."""


@dataclass(frozen=True, kw_only=True)
class SharesOptions:
    """A quick plan without search."""

    shares: bool = False
    """Layers and rows in proportion to speed: one group for each type of device or each node, no search.
    The following go with it."""

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


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Find the best plan for a model on a cluster, and say why it is.

    Without a profile devices are as fast as their data sheets let expect; `zorselike profile` measures them.
    """

    cluster: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(needed, or --from-profile)")
    ] = None
    """The machines, as `zorselike profile` found them or written by hand."""

    profile: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: catalogue, no measurement)")
    ] = None
    """What `zorselike profile` measured."""

    from_profile: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """The same, with the cluster.toml that lies beside it."""

    global_batch: Annotated[int, tyro.conf.arg(help_behavior_hint="(needed)")] = 0
    """Rows per optimizer step."""

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    wanted: tyro.conf.OmitArgPrefixes[WantedOptions] = field(default_factory=WantedOptions)

    search: tyro.conf.OmitArgPrefixes[SearchOptions] = field(default_factory=SearchOptions)

    quick: tyro.conf.OmitArgPrefixes[SharesOptions] = field(default_factory=SharesOptions)

    def run(self) -> None:
        self._check()
        if self.quick.shares:
            from zorselike.cli.plan.shares import print_shares_plan

            print_shares_plan(self)
        else:
            from zorselike.cli.plan.search import print_best_plan

            print_best_plan(self)

    def _check(self) -> None:
        """Raises `ConfigError` for options that contradict each other, before files are read."""
        if self.from_profile is not None and self.profile is not None:
            raise ConfigError("plan: --from-profile and --profile are both given; keep one of them")
        if self.cluster is None and self.from_profile is None:
            raise ConfigError(
                "plan: --cluster is missing; name a cluster file (recipes/clusters has some), or give "
                "--from-profile with what `zorselike profile` wrote"
            )
        if self.global_batch < 1:
            raise ConfigError(f"plan: --global-batch is {self.global_batch}; say how many rows a step has")
        check_outputs("plan", {"--output": self.search.output})
        if self.quick.shares:
            planned = SearchOptions(output=self.search.output)
            if self.wanted != WantedOptions() or self.search != planned:
                raise ConfigError(
                    "plan: --shares is a plan without search and takes none of its options; leave one out"
                )
        elif self.quick != SharesOptions():
            raise ConfigError(
                "plan: --group-by, --ministages, --rows-per-microbatch, --zero, --recompute and --offload go "
                "with --shares; for the search say what is decided as --fix zero=2 ministages=8"
            )
