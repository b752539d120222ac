"""Imports go downward only, and planning needs no torch (DESIGN, section 3)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "zorselike"

LAYERS = [
    {"errors"},
    {"text"},
    {"plan"},
    {"schedule"},
    {"cost"},
    {"simulator"},
    {"planner"},
    {"runtime"},
    {"profiler"},
    {"models"},
    {"train"},
    {"elastic"},
    {"cli"},
]
WITHOUT_TORCH = {"errors", "text", "plan", "schedule", "cost", "simulator", "planner"}
MODULES = sorted(ROOT.rglob("*.py"))


def package_of(module: Path) -> str:
    """`plan` for zorselike/plan/toml.py; `` for the package's own __init__."""
    relative = module.relative_to(ROOT)
    return (
        relative.parts[0].removesuffix(".py")
        if relative.name != "__init__.py" or relative.parent.name
        else ""
    )


def imports_of(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module}: relative import"
    return names


def layer_of(package: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if package in names)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(ROOT)))
def test_imports_go_downward(module: Path) -> None:
    package = package_of(module)
    if not package:
        return
    imported = {name.split(".")[1] for name in imports_of(module) if name.startswith("zorselike.")}
    for other in imported - {package}:
        if any(other in names for names in LAYERS):
            assert layer_of(other) < layer_of(package), f"{package} imports {other}, which lies above it"


@pytest.mark.parametrize(
    "package", sorted(p for p in WITHOUT_TORCH if (ROOT / p).exists() or (ROOT / f"{p}.py").exists())
)
def test_planning_needs_no_torch(package: str) -> None:
    code = f"import sys, zorselike.{package}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_private_torch_names_stay_behind_the_compat_file() -> None:
    for module in MODULES:
        if module.name == "_compat.py":
            continue
        for name in imports_of(module):
            parts = name.split(".")
            is_private = parts[0] == "torch" and any(p.startswith("_") for p in parts[1:])
            assert not is_private, f"{module.relative_to(ROOT)} imports {name}"
