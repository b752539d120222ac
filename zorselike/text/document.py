"""Data with a text form that is kept in a file: a plan, a cluster, a workload, a profile."""

from __future__ import annotations

import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from zorselike.errors import FileError
from zorselike.text.dataclass_tables import read_table, read_value
from zorselike.text.files import read_text, write_text

_MAX_DEPTH = 100


class Document(ABC):
    """A base of dataclasses. Its files are TOML or JSON, of one version."""

    noun: ClassVar[str]
    error: ClassVar[type[ValueError]]
    """What is raised for a file or content that is wrong; its message names file, key and mend."""
    syntax: ClassVar[Literal["TOML", "JSON"]] = "TOML"
    version: ClassVar[int] = 1
    """Raised when a key changes its meaning or must be there; keys that may be missing come without it."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads and validates a file; raises `error` naming file, key and mend."""
        with cls.errors(f"{path}: "):
            return cls.parse(read_text(path, cls.noun))

    def save(self, path: str | Path) -> None:
        """Writes a file, whole or not at all, that `load` reads back equal.

        Raises:
            ValueError: Of the kind `error`: the content contradicts itself, or the file cannot be written.
        """
        with self.errors(f"{path}: "):
            write_text(path, self.format())

    @classmethod
    def parse(cls, text: str) -> Self:
        """What a text says, validated."""
        with cls.errors():
            table = {**parse_text(text, cls.syntax)}
            refuse_other(table, cls.noun)
            if "version" not in table:
                key = "version =" if cls.syntax == "TOML" else '"version":'
                raise FileError(f"version is missing; begin with {key} {cls.version}")
            # Before anything else is judged: another version may mean something else by any key.
            version = read_value(int, table.pop("version"), "version")
            if version != cls.version:
                mend = "upgrade zorselike" if version > cls.version else f"make the {cls.noun} anew with it"
                raise FileError(f"version is {version}; this zorselike reads version {cls.version}: {mend}")
            return cls.from_table(table).validate()

    def format(self) -> str:
        """The text of its file."""
        return self.validate().to_text()

    @classmethod
    @abstractmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """What a file's table says; raises `FileError`."""

    @abstractmethod
    def to_text(self) -> str:
        """The text that `from_table` gets as a table, of content that is valid."""

    @abstractmethod
    def validate(self) -> Self:
        """Returns itself if it is consistent; raises `error` otherwise."""

    @classmethod
    @contextmanager
    def errors(cls, where: str = "") -> Iterator[None]:
        """Errors of files and of the content become `error`, with `where` before them."""
        try:
            yield
        except (FileError, cls.error) as error:
            raise cls.error(f"{where}{error}") from None


def parse_text(text: str, syntax: Literal["TOML", "JSON"]) -> Mapping[str, Any]:
    """The table that a text says; raises `FileError`."""
    try:
        content = tomllib.loads(text) if syntax == "TOML" else json.loads(text)
    except (ValueError, RecursionError) as error:  # Of Python: a number with thousands of digits.
        raise FileError(f"is not {syntax}: {error}") from None
    _refuse_depth(content)
    return read_table(content, "the file")


_SIGNS = {"plan": {"ministages"}, "cluster": {"nodes"}, "recipe": {"hetero", "training"}}
"""Keys by which a TOML file of each kind is known."""


def refuse_other(table: Mapping[str, Any], noun: str) -> None:
    """Raises `FileError` for a file of another kind than `noun`, of which one key after the other would be
    called wrong."""
    kinds = [kind for kind, keys in _SIGNS.items() if not keys.isdisjoint(table)]
    if kinds and noun not in kinds:
        here = " or the one that its [hetero] plan names" if (kinds[0], noun) == ("recipe", "plan") else ""
        raise FileError(f"is a {kinds[0]}, where a {noun} is needed; give a {noun} file{here}")


def _refuse_depth(content: object) -> None:
    """Raises `FileError` for what could not even be shown in an error: long dotted keys nest without
    recursion."""
    level: list[Any] = [[content]]  # The file itself may be a number.
    for _ in range(_MAX_DEPTH + 1):
        inside = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise FileError(f"nests tables and lists more than {_MAX_DEPTH} deep; nothing here needs that")
