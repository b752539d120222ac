"""A job along the availability of GPUs that Sailor's authors recorded in a cloud: planned anew at every
change, and what that comes to beside simpler ways.

    python tools/papers/replay_trace.py --json figures.json
    python tools/papers/replay_trace.py --v100 0 --pause 60

OPT-350M, global batch 1024, sequence 2048, fp32, machines of 4 GPUs in GCP's us-central1, planned and scored
as in `compare_sailor.py`: by the arithmetic of Sailor's published simulator. Assumed here, since the traces
do not say: their times are seconds, all GPUs are in one zone, a trace ends with its last entry, and V100s
(`--v100`) are there all the time. A change of plan takes `--pause` seconds. Sailor publishes no throughput
along these traces. Seconds of planning are of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.sailor.arithmetic import SailorArithmetic
from tools.papers.sailor.cases import MODEL
from tools.papers.sailor.library import find_library
from tools.papers.sailor.planning import Planned, format_plan
from tools.papers.sailor.replay import A100, EXPLAINED, V100, Replay, replay
from tools.papers.sailor.traces import read_trace
from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError

DATA = Path(__file__).parents[2] / "shared" / "data"
DEFAULT_V100 = 16


def main() -> int:
    args = _read_arguments()
    if not args.data.is_dir():
        print(
            f"{args.data}: there is no such folder; give --data the one with Sailor's files", file=sys.stderr
        )
        return 2
    replays = []
    try:
        library = find_library(args.data)
        arithmetic = SailorArithmetic(library, args.model, (A100, V100))
        for path in list_traces(library.root / "traces"):
            for num_v100 in dict.fromkeys((0, args.v100)):
                replays.append(replay(path.stem, read_trace(path), arithmetic, num_v100=num_v100))
                print("\n".join(format_replay(replays[-1], args.pause)), flush=True)
    except (ClusterError, ConfigError, PlanError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(f"{policy}: {what}" for policy, what in EXPLAINED.items()))
    if args.json is not None:
        text = json.dumps({"replays": [to_json(each, args.pause) for each in replays]}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help=f"default: {DATA}")
    parser.add_argument("--json", type=Path, help="where figures and plans are written")
    parser.add_argument("--model", default=MODEL, help=f"of Sailor's profiles; default: {MODEL}")
    parser.add_argument(
        "--v100",
        type=int,
        default=DEFAULT_V100,
        help=f"beside the trace alone, the trace and so many V100s; default: {DEFAULT_V100}",
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds that a change of plan takes; default: 0"
    )
    args = parser.parse_args()
    if args.v100 < 0 or args.pause < 0:
        parser.error("--v100 and --pause must be at least 0")
    return args


def list_traces(folder: Path) -> list[Path]:
    """Raises `ConfigError` if there is none."""
    found = sorted(folder.glob("*.json"))
    if not found:
        raise ConfigError(f"{folder}: no traces in it; give --data Sailor's folder")
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


def to_json(given: Replay, pause_s: float) -> dict[str, object]:
    return {
        "trace": given.name,
        "v100": given.num_v100,
        "pause_s": pause_s,
        "totals": [given.add_up(policy, pause_s).to_json() for policy in given.policies],
        "break_even_s": given.break_even_s(),
        "events": [
            {
                "start_s": event.period.start_s,
                "stop_s": event.period.stop_s,
                "a100": event.period.num_gpus,
                "planned": {policy: _planned_to_json(event.planned[policy]) for policy in given.policies},
            }
            for event in given.events
        ],
    }


def _planned_to_json(planned: Planned | None) -> dict[str, object] | None:
    if planned is None:
        return None
    return {
        "iterations_per_s": planned.figures.throughput,
        "dollars_per_iteration": planned.dollars,
        "gpus": planned.num_gpus,
        "search_s": planned.search_s,
        "plan": planned.plan.to_json(),
    }


if __name__ == "__main__":
    sys.exit(main())
