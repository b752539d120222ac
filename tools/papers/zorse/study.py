"""Table 5 of Zorse's paper, simulated; and a memory of what was simulated, which figures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from .paper import TABLE_5, PaperCluster, Result, make_clusters
from .plans import Options
from .runs import Outcome, compute_bound_tflops, list_options, make_setup, search

SEARCHED_MINISTAGES = (1, 2, 4)
MORE_MINISTAGES = (8,)
"""Ministages where none of those fits."""
SEARCHED_ROWS: Mapping[str, tuple[int, ...]] = {"A": (1, 2), "B": (2, 4), "C": (2, 4)}
"""Rows of a microbatch by cluster."""
OFFLOADS = (("params", "activations"), ("params", "optimizer", "activations"))
"""What Zorse offloads; where nothing fits, optimizer state too."""


@dataclass(frozen=True)
class Cell:
    """One cell of Table 5."""

    cluster: str
    model: str
    outcome: Outcome | None
    """None: no plan can be laid."""
    bound_tflops: float
    peak_tflops: float

    @property
    def paper(self) -> Result:
        return TABLE_5[self.cluster, self.model]

    @property
    def error(self) -> float | None:
        """Relative to the paper's throughput."""
        return None if self.outcome is None else self.outcome.tflops / self.paper.tflops - 1

    @property
    def hfu(self) -> float | None:
        return None if self.outcome is None else self.outcome.tflops / self.peak_tflops


def mean_error(cells: Sequence[Cell]) -> float:
    """Mean absolute relative error of throughput over the cells that were simulated."""
    return fmean(abs(cell.error) for cell in cells if cell.error is not None)


@dataclass
class Study:
    """All simulations, each done once."""

    folder: Path
    """The folder with the authors' files."""
    say: Callable[[str], None] = print
    clusters: Mapping[str, PaperCluster] = field(default_factory=make_clusters)
    _found: dict[tuple[str, tuple[str, ...], str], Outcome | None] = field(default_factory=dict)

    def table_5(self) -> list[Cell]:
        cells = []
        for name, model in TABLE_5:
            cluster = self.clusters[name]
            bound = compute_bound_tflops(make_setup(self.folder, model, cluster))
            cells.append(Cell(name, model, self.find(cluster, model), bound, cluster.peak_tflops))
        return cells

    def find(self, paper: PaperCluster, model: str) -> Outcome | None:
        """The fastest run of a model, with the paper's number of ministages where it is known; where none
        fits by our model of memory, the fastest that does not; None if no plan can be laid."""
        key = (paper.name, paper.types, model)
        if key not in self._found:
            self.say(f"cluster {paper.name}: Llama {model} on {' + '.join(paper.types)}")
            self._found[key] = self._search(paper, model)
        return self._found[key]

    def fitting(self, paper: PaperCluster, model: str) -> Outcome | None:
        """The fastest run of a model that fits; None if none does."""
        outcome = self.find(paper, model)
        return outcome if outcome is not None and outcome.fits else None

    def largest(self, paper: PaperCluster) -> tuple[str, Outcome] | None:
        """The largest model of the cluster's cells in Table 5 that fits on it."""
        models = [model for name, model in TABLE_5 if name == paper.name]
        found = ((model, self.fitting(paper, model)) for model in reversed(models))
        return next(((model, outcome) for model, outcome in found if outcome is not None), None)

    def _search(self, paper: PaperCluster, model: str) -> Outcome | None:
        setup = make_setup(self.folder, model, paper)
        given = TABLE_5[paper.name, model].ministages
        first = SEARCHED_MINISTAGES if given is None else (given,)
        rows = SEARCHED_ROWS[paper.name]
        for offload in OFFLOADS:
            for ministages in (first, MORE_MINISTAGES):
                found = search(setup, list_options(ministages, rows, Options(1, 1, offload=offload)))
                if found is not None:
                    return found
        return search(setup, list_options(first, rows), bounded=False)
