"""A part of the battery, and what it writes down while it runs. Imports no torch."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...report import Figure, to_plain

Status = Literal["passed", "failed", "timed out", "skipped"]


@dataclass(frozen=True)
class Part:
    """One question, asked in a process of its own."""

    name: str
    what: str
    run: str | Callable[[Record], None]
    """`module:function` of this package, imported by the part's own process."""
    limit_s: float
    """Of the letter's usual time."""
    needs: tuple[str, ...] = ("torch", "numpy")
    """Packages without which it is skipped."""


@dataclass(frozen=True)
class Settings:
    """What every part is told."""

    device: Literal["cuda", "cpu"]
    work: Path
    """Folder that the parts of a letter share."""
    out: Path
    """Folder of the results."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        """On a CPU everything is run to see that it runs."""
        return self.device == "cpu"


class SkipPart(Exception):
    """A part cannot say anything here, for the reason given."""


class Record:
    """What a part has found so far: in a file after every line, so that nothing is lost with its process."""

    def __init__(self, path: Path, part: Part, settings: Settings, limit_s: float) -> None:
        self.part, self.settings = part, settings
        self._path, self._deadline = path, time.monotonic() + limit_s
        self._content: dict[str, Any] = {"lines": [], "results": {}, "checks": [], "figures": []}
        self._write()

    @property
    def is_small(self) -> bool:
        return self.settings.is_small

    @property
    def left_s(self) -> float:
        """Seconds until the part's limit."""
        return self._deadline - time.monotonic()

    @property
    def patience_s(self) -> float:
        """For what a part starts: beyond its limit, at which all its processes are asked where they are."""
        return self.left_s + 60.0

    def say(self, text: str) -> None:
        """Lines of the page."""
        self._content["lines"] += text.splitlines()
        self._write()

    def put(self, name: str, value: object) -> None:
        """A result, for the JSON only."""
        self._content["results"][name] = to_plain(value)
        self._write()

    def check(self, name: str, is_right: bool, detail: str = "") -> bool:
        """What has to be so: a part with a wrong one has failed."""
        self._content["checks"].append(
            {"name": name, "status": "passed" if is_right else "failed", "detail": detail}
        )
        self._write()
        return is_right

    def leave_out(self, name: str, reason: str) -> None:
        """A check that cannot be made here; it does not count as passed."""
        self._content["checks"].append({"name": name, "status": "skipped", "detail": reason})
        self._write()

    def figure(self, own: Figure) -> None:
        """A number beside its target; without a target where the device is not one that has to reach it."""
        met = None if self.is_small else own.is_met
        self._content["figures"].append(to_plain(own) | {"target_text": own.target_text, "met": met})
        self._write()

    def keep(self, path: Path, name: str) -> None:
        """A file beside the results; compressed if its new name says so."""
        data = path.read_bytes()
        target = self.settings.out / name
        target.write_bytes(gzip.compress(data, compresslevel=5) if target.suffix == ".gz" else data)
        self.say(f"kept: {name}")

    def end(self, status: Status | None = None, reason: str = "") -> None:
        """The part is over; without a status, by its checks."""
        states = [check["status"] for check in self._content["checks"]]
        if status is None:
            only_skipped = bool(states) and set(states) == {"skipped"}
            status = "failed" if "failed" in states else "skipped" if only_skipped else "passed"
        if not reason and status != "passed":
            bad = [check for check in self._content["checks"] if check["status"] == status]
            reason = "; ".join(f"{check['name']}: {check['detail']}" for check in bad[:3])
        self._content |= {"status": status, "reason": reason}
        self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps(self._content))


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
