"""The stand-in for CUDA says what it lacks, makes each missing name once, and tells faults of ranks apart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tools.pretended_gpu import build, run
from tools.pretended_gpu.scenes import SCENES

MAINS = pytest.mark.parametrize("main", [build.main, run.main], ids=["build", "run"])


@MAINS
@pytest.mark.parametrize("has_torch", [False, True], ids=["no torch", "torch for CPUs"])
def test_one_line_says_that_a_torch_for_cuda_is_missing(
    main: Callable[[Sequence[str]], int],
    has_torch: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "torch" / "__init__.py")) if has_torch else None
    monkeypatch.setattr(build, "find_spec", lambda name: spec)
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert ("is a torch without CUDA" if has_torch else "has no torch") in printed.err


def test_one_line_says_that_the_compiler_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "find_torch", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["--into", str(tmp_path / "made")]) == 2
    assert capsys.readouterr().err == "there is no gcc: install gcc and binutils\n"


@pytest.mark.parametrize("asked", [["nothing"], ["line"], ["broken-off", "--ranks", "2"], ["--ranks", "0"]])
def test_what_cannot_be_played_is_one_line(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(asked) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_scenes_are_listed_without_a_torch_for_cuda() -> None:
    command = [sys.executable, str(Path(run.__file__)), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(SCENES)


def test_every_missing_name_is_made_once() -> None:
    wanted = ["ncclB", "cudaA", "ncclB", "cublasC"]
    assert build.make_stubs(wanted, {"cublasC", "cudaD"}) == (
        "long cudaA(void) { return 0; }\nlong ncclB(void) { return 0; }\n"
    )


def test_what_is_defined_is_found_in_c() -> None:
    text = """
static int cudaHelper = 0;
const char *cudaName(int a) { return ""; }
void **__cudaRegister(void *a,
                      int b) {
  cudaCalled(a);
}
#define ncclMacro(x) x
int cublasLtOne(void) { return ncclInside(); }
int cuDriver(void) { return 0; }
"""
    assert build.find_defined(text) == {"cudaName", "__cudaRegister", "cublasLtOne", "cuDriver"}


def test_nothing_is_defined_twice() -> None:
    pretended = build.find_defined((build.HERE / "pretended.c").read_text())
    driver = build.find_defined((build.HERE / "driver.c").read_text())
    assert {"cudaMalloc", "__cudaPopCallConfiguration", "ncclAllReduce", "cublasCreate_v2"} <= pretended
    names = {"cuCtxGetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxGetState", "cuFuncGetAttribute"}
    assert driver == names
    assert not driver & {*build.DRIVER_NAMES}


def test_waits_and_foreign_contexts_are_faults(tmp_path: Path) -> None:
    """Rank 3 of two cards; also of a process that it started."""
    found = {"reason": "", "seconds": 1.0, "waits": {}}
    (tmp_path / "3.json").write_text(json.dumps(found))
    (tmp_path / "log.3.10").write_text("context on device 1 by set_device tid 10\nsync device\n")
    assert run.read_outcome("line", 3, 2, tmp_path, 0).is_clean

    (tmp_path / "log.3.11").write_text("context on device 0 by stream tid 11\n")
    foreign = run.read_outcome("line", 3, 2, tmp_path, 0)
    assert foreign.foreign == (0,) and not foreign.is_clean

    (tmp_path / "log.3.10").write_text("context on device 0 by set_device tid 10\n")
    assert run.read_outcome("line", 3, 0, tmp_path, 0).is_clean  # It sees its own card alone.

    (tmp_path / "log.3.11").unlink()
    (tmp_path / "log.3.10").unlink()
    (tmp_path / "3.json").write_text(json.dumps(found | {"waits": {"a.py:1 f": 2}}))
    waited = run.read_outcome("line", 3, 2, tmp_path, 0)
    assert waited.lines()[1:] == ["  waits for its card 2 times: a.py:1 f"] and not waited.is_clean


def test_a_rank_that_ends_early_failed(tmp_path: Path) -> None:
    (tmp_path / "out.0").write_text("one\nSegmentation fault\n")
    ended = run.read_outcome("line", 0, 1, tmp_path, -11)
    assert "status -11" in ended.reason and ended.reason.endswith("Segmentation fault")
