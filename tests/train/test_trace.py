"""Chrome traces: which stream works for which actions."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ranks import RunRanks

from zorselike.runtime.result import StepResult
from zorselike.train.config.config import Profiling
from zorselike.train.report.profiling import profiler
from zorselike.train.report.trace import find_actions, name_streams, write_readable

PID, DEVICE = 4321, 0
MAIN, AUTOGRAD = 4321, 4400
Event = dict[str, Any]


def act(name: str, begin: float, duration: float) -> Event:
    event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": PID, "tid": MAIN}
    return event | {"ts": begin, "dur": duration, "args": {"External id": 1}}


def work(number: int, called: float, *, stream: int, duration: float, thread: int = MAIN) -> list[Event]:
    """A call on the host, and what a stream does for it some time later."""
    category = "gpu_memcpy" if number % 2 else "kernel"
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": PID, "tid": thread}
    on_gpu = {"ph": "X", "cat": category, "name": "gemm", "pid": DEVICE, "tid": stream}
    return [
        on_gpu | {"ts": called + 500, "dur": duration, "args": {"stream": stream, "correlation": number}},
        call | {"ts": called, "dur": 1, "args": {"correlation": number}},
    ]


def name(what: str, pid: int, tid: int, value: str, key: str = "name") -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {key: value}}


EVENTS = [
    act("ProfilerStep#3", 0, 1000),
    act("3B0", 100, 100),
    act("FSDP::post_backward", 110, 5),
    act("2LOAD", 200, 10),
    act("2LOAD1", 210, 10),
    act("NORM", 300, 10),
    act("3F0", 20, 50),
    *work(1, 30, stream=7, duration=40),
    *work(2, 150, stream=7, duration=80, thread=AUTOGRAD),
    *work(3, 205, stream=20, duration=10),
    *work(4, 215, stream=24, duration=10),
    *work(5, 305, stream=7, duration=1),  # Too little to be named.
    *work(6, 500, stream=7, duration=900),  # Between steps: of no action.
    *work(7, 501, stream=28, duration=900),
]


def test_streams_are_named_after_what_they_work_for() -> None:
    names = name_streams(EVENTS, find_actions(EVENTS))
    assert names == {
        (DEVICE, 7): "stream 7: iBm iFm",
        (DEVICE, 20): "stream 20: iLOAD",
        (DEVICE, 24): "stream 24: iLOADm",
    }


def test_tracks_of_a_written_trace_have_names(tmp_path: Path) -> None:
    metadata = [
        name("process_name", PID, 0, "python3"),
        name("process_labels", PID, 0, "CPU", "labels"),
        name("process_name", DEVICE, 0, "python3"),
        name("process_labels", DEVICE, 0, "GPU 0", "labels"),
        name("thread_name", PID, MAIN, "thread 4321 (python3)"),
        name("thread_name", PID, AUTOGRAD, "thread 4400 (pt_autograd_0)"),
        name("thread_name", DEVICE, 7, "stream 7 "),
        name("thread_name", DEVICE, 28, "stream 28 "),
    ]
    raw = tmp_path / "rank3_trace.json"
    raw.write_text(json.dumps({"traceEvents": [*metadata, *EVENTS], "schemaVersion": 1}))
    write_readable(raw, tmp_path / "rank3_trace.json.gz", rank=3)
    with gzip.open(tmp_path / "rank3_trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert trace["schemaVersion"] == 1
    assert trace["traceEvents"][len(metadata) :] == EVENTS
    named = [
        event["args"]["name"] for event in trace["traceEvents"][: len(metadata)] if "name" in event["args"]
    ]
    assert named == [
        "rank 3 CPU",
        "rank 3 GPU 0",
        "actions",
        "thread 4400 (pt_autograd_0)",
        "stream 7: iBm iFm",
        "stream 28 ",
    ]


def profile_two_steps(rank: int, size: int, folder: Path) -> list[str]:
    said: list[str] = []
    logger = logging.getLogger("zorselike")
    logger.setLevel(logging.INFO)
    logger.info = lambda text, *values: said.append(text % values)  # type: ignore[method-assign,assignment]
    config = Profiling(enable_profiling=True, profile_freq=5)
    with profiler(config, folder=folder, rank=0) as end_step:
        for _ in range(2):
            end_step(cast(StepResult, SimpleNamespace(loss=0.0)))
    return said


def test_steps_too_few_for_a_trace_are_said(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(profile_two_steps, 1, tmp_path) == [
        ["no trace is written of 2 steps: the first would be after [profiling] profile_freq = 5"]
    ]


def test_a_trace_that_cannot_be_written_is_a_warning(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file")
    config = Profiling(
        enable_profiling=True,
        save_traces_folder="traces",
        profile_freq=2,
        profiler_warmup=0,
        profiler_active=1,
    )

    def train(rank: int, _: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zorselike").addHandler(handler)
        with profiler(config, folder=tmp_path, rank=rank) as end_step:
            for _ in range(4):
                end_step(cast(StepResult, SimpleNamespace(loss=0.0)))
        return said

    (said,) = run_ranks(train, 1)
    assert [text.partition(": ")[0] for text in said] == [
        f"no trace is written to {tmp_path / 'traces' / f'iteration_{step}'}" for step in (2, 4)
    ]
    assert "Not a directory" in said[0]
