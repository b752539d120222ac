"""A corpus: one long stream of tokens on disk, mapped into memory, cut into rows.

Text is tokenized once into a file in `<dump_folder>/dataset_cache`, so that ranks read only the rows that
they need, from any row on. `.bin` files are mapped as they are.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from zorselike.errors import ConfigError, DataError
from zorselike.train.data.rows import Row
from zorselike.train.data.text_files import read_pieces
from zorselike.train.data.tokenizer import Tokenizer

_SAMPLED_BLOCKS = 64
_BLOCK_TOKENS = 1024


class Corpus:
    """A stream of tokens over one or more files, in rows of `seq_len` + 1 that overlap by one.

    Row `i` is tokens `[i * seq_len, (i + 1) * seq_len]`: inputs all but its last, targets all but
    its first. Nothing is padded; an incomplete row at the end is left out.
    """

    is_packed = False

    def __init__(
        self, files: Sequence[Path], *, dtype: str, seq_len: int, vocab_size: int, source: str
    ) -> None:
        """`vocab_size` is the model's: a token that it lacks raises `DataError` when read."""
        self._settings: dict[str, Any] = {
            "dtype": dtype,
            "seq_len": seq_len,
            "vocab_size": vocab_size,
            "source": source,
        }
        itemsize = np.dtype(dtype).itemsize
        for file in files:
            if file.stat().st_size % itemsize:
                raise ConfigError(
                    f"{file}: {file.stat().st_size} bytes are no whole number of {dtype}; "
                    "[training] dataset_dtype must say what the file holds"
                )
        self._files = [file for file in files if file.stat().st_size]
        self._parts = [np.memmap(file, dtype=dtype, mode="r") for file in self._files]
        self._stops = np.cumsum([len(part) for part in self._parts], dtype=np.int64).tolist()
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.source = source
        self.num_tokens: int = self._stops[-1] if self._stops else 0
        self.num_rows = max(self.num_tokens - 1, 0) // seq_len
        if self.num_rows == 0:
            raise ConfigError(
                f"{source}: {self.num_tokens} tokens do not fill one row of [training] seq_len = {seq_len} "
                "tokens and the one after it; give more data or a smaller seq_len"
            )

    def __reduce__(self) -> tuple[Callable[..., Corpus], tuple[()]]:
        """Pickled for data workers as file names; a mapped array would be pickled with its content."""
        return partial(Corpus, self._files, **self._settings), ()

    def read_row(self, row: int) -> Row:
        """`seq_len` + 1 tokens, all but the last as inputs."""
        start = row * self.seq_len
        tokens = self._read(start, start + self.seq_len + 1)
        return Row(tokens[:-1], tokens[1:])

    def fingerprint(self) -> str:
        """Equal for equal streams: their length, and tokens sampled all along them.

        Raises:
            DataError: A sampled token is not in the model's vocabulary.
        """
        digest = hashlib.sha256(str(self.num_tokens).encode())
        last = max(self.num_tokens - _BLOCK_TOKENS, 0)
        for block in range(_SAMPLED_BLOCKS):
            start = last * block // (_SAMPLED_BLOCKS - 1)
            digest.update(self._read(start, min(start + _BLOCK_TOKENS, self.num_tokens)).tobytes())
        return f"{self.num_tokens:,} tokens with hash {digest.hexdigest()[:12]}"

    def describe(self) -> str:
        return f"{self.source}: {self.fingerprint()}, {self.num_rows:,} rows"

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `[start, stop)` of the stream, across files."""
        pieces = []
        part = bisect.bisect_right(self._stops, start)
        while start < stop:
            first = self._stops[part] - len(self._parts[part])
            piece = self._parts[part][start - first : stop - first].astype(np.int64)
            if piece.max() >= self.vocab_size:
                offender = int(piece.argmax())
                raise DataError(
                    f"{self._files[part]}: token {piece[offender]} at {start - first + offender} is not in "
                    f"the model's vocabulary of {self.vocab_size}; the file is of another tokenizer, or of "
                    "another [training] dataset_dtype"
                )
            pieces.append(piece)
            start += len(piece)
            part += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def write_tokens(files: Sequence[Path], tokenizer: Tokenizer, target: Path, *, dtype: str) -> None:
    """Writes the token file of text files."""
    end = b"" if tokenizer.end_of_document is None else np.array(tokenizer.end_of_document, dtype).tobytes()
    total = sum(file.stat().st_size for file in files)
    # `delay`: no bar for what takes a few seconds.
    with (
        target.open("wb") as stream,
        tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", delay=5) as progress,
    ):
        for file in files:
            for piece in read_pieces(file):
                stream.write(tokenizer.encode(piece.text).astype(dtype).tobytes())
                stream.write(end if piece.ends_document else b"")
            progress.update(file.stat().st_size)
