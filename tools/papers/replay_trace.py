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
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import SAILOR, make_data_parser, report_errors
from tools.papers.sailor.arithmetic import SailorArithmetic
from tools.papers.sailor.cases import MODEL
from tools.papers.sailor.library import Library
from tools.papers.sailor.planning import Planned, format_plan
from tools.papers.sailor.replay import A100, EXPLAINED, V100, Replay, read_trace, replay
from tools.report import write_json
from zorselike.errors import ConfigError


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
