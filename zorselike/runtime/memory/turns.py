"""Long copies that let others in between.

A device copies each way by an engine that goes on with one stream's copies as long as there are any. On an
H100, 128 MiB of activations waited 31 ms behind 1.7 GiB of optimizer state on a stream of lower priority, and
took 2.6 ms, as if alone, where that went piece by piece over two streams which wait for each other; all of it
together took as long as before.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from zorselike.runtime.memory.streams import Stream

PIECE_BYTES = 2**26
"""About a millisecond: so long what is urgent waits, and so often two streams wait for each other."""


def copy_in_turns(copies: Iterable[tuple[Tensor, Tensor]], first: Stream, second: Stream) -> None:
    """Starts copies into the former from the latter, `uint8 [num_bytes]` each, after all that `first` has
    been given; they are over when `first` is, which alone is waited for."""
    current, other = first, second
    num_bytes = 0
    """Of the piece that `current` has been given."""
    for target, source in copies:
        for start in range(0, target.numel(), PIECE_BYTES):
            part = target[start : start + PIECE_BYTES]
            if num_bytes and num_bytes + part.numel() > PIECE_BYTES:
                other.wait(current.record())
                current, other, num_bytes = other, current, 0
            with current.use():
                part.copy_(source[start : start + PIECE_BYTES], non_blocking=True)
            num_bytes += part.numel()
    if current is not first:
        first.wait(current.record())
