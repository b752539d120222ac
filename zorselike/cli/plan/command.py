"""`zorselike plan`: the best plan for a cluster, found by search, or a quick one without search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import tyro

from zorselike.cli.launch.launchers import Launcher, name_file
from zorselike.cli.model_choice import ModelOptions
from zorselike.cli.options import check_outputs, one_of
from zorselike.errors import ConfigError

_Words = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
"""Values of an option that may be given several times."""
_Least = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="(default: any)")]


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """The objective, its constraints, and what is already decided."""

    objective: Literal["throughput", "cost"] = "throughput"
    """Shortest step, or cheapest step (nodes of the cluster then need prices)."""

    max_cost_per_iteration: Annotated[
        float | None, tyro.conf.arg(metavar="MONEY", help_behavior_hint="(default: no limit)")
    ] = None
    """Upper limit on the cost of a step, in the cluster's currency."""

    min_throughput: _Least = None
    """Lower limit on steps per second."""

    min_tokens_per_s: _Least = None
    """Lower limit on tokens per second."""

    max_devices: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all)")] = (
        None
    )
    """Upper limit on the number of devices."""

    quota: Annotated[
        _Words, tyro.conf.arg(metavar="[PLACE/]TYPE=INT ...", help_behavior_hint="(default: all devices)")
    ] = ()
    """Upper limits on devices of a type, such as T4=4, or of a type in a zone or region, such as
    us-east/A100-40=16; T4=0 leaves them out."""

    span_regions: bool = False
    """A group, whose ranks exchange most, may span several regions."""

    defer_updates: bool = False
    """For runs that clip by the norm of all gradients (max_norm with clip = "global"): updates wait for all
    gradients of a step."""

    elastic: bool = False
    """For runs with [elastic]: hosts also hold copies of the state, and mirrors of other nodes'."""

    fix: Annotated[
        _Words, tyro.conf.arg(metavar="KEY=VALUE ...", help_behavior_hint="(default: all is planned)")
    ] = ()
    """Settings that the search must keep: groups=type (or node, zone), or groups listed in pipeline order as
    nodes and local ranks (groups=a:0-3,b/c); zero=2, recompute=layer, offload=params,optimizer (or none),
    ministages=8, rows_per_microbatch=2, grad_reduce=once, overlap_grad_reduce=false (on GPUs: nothing runs
    beside reductions), in_flight=bounded (or unbounded: all forwards first), tensor_parallel=4 (replicas of
    1, 2, 4 or 8 like devices of a node, fewer where it has no more; or auto)."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How long the search runs, and what is printed and written."""

    budget: Annotated[str, tyro.conf.arg(metavar="TIME")] = "30s"
    """Time for the search; Ctrl-C ends it early with the best plan so far. Where nothing fits, to find out
    what would may take some times as long."""

    workers: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a core)")
    ] = None
    """Processes of the search; the plan does not depend on how many, unless the budget ends the search."""

    seed: int = 0
    """Random seed; the same seed gives the same plan if the search finishes within its budget."""

    all_devices: bool = False
    """Keep devices that make a step less than 1 % shorter and cost more; they are left out otherwise."""

    top: int = 5
    """Number of plans shown, each of a different structure."""

    explain: bool = False
    """Also print a page: what limits the plan, memory, where the time goes, what each kind of device adds and
    whether it is worth it, and what the next best plan would trade."""

    compare: bool = False
    """Also compare with even shares, Whale, Megatron-LM, TorchTitan-Het, HexiScale and Cephalo on the same
    devices and on parts of them; takes seconds for 20 devices, minutes for more than 100."""

    launch: Annotated[
        tuple[Launcher, ...] | None,
        one_of(*get_args(Launcher), several=True),
        tyro.conf.arg(
            metavar="[torchrun|slurm|jobset|skypilot|ray ...]", help_behavior_hint="(default: none)"
        ),
    ] = None
    """Also print the torchrun command of each node, or write a job file here, with a component for each kind
    of node; `zorselike launch` does it for a plan that is there."""

    html: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Also write a page to look at in a browser, by itself and without a network; needs Bokeh (pip install
    'zorselike[html]'). With --compare the other systems stand beside the plans found."""

    output: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = "plan.toml"
    """File to write the plan to."""


@dataclass(frozen=True, kw_only=True)
class SharesOptions:
    """A quick plan without search; memory is not checked."""

    shares: bool = False
    """Give layers and rows in proportion to speed, with one group per device type or node. The following
    options go with it."""

    # None where an option was not given: beside a search even its default would be a wish that is ignored.
    group_by: Annotated[
        Literal["type", "node"] | None,
        one_of("type", "node"),
        tyro.conf.arg(help_behavior_hint="(default: type)"),
    ] = None
    """Whether a group is the devices of one type or of one node."""

    ministages: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 1)")] = None
    """Number of ministages of each group."""

    rows_per_microbatch: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 1)")
    ] = None
    """Upper limit on the rows of a microbatch."""

    zero: Annotated[
        Literal[0, 1, 2, 3] | None, one_of(0, 1, 2, 3), tyro.conf.arg(help_behavior_hint="(default: 2)")
    ] = None
    """ZeRO stage of every group."""

    recompute: Annotated[
        Literal["none", "layer"] | None,
        one_of("none", "layer"),
        tyro.conf.arg(help_behavior_hint="(default: none)"),
    ] = None
    """Whether layers are recomputed in the backward pass."""

    offload: Annotated[
        tuple[Literal["params", "optimizer", "activations"], ...],
        tyro.conf.arg(help_behavior_hint="(default: none)"),
    ] = ()
    """What is kept in host memory between uses."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Find the best plan for a model on a cluster, and explain it.

    The search chooses the devices, groups and their order, each rank's layers, rows and microbatches, ZeRO
    stages, recomputation, offload and microbatches in flight. Every plan that it returns fits, according to
    the simulator, and comes with a proven bound on how much faster any plan could be. Without a profile the
    speed of devices is estimated from their data sheets; `zorselike profile` measures it.
    """

    cluster: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(needed, or --from-profile)")
    ] = None
    """Cluster file, written by `zorselike profile` or by hand (examples: recipes/clusters)."""

    profile: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: catalogue, no measurement)")
    ] = None
    """Profile written by `zorselike profile`."""

    from_profile: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """Profile, together with the cluster.toml beside it."""

    global_batch: Annotated[int, tyro.conf.arg(help_behavior_hint="(needed)")] = 0
    """Rows per optimizer step."""

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    problem: tyro.conf.OmitArgPrefixes[ProblemOptions] = field(default_factory=ProblemOptions)

    search: tyro.conf.OmitArgPrefixes[SearchOptions] = field(default_factory=SearchOptions)

    proportional: tyro.conf.OmitArgPrefixes[SharesOptions] = field(default_factory=SharesOptions)

    def run(self) -> None:
        self._check()
        if self.proportional.shares:
            from zorselike.cli.plan.shares import print_shares_plan

            print_shares_plan(self)
        else:
            from zorselike.cli.plan.search import print_best_plan

            print_best_plan(self)

    def _check(self) -> None:
        """Raises `ConfigError` for contradictory options, before files are read."""
        from zorselike.cli.plan.inputs import check_files, list_files

        check_files("plan", self)
        if self.global_batch < 1:
            raise ConfigError(
                f"plan: --global-batch is {self.global_batch}; give the number of rows of a step"
            )
        outputs = {"--output": self.search.output, "--html": self.search.html}
        for launcher in self.search.launch or ():
            flag = f"--launch {launcher}'s file, named after --output,"
            outputs[flag] = name_file(launcher, plan=self.search.output)
        check_outputs("plan", outputs, inputs=list_files(self))
        if self.proportional.shares:
            planned = SearchOptions(output=self.search.output)
            if self.problem != ProblemOptions() or self.search != planned:
                raise ConfigError(
                    "plan: --shares plans without a search and takes none of its options; leave one out"
                )
        elif self.proportional != SharesOptions():
            raise ConfigError(
                "plan: --group-by, --ministages, --rows-per-microbatch, --zero, --recompute and --offload go "
                "with --shares; for the search give such settings as --fix zero=2 ministages=8"
            )
