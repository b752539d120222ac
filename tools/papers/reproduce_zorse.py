"""Simulates what Zorse's paper measured: Table 5, and figures 3 and 8 to 11.

    python tools/papers/reproduce_zorse.py --data DIR --json figures.json
    python tools/papers/reproduce_zorse.py --data DIR --only table_5
    python tools/papers/reproduce_zorse.py --data DIR --only baselines

Layer times are those that Zorse's authors published. Groups, sequence lengths and global batch are the
paper's (section 6); layers go to groups and rows to cards by their speed, ministages and microbatches are
searched as its planner does (4.3.3), by the closed form and then the simulator. The baselines of Table 5 are
planned by their own rules (`zorselike/planner/baselines/systems.py`) on the same costs. Nothing is tuned to
the paper's numbers: the error is a finding. All takes about nine minutes of one core, the table alone two,
its baselines three.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import ZORSE, make_data_parser, report_errors, say_progress
from tools.papers.zorse.baselines import format_baselines, plan_cells
from tools.papers.zorse.figures import Figure, Panel, make_figures
from tools.papers.zorse.paper import ASSUMPTIONS
from tools.papers.zorse.study import Cell, Study, mean_error
from tools.papers.zorse.times import find_folder
from tools.report import write_json

TABLE, BASELINES = "table_5", "baselines"


def main() -> int:
    parser = make_data_parser(__doc__, ZORSE)
    parser.add_argument("--only", choices=(TABLE, BASELINES), help="leave out all else")
    args = parser.parse_args()
    study = Study(find_folder(args.data), say=say_progress)
    cells = [] if args.only == BASELINES else study.table_5()
    if cells:
        print("\n".join([*format_cells(cells), ""]), flush=True)
    baselines = [] if args.only == TABLE else plan_cells(study.folder, say=study.say)
    if baselines:
        print("\n".join([*format_baselines(baselines), ""]), flush=True)
    figures = [] if args.only else make_figures(study)
    print("\n\n".join("\n".join(format_figure(figure)) for figure in figures))
    tflops = {(c.cluster, c.model): {b.name: c.tflops(b.name) for b in c.baselines} for c in baselines}
    write_json(args.json, {TABLE: cells, BASELINES: tflops, "figures": figures})
    return 0


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


if __name__ == "__main__":
    sys.exit(report_errors(main))
