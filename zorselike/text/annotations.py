"""What a field's annotation says beside its type: its unit in files, and what its value must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from zorselike.text.units import (
    read_memory,
    read_rate,
    read_size,
    read_time,
    show_rate,
    show_size,
    show_time,
)


class Unit(NamedTuple):
    """Written as text with a unit: `latency_s: Seconds` is `latency = "10us"` in a file."""

    suffix: str
    """Unit at the end of the field's name, which the file's key does without."""
    read: Callable[[object, str], float]
    show: Callable[[float], str]


class Must(NamedTuple):
    """A condition on the value, and what to do where it does not hold."""

    holds: Callable[[Any], bool]
    mend: str


def at_least(least: int) -> Must:
    return Must(lambda value: value >= least, f"give {least} or more")


class Key(NamedTuple):
    """The key in files, where it is not the field's name."""

    name: str


class OneOf(NamedTuple):
    """The values that there are, where the type does not say so."""

    choices: tuple[object, ...]


AS_TABLE = object()
"""Pairs of a name and a value that are a table in the file."""

SIZE = Unit("_bytes", read_size, show_size)
MEMORY = Unit("_bytes", read_memory, show_size)
RATE = Unit("_bytes_per_s", read_rate, show_rate)
TIME = Unit("_s", read_time, show_time)

MAX_BYTES_PER_S = 1e13
"""No link is faster; more is a slip of units."""

Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Quantity = Annotated[float, Must(lambda value: 0 <= value < math.inf, "give a finite number, 0 or more")]
Name = Annotated[str, Must(bool, "give a name")]
Label = Annotated[str, Must(str.isprintable, "use printable characters")]
