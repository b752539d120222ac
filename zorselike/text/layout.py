"""Text for a terminal: tables, and prose in lines."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence


def align_columns(table: Sequence[Sequence[str]], *, left: Collection[int] = ()) -> list[str]:
    """Lines with columns aligned to the right, those of `left` to the left; empty columns are left out."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ).rstrip()
        for row in table
    ]


def wrap_prose(text: str, width: int) -> str:
    """Lines of at most `width` characters; those of tables, which begin with a space, stay as they are."""
    return "\n".join(
        line
        if line.startswith(" ") or len(line) <= width
        else textwrap.fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )
