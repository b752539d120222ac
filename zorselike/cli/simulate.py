"""`zorselike simulate`: what a plan's step would take on a cluster, before anything runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from zorselike.cli.show import ALLOCATOR_SHARE, CONTEXT_BYTES
from zorselike.plan.cluster import Cluster
from zorselike.plan.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.plan.plan import Estimates, Plan
from zorselike.plan.workload import Workload
from zorselike.plan.write_estimates import write_estimates

if TYPE_CHECKING:
    from zorselike.cost.profile import Profile
    from zorselike.simulator.case import Case
    from zorselike.simulator.setting import Setting

_DEFAULT_DTYPE = "bfloat16"
_WIDTHS = (60, 160)
"""Of what is printed, however narrow or wide the terminal."""

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

    workload: _File = None
    """The model's layers as numbers (JSON), for a model that is none of ours."""

    family: Annotated[
        str | None, tyro.conf.arg(aliases=["--model"], help_behavior_hint="(default: the plan's)")
    ] = None
    """Of a model of ours: llama or gpt."""

    flavor: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: the plan's)")] = None
    """Its size, such as 7b."""

    override: tuple[str, ...] = ()
    """Single settings of the model, such as num_layers=8."""

    seq_len: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: the plan's)")] = None
    """Tokens per row."""

    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        tyro.conf.arg(help_behavior_hint="(default: the profile's, else bfloat16)"),
    ] = None
    """What layers compute in; with float16 updates wait for the end of the step."""

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
    from zorselike.cost.layer_times import LayerClock
    from zorselike.simulator.compare import compare_even
    from zorselike.simulator.gantt import draw_gantt
    from zorselike.simulator.ideal import measure_speeds
    from zorselike.simulator.report import format_report

    if command.measured is not None and command.trace is None:
        raise ConfigError("simulate: --measured goes into the file of --trace; give that too")
    if command.write_estimates and command.schedule != "ours":
        raise ConfigError(
            f"simulate: --write-estimates is for runs, which know no --schedule {command.schedule}; leave "
            "one out"
        )
    plan = Plan.load(command.plan)
    setting = _load_setting(command, plan)
    with _naming_files(command):
        case = setting.simulate(plan, schedule=command.schedule, record=True)
    clock = LayerClock(setting.profile, setting.workload)
    speeds = measure_speeds(plan, setting.workload, setting.cluster, clock)
    width = min(_WIDTHS[1], max(_WIDTHS[0], shutil.get_terminal_size((110, 24)).columns))
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


def _load_setting(command: Simulate, plan: Plan) -> Setting:
    from zorselike.cost.profile import Profile
    from zorselike.simulator.setting import Setting

    profile = None if command.profile is None else Profile.load(command.profile)
    workload = _load_workload(command, plan, profile)
    return Setting(
        workload=workload,
        cluster=Cluster.load(command.cluster),
        profile=_assume_profile(workload) if profile is None else profile,
        defer_updates=command.defer_updates or workload.dtype == "float16",
    )


def _assume_profile(workload: Workload) -> Profile:
    """A profile without measurements, which leaves room for what a process takes."""
    from zorselike.cost.profile import Overheads, Profile, Source

    overheads = Overheads(
        context_bytes=CONTEXT_BYTES, allocator_share=ALLOCATOR_SHARE, source=Source("given", note="assumed")
    )
    return Profile(model=workload.model, overheads=overheads)


def _load_workload(command: Simulate, plan: Plan, profile: Profile | None) -> Workload:
    """From --workload; else of the model that --family, the plan or the profile names."""
    if command.seq_len is not None and command.seq_len < 1:
        raise ConfigError(f"simulate: --seq-len is {command.seq_len}; it must be at least 1")
    given = (command.family, command.flavor, command.override or None, command.seq_len, command.dtype)
    if command.workload is not None:
        if any(value is not None for value in given):
            raise ConfigError(
                "simulate: --workload says it all; leave out what the model is by other options"
            )
        return Workload.load(command.workload)

    from zorselike.cli.model_choice import choose_model, parse_model
    from zorselike.models.workload import make_workload

    named = plan.model or (profile.model if profile is not None else None)
    if command.family is not None and command.flavor is not None:
        choice = choose_model(command.family, command.flavor, command.override)
    elif any(given[:3]):
        raise ConfigError("simulate: --family and --flavor go together, as in --family llama --flavor 7b")
    elif named is not None:
        choice = parse_model(named)
    else:
        raise ConfigError(
            f"simulate: {command.plan} names no model; give --family llama --flavor 7b, or --workload FILE"
        )
    layers = () if profile is None else profile.layers
    lengths = {times.sequence_length for times in layers}
    dtypes = {times.dtype for times in layers}
    sequence_length = command.seq_len or plan.sequence_length or (min(lengths) if len(lengths) == 1 else None)
    dtype = command.dtype or (min(dtypes) if len(dtypes) == 1 else None)
    if sequence_length is None:
        raise ConfigError(f"simulate: {command.plan} does not say how long a row is; give --seq-len 2048")
    return make_workload(
        choice.config(),
        sequence_length=sequence_length,
        dtype=dtype or _DEFAULT_DTYPE,
        model=choice.name,
    )


def _list_notes(command: Simulate, plan: Plan, setting: Setting) -> list[str]:
    from zorselike.cost.layer_times import REACHED_OF_PEAK

    notes = []
    if command.profile is None:
        notes.append(
            f"NOT MEASURED: without --profile devices are taken to reach {REACHED_OF_PEAK:.0%} of the "
            f"catalogue's peak FLOP/s, a process to take {CONTEXT_BYTES / 2**30:g} GiB of each and the "
            f"allocator {ALLOCATOR_SHARE:.0%} more than tensors ask for; `zorselike profile` measures that"
        )
    if plan.cluster_fingerprint not in (None, setting.cluster.fingerprint):
        notes.append(
            f"Another cluster: the plan was made for {plan.cluster_fingerprint}, {command.cluster} is "
            f"{setting.cluster.fingerprint}"
        )
    return notes


def _write_files(command: Simulate, case: Case) -> list[str]:
    """Writes what is asked for; a line for each."""
    lines = []
    if command.trace is not None:
        _write_trace(command.trace, command.measured, case)
        lines.append(f"trace written to {command.trace}: open it in https://ui.perfetto.dev")
    if command.png is not None:
        from zorselike.simulator.picture import save_picture

        save_picture(case, command.png)
        lines.append(f"picture written to {command.png}")
    if command.write_estimates:
        write_estimates(Path(command.plan), estimate(case))
        lines.append(f"estimates written to {command.plan}")
    return ["\n".join(lines)] if lines else []


def _write_trace(path: str, measured: str | None, case: Case) -> None:
    from zorselike.simulator.chrome_trace import make_trace, save_trace
    from zorselike.simulator.measured_trace import read_measured

    events = [] if measured is None else read_measured(measured, first_pid=case.plan.num_ranks)
    save_trace(make_trace(case, measured=events), path)


def estimate(case: Case) -> Estimates:
    """What a run of a plan is to be held against."""
    return Estimates(
        iteration_s=case.simulation.iteration_s,
        peak_memory_bytes=case.peak_bytes,
        cost_per_iteration=case.simulation.cost or None,
    )
