"""The order of the corpus's rows: a function of seed and step alone.

The rows of step `s` are positions `[s * global_batch, (s + 1) * global_batch)` of an endless order that
contains all rows of the corpus once per epoch, permuted anew in each. The permutation is computed entry by
entry, so that a run may start at any step, and without a library's random numbers, which change with
versions.
"""

from __future__ import annotations

_ROUNDS = 6
_MASK = 2**64 - 1


def row_at(position: int, *, num_rows: int, seed: int) -> int:
    """The corpus row at a position of the endless order, positions counted from 0."""
    epoch, index = divmod(position, num_rows)
    return permute(index, size=num_rows, key=_mix(_mix(seed) ^ epoch))


def permute(index: int, *, size: int, key: int) -> int:
    """Entry `index` of a pseudo-random permutation of `range(size)`.

    A Feistel network permutes the smallest square power of two that holds the range; an image
    outside of the range is sent through it again (cycle walking: Black and Rogaway, 2002).
    """
    half_bits = max(((size - 1).bit_length() + 1) // 2, 1)
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(key ^ _mix(number << 56 | right)) & half_mask)
        index = left << half_bits | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """A 64-bit hash (splitmix64: Steele, Lea, Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
