"""`zorselike show`: a plan, its schedule, or the largest model that fits."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from zorselike.cli.options import check_at_least, check_outputs, read_size
from zorselike.errors import ConfigError, FileError, PlanError
from zorselike.plan.plan import Plan
from zorselike.plan.workload import ITEMSIZES
from zorselike.text.files import write_text
from zorselike.text.layout import align_columns
from zorselike.text.units import GIB
from zorselike.text.wording import count

if TYPE_CHECKING:
    from zorselike.cost.fit import Fit, Flavor
    from zorselike.schedule.actions import Action

_LINE_LENGTH = 110

CONTEXT_BYTES = GIB
"""Memory of a device that the CUDA context and libraries take."""
ALLOCATOR_SHARE = 0.05
"""Share of a device's memory lost to rounding and gaps in torch's allocator."""
HOST_SHARE = 0.05
"""Share of the host's free memory left to other processes."""


_Size = Annotated[str | None, tyro.conf.arg(metavar="SIZE")]


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show a plan, or with --fit the largest model that this machine can train."""

    plan: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PLAN.toml", help_behavior_hint="(needed, or --fit)"),
    ] = None
    """Plan to show."""

    schedule: bool = False
    """Also show every rank's actions in one step."""

    schedule_csv: Annotated[
        str | None, tyro.conf.arg(metavar="FILE.csv", help_behavior_hint="(default: none)")
    ] = None
    """Also write these actions in the form of torch.distributed.pipelining, which has one rank a group."""

    fit: bool = False
    """Show the largest model of a family that one device can train, for each offload setting."""

    family: Literal["llama", "gpt"] = "llama"
    """With --fit: family of the model."""

    memory: Annotated[_Size, tyro.conf.arg(help_behavior_hint="(default: that of the GPUs here)")] = None
    """With --fit: memory of the device, such as 24GiB."""

    host_memory: Annotated[_Size, tyro.conf.arg(help_behavior_hint="(default: what is free here)")] = None
    """With --fit: host memory for offloading, such as 64GiB."""

    seq_len: int = 2048
    """With --fit: tokens per row."""

    rows: int = 8
    """With --fit: rows per optimizer step."""

    rows_per_microbatch: int = 1
    """With --fit: rows of a microbatch."""

    ministages: int = 8
    """With --fit: upper limit on ministages."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype in which layers compute; in half precision the optimizer updates fp32 master weights."""

    optimizer_moments: int = 2
    """With --fit: moments that the optimizer keeps of each parameter (Adam: 2)."""

    def run(self) -> None:
        print(show_fit(self) if self.fit else show_plan(self))


# -- a plan ----------------------------------------------------------------------------------


def show_plan(command: Show) -> str:
    """The plan as a table, with every rank's actions if requested."""
    if command.plan is None:
        raise ConfigError(
            "show: give a plan file, or --fit for the largest model that this machine can train"
        )
    from zorselike.schedule import ScheduleError, ScheduleSpec, build, to_torch_csv

    _check_plan(command)
    plan = Plan.load(command.plan)
    try:
        actions = build(ScheduleSpec(plan, masters=ITEMSIZES[command.dtype] < 4))
        exported = to_torch_csv(plan, actions) if command.schedule_csv else ""
    except ScheduleError as error:
        raise PlanError(f"{command.plan}: {error}") from None
    shown = [plan.explain()]
    if command.schedule:
        shown.append(_format_schedule(actions, command.dtype))
    if command.schedule_csv:
        try:
            write_text(command.schedule_csv, exported)
        except FileError as error:
            raise ConfigError(f"show: --schedule-csv is {command.schedule_csv}, which {error}") from None
        shown.append(f"Schedule: {command.schedule_csv}, in the form of torch.distributed.pipelining")
    return "\n\n".join(shown)


_OF_A_MACHINE = (
    *("family", "memory", "host_memory", "optimizer_moments"),
    *("seq_len", "rows", "rows_per_microbatch", "ministages"),
)
"""Options that say something with --fit alone."""


def _check_plan(command: Show) -> None:
    for option in fields(command):
        if option.name in _OF_A_MACHINE and getattr(command, option.name) != option.default:
            flag = f"--{option.name.replace('_', '-')}"
            raise ConfigError(f"show: {flag} goes with --fit, which is about a machine; leave it out")
    check_outputs("show", {"--schedule-csv": command.schedule_csv}, inputs=(command.plan,))


def _format_schedule(actions: Mapping[int, Sequence[Action]], dtype: str) -> str:
    from zorselike.schedule import format_actions

    lines = [
        f"one step in {dtype}, rank by rank (ministage, action, microbatch, @peer[rows]);",
        "max_norm and fp16 would defer each STEP to its end:",
    ]
    for rank, listed in actions.items():
        lines += textwrap.wrap(
            f"rank {rank}: {format_actions(listed)}",
            _LINE_LENGTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


# -- the largest model -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Memory for the model, in bytes, and where the number is from."""

    device: str
    device_bytes: int
    host: str
    host_bytes: int


def show_fit(command: Show) -> str:
    """A table for each kind of device at hand, under what it assumes."""
    from zorselike.cost.fit import SETTINGS, Batch, Room, find_largest
    from zorselike.models import flavors as list_flavors

    _check_fit(command)
    batch = Batch(
        num_rows=command.rows,
        rows_per_microbatch=command.rows_per_microbatch,
        num_ministages=command.ministages,
    )
    places = _find_places(command)
    flavors = [
        make_flavor(command.family, name, command.seq_len, command.dtype, command.optimizer_moments)
        for name in list_flavors(command.family)
        if name != "debug"
    ]
    sections = [_describe_job(command)]
    for place in places:
        room = Room(
            device_bytes=int(place.device_bytes * (1 - ALLOCATOR_SHARE)),
            context_bytes=CONTEXT_BYTES,
            host_bytes=place.host_bytes,
        )
        fits = [find_largest(flavors, batch, setting, room) for setting in SETTINGS]
        heading = [
            f"device: {_show_gib(place.device_bytes)} ({place.device})",
            f"host memory for what is offloaded: {_show_gib(place.host_bytes)} ({place.host})",
        ]
        sections.append("\n".join([*heading, "", *_tabulate(command.family, fits)]))
    return "\n\n".join([*sections, _describe_assumptions()])


def _check_fit(command: Show) -> None:
    if command.plan is not None:
        raise ConfigError(
            f"show: --fit is about a machine and takes no plan; leave out {command.plan!r} or --fit"
        )
    if command.schedule or command.schedule_csv:
        raise ConfigError("show: --schedule is about a plan and --fit about a machine; leave one out")
    numbers = {
        "--seq-len": command.seq_len,
        "--rows": command.rows,
        "--rows-per-microbatch": command.rows_per_microbatch,
        "--ministages": command.ministages,
    }
    check_at_least("show", 1, numbers)
    check_at_least("show", 0, {"--optimizer-moments": command.optimizer_moments})
    if command.rows_per_microbatch > command.rows:
        raise ConfigError(
            f"show: --rows-per-microbatch is {command.rows_per_microbatch}, of --rows {command.rows}; "
            "a microbatch has no more rows than a step"
        )


def make_flavor(family: str, name: str, sequence_length: int, dtype: str, num_moments: int = 2) -> Flavor:
    """A decoder of a family, for rows of any length."""
    from zorselike.cost.fit import Flavor
    from zorselike.models import get_config
    from zorselike.models.workload import make_workload

    config = get_config(family, name)
    if sequence_length > config.max_seq_len:
        config = get_config(family, name, max_seq_len=sequence_length)
    workload = make_workload(
        config,
        sequence_length=sequence_length,
        dtype=dtype,
        model=f"{family} {name}",
        num_moments=num_moments,
    )
    return Flavor(name=name, dim=config.dim, workload=workload)


def _find_places(command: Show) -> list[_Place]:
    """Each kind of GPU of this machine, or the memory given by options, with the host's memory."""
    from zorselike.runtime.memory.host_room import find_host_room

    free = find_host_room()
    host_bytes = read_size("show", "--host-memory", command.host_memory)
    host = "as --host-memory says"
    if host_bytes is None:
        host_bytes = int(free.num_bytes * (1 - HOST_SHARE))
        host = f"{100 * (1 - HOST_SHARE):.0f} % of what is free here ({free.limit})"
    device_bytes = read_size("show", "--memory", command.memory)
    found = {"as --memory says": device_bytes} if device_bytes is not None else _find_devices()
    if not found:
        found = {"no GPU here: the host's free memory is taken instead, or give --memory": free.num_bytes}
    return [_Place(device, num_bytes, host, host_bytes) for device, num_bytes in found.items()]


def _find_devices() -> dict[str, int]:
    """Memory of each kind of GPU of this machine, in bytes."""
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    numbers = Counter((each.name, each.total_memory) for each in properties)
    return {
        name if number == 1 else f"{name}, one of {number}, with all of the host to itself": num_bytes
        for (name, num_bytes), number in numbers.items()
    }


def _show_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"


def _describe_job(command: Show) -> str:
    masters = ", fp32 gradients and master weights" if ITEMSIZES[command.dtype] < 4 else ""
    tokens = command.rows * command.seq_len
    return "\n".join(
        [
            f"the largest {command.family} that one device trains",
            f"step: {tokens:,} tokens in {count(command.rows, 'row')} of {command.seq_len:,}, "
            f"{count(command.rows_per_microbatch, 'row')} a microbatch",
            f"precision: {command.dtype}{masters}; {count(command.optimizer_moments, 'fp32 moment')} "
            "a parameter",
            f"plan: one rank, ZeRO 2, {count(command.ministages, 'ministage')} at most, updates not deferred",
        ]
    )


def _describe_assumptions() -> str:
    from zorselike.cost.fit import MAX_DEPTH, MIN_DEPTH

    text = (
        f"Assumed: {_show_gib(CONTEXT_BYTES)} of the device for the CUDA context and libraries, and "
        f"{100 * ALLOCATOR_SHARE:.0f} % for gaps in the allocator; an optimizer that updates in place "
        "(fused); flash attention (in float32 the memory-efficient one), no dropout, no torch.compile; "
        "activations as zorselike/models/activation_bytes.py counts them, others as zorselike/cost/memory.py"
        f" walks the schedule, an upper bound. A model has {MIN_DEPTH:g} to {MAX_DEPTH:g} times the layers "
        "of the flavor of its width, where such a one fits. What limits it is what one more layer would "
        "not fit into."
    )
    return "\n".join(textwrap.wrap(text, _LINE_LENGTH))


def _tabulate(family: str, fits: Sequence[Fit]) -> list[str]:
    table = [("offload", "flavor", "largest model", "device peak", "host", "what limits it")]
    for fit in fits:
        if fit.walk is None:
            model, device, host = f"none, not even one layer of h={fit.base.dim}", "", ""
        else:
            parameters = fit.base.with_layers(fit.num_layers).num_parameters / 1e9
            model = f"h={fit.base.dim} x {count(fit.num_layers, 'layer')}, {parameters:.1f} B parameters"
            device = _show_gib(fit.walk.device_peak_bytes)
            host = _show_gib(fit.walk.host_peak_bytes)
        flavor = f"{family} {fit.flavor.name}" if fit.flavor else "none"
        table.append((fit.setting.name, flavor, model, device, host, fit.limit))
    return align_columns(table, left=range(len(table[0])))
