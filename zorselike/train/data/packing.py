"""Several documents in one row, none of them split."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Documents by row: best fit, the longest first (Johnson, 1973; "bfd" of TRL).

    Rows, and the documents of a row, are in the order of the documents. No length exceeds `capacity`.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """Room in each row that has some, ascending, and the row."""
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[document]
        fitting = bisect_left(free, (length, 0))
        if fitting == len(free):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room, row = free.pop(fitting)
        rows[row].append(document)
        if room > length:
            insort(free, (room - length, row))
    return sorted(sorted(row) for row in rows)
