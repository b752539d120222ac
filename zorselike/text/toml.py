"""TOML texts: parsed, and written as people would, short tables in one line and long lists in rows."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from zorselike.errors import FileError

LINE_LENGTH = 100


def parse_toml(text: str) -> dict[str, Any]:
    """The table that a text says; `FileError` if it is not TOML."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileError(f"is not TOML: {error}") from None


def format_table(values: Mapping[str, object]) -> list[str]:
    """`key = value` lines, without those keys whose value is None."""
    return [_format_line(key, value) for key, value in values.items() if value is not None]


def _format_line(key: str, value: object) -> str:
    line = f"{key} = {_format_value(value)}"
    if len(line) <= LINE_LENGTH or not isinstance(value, (list, tuple)):
        return line
    # tomli_w writes one number a line; a thousand microbatches want a table one can read.
    rows = [""]
    for item in value:
        text = f"{_format_value(item)}, "
        if rows[-1] and len(rows[-1]) + len(text) > LINE_LENGTH - 4:
            rows.append("")
        rows[-1] += text
    return "\n".join([f"{key} = [", *(f"    {row.rstrip()}" for row in rows), "]"])


def _format_value(value: object) -> str:
    match value:
        case list() | tuple():
            return f"[{', '.join(_format_value(item) for item in value)}]"
        case Mapping():
            fields = [f"{key} = {_format_value(item)}" for key, item in value.items() if item is not None]
            return f"{{ {', '.join(fields)} }}"
        case _:
            return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
