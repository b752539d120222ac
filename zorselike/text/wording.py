"""How messages and tables name rows, ranks and modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")

MAX_LISTED = 4
"""How many things an error lists before it only counts the rest."""

MAX_VALUE_LENGTH = 60
"""How many characters of a wrong value an error shows."""


def suggest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the valid name nearest to a wrong one but for case, `'x' or 'y'` for those of
    which it is the end, or nothing if none is near."""
    by_folded = {known.casefold(): known for known in valid}
    longer = [known for folded, known in by_folded.items() if folded.endswith(f"_{name.casefold()}")]
    if 1 < len(longer) <= MAX_LISTED:
        return f"; did you mean {' or '.join(map(repr, longer))}?"
    nearest = get_close_matches(name.casefold(), list(by_folded), n=1)
    return f"; did you mean {by_folded[nearest[0]]!r}?" if nearest else ""


def show_value(value: object) -> str:
    """A wrong value, cut if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "..."


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `3 processes`."""
    plural = noun + ("es" if noun.endswith(("s", "x", "ch")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def list_few(items: Iterable[object], noun: str = "") -> str:
    """`ranks 1, 2 and 3`, or the first few and how many more."""
    texts = [str(item) for item in items]
    if len(texts) > MAX_LISTED:
        joined = f"{', '.join(texts[:MAX_LISTED])} and {len(texts) - MAX_LISTED} more"
    elif len(texts) > 1:
        joined = f"{', '.join(texts[:-1])} and {texts[-1]}"
    else:
        joined = "".join(texts)
    if not noun:
        return joined
    return f"{noun if len(texts) == 1 else noun + 's'} {joined}"


def show_rows(start: int, stop: int) -> str:
    """`row 3` or `rows 3 to 7`, the last included, for rows `[start, stop)`."""
    return f"row {start}" if stop - start == 1 else f"rows {start} to {stop - 1}"


def show_numbers(numbers: Sequence[int]) -> str:
    """`0-3, 6, 5` for 0, 1, 2, 3, 6, 5: runs of three or more are shortened."""
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in split_runs(numbers, lambda before, after: after == before + 1)
    )


def show_bytes(num_bytes: float, decimals: int = 1) -> str:
    """`1.5 GiB`, or below a GiB `20.3 MiB`."""
    size, unit = (num_bytes / 2**30, "GiB") if num_bytes >= 2**30 else (num_bytes / 2**20, "MiB")
    return f"{size:,.{decimals}f} {unit}"


def show_modules(names: Sequence[str]) -> str:
    """`embed, layers.0 .. layers.7` for a module list: runs of three or more are shortened."""
    return ", ".join(
        f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(run)
        for run in split_runs(names, lambda before, after: after == _successor(before))
    )


def expand_modules(names: Iterable[str]) -> list[str]:
    """`layers.0`, `layers.1`, `layers.2` for `layers.0 .. layers.2`, as `show_modules` shows them; others as
    they are. Raises `ValueError` with the range that is none."""
    expanded = []
    for name in names:
        first, dots, last = name.partition(" .. ")
        expanded.append(first)
        if dots:
            (prefix, start), (other, stop) = (_split_number(end.strip()) for end in (first, last))
            if start is None or stop is None or prefix != other or stop < start:
                raise ValueError(name)
            expanded += [f"{prefix}{number}" for number in range(start + 1, stop + 1)]
    return expanded


def _split_number(name: str) -> tuple[str, int | None]:
    """`layers.` and 7 of `layers.7`."""
    match = re.fullmatch(r"(.*\.|)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _successor(name: str) -> str | None:
    """`layers.8` for `layers.7`, None for a name that does not end in a number."""
    prefix, number = _split_number(name)
    return None if number is None else f"{prefix}{number + 1}"


def split_runs(items: Iterable[T], follows: Callable[[T, T], bool]) -> list[list[T]]:
    """Items in runs, in each of which every item follows the one before."""
    runs: list[list[T]] = []
    for item in items:
        if runs and follows(runs[-1][-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message, with the next where it ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] = f"{lines[0]} {lines[1]}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
