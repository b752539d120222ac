"""Rows: what a step reads of the data, whatever they were made of."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class Row(NamedTuple):
    """One sample of the global batch; each entry is `[seq_len]`."""

    inputs: Numbers
    targets: Numbers
    """The token after each input; the loss's ignore index where it does not count."""
    positions: Numbers | None = None
    """Of each input in its document, from 0; None where the whole row is one document."""


class Rows(Protocol):
    """Data as rows of `seq_len` tokens, read by number in any order and by any process."""

    source: str
    """Where they are from, for messages."""
    seq_len: int
    num_rows: int
    is_packed: bool
    """Whether a row holds several documents that must not see each other."""

    def read_row(self, row: int) -> Row: ...

    def fingerprint(self) -> str:
        """Equal for equal inputs and targets; raises `ConfigError` for tokens that the model lacks."""

    def describe(self) -> str:
        """What was read, for the log."""
