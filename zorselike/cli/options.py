"""Checks of option values that several commands share, and the width of printed text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec

from zorselike.errors import ConfigError, FileError
from zorselike.text.files import check_writable
from zorselike.text.units import parse_size

_WIDTHS = (60, 160)
"""Least and largest width of printed text, whatever the terminal's."""


def one_of(*choices: str | int, several: bool = False) -> PrimitiveConstructorSpec[Any]:
    """For the `Annotated` of an option of these values, or None where it is left out.

    tyro itself would take the word None too, and list it, and the values in any order, for a wrong one.
    """
    values = {str(choice): choice for choice in choices}
    return PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar="{" + ",".join(values) + "}",
        instance_from_str=lambda words: (
            tuple(values[word] for word in words) if several else values[words[0]]
        ),
        is_instance=lambda _: True,
        str_from_instance=lambda value: [str(value)],
        choices=tuple(values),
    )


def check_outputs(
    command: str,
    paths: Mapping[str, str | None],
    *,
    inputs: Iterable[str | Path | None] = (),
    writes: bool = True,
) -> None:
    """Raises `ConfigError` if a file, given by its flag, is a folder, in a folder that does not exist, one of
    `inputs`, which would be lost, that of an earlier flag, of which nothing would be left, or one that this
    process cannot write; `writes`: whether it is this process that will."""
    read = {Path(path).resolve() for path in inputs if path is not None}
    flag_of: dict[Path, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        if not os.path.isdir(Path(path).absolute().parent):  # noqa: PTH112  `is_dir` raises for long names.
            raise ConfigError(f"{command}: {flag} is {path}, in a folder that does not exist; make it first")
        if os.path.isdir(path):  # noqa: PTH112
            raise ConfigError(f"{command}: {flag} is {path}, a folder; name a file")
        if Path(path).resolve() in read:
            raise ConfigError(f"{command}: {flag} is {path}, which is read too; name another file")
        first = flag_of.setdefault(Path(path).resolve(), flag)
        if first != flag:
            raise ConfigError(f"{command}: {flag} is {path}, which is {first}'s too; name another file")
        if writes:
            try:
                check_writable(path)
            except FileError as error:
                raise ConfigError(f"{command}: {flag} is {path}, which {error}") from None


def check_at_least(command: str, least: int, numbers: Mapping[str, int]) -> None:
    """Raises `ConfigError` if a number, given by its flag, is less than `least`."""
    for flag, number in numbers.items():
        if number < least:
            raise ConfigError(f"{command}: {flag} is {number}; it must be at least {least}")


def read_size(command: str, flag: str, text: str | None) -> int | None:
    """Bytes of `24GiB` or `80 GB`; None for None. Raises `ConfigError` for other text."""
    if text is None:
        return None
    num_bytes = parse_size(text)
    if num_bytes is None or num_bytes <= 0:
        raise ConfigError(
            f"{command}: {flag} is '{text}'; write it as 24GiB or 80GB (MiB, GiB, TiB, MB, GB, TB)"
        )
    return int(num_bytes)


def find_width() -> int:
    """Characters per line on this terminal."""
    return min(_WIDTHS[1], max(_WIDTHS[0], shutil.get_terminal_size((110, 24)).columns))
