"""A job along the availability of GPUs that Sailor's authors recorded in a cloud: planned anew at every
change, and what that comes to beside simpler ways.

    python tools/papers/replay_trace.py --data DIR --json figures.json
    python tools/papers/replay_trace.py --data DIR --v100 0 --pause 60

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1, planned and scored
as in `compare_sailor.py`: by the arithmetic of Sailor's published simulator. Assumed here, since the traces
do not say: their times are seconds, all GPUs are in one zone, a trace ends with its last entry, and V100s
(`--v100`) are there all the time. A change of plan takes `--pause` seconds. Sailor publishes no throughput
along these traces. Seconds of planning are of one core.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import SAILOR, make_data_parser, read_list, report_errors
from tools.papers.sailor.arithmetic import SailorArithmetic
from tools.papers.sailor.cases import (
    GLOBAL_BATCH,
    MODEL,
    ZONES,
    Planned,
    format_plan,
    lay_even_mesh,
    search_quotas,
)
from tools.papers.sailor.library import Library
from tools.papers.sailor.pipelines import Quotas
from tools.report import write_json
from zorselike.errors import ConfigError, PlanError, ProfileError
from zorselike.planner.pipelines.allocation import AllocationGoal

Policy = Literal["ours", "cheaper", "A100 alone", "V100 alone", "even mesh", "never replanned"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
EXPLAINED: Mapping[Policy, str] = {
    "ours": "our search, all there is, the fastest",
    "cheaper": "our search, the cheapest that has 90 % of that throughput",
    "A100 alone": "our search on the A100s",
    "V100 alone": "our search on the V100s",
    "never replanned": "our plan for the fewest A100s that the trace ever has, all the time",
    "even mesh": "stages of as many layers, replicas and GPUs each, the fastest of all such, A100s first",
}
ENOUGH = 0.9
"""Share of the most throughput that the cheaper plan must reach."""
A100, V100 = "A100-40", "V100-16"


@dataclass(frozen=True)
class Period:
    """Between two changes."""

    start_s: float
    stop_s: float
    num_gpus: int

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


def read_trace(path: Path) -> tuple[Period, ...]:
    """The periods of a trace, those with as many GPUs one after the other taken together; the last may have
    no length. Raises `ProfileError` for entries that are none, or whose times do not rise."""
    entries = read_list(path)
    try:
        points = [(float(entry["Time"]), int(entry["GPUs"])) for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"{path}: every entry needs a Time and GPUs ({error!r})") from None
    if not points:
        raise ProfileError(f"{path}: no entries; give a trace with at least one")
    for (before, _), (after, number) in pairwise(points):
        if after <= before:
            raise ProfileError(f"{path}: Time {after:g} comes after {before:g}; times must rise")
        if number < 0:
            raise ProfileError(f"{path}: {number} GPUs at Time {after:g}; give 0 or more")
    changes = [points[0], *(b for a, b in pairwise(points) if a[1] != b[1])]
    stops = [*(time for time, _ in changes[1:]), points[-1][0]]
    return tuple(Period(start, stop, number) for (start, number), stop in zip(changes, stops, strict=True))


@dataclass(frozen=True)
class Event:
    """One change of availability, and what each policy does; None: nothing fits."""

    period: Period
    planned: Mapping[Policy, Planned | None]


@dataclass(frozen=True)
class Total:
    """What a policy comes to along a trace."""

    policy: Policy
    iterations: float
    dollars: float
    plan_s: tuple[float, ...]
    """Seconds of each search."""
    seconds: float
    num_changes: int
    """Changes of the plan."""

    @property
    def throughput(self) -> float:
        return self.iterations / self.seconds if self.seconds else 0.0

    @property
    def dollars_per_iteration(self) -> float:
        return self.dollars / self.iterations if self.iterations else 0.0


@dataclass(frozen=True)
class Replay:
    """A job along a trace."""

    name: str
    num_v100: int
    """V100s that are there all the time: an assumption, the traces have A100s only."""
    events: tuple[Event, ...]

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(policy for policy in POLICIES if policy in self.events[0].planned)

    def add_up(self, policy: Policy, pause_s: float = 0.0) -> Total:
        """Sums up a policy; `pause_s` seconds after each change of plan are lost and paid for."""
        iterations, dollars, changes = 0.0, 0.0, 0
        before: Planned | None = None
        for event in self.events:
            planned, seconds = event.planned[policy], event.period.seconds
            if planned is not None:
                is_new = before is not None and planned.plan != before.plan
                changes += is_new
                running_s = max(0.0, seconds - pause_s) if is_new else seconds
                iterations += running_s * planned.figures.throughput
                # Rent goes on while nothing is computed, egress does not.
                dollars += seconds * planned.figures.rent * planned.figures.throughput
                dollars += running_s * planned.figures.egress * planned.figures.throughput
            before = planned
        plan_s = tuple(p.search_s for event in self.events if (p := event.planned[policy]) is not None)
        seconds = self.events[-1].period.stop_s - self.events[0].period.start_s
        return Total(policy, iterations, dollars, plan_s or (0.0,), seconds, changes)

    def break_even_s(self) -> float | None:
        """How long each change of our plan may take until never planning anew has made as many iterations;
        None where that is longer than the trace."""
        never = self.add_up("never replanned").iterations
        low, high = 0.0, self.events[-1].period.stop_s - self.events[0].period.start_s
        if self.add_up("ours", high).iterations >= never:
            return None
        while high - low > 0.1:
            middle = (low + high) / 2
            low, high = (middle, high) if self.add_up("ours", middle).iterations > never else (low, middle)
        return low


def replay(name: str, trace: Sequence[Period], arithmetic: SailorArithmetic, *, num_v100: int = 0) -> Replay:
    """Plans at every change.

    Raises:
        ConfigError: The trace has no GPUs at some time, and there are no others.
    """
    fewest = min(period.num_gpus for period in trace)
    if fewest + num_v100 < 1:
        raise ConfigError(f"{name}: no GPUs at some time; keep some V100s beside them")
    kept = _search(arithmetic, _quotas(fewest, num_v100))
    return Replay(
        name,
        num_v100,
        tuple(
            Event(period, _plan(arithmetic, period.num_gpus, num_v100) | {"never replanned": kept})
            for period in trace
        ),
    )


def _quotas(num_a100: int, num_v100: int) -> Quotas:
    counts = {A100: num_a100, V100: num_v100}
    return Quotas({(gpu, ZONES[0]): number for gpu, number in counts.items() if number})


def _plan(arithmetic: SailorArithmetic, num_a100: int, num_v100: int) -> dict[Policy, Planned | None]:
    quotas = _quotas(num_a100, num_v100)
    ours = _search(arithmetic, quotas)
    planned: dict[Policy, Planned | None] = {"ours": ours, "cheaper": None}
    if ours is not None:
        planned["cheaper"] = _search(
            arithmetic, quotas, objective="cost", min_throughput=ENOUGH * ours.figures.throughput
        )
    if num_v100:
        planned["A100 alone"] = _search(arithmetic, _quotas(num_a100, 0)) if num_a100 else None
        planned["V100 alone"] = _search(arithmetic, _quotas(0, num_v100))
    planned["even mesh"] = lay_even_mesh(arithmetic, quotas, GLOBAL_BATCH)
    return planned


def _search(arithmetic: SailorArithmetic, quotas: Quotas, **goal: Any) -> Planned | None:
    try:
        return search_quotas(arithmetic, quotas, AllocationGoal(bill_idle=False, **goal), GLOBAL_BATCH)
    except PlanError:
        return None


def main() -> int:
    parser = make_data_parser(__doc__, SAILOR)
    parser.add_argument("--model", default=MODEL, help="of Sailor's profiles (default: %(default)s)")
    v100_help = "beside the trace alone, the trace and so many V100s (default: %(default)s)"
    parser.add_argument("--v100", type=int, default=16, metavar="N", help=v100_help)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds that a change of plan takes (default: 0)"
    )
    args = parser.parse_args()
    if args.v100 < 0 or args.pause < 0:
        parser.error("--v100 and --pause must be at least 0")
    library = Library(args.data)
    arithmetic = SailorArithmetic(library, args.model, (A100, V100))
    replays = []
    for path in list_traces(library.find("traces")):
        for num_v100 in dict.fromkeys((0, args.v100)):
            replays.append(replay(path.stem, read_trace(path), arithmetic, num_v100=num_v100))
            print("\n".join(format_replay(replays[-1], args.pause)), flush=True)
    print("\n".join(f"{policy}: {what}" for policy, what in EXPLAINED.items()))
    totals = [[own.add_up(policy, args.pause) for policy in own.policies] for own in replays]
    write_json(args.json, {"replays": replays, "pause_s": args.pause, "totals": totals})
    return 0


def list_traces(folder: Path) -> list[Path]:
    """Raises `ConfigError` if there is none."""
    found = sorted(folder.glob("a100_trace_*.json"))
    if not found:
        raise ConfigError(f"{folder}: no a100_trace_*.json in it")
    return found


def format_replay(given: Replay, pause_s: float) -> list[str]:
    """Throughput and money at every change, then what they come to, then our plans."""
    others = f" and {given.num_v100} V100" if given.num_v100 else ""
    widths = {policy: max(15, len(policy)) for policy in given.policies}
    titles = "".join(f"  {policy:>{widths[policy]}}" for policy in given.policies)
    lines = [f"{given.name}: A100 by the trace{others}", "", f"{'from s':>7} {'A100':>5}{titles}  plan s"]
    for event in given.events:
        cells = "".join(f"  {_format_cell(event.planned[p]):>{widths[p]}}" for p in given.policies)
        ours = event.planned["ours"]
        took = "" if ours is None else f"{ours.search_s:6.2f}"
        lines.append(f"{event.period.start_s:7.0f} {event.period.num_gpus:5}{cells}  {took:>6}")
    return [*lines, "", *_format_totals(given, pause_s), "", *_format_plans(given), ""]


def _format_cell(planned: Planned | None) -> str:
    """Iterations a second, dollars an iteration."""
    return "nothing fits" if planned is None else f"{planned.figures.throughput:.4f} ${planned.dollars:.4f}"


def _format_totals(given: Replay, pause_s: float) -> list[str]:
    ours = given.add_up("ours", pause_s)
    lines = [f"{'':<16} {'iterations':>10} {'it/s':>7} {'ours more':>9} {'$':>8} {'$/it':>7} {'plan s':>12}"]
    for policy in given.policies:
        total = given.add_up(policy, pause_s)
        more = ours.iterations / total.iterations - 1 if total.iterations else float("inf")
        took = "-" if policy == "never replanned" else f"{fmean(total.plan_s):.2f}, {max(total.plan_s):.2f}"
        lines.append(
            f"{policy:<16} {total.iterations:>10.1f} {total.throughput:>7.4f} {more:>9.1%} "
            f"{total.dollars:>8.2f} {total.dollars_per_iteration:>7.4f} {took:>12}"
        )
    limit_s = given.break_even_s()
    pays = "whatever it takes" if limit_s is None else f"up to {limit_s:.0f} s each"
    lines.append(f"{len(given.events)} periods, {ours.num_changes} changes of our plan, which pay {pays}")
    return lines


def _format_plans(given: Replay) -> list[str]:
    """Ours, once for each number of GPUs."""
    plans = {event.period.num_gpus: event.planned["ours"] for event in given.events}
    return [
        f"{number:>4} A100: {'nothing fits' if planned is None else format_plan(planned.plan)}"
        for number, planned in sorted(plans.items())
    ]


if __name__ == "__main__":
    sys.exit(report_errors(main))
