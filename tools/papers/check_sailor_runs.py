"""How far the simulator is from Sailor's real runs: iteration time and peak memory, run by run.

    python tools/papers/check_sailor_runs.py --json figures.json                     # the 15 OPT-350M runs
    python tools/papers/check_sailor_runs.py --runs DIR --model GPT-Neo-2.7          # other runs of theirs

`--data` is the folder with Sailor's files (`llm_info.json`, `profiles/`, `providers/`, `measured/`), one
above it, or a folder of runs under it. Time comes from the profiles, with no constant fitted; profiles that
fall where more is computed are repaired (lower envelope), with a warning. Of memory an overhead and a
working set are fitted to the runs of one and two nodes of each folder, and printed. Averages are of absolute
relative errors (0.05 is 5 %) of all runs that can be simulated, suspect ones included.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.sailor.library import find_library
from tools.papers.sailor.score import Folder, Score, Summary, score_folder, summarise
from zorselike.errors import ClusterError, PlanError, ProfileError

DATA = Path(__file__).parents[2] / "shared" / "data"
_GIGA = 1e9


def main() -> int:
    args = _read_arguments()
    if not args.data.is_dir():
        print(
            f"{args.data}: there is no such folder; give --data the one with Sailor's files", file=sys.stderr
        )
        return 2
    try:
        library = find_library(args.data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            folders = [
                score_folder(folder, library, args.model) for folder in list_folders(args.runs or args.data)
            ]
    except (ClusterError, PlanError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"warning: {line}")
    scores = [score for folder in folders for score in folder.scores]
    for folder in folders:
        print("\n".join(["", *format_folder(folder)]))
    summary = summarise(scores)
    print("\n" + format_summary(summary))
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(folders, summary), indent=2) + "\n", encoding="utf-8")
    if not scores:
        print("no run could be simulated", file=sys.stderr)
    return 0 if scores else 1


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help=f"default: {DATA}")
    parser.add_argument("--runs", type=Path, help="a folder of runs; default: all under --data")
    parser.add_argument("--model", help="of all runs; default: by a run's number of layers")
    parser.add_argument("--json", type=Path, help="where figures are written")
    return parser.parse_args()


def list_folders(given: Path) -> list[Path]:
    """The folders of runs: each under a `measured/`, else the given one itself."""
    for measured in (given / "sailor" / "measured", given / "measured", given):
        if measured.name == "measured" and measured.is_dir():
            return sorted(folder for folder in measured.iterdir() if folder.is_dir())
    return [given]


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


def to_json(folders: Sequence[Folder], summary: Summary) -> dict[str, object]:
    return asdict(summary) | {
        "folders": [
            {
                "folder": folder.name,
                **asdict(summarise(folder.scores)),
                "memory_constants": asdict(folder.constants),
                "runs": [score.to_json() for score in folder.scores],
                "not_simulated": list(folder.refused),
            }
            for folder in folders
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
