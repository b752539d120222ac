"""Examples as rows: each whole in one row, beside others or alone, and padded to the row's length.

Encoded and packed once into a folder of plain numbers, from which any process reads any row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zorselike.errors import ConfigError
from zorselike.runtime.loss import IGNORE_INDEX
from zorselike.text.wording import count
from zorselike.train.data.packing import pack
from zorselike.train.data.rows import Row
from zorselike.train.data.tokenizer import Encoded

_COUNTS, _STARTS = 1, 2
"""Marks of a token: it counts in the loss where it is predicted; it is the first of an example."""
_PACKED_AT_ONCE = 4096
"""Examples that rows are made of, in the order of the files; bounds the memory."""


@dataclass(frozen=True)
class Contents:
    """What a folder of rows holds, in numbers."""

    noun: str
    """What an example is: "conversation", "completion"."""
    dtype: str
    seq_len: int
    is_packed: bool
    num_examples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    """Tokens that count in the loss."""
    num_rows: int = 0
    num_truncated: int = 0
    num_left_out: int = 0
    hash: str = ""

    @property
    def padding(self) -> float:
        """Share of the rows' tokens that is padding: the last token of an example is no input."""
        return 1 - (self.num_tokens - self.num_examples) / max(self.num_rows * self.seq_len, 1)


def write_rows(
    folder: Path,
    examples: Iterable[Encoded],
    *,
    noun: str,
    dtype: str,
    seq_len: int,
    packs: bool,
    trains_on_input: bool,
) -> Contents:
    """Writes examples as rows into a new folder.

    An example of more than `seq_len` + 1 tokens, all but the last of which are inputs, loses its end; one
    that then has nothing to predict is left out.
    """
    folder.mkdir()
    numbers = dict.fromkeys(("examples", "tokens", "targets", "rows", "truncated", "left_out"), 0)
    digest = hashlib.sha256()

    def prepare() -> Iterator[Encoded]:
        for tokens, is_answer in examples:
            numbers["truncated"] += len(tokens) > seq_len + 1
            kept = Encoded(tokens[: seq_len + 1], is_answer[: seq_len + 1] | trains_on_input)
            if kept.is_answer[1:].any():
                yield kept
            else:
                numbers["left_out"] += 1

    prepared = prepare()
    with (
        (folder / "tokens.bin").open("wb") as token_file,
        (folder / "marks.bin").open("wb") as mark_file,
        (folder / "rows.bin").open("wb") as row_file,
    ):
        row_file.write(np.int64(0).tobytes())
        while window := list(islice(prepared, _PACKED_AT_ONCE)):
            lengths = [len(tokens) - 1 for tokens, _ in window]
            for members in pack(lengths, seq_len) if packs else [[index] for index in range(len(window))]:
                for tokens, is_answer in (window[index] for index in members):
                    marks = is_answer * np.uint8(_COUNTS)
                    marks[0] = _STARTS
                    parts = tokens.astype(dtype).tobytes(), marks.astype(np.uint8).tobytes()
                    token_file.write(parts[0])
                    mark_file.write(parts[1])
                    digest.update(b"".join(parts))
                    numbers["examples"] += 1
                    numbers["tokens"] += len(tokens)
                    numbers["targets"] += int(is_answer[1:].sum())
                numbers["rows"] += 1
                row_file.write(np.int64(numbers["tokens"]).tobytes())
                digest.update(b"row")
    contents = Contents(
        noun=noun,
        dtype=dtype,
        seq_len=seq_len,
        is_packed=packs,
        hash=digest.hexdigest()[:12],
        **{f"num_{name}": number for name, number in numbers.items()},
    )
    (folder / "contents.json").write_text(json.dumps(asdict(contents)))
    return contents


class ExampleRows:
    """The rows of such a folder, mapped into memory. Padding follows the last example of a row, as a document
    of its own that nothing is predicted in."""

    def __init__(self, folder: Path, *, source: str) -> None:
        """Raises `ConfigError` where the folder has no row."""
        self._folder = folder
        self.source = source
        self._contents = Contents(**json.loads((folder / "contents.json").read_text()))
        self.num_rows, self.seq_len = self._contents.num_rows, self._contents.seq_len
        self.is_packed = self._contents.is_packed
        if not self.num_rows:
            raise ConfigError(
                f"{source}: nothing is left to train on: {self._lost()}; give data with answers, or a larger "
                "[training] seq_len"
            )
        self._tokens = self._map("tokens.bin", self._contents.dtype)
        self._marks = self._map("marks.bin", "uint8")
        self._rows = self._map("rows.bin", "int64")

    def __reduce__(self) -> tuple[Callable[..., ExampleRows], tuple[()]]:
        """Pickled for data workers as a folder's name, not with its content."""
        return partial(ExampleRows, self._folder, source=self.source), ()

    def read_row(self, row: int) -> Row:
        """The examples of a row, without the last token of each as input and the first as target."""
        where = slice(int(self._rows[row]), int(self._rows[row + 1]))
        tokens, marks = self._tokens[where].astype(np.int64), self._marks[where]
        is_first = (marks & _STARTS) != 0
        is_last = np.append(is_first[1:], True)
        counts = (marks[~is_first] & _COUNTS) != 0
        used = len(counts)
        inputs = np.zeros(self.seq_len, dtype=np.int64)
        inputs[:used] = tokens[~is_last]
        targets = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        targets[:used] = np.where(counts, tokens[~is_first], IGNORE_INDEX)
        if not self.is_packed:
            return Row(inputs, targets)
        starts = np.zeros(self.seq_len, dtype=np.bool_)
        starts[:used] = is_first[~is_last]
        starts[used : used + 1] = True
        indices = np.arange(self.seq_len, dtype=np.int64)
        return Row(inputs, targets, indices - np.maximum.accumulate(np.where(starts, indices, 0)))

    def fingerprint(self) -> str:
        """Equal for equal rows, targets included."""
        found = self._contents
        return f"{found.num_tokens:,} tokens in {found.num_rows:,} rows with hash {found.hash}"

    def describe(self) -> str:
        found, lost = self._contents, self._lost()
        rows = "packed rows" if found.is_packed else "rows of one each"
        return (
            f"{self.source}: {found.num_examples:,} {found.noun}s, {found.num_tokens:,} tokens, "
            f"{found.num_targets:,} of them in the loss; {found.num_rows:,} {rows}, "
            f"{100 * found.padding:.1f} % padding; "
            f"hash {found.hash}{f'; {lost}' if lost else ''}"
        )

    def _lost(self) -> str:
        found, lost = self._contents, []
        if found.num_truncated:
            lost.append(
                f"{count(found.num_truncated, found.noun)} longer than seq_len + 1 = {found.seq_len + 1} "
                "tokens lost the end"
            )
        if found.num_left_out:
            lost.append(f"{count(found.num_left_out, found.noun)} without an answer left out")
        return ", ".join(lost)

    def _map(self, name: str, dtype: str) -> Any:
        return np.memmap(self._folder / name, dtype=dtype, mode="r")
