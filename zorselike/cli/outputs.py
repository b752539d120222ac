"""Files that commands write: whether they can be, before the work that would be lost."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from zorselike.errors import ConfigError

_WIDTHS = (60, 160)
"""Of what is printed, however narrow or wide the terminal."""


def check_outputs(command: str, paths: Mapping[str, str | None]) -> None:
    """Raises `ConfigError` for a file, by its flag, in a folder that is not there, or that is a folder."""
    for flag, path in paths.items():
        if path is None:
            continue
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{command}: {flag} is {path}, in a folder that does not exist; make it first")
        if Path(path).is_dir():
            raise ConfigError(f"{command}: {flag} is {path}, a folder; name a file")


def find_width() -> int:
    """Characters of a line on this terminal."""
    return min(_WIDTHS[1], max(_WIDTHS[0], shutil.get_terminal_size((110, 24)).columns))
