"""Simulates what Zorse's paper measured: Table 5, and figures 3 and 8 to 11.

    python tools/papers/reproduce_zorse.py --json figures.json --pictures pictures/
    python tools/papers/reproduce_zorse.py --only table_5
    python tools/papers/reproduce_zorse.py --only baselines

`--data` is the folder of other people's data (or its `zorse/`), with the layer times that Zorse's authors
published. Groups, sequence lengths and global batch are the paper's (section 6); layers go to groups and
rows to cards by their speed, ministages and microbatches are searched as its planner does (4.3.3), by
the closed form and then the simulator. The baselines of Table 5 are planned by their own rules
(`zorselike/planner/baselines/systems.py`) on the same costs. Nothing is tuned to the paper's numbers: the
error is a finding. All takes about nine minutes of one core, the table alone two, its baselines three.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.zorse.baselines import BaselineCell, format_baselines, plan_cells
from tools.papers.zorse.figures import Figure, Panel, make_figures
from tools.papers.zorse.paper import ASSUMPTIONS
from tools.papers.zorse.pictures import draw_figures, table_5_panels
from tools.papers.zorse.study import Cell, Study, mean_error
from tools.papers.zorse.times import TIMES_FILE
from zorselike.cost.curves import CurveWarning
from zorselike.errors import ClusterError, PlanError, ProfileError

DATA = Path(__file__).parents[2] / "shared" / "data"
TABLE, BASELINES = "table_5", "baselines"


def main() -> int:
    args = _read_arguments()
    folder = next((f for f in (args.data / "zorse", args.data) if (f / TIMES_FILE).is_file()), None)
    if folder is None:
        print(f"{args.data}: no {TIMES_FILE} in it or its zorse/; give --data that folder", file=sys.stderr)
        return 2
    # Of the authors' times some fall by a few percent where more is computed; curves repair them.
    warnings.simplefilter("ignore", CurveWarning)
    study = Study(folder, say=lambda line: print(f"... {line}", file=sys.stderr, flush=True))
    try:
        cells = [] if args.only == BASELINES else study.table_5()
        if cells:
            print("\n".join([*format_cells(cells), ""]), flush=True)
        baselines = [] if args.only == TABLE else plan_cells(folder, say=study.say)
        if baselines:
            print("\n".join([*format_baselines(baselines), ""]), flush=True)
        figures = [] if args.only else make_figures(study)
    except (ClusterError, PlanError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join("\n".join(format_figure(figure)) for figure in figures))
    if args.json is not None:
        args.json.write_text(
            json.dumps(to_json(cells, baselines, figures), indent=2) + "\n", encoding="utf-8"
        )
    if args.pictures is not None:
        try:
            paths = draw_figures([*([table_5_panels(cells)] if cells else []), *figures], args.pictures)
        except ImportError:
            print("no pictures: matplotlib is missing; install zorselike[viz]", file=sys.stderr)
            return 2
        print("\n" + "\n".join(f"wrote {path}" for path in paths))
    return 0


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help=f"default: {DATA}")
    parser.add_argument("--json", type=Path, help="where figures are written")
    parser.add_argument("--pictures", type=Path, help="a folder for PNGs")
    parser.add_argument("--only", choices=(TABLE, BASELINES), help="leave out all else")
    return parser.parse_args()


def format_cells(cells: Sequence[Cell]) -> list[str]:
    """Table 5's cells, what was chosen for each, the mean error and what was assumed."""
    lines = [
        "Table 5, Zorse: TFLOP/s and HFU, simulated beside the paper's, and the compute-bound limit",
        f"{'cluster':<8}{'model':<7}{'TFLOP/s':>9}{'paper':>9}{'error':>8}{'HFU':>7}{'paper':>7}{'limit':>8}"
        f"{'of it':>7}{'paper':>7}{'memory':>8}  ministages, rows, layers of groups, offloaded",
    ]
    lines += [_format_cell(cell) for cell in cells]
    lines.append(f"mean absolute error of throughput: {mean_error(cells):.1%} over {len(cells)} cells")
    lines += ["assumed:", *(f"  {line}" for line in ASSUMPTIONS)]
    found = {line for cell in cells if cell.outcome for line in cell.outcome.costs.assumptions}
    return lines + [f"  {line}" for line in sorted(found)]


def _format_cell(cell: Cell) -> str:
    outcome, hfu, error = cell.outcome, cell.hfu, cell.error
    line = f"{cell.cluster:<8}{cell.model:<7}"
    if outcome is None or hfu is None or error is None:
        return line + f"{'OOM':>9}{cell.paper.tflops:>9.0f}"
    return line + (
        f"{outcome.tflops:>9.0f}{cell.paper.tflops:>9.0f}{error:>+8.1%}{hfu:>7.1%}{cell.paper.hfu:>7.1%}"
        f"{cell.bound_tflops:>8.0f}{outcome.tflops / cell.bound_tflops:>7.0%}"
        f"{cell.paper.tflops / cell.bound_tflops:>7.0%}{outcome.memory_share:>8.0%}  "
        f"{outcome.options.ministages}, {outcome.options.rows_per_microbatch}, {outcome.layers}, "
        f"{' '.join(outcome.options.offload)}"
        + ("" if outcome.fits else "; does not fit by our model of memory")
    )


def format_figure(figure: Figure) -> list[str]:
    """A table for each panel."""
    lines = [f"{figure.key.replace('_', ' ')}: {figure.title}"]
    for panel in figure.panels:
        lines += _format_panel(panel)
    return lines + [f"  ({note})" for note in figure.notes]


def _format_panel(panel: Panel) -> list[str]:
    width = max(len(label) for label in panel.labels) + 2
    names = list(panel.series)
    lines = [f"  {panel.title}", "    " + " " * width + "".join(f"{name:>24}" for name in names)]
    for i, label in enumerate(panel.labels):
        values = [panel.series[name][i] for name in names]
        lines.append(f"    {label:<{width}}" + "".join(f"{_format_value(value):>24}" for value in values))
    return lines


def _format_value(value: float | None) -> str:
    if value is None:
        return "OOM"
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}"


def to_json(
    cells: Sequence[Cell], baselines: Sequence[BaselineCell], figures: Sequence[Figure]
) -> dict[str, Any]:
    return {
        "mean_absolute_error": mean_error(cells) if cells else None,
        "assumptions": list(ASSUMPTIONS),
        TABLE: [cell.to_json() for cell in cells],
        BASELINES: [cell.to_json() for cell in baselines],
        **{figure.key: figure.to_json() for figure in figures},
    }


if __name__ == "__main__":
    sys.exit(main())
