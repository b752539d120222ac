"""Which packages this machine lacks for the battery, and what each absence costs. Imports none of them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@dataclass(frozen=True)
class Package:
    """One that something here imports."""

    module: str
    wheel: str
    costs: str
    """What is not done without it."""


PACKAGES = (
    Package("torch", "torch", "nothing runs"),
    Package("numpy", "numpy", "nothing runs"),
    Package("safetensors", "safetensors", "nothing here; checkpoints and Hugging Face weights elsewhere"),
    Package("scipy", "scipy", "C: curves through measured times are straight between them"),
    Package("pytest", "pytest", "A: tests; the scenes of the same kind run without it"),
    Package("xdist", "pytest-xdist", "A: tests run one after the other instead of six beside each other"),
    Package("hypothesis", "hypothesis", "A: tests (their configuration imports it)"),
    Package("tqdm", "tqdm", "nothing here; bars of progress"),
    Package("tyro", "tyro", "nothing here; the command line, whose functions are called instead"),
    Package("docstring_parser", "docstring-parser", "nothing here; tyro needs it"),
    Package("typeguard", "typeguard", "nothing here; tyro needs it"),
    Package("torchdata", "torchdata", "nothing here; the trainer's loader"),
    Package("networkx", "networkx", "nothing here; the planner's minimum cut"),
    Package("tensorboard", "tensorboard", "nothing here; the trainer's metrics"),
)


def is_there(module: str) -> bool:
    """Whether it could be imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def find_missing(there: Callable[[str], bool] = is_there) -> tuple[Package, ...]:
    """Those that this machine lacks."""
    return tuple(package for package in PACKAGES if not there(package.module))


def format_missing(missing: tuple[Package, ...]) -> str:
    """The first lines of the page."""
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    head = f"Python {platform.python_version()}, {torch}"
    if not missing:
        return f"{head}; no package is missing"
    lines = [f"  {package.wheel:18} without it: {package.costs}" for package in missing]
    wheels = " ".join(package.wheel for package in missing)
    return "\n".join([f"{head}; this machine lacks {len(missing)} packages", *lines, f"  wheels: {wheels}"])
