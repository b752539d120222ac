"""Long copies that let others in between.

A device copies each way by an engine that goes on with one stream's copies as long as there are any. On an
H100, 128 MiB of activations waited 31 ms behind 1.7 GiB of optimizer state on a stream of lower priority, and
took 2.6 ms, as if alone, where that went piece by piece over two streams which wait for each other; all of it
together took as long as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zorselike.runtime.memory.streams import Stream

PIECE_BYTES = 2**26
"""About a millisecond: so long what is urgent waits, and so often two streams wait for each other."""


def copy_in_turns(copies: Iterable[tuple[Tensor, Tensor]], first: Stream, second: Stream) -> None:
    """Starts copies into the former from the latter, `uint8 [num_bytes]` each, after all that `first` has
    been given; they are over when `first` is, which alone is waited for."""
    current, other = first, second
    for number, piece in enumerate(_pieces(copies)):
        if number:
            other.wait(current.record())
            current, other = other, current
        with current.use():  # Once for all that is short: it takes the host longer than a copy.
            for target, source in piece:
                target.copy_(source, non_blocking=True)
    if current is not first:
        first.wait(current.record())


def _pieces(copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The same in lists of at most `PIECE_BYTES`."""
    piece: list[tuple[Tensor, Tensor]] = []
    num_bytes = 0
    for copy in copies:
        parts: Iterable[tuple[Tensor, Tensor]] = (copy,)
        if copy[0].numel() > PIECE_BYTES:
            parts = zip(*(torch.split(tensor, PIECE_BYTES) for tensor in copy), strict=True)
        for target, source in parts:
            if piece and num_bytes + target.numel() > PIECE_BYTES:
                yield piece
                piece, num_bytes = [], 0
            piece.append((target, source))
            num_bytes += target.numel()
    if piece:
        yield piece
