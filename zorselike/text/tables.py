"""Strict reading of the tables that TOML and JSON files hold.

A key that does not exist, one that is missing, or a value of another type is a `FileError` that names
the place and the mend; whoever reads the file adds its name. `where` is the place, as in
`groups[0].ranks`, or with a dot at its end that of the table whose key follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from zorselike.errors import FileError
from zorselike.text.wording import show_value, suggest

T = TypeVar("T")
D = TypeVar("D")


def check_keys(table: Mapping[str, Any], where: str, valid: Sequence[str], noun: str) -> None:
    """Refuses keys that are not valid; `noun` is what the file holds: `plan`, `cluster`."""
    for key in table:
        if key not in valid:
            hint = suggest(key, valid) or f"; valid keys are {', '.join(valid)}"
            shown = key if key.isprintable() else repr(key)
            raise FileError(f"{where}{shown} is not a key of a {noun}{hint}")


def check_version(table: Mapping[str, Any], version: int, missing: str) -> None:
    """To be called before anything else is judged: another version may mean something else by any
    key. `missing` says what to write where there is none."""
    found = read_optional(table, "version", read_int, None)
    if found is None:
        raise FileError(f"version is missing; {missing}")
    if found != version:
        raise FileError(f"version is {found}; this zorselike reads version {version}")


def read(table: Mapping[str, Any], key: str, reader: Callable[[object, str], T], where: str = "") -> T:
    """A key that must be there; `reader` takes the value and the name of its place."""
    if key not in table:
        raise FileError(f"{where}{key} is missing; add it")
    return reader(table[key], f"{where}{key}")


def read_optional(
    table: Mapping[str, Any], key: str, reader: Callable[[object, str], T], default: D, where: str = ""
) -> T | D:
    """A key that may be missing."""
    return reader(table[key], f"{where}{key}") if key in table else default


def read_int(value: object, where: str) -> int:
    if type(value) is not int:  # bool is an int to isinstance
        raise wrong_type(where, value, "an integer")
    return value


def read_number(value: object, where: str) -> float:
    """An integer stays one."""
    if type(value) not in (int, float):
        raise wrong_type(where, value, "a number")
    return cast(float, value)


def read_str(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(where, value, "a string")
    return value


def read_list(value: object, where: str, expected: str) -> list[object]:
    if not isinstance(value, list):
        raise wrong_type(where, value, expected)
    return value


def read_ints(value: object, where: str) -> tuple[int, ...]:
    items = read_list(value, where, "a list of integers")
    return tuple(read_int(item, f"{where}[{i}]") for i, item in enumerate(items))


def read_numbers(value: object, where: str) -> tuple[float, ...]:
    items = read_list(value, where, "a list of numbers")
    return tuple(read_number(item, f"{where}[{i}]") for i, item in enumerate(items))


def read_strings(value: object, where: str) -> tuple[str, ...]:
    items = read_list(value, where, "a list of strings")
    return tuple(read_str(item, f"{where}[{i}]") for i, item in enumerate(items))


def read_table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, value, "a table")
    return value


def read_tables(value: object, where: str) -> Sequence[dict[str, Any]]:
    """TOML's `[[name]]`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong_type(where, value, f"a list of tables, each under a line [[{where}]]")
    return value


def wrong_type(where: str, value: object, expected: str) -> FileError:
    """The error for a value that is not what was expected."""
    return FileError(f"{where} is {show_value(value)}; it must be {expected}")
