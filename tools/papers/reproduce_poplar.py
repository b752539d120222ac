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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.papers.data import ZORSE, make_data_parser, report_errors, say_progress
from tools.papers.poplar.algorithms import raise_zero
from tools.papers.poplar.runs import (
    ASSUMPTIONS,
    CLUSTERS,
    LLAMA_OVER,
    NETWORK_BYTES_PER_S,
    NUMBERS,
    SPEEDUP_RANGE,
    TOKENS_PER_STEP,
    Job,
    PoplarCluster,
    make_job,
)
from tools.papers.poplar.shares import (
    Neighbours,
    Run,
    run_even,
    run_ours,
    run_poplar,
    run_whale,
    try_neighbours,
)
from tools.papers.zorse.paper import GBIT
from tools.papers.zorse.times import find_folder
from tools.report import write_json
from zorselike.errors import PlanError

STAGES = (0, 1, 2, 3)
WAYS = ("weak", "strong", "even", "Whale", "Poplar", "ours")
"""Fig. 3's five bars, and the exact shares."""
SHOWN = 3
"""Exceptions to a claim."""
PAPER_SIZES = ("0.5b", "tiny")
"""Models of about the sizes that the paper ran."""


@dataclass(frozen=True)
class Cell:
    """One ZeRO stage of one model on one cluster."""

    paper: PoplarCluster
    model: str
    job: Job = field(repr=False)
    runs: Mapping[str, Run | None]
    """Runs by way; None: it does not fit."""
    neighbours: Mapping[str, Neighbours]
    """Neighbours of Poplar's shares and of ours."""

    @property
    def max_rows(self) -> dict[str, int]:
        """Rows that fit at once, by device type."""
        return {device: card.max_rows for device, card in zip(self.job.devices, self.job.cards, strict=True)}

    def ratio(self, way: str, other: str) -> float | None:
        """Ratio of throughputs; None where one of them does not fit."""
        first, second = self.runs[way], self.runs[other]
        return None if first is None or second is None else first.tflops / second.tflops


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and what comes out here."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True)
class Study:
    """Everything that is simulated."""

    folder: Path
    """The folder with the files of Zorse's authors."""
    clusters: tuple[str, ...]
    """Names of those of Table 1 to simulate."""
    network_bytes_per_s: float
    tokens_per_step: int
    say: Callable[[str], None] = print

    @cached_property
    def papers(self) -> tuple[PoplarCluster, ...]:
        return tuple(
            replace(paper, network_bytes_per_s=self.network_bytes_per_s, tokens_per_step=self.tokens_per_step)
            for paper in CLUSTERS
            if paper.name in self.clusters
        )

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Figs. 3 and 4."""
        return tuple(
            self.make_cell(paper, model, zero)
            for paper in self.papers
            for model in paper.models
            for zero in STAGES
        )

    @cached_property
    def by_numbers(self) -> dict[tuple[int, int], tuple[float | None, ...]]:
        """Fig. 5: TFLOP/s by numbers of strong and weak GPUs of cluster C and ZeRO stage."""
        found: dict[tuple[int, int], tuple[float | None, ...]] = {}
        for paper in self.papers:
            if paper.name != "C":
                continue
            for numbers in NUMBERS:
                self.say(f"cluster C: {numbers[0]} + {numbers[1]}")
                own = paper.with_numbers(*numbers)
                runs = [run_ours(make_job(self.folder, own, PAPER_SIZES[0], zero)) for zero in STAGES]
                found[numbers] = tuple(None if run is None else run.tflops for run in runs)
        return found

    def make_cell(self, paper: PoplarCluster, model: str, zero: int) -> Cell:
        """All ways, and what is one row away from the last two."""
        self.say(f"cluster {paper.name}: Llama {model}, ZeRO {zero}")
        numbers = ((0, paper.num_weak), (paper.num_strong, 0), (paper.num_strong, paper.num_weak))
        weak, strong, whole = (
            make_job(self.folder, paper.with_numbers(*own), model, zero) for own in numbers
        )
        found = (run_even(weak), run_even(strong), run_even(whole), run_whale(whole), run_poplar(whole))
        runs = dict(zip(WAYS, (*found, run_ours(whole)), strict=True))
        last = ((way, runs[way]) for way in WAYS[-2:])
        neighbours = {way: try_neighbours(whole, run) for way, run in last if run is not None}
        return Cell(paper, model, whole, runs, neighbours)


def find_stage(cells: Sequence[Cell]) -> str:
    """The ZeRO stage to which Algorithm 1 comes for one model on one cluster, in words."""
    by_stage = {cell.job.zero: [card.max_rows for card in cell.job.cards] for cell in cells}
    try:
        stage = raise_zero(by_stage)
    except PlanError:
        return "a row fits on no card at any stage"
    if all(by_stage[stage]):
        return f"from ZeRO {stage} on a row fits on every card"
    return f"with ZeRO {stage} a row fits on most cards, on all at no stage"


# -- what the text says --------------------------------------------------------------------


def list_claims(study: Study) -> list[Claim]:
    """Those that can be looked at with what was simulated."""
    cells = study.cells
    on_a = _span([cell for cell in cells if cell.paper.name == "A"], "Whale", "even")
    whale = [Claim("cluster A: Whale over DeepSpeed", "about the same", on_a)] if on_a else []
    return [*_claim_speedups(cells), *whale, *_claim_optimum(cells), *_claim_numbers(study)]


def _ratios(cells: Sequence[Cell], way: str, *others: str) -> list[float]:
    found = (cell.ratio(way, other) for cell in cells for other in others)
    return [ratio for ratio in found if ratio is not None]


def _span(cells: Sequence[Cell], way: str, *others: str, digits: int = 2) -> str:
    """The least ratio to the most; nothing without any."""
    ratios = _ratios(cells, way, *others)
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}" if ratios else ""


def _claim_speedups(cells: Sequence[Cell]) -> Iterator[Claim]:
    small = [cell for cell in cells if cell.model in PAPER_SIZES]
    if found := _span(small, "Poplar", "even", "Whale"):
        yield Claim(
            "Poplar's throughput over the other systems' (abstract; also BERT, which is left out here)",
            f"{SPEEDUP_RANGE[0]:.2f} to {SPEEDUP_RANGE[1]:.2f}",
            f"{found}; ours {_span(small, 'ours', 'even', 'Whale')}",
        )
    by_paper = {cell.paper.name: [own for own in small if own.paper == cell.paper] for cell in small}
    for other, name in (("even", "DeepSpeed"), ("Whale", "Whale")):
        for paper, own in by_paper.items():
            if ratios := _ratios([cell for cell in own if cell.model == "tiny"], "Poplar", other):
                what = (
                    f"Llama 1.1B, the most over {name} (Fig. 4 b, cluster not named); here tiny on cluster "
                )
                yield Claim(what + paper, f"{LLAMA_OVER[other]:.2f}", f"{max(ratios):.2f}")
    for paper, own in by_paper.items():
        few = _span([cell for cell in own if not cell.job.has_rounds], "Poplar", "even")
        many = _span([cell for cell in own if cell.job.has_rounds], "Poplar", "even")
        if few and many:
            what = f"cluster {paper}: ZeRO 2 and 3 gain substantially over even shares"
            yield Claim(what, "yes", f"{many}, with ZeRO 0 and 1 {few}")


def _claim_optimum(cells: Sequence[Cell]) -> Iterator[Claim]:
    for way in ("Poplar", "ours"):
        tried = [cell.neighbours[way] for cell in cells if way in cell.neighbours]
        if not tried:
            continue
        better = [found.best_gain for found in tried if found.best_gain > 0]
        most = f", the most by {max(better):.2%}" if better else ""
        yield Claim(
            f"shares one row away from {'its' if way == 'Poplar' else 'our'} answer that are faster",
            "none, in all experiments" if way == "Poplar" else "",
            f"in {len(better)} of {len(tried)} cells{most}; {sum(found.number for found in tried)} tried",
        )
    if found := _span(cells, "ours", "Poplar", digits=3):
        yield Claim("our throughput over Poplar's", "", found)


def _claim_numbers(study: Study) -> Iterator[Claim]:
    # 0 where it does not fit.
    found = {numbers: [own or 0.0 for own in tflops] for numbers, tflops in study.by_numbers.items()}
    if not found:
        return
    larger = [(a, b) for a in found for b in found if a != b and a[0] <= b[0] and a[1] <= b[1]]
    slower = [
        f"{b[0]} + {b[1]} is slower than {a[0]} + {a[1]} with ZeRO {zero}"
        for zero in STAGES
        for a, b in larger
        if found[b][zero] <= found[a][zero]
    ]
    yield Claim(
        "cluster C: more GPUs of either type are faster (Fig. 5)",
        "yes",
        f"not in {len(slower)} of {len(STAGES) * len(larger)} pairs: {', '.join(slower[:SHOWN])}"
        if slower
        else "yes",
    )
    costs_more = all(found[n, 4][zero] < found[4, n][zero] for n in (1, 2, 3) for zero in STAGES)
    what = "cluster C: fewer A800 cost more than fewer V100S (Fig. 5)"
    yield Claim(what, "yes, significantly", "yes" if costs_more else "no")


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
