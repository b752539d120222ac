"""How far the simulator is from Sailor's real runs: iteration time and peak memory, run by run.

    python tools/papers/check_sailor_runs.py --data DIR                     # the 15 OPT-350M runs
    python tools/papers/check_sailor_runs.py --data DIR --model GPT-Neo     # the 12 of GPT-Neo-2.7B
    python tools/papers/check_sailor_runs.py --data DIR --runs OTHER        # of your own

Time comes from the profiles, with no constant fitted; profiles that
fall where more is computed are repaired (lower envelope), with a warning. Of memory an overhead and a
working set are fitted to the runs of one and two nodes of each folder, and printed. Averages are of absolute
relative errors (0.05 is 5 %) of all runs that can be simulated, suspect ones included.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import SAILOR, make_data_parser, report_errors
from tools.papers.sailor.costs import prepare, simulate_run
from tools.papers.sailor.library import Library
from tools.papers.sailor.runs import MeasuredRun, read_run
from tools.report import write_json
from zorselike.errors import ClusterError, PlanError, ProfileError

SMALL_NODES = 2
"""Runs of so many nodes and fewer give the constants of memory; only larger ones are in `time_mape_large`."""


@dataclass(frozen=True)
class MemoryConstants:
    """What the model of memory does not count, from small runs."""

    overhead_bytes: float = 0.0
    """Memory of every GPU for context, libraries and communication buffers."""
    working_bytes_per_row: float = 0.0
    """What comes and goes while a microbatch is computed."""
    num_runs: int = 0
    """Runs that the constants are fitted to; 0: there were none, and the constants are 0."""


@dataclass(frozen=True)
class Score:
    """One run: what was simulated beside what was measured."""

    run: MeasuredRun
    model: str
    iteration_s: float
    held_bytes: int
    """The most that a GPU holds by the model, without what is fitted."""
    memory_bytes: float = 0.0
    """The same with what is fitted."""
    doubts: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def time_error(self) -> float:
        """Relative, positive where too long was simulated."""
        return self.iteration_s / self.run.iteration_s - 1

    @property
    def memory_error(self) -> float | None:
        if not self.run.memory_bytes:
            return None
        return self.memory_bytes / self.run.memory_bytes - 1


@dataclass(frozen=True)
class Folder:
    """The runs of one folder."""

    name: str
    scores: tuple[Score, ...]
    constants: MemoryConstants
    refused: tuple[str, ...]
    """Runs that could not be simulated, and why."""


def score_folder(root: Path, library: Library, model: str | None = None) -> Folder:
    """Simulates all runs under a folder.

    Args:
        model: of all runs; None: the one that has as many layers as a run.
    """
    scores, refused = [], []
    for path in sorted(root.rglob("*.json")):
        try:
            run = read_run(path, root)
            scores.append(_score(run, library, model or library.guess_model(run.num_layers)))
        except (PlanError, ProfileError, ClusterError) as error:
            message = str(error)
            name = path.relative_to(root).as_posix().removesuffix(".json")
            refused.append(message if message.startswith(name) else f"{name}: {message}")
    scores = _compare(scores)
    constants = fit_memory(scores)
    scores = [replace(score, memory_bytes=add_constants(score, constants)) for score in scores]
    return Folder(root.name, tuple(scores), constants, tuple(refused))


def _score(run: MeasuredRun, library: Library, model: str) -> Score:
    prepared = prepare(run, library, model)
    simulation = simulate_run(prepared)
    return Score(
        run,
        model,
        simulation.iteration_s,
        max(simulation.peak_bytes),
        doubts=run.doubts,
        assumptions=prepared.costs.assumptions,
    )


def _compare(scores: Sequence[Score]) -> list[Score]:
    """The same with doubts that come of what was simulated, and of runs beside each other: one measurement
    for two plans, or a run of another model than most."""
    by_time: defaultdict[float, list[str]] = defaultdict(list)
    for score in scores:
        by_time[score.run.iteration_s].append(score.run.name)
    models = [score.model for score in scores]
    compared = []
    for score in scores:
        doubts = list(score.doubts)
        same = [name for name in by_time[score.run.iteration_s] if name != score.run.name]
        if same:
            doubts.append(f"the same seconds as {', '.join(same)}")
        usual = max(set(models), key=models.count)
        if score.model != usual:
            doubts.append(f"layers of {score.model} among runs of {usual}")
        if not _holds_enough(score):
            doubts.append("max_mem is less than weights, gradients, moments and activations")
        compared.append(replace(score, doubts=tuple(doubts)))
    return compared


def _holds_enough(score: Score) -> bool:
    """Whether a run held what the model counts; one that measured less says nothing of an overhead."""
    return score.run.memory_bytes is None or score.run.memory_bytes >= score.held_bytes


def fit_memory(scores: Sequence[Score]) -> MemoryConstants:
    """Overhead and working set by least squares of relative errors over the small runs; 0 without any.

    Both are at least 0. Where all have as many rows a microbatch, the working set is in the overhead.
    """
    from scipy.optimize import nnls

    small = [
        score
        for score in scores
        if score.run.num_nodes <= SMALL_NODES and score.run.memory_bytes and _holds_enough(score)
    ]
    if not small:
        return MemoryConstants()
    varies = len({score.run.microbatch_rows for score in small}) > 1
    factors, rest = [], []
    for score in small:
        measured = float(score.run.memory_bytes or 0)
        factors.append([1 / measured, score.run.microbatch_rows * varies / measured])
        rest.append(1 - score.held_bytes / measured)
    (overhead, working), _ = nnls(factors, rest)
    return MemoryConstants(float(overhead), float(working), len(small))


def add_constants(score: Score, constants: MemoryConstants) -> float:
    """The most that a GPU of a run holds: at its peak it always computes a microbatch."""
    return (
        score.held_bytes
        + constants.overhead_bytes
        + score.run.microbatch_rows * constants.working_bytes_per_row
    )


@dataclass(frozen=True)
class Summary:
    """Mean absolute relative errors; None where there is nothing to average."""

    time_mape: float | None
    time_mape_large: float | None
    """Over more than two nodes."""
    memory_mape: float | None
    num_runs: int


def summarise(scores: Sequence[Score]) -> Summary:
    return Summary(
        time_mape=_mean([abs(score.time_error) for score in scores]),
        time_mape_large=_mean(
            [abs(score.time_error) for score in scores if score.run.num_nodes > SMALL_NODES]
        ),
        memory_mape=_mean([abs(e) for score in scores if (e := score.memory_error) is not None]),
        num_runs=len(scores),
    )


def _mean(errors: Sequence[float]) -> float | None:
    return fmean(errors) if errors else None


RUNS = {model: f"measured/{model}-GH200" for model in ("OPT-350", "GPT-Neo-2.7")}
"""Of each model that was run."""
_GIGA = 1e9


def main() -> int:
    parser = make_data_parser(__doc__, SAILOR)
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="runs (default: those of theirs of the model on GH200)"
    )
    parser.add_argument("--model", help="of all runs; default: OPT-350, or by a run's number of layers")
    args = parser.parse_args()
    library = Library(args.data)
    model = None if args.model is None else library.find_model(args.model)
    if args.runs is None and model is not None and model not in RUNS:
        raise ProfileError(f"no runs of {model} are known, only of {', '.join(RUNS)}; name yours by --runs")
    runs = args.runs or library.find(RUNS[model or "OPT-350"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = score_folder(runs, library, model)
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
