"""How far the simulator is from Sailor's real runs: iteration time and peak memory, run by run.

    python tools/papers/check_sailor_runs.py --data DIR                              # the 15 OPT-350M runs
    python tools/papers/check_sailor_runs.py --data DIR --runs OTHER --model GPT-Neo-2.7

Time comes from the profiles, with no constant fitted; profiles that
fall where more is computed are repaired (lower envelope), with a warning. Of memory an overhead and a
working set are fitted to the runs of one and two nodes of each folder, and printed. Averages are of absolute
relative errors (0.05 is 5 %) of all runs that can be simulated, suspect ones included.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import SAILOR, make_data_parser, report_errors
from tools.papers.sailor.library import Library
from tools.papers.sailor.score import Folder, Score, Summary, score_folder, summarise
from tools.report import write_json

RUNS = "measured/OPT-350-GH200"
_GIGA = 1e9


def main() -> int:
    parser = make_data_parser(__doc__, SAILOR)
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="runs of theirs (default: OPT-350M on GH200)"
    )
    parser.add_argument("--model", help="of all runs; default: by a run's number of layers")
    args = parser.parse_args()
    library = Library(args.data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = score_folder(args.runs or library.find(RUNS), library, args.model)
    for line in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"warning: {line}")
    summary = summarise(folder.scores)
    print("\n".join(["", *format_folder(folder), "", format_summary(summary)]))
    write_json(args.json, {"summary": summary, "folder": folder})
    if not folder.scores:
        print("no run could be simulated", file=sys.stderr)
    return 0 if folder.scores else 1


def format_folder(folder: Folder) -> list[str]:
    """Every run of a folder, what was fitted, and what could not be simulated."""
    lines = [f"{folder.name}:", _HEADER, *(_format_score(score) for score in folder.scores)]
    constants = folder.constants
    origin = (
        f"fitted to {constants.num_runs} runs of 1 and 2 nodes"
        if constants.num_runs
        else "no run of 1 or 2 nodes to fit to"
    )
    lines.append(
        f"  memory, {origin}: overhead {constants.overhead_bytes / _GIGA:.2f} GB, working set "
        f"{constants.working_bytes_per_row / _GIGA:.3f} GB a row"
    )
    lines += [f"  not simulated: {line}" for line in folder.refused]
    notes = dict.fromkeys(line for score in folder.scores for line in score.assumptions)
    return lines + [f"  assumed: {line}" for line in notes]


_HEADER = (
    f"  {'run':<34} {'nodes':>5} {'GPUs':>5} {'simulated s':>11} {'measured s':>11} {'error':>7} "
    f"{'simulated GB':>13} {'measured GB':>12} {'error':>7}"
)


def _format_score(score: Score) -> str:
    run = score.run
    line = (
        f"  {run.name:<34} {run.num_nodes:>5} {run.num_gpus:>5} {score.iteration_s:>11.4f} "
        f"{run.iteration_s:>11.4f} {score.time_error:>+7.1%}"
    )
    if score.memory_error is not None and run.memory_bytes is not None:
        line += f" {score.memory_bytes / _GIGA:>13.2f} {run.memory_bytes / _GIGA:>12.2f}"
        line += f" {score.memory_error:>+7.1%}"
    return line + (f"  suspect: {'; '.join(score.doubts)}" if score.doubts else "")


def format_summary(summary: Summary) -> str:
    spelled = [
        f"{name} {'-' if value is None else f'{value:.1%}'}"
        for name, value in (
            ("time", summary.time_mape),
            ("time above two nodes", summary.time_mape_large),
            ("memory", summary.memory_mape),
        )
    ]
    return f"mean absolute error over {summary.num_runs} runs: {', '.join(spelled)}"


if __name__ == "__main__":
    sys.exit(report_errors(main))
