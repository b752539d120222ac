"""`zorselike simulate`: how a plan's step would run on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from zorselike.cli.model_choice import Dtype, ModelOptions
from zorselike.cli.options import check_outputs, find_width
from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Estimates, Plan
from zorselike.plan.workload import Workload
from zorselike.plan.write_estimates import write_estimates
from zorselike.schedule.orders import DEFAULT_ORDER, ORDERS

if TYPE_CHECKING:
    from zorselike.simulator.inputs import SimulationInputs
    from zorselike.simulator.simulated_plan import SimulatedPlan

_File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")]


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate a step of a plan: how fast it is, what limits it, and whether it fits.

    Prints a page and a drawing of the step. The page compares the plan with the fastest devices alone and
    with even shares, then shows the share of the devices' speed that is used, the cost if the cluster has
    prices, and each rank's time and memory. The simulated list of actions is the one that a run executes.
    Without a profile the speed of devices is estimated from their data sheets.
    """

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.toml")]
    """Plan to simulate."""

    cluster: Annotated[str, tyro.conf.arg(metavar="CLUSTER.toml")]
    """Cluster file: the machines and the links between them."""

    profile: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: catalogue, no measurement)")
    ] = None
    """Profile written by `zorselike profile`."""

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    defer_updates: bool = False
    """Updates wait for all gradients of a step, as with max_norm and clip = "global"."""

    elastic: bool = False
    """Hosts also hold copies of the state, and mirrors of other nodes', as with [elastic]."""

    schedule: Annotated[str, tyro.conf.arg(metavar="|".join((*ORDERS, "FILE.csv")))] = DEFAULT_ORDER
    """Order in which ranks compute: that of a run, a common pipeline schedule, or a file in the form of
    torch.distributed.pipelining, which has one rank a group."""

    trace: _File = None
    """Also write a Chrome trace, for https://ui.perfetto.dev; gzipped if the name ends in .gz. It has a track
    for each resource of each rank, arrows from sends to receives, and memory."""

    measured: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: none)")] = (
        None
    )
    """With --trace: traces of a real step ([profiling] in a recipe) to show in the same file, such as
    outputs/RUN/profile_traces/iteration_10."""

    png: _File = None
    """Also draw the step as a picture; needs matplotlib (pip install 'zorselike[viz]')."""

    html: _File = None
    """Also write a page to look at in a browser, by itself and without a network; needs Bokeh (pip install
    'zorselike[html]')."""

    write_estimates: bool = False
    """Also write time, memory and cost into the plan; a run then ends with a comparison by rank."""

    def run(self) -> None:
        print(simulate_plan(self))


def simulate_plan(command: Simulate) -> str:
    """The page and the drawing as text; writes the requested files."""
    from zorselike.cost.layer_times import LayerTimeModel
    from zorselike.planner.baselines.even import compare_even
    from zorselike.planner.devices.bounds import DeviceBounds
    from zorselike.planner.problem import PlanProblem
    from zorselike.simulator.report.gantt import draw_gantt
    from zorselike.simulator.report.page import format_report
    from zorselike.simulator.report.speeds import measure_speeds

    if command.measured is not None and command.trace is None:
        raise ConfigError("simulate: --measured is written into the file of --trace; give that too")
    if command.write_estimates and command.schedule != DEFAULT_ORDER:
        raise ConfigError(
            f"simulate: --write-estimates is for runs, which do not use --schedule {command.schedule}; leave "
            "one out"
        )
    check_outputs(
        "simulate",
        {"--trace": command.trace, "--png": command.png, "--html": command.html},
        inputs=(command.plan, command.cluster, command.profile, command.model.workload),
    )
    if command.html is not None:
        from zorselike.simulator.html.document import check_bokeh

        check_bokeh()
    plan = Plan.load(command.plan)
    inputs = _load_inputs(command, plan)
    with _naming_files(command):
        simulated = inputs.simulate(plan, schedule=command.schedule, record=True)
    clock = LayerTimeModel(inputs.profile, inputs.workload)
    speeds = measure_speeds(plan, inputs.workload, inputs.cluster, clock)
    width = find_width()
    baselines = compare_even(simulated, inputs, speeds)
    problem = PlanProblem(
        workload=inputs.workload,
        cluster=inputs.cluster,
        profile=inputs.profile,
        global_batch=plan.global_batch,
    )
    degree = max(group.degree for group in plan.groups)
    bounds = DeviceBounds(problem, clock, degree=degree)
    ideal_s = bounds.bound_types_s(Counter(simulated.device_types))
    notes = _list_notes(command, plan, inputs)
    page = format_report(simulated, baselines, ideal_s=ideal_s, notes=notes, width=width)
    drawing = draw_gantt(plan, simulated.simulation, device_types=simulated.device_types, width=width)
    written = _write_files(command, simulated)
    if command.html is not None:
        from zorselike.simulator.html.document import save_page

        save_page(simulated, command.html, baselines=baselines, speeds=speeds, ideal_s=ideal_s, notes=notes)
        written.append(f"page written to {command.html}: open it in a browser")
    return "\n\n".join([page, drawing, *(["\n".join(written)] if written else [])])


@contextmanager
def _naming_files(command: Simulate) -> Iterator[None]:
    """Prefixes errors with the names of the files that they are about."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{command.plan}: {error}") from None
    except ClusterError as error:
        raise ClusterError(f"{command.plan} on {command.cluster}: {error}") from None
    except ProfileError as error:
        raise ProfileError(f"{command.profile or command.cluster}: {error}") from None


def _load_inputs(command: Simulate, plan: Plan) -> SimulationInputs:
    from zorselike.cli.assumed_profile import assume_profile
    from zorselike.cost.profile import Profile
    from zorselike.simulator.inputs import SimulationInputs

    profile = None if command.profile is None else Profile.load(command.profile)
    cluster = Cluster.load(command.cluster)
    with _naming_files(command):
        devices = {cluster.device_type(place) for place in cluster.place_ranks(plan)}

    def load(model: ModelOptions) -> Workload:
        return model.load_workload(
            "simulate",
            source=command.plan,
            devices=devices,
            model=plan.model,
            sequence_length=plan.sequence_length,
            profile=profile,
            profile_file=command.profile,
        )

    workload = load(command.model)
    if command.model.dtype is None and plan.workload_fingerprint not in (None, workload.fingerprint):
        # Devices that the planner could have used, and left out, may have decided on the dtype.
        dtypes: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
        for dtype in dtypes:
            with suppress(ConfigError):
                other = load(replace(command.model, dtype=dtype))
                workload = other if other.fingerprint == plan.workload_fingerprint else workload
    return SimulationInputs(
        workload=workload,
        cluster=cluster,
        profile=assume_profile(workload) if profile is None else profile,
        defer_updates=command.defer_updates or workload.dtype == "float16",
        is_mirrored=command.elastic,
    )


def _list_notes(command: Simulate, plan: Plan, inputs: SimulationInputs) -> list[str]:
    from zorselike.cli.assumed_profile import NOT_MEASURED
    from zorselike.cost.layer_times import find_implausible

    notes = [NOT_MEASURED] if command.profile is None else []
    implausible = find_implausible(inputs.profile, inputs.workload)
    notes += [] if implausible is None else [implausible]
    if plan.cluster_fingerprint not in (None, inputs.cluster.fingerprint):
        notes.append(
            f"The plan was made for another cluster: {plan.cluster_fingerprint}, while {command.cluster} is "
            f"{inputs.cluster.fingerprint}"
        )
    return notes


def _write_files(command: Simulate, simulated: SimulatedPlan) -> list[str]:
    """Writes the requested files; a line for each."""
    lines = []
    if command.trace is not None:
        _write_trace(command.trace, command.measured, simulated)
        lines.append(f"trace written to {command.trace}: open it in https://ui.perfetto.dev")
    if command.png is not None:
        from zorselike.simulator.report.picture import save_picture

        save_picture(simulated, command.png)
        lines.append(f"picture written to {command.png}")
    if command.write_estimates:
        write_estimates(Path(command.plan), estimate(simulated))
        lines.append(f"estimates written to {command.plan}")
    return lines


def _write_trace(path: str, measured: str | None, simulated: SimulatedPlan) -> None:
    from zorselike.simulator.report.chrome_trace import make_trace, save_trace
    from zorselike.simulator.report.measured_trace import read_measured

    events = [] if measured is None else read_measured(measured, first_pid=simulated.plan.num_ranks)
    save_trace(make_trace(simulated, measured=events), path)


def estimate(simulated: SimulatedPlan) -> Estimates:
    """Estimates that a run of the plan is compared with."""
    return Estimates(
        iteration_s=simulated.simulation.iteration_s,
        peak_memory_bytes=simulated.peak_bytes,
        cost_per_iteration=simulated.simulation.cost or None,
    )
