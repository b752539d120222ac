"""TOML as people would write it: short tables in one line and long lists in rows."""

from __future__ import annotations

import json
from collections.abc import Mapping

LINE_LENGTH = 100


def format_table(values: Mapping[str, object]) -> list[str]:
    """`key = value` lines, without those keys whose value is None."""
    return [_format_line(key, value) for key, value in values.items() if value is not None]


def _format_line(key: str, value: object) -> str:
    line = f"{key} = {_format_value(value)}"
    if len(line) <= LINE_LENGTH or not isinstance(value, (list, tuple)):
        return line
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
        case bool():
            return str(value).lower()
        case float():
            return float.__repr__(value)
        case str():
            # JSON's strings are TOML's but for one character that must be escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int():
            return str(value)
    raise TypeError(f"{value!r} has no form in TOML")
