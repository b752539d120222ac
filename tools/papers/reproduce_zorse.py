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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import ZORSE, make_data_parser, report_errors, say_progress
from tools.papers.zorse.baselines import format_baselines, plan_cells
from tools.papers.zorse.paper import ASSUMPTIONS, GBIT, PaperCluster, keep_types, make_cluster, make_nodes
from tools.papers.zorse.plans import Options
from tools.papers.zorse.runs import Outcome, Setup, fit_plan, list_options, make_setup, run_plan, search
from tools.papers.zorse.study import Cell, Study, mean_error
from tools.papers.zorse.times import find_folder
from tools.report import write_json
from zorselike.plan.cluster.cluster import Node


@dataclass(frozen=True)
class Panel:
    """A group of bars, or a block of a table: a row a label, a column a series."""

    title: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    """None: it does not fit."""


@dataclass(frozen=True)
class Figure:
    """What stands in for one figure of the paper."""

    key: str
    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = ()


def make_figures(study: Study) -> list[Figure]:
    """All of them."""
    return [make(study) for make in (_figure_3, _figure_8, _figure_9, _figure_10, _figure_11)]


def _figure_3(study: Study) -> Figure:
    """PP with ZeRO 2 and with ZeRO 3."""
    nodes = make_nodes(1, "V100-16", 8, nic=25 * GBIT) + make_nodes(1, "T4", 8, nic=25 * GBIT)
    models = ("tiny", "3b", "7b", "13b")
    notes = ["1F1B, a group a node, 512 tokens, no offloading; tiny is 1.3B"]
    outcomes: dict[str, list[Outcome | None]] = {"ZeRO 2": [], "ZeRO 3": []}
    for model in models:
        study.say(f"figure 3: Llama {model}")
        setup = make_setup(study.folder, model, _two_groups("3", nodes, 512))
        for zero in (2, 3):
            base = Options(1, 1, zero=zero, offload=(), order="1f1b")
            outcomes[f"ZeRO {zero}"].append(search(setup, list_options((1,), (1, 2, 4), base)))
        notes += [f"{model}: {line}" for line in setup.clock.assumptions if "nothing was measured" in line]
    tflops = {
        name: [None if own is None else own.tflops for own in found] for name, found in outcomes.items()
    }
    memory = {
        name: [None if own is None else own.memory_share for own in found] for name, found in outcomes.items()
    }
    panels = [Panel("TFLOP/s", models, tflops), Panel("memory of the fullest GPU, share", models, memory)]
    return Figure("figure_3", "PP with ZeRO 2 and with ZeRO 3 on 8 V100 and 8 T4", panels, notes)


STEPS: Mapping[str, tuple[str, ...]] = {
    "A": ("A100-80", "H100-NVL"),
    "B": ("T4", "V100-16", "A10G", "A100-40"),
    "C": ("T4", "V100-16", "A10G"),
}
"""Device types of each cluster from the slowest."""


def _figure_8(study: Study) -> Figure:
    """Cards added step by step."""
    panels = []
    for name, types in STEPS.items():
        steps = [types[: i + 1] for i in range(len(types))]
        parts = [keep_types(study.clusters[name], set(step)) for step in steps]
        largest = study.largest(parts[0])
        if largest is None:
            continue
        outcomes = [(study.fitting(part, largest[0]), part) for part in parts]
        series = {
            "PFLOP/s": [None if own is None else own.tflops / 1e3 for own, _ in outcomes],
            "HFU": [None if own is None else own.tflops / part.peak_tflops for own, part in outcomes],
        }
        panels.append(Panel(f"cluster {name}, Llama {largest[0]}", list(map("+".join, steps)), series))
    notes = ("the largest model of Table 5 that fits on the slowest cards by our memory model",)
    return Figure("figure_8", "cards added step by step", panels, notes)


def _figure_9(study: Study) -> Figure:
    """Mixed against alone."""
    panels = []
    notes = ["the largest model of Table 5 that fits on the cluster, alone the same where it fits"]
    for name, types in STEPS.items():
        paper = study.clusters[name]
        largest = study.largest(paper)
        if largest is None:
            continue
        model, mixed = largest
        alone: list[float | None] = []
        for device in types:
            part = keep_types(paper, {device})
            outcome = study.fitting(part, model)
            if outcome is None and (smaller := study.largest(part)) is not None:
                other, outcome = smaller
                notes.append(f"cluster {name}, {device} alone: Llama {other}, since {model} does not fit")
            alone.append(None if outcome is None else outcome.hfu_of(device))
        series: dict[str, list[float | None]] = {
            "mixed": [mixed.hfu_of(device) for device in types],
            "alone": alone,
        }
        panels.append(Panel(f"cluster {name}, Llama {model}", types, series))
    return Figure("figure_9", "HFU by type of card, mixed against alone", panels, notes)


INTERLEAVED = {"A100-40": ("7b", (1, 2, 4, 8, 16)), "A10G": ("3b", (1, 2, 4, 7, 13))}
"""By type of card, the model and the ministages of each GPU, up to one a layer."""


def _figure_10(study: Study) -> Figure:
    """Ministages."""
    panels = []
    for device, (model, ministages) in INTERLEAVED.items():
        study.say(f"figure 10: {device}")
        paper = _two_groups("10", make_nodes(2, device, 8, nic=25 * GBIT), 1024)
        setup = make_setup(study.folder, model, paper)
        options = {str(number): Options(number, 2) for number in ministages}
        for zero in (2, 3):
            options[f"PP + ZeRO {zero}"] = Options(1, 2, zero=zero, offload=("activations",))
        base, *_ = outcomes = [_run_by_speed(setup, choice) for choice in options.values()]
        series = {
            "throughput": [own.tflops / base.tflops for own in outcomes],
            "memory": [max(own.peak_bytes) / max(base.peak_bytes) for own in outcomes],
        }
        panels.append(Panel(f"16 {device}, Llama {model}", list(options), series))
    notes = (
        "two nodes of 8, a group a node, 1024 tokens, 2 rows a microbatch; the models are our choice",
        "PP + ZeRO 2 and 3 in the same order with one ministage; activations are offloaded there too",
    )
    return Figure("figure_10", "ministages for each GPU, relative to one", panels, notes)


def _figure_11(study: Study) -> Figure:
    """Ablation, Llama 65B on cluster A: base, activation offloading, interleaving, groups by node."""
    by_node = make_setup(study.folder, "65b", study.clusters["A"])
    places = by_node.places
    by_four = replace(by_node, groups=tuple(tuple(places[i : i + 4]) for i in range(0, len(places), 4)))
    steps = {
        "base": (by_four, Options(1, 1, offload=())),
        "+O": (by_four, Options(1, 1, offload=("activations",))),
        "+O +I": (by_four, Options(8, 1)),
        "+O +I +H": (by_node, Options(8, 1)),
    }
    tflops: list[float | None] = []
    unbounded: list[Outcome] = []
    for label, (setup, options) in steps.items():
        study.say(f"figure 11: {label}")
        fitting = fit_plan(setup, options)
        tflops.append(None if fitting is None else run_plan(setup, options, fitting).tflops)
        unbounded.append(_run_by_speed(setup, options))
    fastest: dict[str, list[float | None]] = {
        "that fits": tflops,
        "layers by speed alone": [own.tflops for own in unbounded],
    }
    memory = {"memory": [own.memory_share for own in unbounded]}
    panels = [
        Panel("TFLOP/s", list(steps), fastest),
        Panel("memory of the fullest GPU with layers by speed alone, share", list(steps), memory),
    ]
    notes = (
        "base: five groups of four, ZeRO 2, one ministage; +O offloads activations; +I eight ministages, "
        "whose parameters are offloaded and which are updated one by one; +H a group a node",
    )
    return Figure("figure_11", "ablation on Llama 65B, cluster A", panels, notes)


def _two_groups(name: str, nodes: list[Node], sequence_length: int) -> PaperCluster:
    """Two nodes, a group each."""
    return PaperCluster(name, make_cluster(name, nodes, nic=25 * GBIT), sequence_length, ((0,), (1,)))


def _run_by_speed(setup: Setup, options: Options) -> Outcome:
    """Whether it fits or not."""
    plan = fit_plan(setup, options, bounded=False)
    assert plan is not None, "every group has layers"
    return run_plan(setup, options, plan)


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
