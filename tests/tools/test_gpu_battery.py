"""The battery for a GPU: how its parts are watched, what it writes, and all of it on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import volume

from tools import gpu_battery
from tools.bench.forked import run_forked
from tools.gpu.battery import speed, supervise
from tools.gpu.battery.delays import disturbing
from tools.gpu.battery.gaps import describe_gaps, find_gaps
from tools.gpu.battery.letters import LETTERS, Letter
from tools.gpu.battery.packages import PACKAGES, find_missing, format_missing
from tools.gpu.battery.page import SCHEMA, _format_part
from tools.gpu.battery.part import Part, Record, Settings, SkipPart
from tools.gpu.battery.smoke import noting_waits
from tools.gpu.battery.supervise import find_function, run_part
from tools.gpu.battery.trace import compare_orders, find_exposure, number_starts
from tools.gpu.job import Job, Measurement, Outcome
from tools.report import Figure

SCRIPT = Path(gpu_battery.__file__)


@pytest.fixture(autouse=True)
def stacks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "STACKS_S", 0.5)


def run(function: str | Callable[[Record], None], folder: Path, *, limit_s: float = 60.0) -> dict[str, Any]:
    part = Part("part", "a part", function, limit_s)
    return run_part(part, Settings("cpu", folder, folder), limit_s)


# -- parts ---------------------------------------------------------------------------------


def hang(record: Record) -> None:
    record.say("before it hung")
    record.put("child", child := os.fork())
    if child == 0:
        wait_in_the_child()
    signal.pause()


def wait_in_the_child() -> None:
    signal.pause()


def test_a_part_that_hangs_says_where_and_keeps_what_it_had(tmp_path: Path) -> None:
    found = run(hang, tmp_path, limit_s=0.5)
    assert found["status"] == "timed out" and found["reason"] == "not over after 0 s"
    assert found["lines"] == ["before it hung"]
    # Its own stack, and that of the process which it had started and which is gone now.
    assert "in hang" in found["stack"] and "in wait_in_the_child" in found["stack"]
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.kill(found["results"]["child"], 0)
            time.sleep(0.02)


def hang_in_a_rank(record: Record) -> None:
    run_forked(wait_in_a_rank, 1, timeout_s=record.patience_s)


def wait_in_a_rank(rank: int) -> None:
    print("before the rank hung", flush=True)
    signal.pause()


def test_ranks_that_hang_say_where_and_what_they_had_said(tmp_path: Path) -> None:
    found = run(hang_in_a_rank, tmp_path, limit_s=2.0)
    assert found["status"] == "timed out" and "in wait_in_a_rank" in found["stack"]
    page = "\n".join(_format_part(found))
    assert page.index("before the rank hung") < page.index("in wait_in_a_rank")


def crash(record: Record) -> None:
    record.check("one thing", True)
    raise ValueError("the first line\nand more")


def die(record: Record) -> None:
    record.say("about to")
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_part_that_crashes_is_told_by_its_first_line(tmp_path: Path) -> None:
    found = run(crash, tmp_path)
    assert found["status"] == "failed" and found["reason"] == "ValueError: the first line"
    assert found["checks"][0]["name"] == "one thing" and "Traceback" in found["log"]
    found = run(die, tmp_path)
    assert found["status"] == "failed" and found["reason"] == "its process died of SIGSEGV"
    assert found["lines"] == ["about to"]
    assert run("not_there:run", tmp_path)["reason"].startswith("ModuleNotFoundError: No module named")


def leave_out(record: Record) -> None:
    record.leave_out("needs a card", "there is none")


def pass_some(record: Record) -> None:
    leave_out(record)
    record.check("the rest", True)
    record.figure(Figure("speed", 1.0, target=2.0))


def fail_one(record: Record) -> None:
    pass_some(record)
    record.check("sums", 1 + 1 == 3, "two")


def skip(record: Record) -> None:
    raise SkipPart("needs two cards")


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        (leave_out, "skipped", "needs a card: there is none"),
        (skip, "skipped", "needs two cards"),
        (pass_some, "passed", ""),
        (fail_one, "failed", "sums: two"),
    ],
)
def test_what_is_skipped_is_not_passed(
    function: Callable[[Record], None], status: str, reason: str, tmp_path: Path
) -> None:
    found = run(function, tmp_path)
    assert (found["status"], found["reason"]) == (status, reason)
    assert all(figure["met"] is None for figure in found["figures"])  # A CPU has no targets.


def test_every_part_is_there() -> None:
    names = [part.name for letter in LETTERS.values() for part in letter.parts]
    assert len(names) == len(set(names))
    for letter in LETTERS.values():
        for part in letter.parts:
            assert find_function(part.run).__doc__


# -- packages ------------------------------------------------------------------------------


def test_missing_packages_are_named_with_what_they_cost() -> None:
    there = {"torch", "numpy", "safetensors"}
    missing = find_missing(there.__contains__)
    assert {package.module for package in missing} == {package.module for package in PACKAGES} - there
    text = format_missing(missing)
    assert "pytest             without it: A: tests" in text and "docstring-parser typeguard" in text
    assert "no package is missing" in format_missing(())


# -- letters -------------------------------------------------------------------------------


def test_a_letter_keeps_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(Part(own.__name__, "what", own, 60.0) for own in (pass_some, crash, hang, leave_out))
    lacking = Part("lacking", "what", pass_some, 60.0, needs=("no_such_package",))
    late = Part("late", "what", pass_some, 60.0)
    letter = Letter("does it hold", 60.0, (*parts[:2], lacking, *parts[3:], parts[2], late))
    monkeypatch.setattr(gpu_battery, "LETTERS", {"A": letter})
    monkeypatch.setattr(gpu_battery, "_import_once", lambda environment: None)
    monkeypatch.setattr(gpu_battery, "_LEAST_S", 1.0)
    assert gpu_battery.main(["A", "--device", "cpu", "--out", str(tmp_path), "--seconds", "3"]) == 1
    content = json.loads((tmp_path / "A.json").read_text())
    assert {part["name"]: part["status"] for part in content["parts"]} == {
        "pass_some": "passed",
        "crash": "failed",
        "lacking": "skipped",
        "leave_out": "skipped",
        "hang": "timed out",
        "late": "skipped",
    }
    reasons = {part["name"]: part["reason"] for part in content["parts"]}
    assert reasons["lacking"] == "this machine has no no_such_package" and reasons["late"] == "no time left"
    # What readers of these files rely on.
    assert content["schema"] == SCHEMA == 1
    assert [*content] == (
        [
            "schema",
            "letter",
            "question",
            "device",
            "started",
            "seconds",
            "machine",
            "environment",
            "packages",
            "missing",
            "parts",
        ]
    )
    keys = [
        "name",
        "what",
        "limit_s",
        "seconds",
        "status",
        "reason",
        "stack",
        "log",
        "lines",
        "results",
        "checks",
        "figures",
    ]
    assert all(set(part) == set(keys) for part in content["parts"])
    assert set(content["parts"][0]["checks"][0]) == {"name", "status", "detail"}
    assert content["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    page = (tmp_path / "A.txt").read_text()
    assert (
        "TIMED OUT hang" in page and "in wait_in_the_child" in page and "ValueError: the first line" in page
    )
    assert "[skipped] needs a card: there is none" in page


def test_only_some_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(Part(own.__name__, "what", own, 60.0) for own in (crash, leave_out))
    monkeypatch.setattr(gpu_battery, "LETTERS", {"A": Letter("question", 60.0, parts)})
    monkeypatch.setattr(gpu_battery, "_import_once", lambda environment: None)
    assert gpu_battery.main(["A", "--device", "cpu", "--out", str(tmp_path), "--only", "leave_out"]) == 0
    assert [part["name"] for part in json.loads((tmp_path / "A.json").read_text())["parts"]] == ["leave_out"]
    with pytest.raises(SystemExit):
        gpu_battery.main(["A", "--only", "nothing"])


_BLOCK = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_allowed(name, path=None, target=None):
    return None if name.partition(".")[0] in {names} else find_spec(name, path, target)
PathFinder.find_spec = find_allowed
"""


@volume.parametrize("letter", [*LETTERS])
def test_everything_runs_on_a_cpu(letter: str, tmp_path: Path) -> None:
    """All but A with nothing but torch, numpy and safetensors."""
    environment = dict(os.environ)
    if is_bare := letter != "A":
        names = {package.module for package in PACKAGES} - {"torch", "numpy", "safetensors"}
        (tmp_path / "sitecustomize.py").write_text(_BLOCK.format(names=names | {"tomli_w"}))
        environment["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, str(SCRIPT), letter, "--device", "cpu", "--out", str(tmp_path)]
    finished = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    page = (tmp_path / f"{letter}.txt").read_text()
    assert finished.returncode == 0, f"{finished.stdout}{finished.stderr}\n{page}"
    content = json.loads((tmp_path / f"{letter}.json").read_text())
    assert [part["name"] for part in content["parts"]] == [part.name for part in LETTERS[letter].parts]
    assert {part["status"] for part in content["parts"]} == {"passed"}, finished.stdout
    assert ("tyro" in content["missing"]) == is_bare
    if letter == "C":
        assert {"C-profile.json", "C-offloaded_4-trace.json.gz"} <= {path.name for path in tmp_path.iterdir()}


# -- what parts look with ------------------------------------------------------------------


def test_losses_that_differ_fail_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def train(job: Job, timeout_s: float) -> Outcome:
        # As where everything's way to the host loses something, and as kernels are that add in any order.
        off = (0.5 if job.variant == "c" else 0.0) if job.is_deterministic else 0.25 * len(jobs)
        jobs.append(job)
        loss, size = 5.0 + off, 2**20
        own = Measurement(job.variant, job.num_tokens, 2, 2, 10, (1.0,), loss, size, size, size, 1.0, "card")
        return Outcome(own)

    monkeypatch.setattr(speed, "run_job", train)
    found = run(speed.run_offload, tmp_path)
    assert found["status"] == "failed"
    assert found["results"]["losses"] == {"a": 5.0, "b": 5.0, "c": 5.5}


def test_memory_that_grows_is_not_a_number() -> None:
    tensor = torch.ones(4)
    with disturbing(seed=0) as disturbance:
        tensor.untyped_storage().resize_(32)
        torch.empty(0).untyped_storage().resize_(0)
    assert disturbance.num_filled == 1
    grown = torch.empty(0).set_(tensor.untyped_storage())
    assert grown[:4].tolist() == [1.0] * 4 and grown[4:].isnan().all()
    assert grown[4:].view(torch.bfloat16).isnan().all()
    tensor.untyped_storage().resize_(64)
    assert disturbance.num_filled == 1


def test_calls_that_wait_are_counted_by_line() -> None:
    with noting_waits("cpu") as found:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((where, times),) = found.items()
    assert where.startswith("tests/tools/test_gpu_battery.py:") and times == 2


def test_exposed_copies_are_those_beside_no_kernel() -> None:
    def event(category: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur}

    events = [
        event("kernel", "gemm", 0, 10),
        event("kernel", "gemm", 5, 15),
        event("kernel", "ncclDevKernel", 20, 100),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 15, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2, 4),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 30, 10),
        event("kernel", "gemm", 40, 10),
        {"ph": "M", "name": "thread_name"},
    ]
    found = find_exposure(events, on_gpu=True)
    assert found.step_s == pytest.approx(50e-6) and found.compute_s == pytest.approx(30e-6)
    assert found.copies["HtoD"] == pytest.approx((10e-6, 5e-6))
    assert found.copies["DtoH"] == pytest.approx((4e-6, 0.0))
    assert found.exposed_s == pytest.approx(5e-6)
    on_cpu = [event("user_annotation", "0LOAD", 0, 2), event("user_annotation", "0F0", 2, 8)]
    found = find_exposure(on_cpu, on_gpu=False)
    assert found.copies == {"copies": pytest.approx((2e-6, 2e-6))} and found.compute_s == pytest.approx(8e-6)


def test_gaps_say_whether_a_stream_waited_or_the_host_was_late() -> None:
    def event(
        category: str, name: str, ts: float, dur: float, correlation: int | None = None
    ) -> dict[str, Any]:
        args = {} if correlation is None else {"correlation": correlation}
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "ts": 1e3 * ts,
            "dur": 1e3 * dur,
            "args": args,
            "tid": 1,
        }

    gaps = find_gaps(
        [
            event("kernel", "first", 0, 10, 1),
            event("kernel", "beside it", 2, 6, 2),
            event("kernel", "after a copy", 30, 10, 3),
            event("kernel", "after the host", 45, 5, 4),
            event("kernel", "at once", 50.001, 5, 5),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 24),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 35, 7),
            event("cuda_runtime", "cudaLaunchKernel", 4, 0.01, 3),
            event("cuda_runtime", "cudaLaunchKernel", 44, 0.01, 4),
            event("cuda_runtime", "cudaMalloc", 39, 4.5),
            event("user_annotation", "a step", 0, 60),
            event("user_annotation", "1B0", 3, 5),
            {"ph": "M", "name": "thread_name"},
        ]
    )
    waited, late = gaps
    assert (waited.start_s, waited.length_s) == pytest.approx((0.01, 0.02))
    assert (waited.ended_by, waited.action) == ("after a copy", "1B0")
    assert waited.launched_s == pytest.approx(-0.006) and waited.host_late_s == 0
    assert dict(waited.copies) == {"HtoD": pytest.approx(0.019)}
    assert (late.action, late.launched_s, late.host_late_s) == (
        "a step",
        pytest.approx(0.004),
        pytest.approx(0.004),
    )
    assert late.host_call == ("cudaMalloc", pytest.approx(0.0035))
    total, first, second = describe_gaps(gaps)
    assert total == "without kernels: 25.0 ms in 2 gaps, of which the host was late 4.0 ms"
    assert "until 1B0" in first and "its stream waited; HtoD 19.0 ms" in first
    assert "the host was late (3.5 ms in cudaMalloc); DtoH 2.0 ms" in second
    assert list(describe_gaps([])) == ["without kernels: 0.0 ms in 0 gaps, of which the host was late 0.0 ms"]


def test_the_first_inversion_is_named() -> None:
    simulated = {"0F0": 0.0, "0LOAD": 1.0, "0F1": 2.0, "1F0": 3.0}
    assert compare_orders(simulated, simulated, tolerance_s=0.1).first_inversion == ""
    order = compare_orders(simulated, simulated | {"0LOAD": 2.5, "0F1": 2.45}, tolerance_s=0.1)
    assert order.agreement == 1.0 and order.num_compared == 4
    order = compare_orders(simulated, simulated | {"0LOAD": 2.5}, tolerance_s=0.1)
    assert order.first_inversion.startswith("0LOAD before 0F1 when simulated")
    assert order.agreement == pytest.approx(5 / 6)


def test_what_happens_twice_is_numbered() -> None:
    times = {"0LOAD": 2, "0F0": 1, "0UNSHARD": 2}
    starts = [("0F0", 3.0), ("0LOAD", 7.0), ("0LOAD", 1.0), ("0F0", 2.0), ("0UNSHARD", 0.0), ("else", 1.0)]
    assert number_starts(starts, times) == {"0F0": 2.0, "0LOAD (1)": 1.0, "0LOAD (2)": 7.0}
