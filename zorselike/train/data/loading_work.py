"""The data loading of a training program between two steps, for the profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from zorselike.train.config.config import DataLoader
from zorselike.train.data.corpus import Corpus
from zorselike.train.data.loader import RowLoader, StepDataset

_NUM_ROWS = 64
"""Rows of the corpus."""
_ROWS_PER_STEP = 8


@contextmanager
def loading_rows(seq_len: int) -> Iterator[Callable[[], object]]:
    """Yields a function that reads the next batch like the trainer after each step: with the default loader
    and its worker, from a small corpus of zeros with rows of `seq_len` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "zeros.bin"
        np.zeros(_NUM_ROWS * seq_len + 1, dtype=np.uint16).tofile(file)
        corpus = Corpus([file], dtype="uint16", seq_len=seq_len, vocab_size=1, source="zeros")
        rows = range(_ROWS_PER_STEP)
        dataset = StepDataset(corpus, global_batch=_ROWS_PER_STEP, seed=0, input_rows=rows, target_rows=rows)
        with closing(RowLoader(dataset, DataLoader())) as loader:
            batches = iter(loader)
            yield lambda: next(batches)
