"""Imports go downward and in no circle, planning needs no torch, files and folders stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "zorselike"

LAYERS = [
    "errors",
    "text",
    "plan",
    "schedule",
    "cost",
    "simulator",
    "planner",
    "checkpoint",
    "runtime",
    "hf",
    "profiler",
    "models",
    "elastic",
    "train",
    "cli",
]
WITHOUT_TORCH = LAYERS[: LAYERS.index("runtime")]

MAX_LINES = 500
MAX_MODULES = 16
NOT_COUNTED = {"__init__.py", "__main__.py", "conftest.py"}


def name_of(path: Path) -> str:
    """`zorselike.plan.toml` of its file, `zorselike.plan` of the package's."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def imports_of(module: str) -> frozenset[str]:
    """Everything that a module imports anywhere but for type checkers; of `from a import b` also `a.b`."""
    found: set[str] = set()
    for node in walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return frozenset(found)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from walk(child)


@cache
def modules_needed(module: str) -> frozenset[str]:
    """The modules of ours that a module imports: of `from package import name` the module of that name, if it
    is one."""
    found = {name for name in imports_of(module) if name in MODULES}
    packages = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
    return frozenset(found - packages) | {name for name in packages if is_asked_itself(module, name)}


def is_asked_itself(module: str, package: str) -> bool:
    """Whether something is imported from a package that is none of its modules."""
    inside = {name for name in imports_of(module) if name.rpartition(".")[0] == package}
    return any(name not in MODULES for name in inside)


def find_circle(needed: Mapping[str, frozenset[str] | set[str]]) -> list[str]:
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_downward() -> None:
    for module in MODULES:
        package = module.split(".")[1] if "." in module else None
        for name in imports_of(module):
            other = name.split(".")[1] if name.startswith("zorselike.") else package
            if package in LAYERS and other in LAYERS:
                assert LAYERS.index(other) <= LAYERS.index(package), f"{module} imports {name}"


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count too; what `zorselike` itself imports late does not, being written there
    as text."""
    assert find_circle({module: modules_needed(module) for module in MODULES}) == []


def folders_needed(package: str, *, apart: bool = False) -> dict[str, set[str]]:
    """Which others each direct subfolder of a package imports from. Modules directly in the package are one
    more, `.` (`apart`: each is one), but for private ones, which all may use."""
    folder_of: dict[str, str] = {}
    for module in MODULES:
        first, _, rest = module.removeprefix(f"{package}.").partition(".")
        if module.startswith(f"{package}.") and not first.startswith("_"):
            folder_of[module] = first if rest or apart else "."
    needed: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for module, folder in folder_of.items():
        needed[folder] |= {folder_of[name] for name in modules_needed(module) if name in folder_of} - {folder}
    return needed


@pytest.mark.parametrize("package", ["zorselike.runtime"])
def test_folders_of_a_package_import_in_no_circle(package: str) -> None:
    """Modules directly in the package import from its folders, so that no folder imports from them."""
    needed = folders_needed(package)
    assert len(needed["."]) > 1 and find_circle(needed) == []


@pytest.mark.parametrize("package", ["zorselike.schedule", "zorselike.simulator"])
def test_folders_import_in_no_circle_through_modules_beside_them(package: str) -> None:
    """Modules directly in the package are above some of its folders and below others."""
    needed = folders_needed(package, apart=True)
    assert len(needed) > 5 and find_circle(needed) == []


def test_planning_needs_no_torch() -> None:
    """Not one of the modules, each imported with torch out of reach."""
    modules = [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in WITHOUT_TORCH]
    code = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {modules}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
    assert len(modules) > 100


def test_a_search_starts_without_heavy_libraries() -> None:
    code = """
import sys, zorselike.planner.search.search
assert not {'scipy', 'networkx', 'torch'} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_private_torch_names_stay_behind_the_compat_file() -> None:
    for module in MODULES:
        for name in imports_of(module):
            is_private = name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
            assert not is_private or module == "zorselike.runtime._compat", f"{module} imports {name}"


def test_private_operators_stay_behind_the_compat_file() -> None:
    for path in (REPOSITORY / "zorselike").rglob("*.py"):
        private = re.findall(r"torch\.ops\.\w+\._\w+", path.read_text())
        assert not private or path.name == "_compat.py", f"{path} names {private[0]}"


def test_every_new_tensor_is_told_its_device() -> None:
    """Else a caller's default device (`torch.set_default_device`) would move what has to be on the host."""
    makers = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint"}
    makers = {f"torch.{name}" for name in makers | {"randn", "randperm", "tensor", "zeros"}}
    for module, path in MODULES.items():
        for node in walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in makers:
                is_told = any(keyword.arg == "device" for keyword in node.keywords)
                assert is_told, f"{module}, line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", ["zorselike", "tools", "tests"])
def test_files_and_folders_are_small(folder: str) -> None:
    for inside in [REPOSITORY / folder, *(REPOSITORY / folder).rglob("*/")]:
        modules = [path for path in inside.glob("*.py") if path.name not in NOT_COUNTED]
        assert len(modules) <= MAX_MODULES, f"{inside} has {len(modules)} modules"
        for path in modules:
            lines = len(path.read_text().splitlines())
            assert lines <= MAX_LINES or folder == "tests", f"{path} has {lines} lines"
