"""What all tools say alike: options, figures beside their targets, the machine, JSON. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A tool's command line: its module's text as help, and `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=_output, metavar="FILE", help="write all results there too")
    return parser


def _output(text: str) -> Path:
    """A file that can be written, which is known before minutes of work."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is in a folder that does not exist; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; name another file")
    return path


def positive(text: str) -> int:
    """For the `type` of an option that counts something."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, 1 or more")
    return int(text)


def positive_s(text: str) -> float:
    """For the `type` of an option that is seconds, of which there must be some."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give seconds, more than 0")
    return seconds


def choose_named(everything: Iterable[N], text: str | None) -> list[N]:
    """Those whose names hold the text of `--only`, all for None; ends the program, which has measured nothing
    yet, where there are none."""
    named = list(everything)
    chosen = [own for own in named if text is None or text in own.name]
    if not chosen:
        print(
            f"error: --only {text}: no name holds that; there are {'; '.join(own.name for own in named)}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return chosen


def write_json(path: Path | None, content: object) -> None:
    """Writes results to the file of `--json`, if there is one."""
    if path is not None:
        path.write_text(json.dumps(to_plain(content), indent=1) + "\n", encoding="utf-8")


def to_plain(value: Any) -> Any:
    """A value as JSON has it; of a dataclass the fields that its `repr` shows, and its properties of
    numbers."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
        names = (name for name, own in vars(type(value)).items() if isinstance(own, property))
        found |= {name: got for name in names if isinstance(got := getattr(value, name), int | float)}
        return to_plain(found)
    if isinstance(value, Mapping):
        joined = {", ".join(map(str, k)) if isinstance(k, tuple) else str(k): v for k, v in value.items()}
        return {key: to_plain(own) for key, own in joined.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [to_plain(own) for own in value]
    return str(value)


@dataclass(frozen=True)
class Figure:
    """One number beside its target; `target` None: only reported."""

    name: str
    value: float
    target: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def target_text(self) -> str:
        return "" if self.target is None else f"{'<=' if self.at_most else '>='} {self.target:g}"


def format_figures(figures: Sequence[Figure]) -> str:
    """A table of all figures with their targets."""
    lines = [f"{'figure':44} {'value':>9} {'target':>9}"]
    for figure in figures:
        verdict = {None: "", True: "met", False: "MISSED"}[figure.is_met]
        lines.append(
            f"{figure.name:44} {figure.value:9.3f} {figure.target_text:>9} {verdict:7} {figure.note}"
        )
    return "\n".join(lines)


def list_figures(figures: Sequence[Figure]) -> dict[str, Any]:
    """Figures and targets for JSON: `figures` maps names to values."""
    targets = {f.name: {"target": f.target_text, "met": f.is_met, "note": f.note} for f in figures}
    return {"figures": {figure.name: figure.value for figure in figures}, "targets": targets}


def conclude(path: Path | None, figures: Sequence[Figure], note: str = "", **more: object) -> int:
    """Prints figures beside their targets, the machine and a note, and writes them with what is more; 1 if a
    target was missed."""
    machine = describe_machine()
    print(f"\n{format_figures(figures)}\n\n{format_machine(machine)}" + (f"\n{note}" if note else ""))
    write_json(path, list_figures(figures) | {"machine": machine} | more)
    return int(any(figure.is_met is False for figure in figures))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Where and with what results were measured."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux only.
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "processor": next(names, platform.processor() or platform.machine()),
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch,
    }


def format_machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())
