"""`zorselike simulate`: what a plan's step would take on a cluster, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from zorselike.cli.model_choice import ModelOptions
from zorselike.cli.outputs import check_outputs, find_width
from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Estimates, Plan
from zorselike.plan.write_estimates import write_estimates

if TYPE_CHECKING:
    from zorselike.simulator.inputs import SimulationInputs
    from zorselike.simulator.simulated_plan import SimulatedPlan

_File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate a step of a plan: how fast, who limits, what fits, and what even shares would do."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.toml")]
    """The plan."""

    cluster: Annotated[str, tyro.conf.arg(metavar="CLUSTER.toml")]
    """The machines and the links between them."""

    profile: Annotated[_File, tyro.conf.arg(help_behavior_hint="(default: catalogue, no measurement)")] = None
    """What was measured, from `zorselike profile`."""

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    defer_updates: bool = False
    """Updates wait for all gradients of a step, as with a global max_norm."""

    schedule: Literal["ours", "1f1b", "interleaved"] = "ours"
    """In which order ranks compute; the others are what pipelines do today."""

    trace: _File = None
    """Also write a Chrome trace, for Perfetto; gzipped if it ends in .gz."""

    measured: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """With --trace: traces of a real step to show below, such as outputs/RUN/profile_traces/iteration_10."""

    png: _File = None
    """Also draw the step; needs matplotlib."""

    write_estimates: bool = False
    """Also write time, memory and cost into the plan, for a run to compare itself with."""

    def run(self) -> None:
        print(simulate_plan(self))


def simulate_plan(command: Simulate) -> str:
    """The report and the drawing as text; writes the files that are asked for."""
    from zorselike.cost.layer_times import LayerTimeModel
    from zorselike.planner.baselines.even import compare_even
    from zorselike.simulator.report.gantt import draw_gantt
    from zorselike.simulator.report.ideal import measure_speeds
    from zorselike.simulator.report.page import format_report

    if command.measured is not None and command.trace is None:
        raise ConfigError("simulate: --measured goes into the file of --trace; give that too")
    if command.write_estimates and command.schedule != "ours":
        raise ConfigError(
            f"simulate: --write-estimates is for runs, which know no --schedule {command.schedule}; leave "
            "one out"
        )
    check_outputs("simulate", {"--trace": command.trace, "--png": command.png})
    plan = Plan.load(command.plan)
    setting = _load_setting(command, plan)
    with _naming_files(command):
        case = setting.simulate(plan, schedule=command.schedule, record=True)
    clock = LayerTimeModel(setting.profile, setting.workload)
    speeds = measure_speeds(plan, setting.workload, setting.cluster, clock)
    width = find_width()
    page = format_report(
        case,
        compare_even(case, setting, speeds),
        ideal_s=plan.global_batch / sum(speeds),
        notes=_list_notes(command, plan, setting),
        width=width,
    )
    drawing = draw_gantt(plan, case.simulation, device_types=case.device_types, width=width)
    return "\n\n".join([page, drawing, *_write_files(command, case)])


@contextmanager
def _naming_files(command: Simulate) -> Iterator[None]:
    """Errors of what the files say together begin with their names."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{command.plan}: {error}") from None
    except ClusterError as error:
        raise ClusterError(f"{command.plan} on {command.cluster}: {error}") from None
    except ProfileError as error:
        raise ProfileError(f"{command.profile or command.cluster}: {error}") from None


def _load_setting(command: Simulate, plan: Plan) -> SimulationInputs:
    from zorselike.cli.assumed_profile import assume_profile
    from zorselike.cost.profile import Profile
    from zorselike.simulator.inputs import SimulationInputs

    profile = None if command.profile is None else Profile.load(command.profile)
    cluster = Cluster.load(command.cluster)
    with _naming_files(command):
        devices = {cluster.device_type(place) for place in cluster.place_ranks(plan)}
    workload = command.model.load_workload(
        "simulate",
        source=command.plan,
        devices=devices,
        model=plan.model,
        sequence_length=plan.sequence_length,
        profile=profile,
    )
    return SimulationInputs(
        workload=workload,
        cluster=cluster,
        profile=assume_profile(workload) if profile is None else profile,
        defer_updates=command.defer_updates or workload.dtype == "float16",
    )


def _list_notes(command: Simulate, plan: Plan, setting: SimulationInputs) -> list[str]:
    from zorselike.cli.assumed_profile import NOT_MEASURED

    notes = [NOT_MEASURED] if command.profile is None else []
    if plan.cluster_fingerprint not in (None, setting.cluster.fingerprint):
        notes.append(
            f"Another cluster: the plan was made for {plan.cluster_fingerprint}, {command.cluster} is "
            f"{setting.cluster.fingerprint}"
        )
    return notes


def _write_files(command: Simulate, case: SimulatedPlan) -> list[str]:
    """Writes what is asked for; a line for each."""
    lines = []
    if command.trace is not None:
        _write_trace(command.trace, command.measured, case)
        lines.append(f"trace written to {command.trace}: open it in https://ui.perfetto.dev")
    if command.png is not None:
        from zorselike.simulator.report.picture import save_picture

        save_picture(case, command.png)
        lines.append(f"picture written to {command.png}")
    if command.write_estimates:
        write_estimates(Path(command.plan), estimate(case))
        lines.append(f"estimates written to {command.plan}")
    return ["\n".join(lines)] if lines else []


def _write_trace(path: str, measured: str | None, case: SimulatedPlan) -> None:
    from zorselike.simulator.report.chrome_trace import make_trace, save_trace
    from zorselike.simulator.report.measured_trace import read_measured

    events = [] if measured is None else read_measured(measured, first_pid=case.plan.num_ranks)
    save_trace(make_trace(case, measured=events), path)


def estimate(case: SimulatedPlan) -> Estimates:
    """What a run of a plan is to be held against."""
    return Estimates(
        iteration_s=case.simulation.iteration_s,
        peak_memory_bytes=case.peak_bytes,
        cost_per_iteration=case.simulation.cost or None,
    )
