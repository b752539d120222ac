"""Simulates what Poplar's paper measured: Figs. 3 to 5, rows dealt to unequal GPUs at each ZeRO stage.

    python tools/papers/reproduce_poplar.py --data DIR --json poplar.json
    python tools/papers/reproduce_poplar.py --data DIR --cluster A --network-gbit 100 --tokens 262144

Layer times are those that Zorse's authors published: Poplar's own are not. Its figures are plots without
numbers, so beside ours stand the ratios that its text names. Nothing is tuned to them. All takes about a
minute of one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import ZORSE, make_data_parser, report_errors, say_progress
from tools.papers.poplar.paper import ASSUMPTIONS, CLUSTERS, NETWORK_BYTES_PER_S, TOKENS_PER_STEP
from tools.papers.poplar.shares import Run
from tools.papers.poplar.study import PAPER_SIZES, STAGES, WAYS, Cell, Claim, Study, find_stage, list_claims
from tools.papers.zorse.paper import GBIT
from tools.papers.zorse.times import find_folder
from tools.report import write_json


def main() -> int:
    parser = make_data_parser(__doc__, ZORSE)
    names = [paper.name for paper in CLUSTERS]
    parser.add_argument("--cluster", nargs="+", choices=names, default=names, help="of Table 1")
    gbit_help = "Gb/s between a cluster's two machines, which the paper does not give (default: %(default)g)"
    gbit = NETWORK_BYTES_PER_S / GBIT
    parser.add_argument("--network-gbit", type=_read_gbit, default=gbit, help=gbit_help)
    tokens_help = "of a step (default: the paper's, %(default)d)"
    parser.add_argument("--tokens", type=_read_tokens, default=TOKENS_PER_STEP, help=tokens_help)
    args = parser.parse_args()
    study = Study(
        find_folder(args.data),
        clusters=tuple(args.cluster),
        network_bytes_per_s=args.network_gbit * GBIT,
        tokens_per_step=args.tokens,
        say=say_progress,
    )
    print("\n".join(format_study(study)))
    write_json(args.json, {"cells": study.cells, "by_numbers": study.by_numbers})
    return 0


def _read_gbit(text: str) -> float:
    gbit = float(text)
    if not 0 < gbit < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} Gb/s; give more than 0")
    return gbit


def _read_tokens(text: str) -> int:
    tokens, least = int(text), max(paper.sequence_length for paper in CLUSTERS)
    if tokens < least:
        raise argparse.ArgumentTypeError(f"{text} tokens; give at least {least}, one row")
    return tokens


# -- text ----------------------------------------------------------------------------------


def format_study(study: Study) -> list[str]:
    """A table for each model on each cluster, Fig. 5's, the paper's claims, and what was assumed."""
    lines = [
        "Figs. 3 and 4: TFLOP/s of a step, simulated; Poplar as printed but for its slips, ours exact; "
        "planned: CPU time of ours; neighbours: throughput of the best share one row away, over ours"
    ]
    for _, cells in groupby(study.cells, key=lambda cell: (cell.paper, cell.model)):
        lines += ["", *format_cells(list(cells))]
    if study.by_numbers:
        lines += ["", *format_numbers(study)]
    lines += ["", *format_claims(list_claims(study)), "", "assumed:"]
    return [*lines, *(f"  {line}" for line in [*ASSUMPTIONS, *_list_assumptions(study.cells)])]


def format_cells(cells: Sequence[Cell]) -> list[str]:
    """The stages of one model on one cluster."""
    paper, job = cells[0].paper, cells[0].job
    return [
        f"cluster {paper.name} ({paper.describe()}), Llama {cells[0].model} "
        f"({job.workload.num_parameters / 1e9:.2f} B parameters, {paper.dtype}, {paper.sequence_length} "
        f"tokens), {job.num_rows} rows a step; {find_stage(cells)}",
        "  ZeRO" + "".join(f"{way:>8}" for way in WAYS) + f"{'/even':>8}{'/Whale':>8}{'/Poplar':>9}"
        f"{'planned':>9}  rows at once (room), neighbours",
        *(_format_cell(cell) for cell in cells),
    ]


def _format_cell(cell: Cell) -> str:
    ours = cell.runs["ours"]
    line = f"  {cell.job.zero:<4}" + "".join(f"{_format_tflops(cell.runs[way]):>8}" for way in WAYS)
    if ours is None:
        return line
    ratios = [cell.ratio("ours", other) for other in ("even", "Whale", "Poplar")]
    texts = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    line += f"{texts[0]:>8}{texts[1]:>8}{texts[2]:>9}{ours.planning_s * 1e3:>6.0f} ms  "
    found = cell.neighbours["ours"]
    return line + (
        ", ".join(_list_rows(cell, ours)) + f", {found.best_gain:+.2%} of {found.number}"
        if found.number
        else ", ".join(_list_rows(cell, ours)) + ", none"
    )


def _format_tflops(run: Run | None) -> str:
    return "OOM" if run is None else f"{run.tflops:.1f}" if run.tflops < 100 else f"{run.tflops:.0f}"


def _list_rows(cell: Cell, run: Run) -> Iterable[str]:
    for device, most in cell.max_rows.items():
        own = {n for n, other in zip(run.rows_at_once, cell.job.devices, strict=True) if other == device}
        yield f"{device} {'/'.join(str(n) for n in sorted(own))} ({most})"


def format_numbers(study: Study) -> list[str]:
    """Fig. 5."""
    paper = next(each for each in study.papers if each.name == "C")
    lines = [
        f"Fig. 5: TFLOP/s of our shares by numbers of GPUs, Llama {PAPER_SIZES[0]} on cluster C "
        "(the paper's are a plot)",
        f"  {paper.strong} + {paper.weak}" + "".join(f"{f'ZeRO {zero}':>9}" for zero in STAGES),
    ]
    width = len(lines[-1]) - 9 * len(STAGES) - 2
    for (num_strong, num_weak), tflops in study.by_numbers.items():
        texts = ["OOM" if value is None else f"{value:.0f}" for value in tflops]
        lines.append(f"  {f'{num_strong} + {num_weak}':<{width}}" + "".join(f"{text:>9}" for text in texts))
    return lines


def format_claims(claims: Sequence[Claim]) -> list[str]:
    """What the paper's text says, beside ours."""
    lines = ["what the paper's text says, and what is simulated here (of Poplar's shares unless said):"]
    for claim in claims:
        paper = f"paper {claim.paper}; here " if claim.paper else ""
        lines.append(f"  {claim.what}: {paper}{claim.ours}")
    return [*lines, "  time that planning takes: paper: in its appendix, which we do not have; here above"]


def _list_assumptions(cells: Sequence[Cell]) -> list[str]:
    return sorted({line for cell in cells for line in cell.job.clock.assumptions})


if __name__ == "__main__":
    sys.exit(report_errors(main))
