"""`zorselike replay`: how a job would fare while devices come and go."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from zorselike.cli.model_choice import ModelOptions
from zorselike.cli.options import check_outputs, find_width
from zorselike.errors import ConfigError, FileError
from zorselike.text.units import read_time

if TYPE_CHECKING:
    from zorselike.elastic.replay.page import Report

_File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")]
_Time = Annotated[str, tyro.conf.arg(metavar="TIME")]


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What changes take, which no simulation knows: measure it on your machines. The bytes that are moved
    are added from the cluster's links."""

    recovery: _Time = "5s"
    """From a loss to the next step where the other processes go on."""

    switch: _Time = "2s"
    """Pause when going over to another plan between two steps."""

    restart: _Time = "120s"
    """From a loss to the next step where all processes start anew and load a checkpoint."""

    checkpoint_every: _Time = "600s"
    """From one checkpoint to the next."""

    checkpoint: _Time = "0s"
    """For how long a checkpoint holds up training."""

    payback: _Time = "600s"
    """Within which a better plan must have paid for going over to it."""

    mirror_share: float = 0.1
    """Share of the time that mirrors of the state may take."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Replay a record of which devices were there when, and compare what jobs would have trained.

    EVENTS is CSV (or a JSON list of objects): time_s, and the number of devices that are there from then on,
    in columns named after a type of device, a node of the cluster, or gpus for any; SkyPilot's spot-traces
    are read as they are. Beside zorselike's own
    rule (the same processes go on, from mirrors in memory) stand restarts from checkpoints with the best
    plan, whole replicas of which one is out when it loses a device, and the first plan alone. Every plan is
    found by the planner and simulated; goodput counts what was trained and kept.
    """

    events: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EVENTS")]
    """Record of availability."""

    cluster: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(needed, or --from-profile)")
    ] = None
    """Cluster file with every device that may ever be there (examples: recipes/clusters)."""

    profile: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: catalogue, no measurement)")
    ] = None
    """Profile written by `zorselike profile`."""

    from_profile: _File = None
    """Profile, together with the cluster.toml beside it."""

    global_batch: Annotated[int, tyro.conf.arg(help_behavior_hint="(needed)")] = 0
    """Rows per optimizer step."""

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    costs: tyro.conf.OmitArgPrefixes[CostOptions] = field(default_factory=CostOptions)

    budget: _Time = "10s"
    """Time of the search for each set of devices."""

    until: Annotated[
        str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(default: the last event)")
    ] = None
    """End of the replay, counted as the events are."""

    csv: _File = None
    """Also write rows per second over time, by rule."""

    json: _File = None
    """Also write the table's numbers."""

    def run(self) -> None:
        print(replay(self))


def replay(command: Replay) -> str:
    """The page; writes the requested files."""
    from tqdm import tqdm

    from zorselike.cli.plan.inputs import check_files, list_files, load_cluster, load_inputs
    from zorselike.elastic.replay.costs import Costs
    from zorselike.elastic.replay.events import read_stretches
    from zorselike.elastic.replay.page import Report, format_page
    from zorselike.elastic.replay.rates import Rates
    from zorselike.elastic.replay.rules import Replay as Record
    from zorselike.planner.problem import PlanProblem
    from zorselike.planner.search.helpers import count_cores

    check_files("replay", command)
    outputs = {"--csv": command.csv, "--json": command.json}
    check_outputs("replay", outputs, inputs=(command.events, *list_files(command)))
    if command.global_batch < 1:
        raise ConfigError(f"replay: --global-batch is {command.global_batch}; give the rows of a step")
    if not 0 < command.costs.mirror_share <= 1:
        raise ConfigError(
            f"replay: --mirror-share is {command.costs.mirror_share:g}; give more than 0, at most 1"
        )
    budget_s = _read("--budget", command.budget, more_than_0=True)
    given = command.costs
    costs = Costs(
        recovery_s=_read("--recovery", given.recovery),
        switch_s=_read("--switch", given.switch),
        restart_s=_read("--restart", given.restart),
        checkpoint_every_s=_read("--checkpoint-every", given.checkpoint_every, more_than_0=True),
        checkpoint_s=_read("--checkpoint", given.checkpoint),
        payback_s=_read("--payback", given.payback, more_than_0=True),
        mirror_share=given.mirror_share,
    )
    until_s = None if command.until is None else _read("--until", command.until)
    cluster = load_cluster("replay", command)
    stretches = read_stretches(command.events, cluster, until_s)
    types = {cluster.device_type(cluster.places[d]) for each in stretches for d in each.devices}
    inputs = load_inputs("replay", command, cluster, types)
    problem = PlanProblem(
        workload=inputs.workload,
        cluster=cluster,
        profile=inputs.profile,
        global_batch=command.global_batch,
        defer_updates=inputs.workload.dtype == "float16",
    )
    problem.check()
    with tqdm(desc="planning", unit=" sets of devices", file=sys.stderr, disable=None, leave=False) as bar:
        rates = Rates(problem, budget_s, workers=count_cores(), on_search=lambda _: bar.update())
        record = Record(stretches, rates, costs)
        report = Report(record, tuple(record.run_rules()), inputs.notes)
    page = format_page(report, find_width())
    return "\n".join([page, *_write_files(command, report)])


def _read(flag: str, text: str, *, more_than_0: bool = False) -> float:
    """Seconds."""
    try:
        seconds = read_time(text, f"replay: {flag}")
    except FileError:
        raise ConfigError(f"replay: {flag} is '{text}'; write a time with its unit, such as 30s") from None
    if seconds < 0 or (more_than_0 and not seconds):
        raise ConfigError(f"replay: {flag} is {text}; give {'more than 0s' if more_than_0 else '0s or more'}")
    return seconds


def _write_files(command: Replay, report: Report) -> list[str]:
    """Writes the requested files; a line for each."""
    lines = []
    if command.csv is not None:
        with Path(command.csv).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["rule", "start_s", "stop_s", "rows_per_s", "devices"])
            for outcome in report.outcomes:
                writer.writerows([outcome.name, *piece] for piece in outcome.pieces)
        lines.append(f"wrote {command.csv}")
    if command.json is not None:
        Path(command.json).write_text(json.dumps(report.to_table(), indent=1) + "\n")
        lines.append(f"wrote {command.json}")
    return lines
