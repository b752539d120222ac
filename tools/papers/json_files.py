"""JSON files of other people: read whole, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zorselike.errors import ProfileError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ProfileError` naming the file if there is none."""
    found = _read(path)
    if not isinstance(found, dict):
        raise ProfileError(f"{path}: holds a {type(found).__name__}; expected an object")
    return found


def read_list(path: Path) -> list[Any]:
    """The list in a JSON file; raises `ProfileError` naming the file if there is none."""
    found = _read(path)
    if not isinstance(found, list):
        raise ProfileError(f"{path}: holds a {type(found).__name__}; expected a list")
    return found


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}; check the data folder") from None
    except ValueError as error:
        raise ProfileError(f"{path}: is not JSON ({error}); fetch the file again") from None
