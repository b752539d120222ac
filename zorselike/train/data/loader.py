"""Batches for one rank: in every step the inputs and targets of its rows.

What is read depends on the seed, on how many rows all steps before have read, and on the rank's rows of the
global batch; so a run goes on under any plan, with any number of workers.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from zorselike.errors import ConfigError
from zorselike.train.config.config import DataLoader
from zorselike.train.data.corpus import Corpus
from zorselike.train.data.packed_models import name_documents
from zorselike.train.data.row_order import row_at
from zorselike.train.data.rows import Numbers, Row, Rows

_PR_SET_PDEATHSIG = 1

_SAMPLE_ROWS, _SAMPLE_BATCH = 64, 8
"""Rows of the corpus that the profiler reads, and of a step."""


class Batch(NamedTuple):
    """What one rank gives to a step; all tensors are `[rows, seq_len]` of int64."""

    inputs: Tensor | None
    """None where the rank feeds no rows."""
    targets: Tensor | None
    """None where it compares with none."""
    keywords: dict[str, Tensor]
    """Of packed documents, for all rows that the rank computes, by the model's names."""


class StepDataset(Dataset[Batch | ConfigError]):
    """One item per step: the rows of the step's global batch that this rank needs.

    An error is an item too, because a worker would wrap it in its own traceback.
    """

    def __init__(
        self,
        source: Rows,
        *,
        global_batch: int,
        seed: int | None,
        input_rows: Sequence[int],
        target_rows: Sequence[int],
        rows_before: int = 0,
        keyword_rows: Sequence[int] = (),
        keywords: Sequence[str] = (),
    ) -> None:
        """`seed`: of the order of rows; None: their own. `rows_before`: how many of the order were read
        before the first step of this dataset, whatever the global batch was then. `keywords`: those of
        `document_keywords`, wanted of `keyword_rows`."""
        self._source = source
        self._global_batch = global_batch
        self._seed = seed
        self._rows_before = rows_before
        self._input_rows = tuple(input_rows)
        self._target_rows = tuple(target_rows)
        self._keyword_rows = tuple(keyword_rows) if keywords else ()
        self._keywords = tuple(keywords)

    def __getitem__(self, step: int) -> Batch | ConfigError:
        wanted = {*self._input_rows, *self._target_rows, *self._keyword_rows}
        try:
            read = {row: self._read(step, row) for row in wanted}
        except ConfigError as error:
            return error
        inputs = [read[row].inputs for row in self._input_rows]
        targets = [read[row].targets for row in self._target_rows]
        positions = [read[row].positions for row in self._keyword_rows]
        return Batch(_stack(inputs), _stack(targets), self._name(positions))

    def _name(self, positions: Sequence[Numbers | None]) -> dict[str, Tensor]:
        none = np.zeros((0, self._source.seq_len), dtype=np.int64)
        known = [row for row in positions if row is not None]
        return name_documents(np.stack(known) if known else none, self._keywords)

    def _read(self, step: int, row: int) -> Row:
        position = self._rows_before + step * self._global_batch + row
        if self._seed is not None:
            position = row_at(position, num_rows=self._source.num_rows, seed=self._seed)
        return self._source.read_row(position)


class RowLoader:
    """Endless batches of one rank.

    Only one iteration at a time: another one, or `close`, ends the workers of the previous.
    """

    def __init__(
        self, dataset: StepDataset, settings: DataLoader, *, device: torch.device | None = None
    ) -> None:
        """`device`: where batches go, the CPU if None; memory is pinned for GPUs alone."""
        self._dataset = dataset
        self._pins = settings.pin_memory and device is not None and device.type == "cuda"
        self._settings = settings
        self._batches: Generator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        # Before multiprocessing's own exit handler, which waits for workers that ignore SIGTERM.
        atexit.register(self.close)
        self._batches = self._read()
        return self._batches

    def close(self) -> None:
        """Ends the workers; may be called repeatedly."""
        atexit.unregister(self.close)
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _read(self) -> Generator[Batch]:
        for batch in self._build_loader():
            if isinstance(batch, ConfigError):
                raise batch
            yield batch

    def _build_loader(self) -> StatefulDataLoader[Batch | ConfigError]:
        settings = self._settings
        workers = settings.num_workers > 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital.*")  # A warning of torchdata about itself.
            return StatefulDataLoader(
                self._dataset,
                batch_size=None,
                sampler=_StepSampler(),
                num_workers=settings.num_workers,
                pin_memory=self._pins,
                prefetch_factor=(settings.prefetch_factor or 2) if workers else None,
                worker_init_fn=_prepare_worker if workers else None,
            )


class _StepSampler(Sampler[int]):
    """Steps without end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def _stack(rows: Sequence[np.ndarray]) -> Tensor | None:
    return torch.from_numpy(np.stack(rows)) if rows else None


def _prepare_worker(worker: int) -> None:
    """Ties a worker's life to its rank's: signals are left to the rank, and a worker that outlived a killed
    rank would keep its connections open, so that no peer would notice. What is garbage in the rank is left to
    it too: a process group's threads were not forked, and who ends the group waits for them forever."""
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def loading_rows(seq_len: int) -> Iterator[Callable[[], object]]:
    """For the profiler: yields what reads the next batch like the trainer after each step, with the
    default loader and its worker, from a small corpus of zeros with rows of `seq_len` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "zeros.bin"
        np.zeros(_SAMPLE_ROWS * seq_len + 1, dtype=np.uint16).tofile(file)
        corpus = Corpus([file], dtype="uint16", seq_len=seq_len, vocab_size=1, source="zeros")
        rows = range(_SAMPLE_BATCH)
        dataset = StepDataset(corpus, global_batch=_SAMPLE_BATCH, seed=0, input_rows=rows, target_rows=rows)
        with closing(RowLoader(dataset, DataLoader())) as loader:
            batches = iter(loader)
            yield lambda: next(batches)
