"""Chrome traces of simulated and measured steps: what the format demands, and what Perfetto needs."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from handmade import GIB, SPANS, make_case, make_simulation, make_spans
from hypothesis import given, settings
from plans import plans

from zorselike.cost.profile import Profile
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.schedule.actions import SENDS, parse_action
from zorselike.simulator.inputs import SimulationInputs
from zorselike.simulator.report.chrome_trace import make_trace, save_trace
from zorselike.simulator.report.gantt import draw_gantt
from zorselike.simulator.report.measured_trace import read_measured

Event = dict[str, Any]


def check_format(trace: dict[str, Any]) -> None:
    """What viewers of the format rely on."""
    events = trace["traceEvents"]
    json.dumps(trace, allow_nan=False)
    assert {event["ph"] for event in events} <= {"X", "M", "C", "s", "f"}
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    timed = [event for event in events if event["ph"] != "M"]
    assert events[len(events) - len(timed) :] == timed
    assert all(event["ts"] >= 0 for event in timed)
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    check_slices(events)
    check_flows(events)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in timed} <= processes


def check_slices(events: Sequence[Event]) -> None:
    """Slices of a thread do not overlap: Perfetto drops those that do."""
    by_thread: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_thread[event["pid"], event["tid"]].append(event)
    for own in by_thread.values():
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def check_flows(events: Sequence[Event]) -> None:
    """Every arrow has one beginning and one end, later, each inside a slice of its thread."""
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(begins) + len(ends) == sum(event["ph"] in "sf" for event in events)
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        end = ends[number]
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert begin["ts"] <= end["ts"] and end["bp"] == "e"
        assert find_slice(events, begin) is not None
        assert find_slice(events, end) is not None


def find_slice(events: Sequence[Event], arrow: Event) -> Event | None:
    """The slice that an arrow's end is bound to."""
    for event in events:
        is_here = event["ph"] == "X" and (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
        if is_here and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]:
            return event
    return None


def list_arrows(events: Sequence[Event]) -> list[tuple[int, str, int, str]]:
    """`(rank, action, rank, action)` of every arrow."""
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    arrows = []
    for begin in (event for event in events if event["ph"] == "s"):
        source, target = find_slice(events, begin), find_slice(events, ends[begin["id"]])
        assert source is not None and target is not None
        arrows.append((source["pid"], source["name"], target["pid"], target["name"]))
    return sorted(arrows)


def thread_names(trace: dict[str, Any], pid: int) -> list[str]:
    events = trace["traceEvents"]
    own = [event for event in events if event["name"] == "thread_name" and event["pid"] == pid]
    return [event["args"]["name"] for event in sorted(own, key=lambda event: int(event["tid"]))]


# -- simulated ---------------------------------------------------------------------------------


def test_a_track_for_each_resource_and_an_arrow_for_each_transfer() -> None:
    trace = make_trace(make_case())
    check_format(trace)
    events = trace["traceEvents"]
    assert thread_names(trace, 0) == [
        "compute",
        "update",
        "send to 1",
        "send to 2",
        "receive from 1",
        "receive from 2",
    ]
    assert thread_names(trace, 1) == ["compute", "update", "reduce", "send to 0", "receive from 0"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 A100-40 simulated", "rank 1 T4 simulated", "rank 2 T4 simulated"]
    assert list_arrows(events) == [
        (0, "0SEND_F0@1[0:2]", 1, "1RECV_F0@0[0:2]"),
        (0, "0SEND_F0@2[2:4]", 2, "1RECV_F0@0[2:4]"),
        (1, "1SEND_B0@0[0:2]", 0, "0RECV_B0@1[0:2]"),
        (2, "1SEND_B0@0[2:4]", 0, "0RECV_B0@2[2:4]"),
    ]


def test_names_are_the_actions_and_times_microseconds() -> None:
    slices = [event for event in make_trace(make_case())["traceEvents"] if event["ph"] == "X"]
    found = Counter((event["pid"], event["name"], event["ts"], event["dur"]) for event in slices)
    assert found == Counter((rank, text, a * 1e6, (b - a) * 1e6) for rank, _, a, b, text in SPANS)


def test_memory_is_counted_at_every_action() -> None:
    events = make_trace(make_case())["traceEvents"]
    counted = [event for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert [event["ts"] for event in counted] == [
        start * 1e6 for rank, _, start, _, _ in sorted(SPANS, key=lambda row: row[2]) if rank == 0
    ]
    assert max(event["args"]["MiB"] for event in counted) == 10 * GIB / 2**20


def test_what_overlaps_gets_a_lane_of_its_own() -> None:
    overlapping = [
        (0, "gather", 0.0, 2.0, "0UNSHARD"),
        (0, "gather", 1.0, 3.0, "1UNSHARD"),
        (0, "gather", 2.0, 4.0, "2UNSHARD"),
        (0, "compute", 2.0, 4.0, "0F0"),
    ]
    trace = make_trace(make_case(make_simulation(spans=make_spans(overlapping))))  # type: ignore[arg-type]
    check_format(trace)
    assert thread_names(trace, 0) == ["compute", "gather", "gather (2)"]


def test_a_transfer_of_which_one_end_is_missing_has_no_arrow() -> None:
    rows = [row for row in SPANS if row[4] != "1RECV_F0@0[2:4]"]
    trace = make_trace(make_case(make_simulation(spans=make_spans(rows))))
    check_format(trace)
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == 3


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read_back(tmp_path: Path, name: str) -> None:
    trace = make_trace(make_case())
    save_trace(trace, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert json.loads(gzip.decompress(data) if name.endswith(".gz") else data) == trace


def test_a_trace_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/such/trace\.json: the trace cannot be written: No such file"):
        save_trace(make_trace(make_case()), tmp_path / "no" / "such" / "trace.json")


@settings(max_examples=25)
@given(plan=plans(max_groups=3, max_ranks_per_group=3, max_ministages_per_group=3, max_rows=8))
def test_any_plan_s_step_makes_a_valid_trace_and_drawing(plan: Plan) -> None:
    case = make_setting(plan).simulate(plan, record=True)
    trace = make_trace(case)
    check_format(trace)
    actions = [action for own in case.actions.values() for action in own]
    arrows = list_arrows(trace["traceEvents"])
    assert len(arrows) == sum(action.kind in SENDS for action in actions)
    for source, send, target, receive in arrows:
        sent, received = parse_action(send), parse_action(receive)
        assert (sent.peer, received.peer) == (target, source)
        assert (sent.start, sent.stop) == (received.start, received.stop)
    counted = sum(event["ph"] == "C" for event in trace["traceEvents"])
    assert counted == len(actions)
    drawing = draw_gantt(plan, case.simulation, device_types=case.device_types, width=80)
    assert max(map(len, drawing.splitlines())) <= 80


def make_setting(plan: Plan) -> SimulationInputs:
    """A chain of the plan's layers on nodes of three devices each."""
    modules = list(plan.ministage_of)
    kind = LayerKind(
        name="layer",
        num_parameters=10**6,
        forward_flops_per_row=1e12,
        input_elements_per_row=10**6,
        output_elements_per_row=10**6,
        activation_bytes_per_row=10**7,
    )
    workload = Workload(
        model="chain",
        sequence_length=10,
        dtype="float16",
        layers=tuple((module, "layer") for module in modules),
        kinds={"layer": kind},
    )
    nodes = tuple(
        Node(name=f"n{i}", devices=("T4", "A100-40", "T4"), fabric=Link(1e10, 1e-5), nic=Link(1e9))
        for i in range(-(-plan.num_ranks // 3))
    )
    cluster = Cluster(nodes=nodes, default_link=Link(1e9, 1e-4))
    return SimulationInputs(workload=workload, cluster=cluster, profile=Profile(model="chain"))


# -- measured ----------------------------------------------------------------------------------

ACTIONS = (
    (0, 0.0, 2.0, "0F0"),
    (0, 2.0, 2.1, "0SEND_F0@1[0:2]"),
    (1, 0.0, 0.1, "1RECV_F0@0[0:2]"),
    (1, 0.1, 4.0, "1F0"),
    (1, 4.0, 5.0, "1B0"),
    (1, 5.0, 5.1, "1SEND_B0@0[0:2]"),
    (0, 2.1, 2.2, "0RECV_B0@1[0:2]"),
    (0, 2.2, 8.0, "0B0"),
)
"""Rank, begin and end in milliseconds, as the host's thread runs them: a computation waits for its rows."""


def write_traces(folder: Path, *, num_steps: int = 1, began_ns: int = 1_700_000_000_123_456_789) -> Path:
    """What `zorselike/train/report/trace.py` leaves, with times against a base that differs by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in (0, 1):
        skew_us = 1000.0 * (rank + 1)
        events: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": f"rank {rank} CPU"}},
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 4321, "args": {"name": "actions"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7: iFm iBm"}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 4321, "ts": 5.0, "dur": 1.0},
        ]
        for step in range(num_steps):
            annotation = {"ph": "X", "cat": "user_annotation", "pid": 77, "tid": 4321}
            at = 10_000.0 * step + skew_us
            events.append(annotation | {"name": f"ProfilerStep#{step}", "ts": at, "dur": 9000.0})
            for owner, start, stop, text in ACTIONS:
                if owner == rank:
                    times = {"ts": at + 1000 * start, "dur": 1000 * (stop - start)}
                    events.append(annotation | {"name": text} | times)
                    if text[1] in "FB":
                        on_gpu = {"cat": "gpu_user_annotation", "pid": 0, "tid": 7}
                        events.append(annotation | {"name": text} | times | on_gpu)
        trace = {"traceEvents": events, "baseTimeNanoseconds": began_ns - int(1000 * skew_us)}
        with gzip.open(folder / f"rank{rank}_trace.json.gz", "wt") as file:
            json.dump(trace, file)
    return folder


def test_simulated_and_measured_steps_are_in_one_window(tmp_path: Path) -> None:
    measured = read_measured(write_traces(tmp_path), first_pid=3)
    trace = make_trace(make_case(), measured=measured)
    check_format(trace)
    assert thread_names(trace, 3) == ["actions", "stream 7: iFm iBm"]
    pids = {event["args"]["name"]: event["pid"] for event in measured if event["name"] == "process_name"}
    assert pids == {"rank 0 measured": 3, "rank 1 measured": 4}
    names = {event["name"] for event in measured if event["ph"] == "X"}
    assert names == {text for *_, text in ACTIONS}
    simulated = {event["name"] for event in make_trace(make_case())["traceEvents"] if event["ph"] == "X"}
    assert names & simulated == {"0F0", "1F0", "1B0", "0B0"} | {
        text for *_, text in ACTIONS if parse_action(text).peer is not None
    }


def test_ranks_are_set_by_the_machine_s_clock(tmp_path: Path) -> None:
    measured = read_measured(write_traces(tmp_path), first_pid=0)
    begins = {
        (event["pid"], event["name"]): event["ts"]
        for event in measured
        if event["ph"] == "X" and event["tid"] == 0
    }
    expected = {(rank, text): pytest.approx(1000 * start) for rank, start, _, text in ACTIONS}
    assert begins == expected


@pytest.mark.parametrize("num_steps", [1, 3])
def test_measured_arrows_end_where_rows_are_waited_for(tmp_path: Path, num_steps: int) -> None:
    measured = read_measured(write_traces(tmp_path, num_steps=num_steps), first_pid=3)
    trace = make_trace(make_case(), measured=measured)
    check_format(trace)
    arrows = [arrow for arrow in list_arrows(trace["traceEvents"]) if arrow[0] >= 3]
    once = [(3, "0SEND_F0@1[0:2]", 4, "1F0"), (4, "1SEND_B0@0[0:2]", 3, "0B0")]
    assert arrows == sorted(once * num_steps)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no such folder; give the folder of one iteration"),
        ({}, r"contains no rank0_trace\.json\.gz; give the folder"),
        ({"rank0_trace.json": "{"}, r"rank0_trace\.json: is not a Chrome trace that can be read"),
        ({"rank0_trace.json": "[]"}, r"rank0_trace\.json: is not a Chrome trace that can be read"),
        ({"rank0_trace.json": '{"traceEvents": []}'}, r"rank0_trace\.json: contains no action of a schedule"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(
    tmp_path: Path, content: dict[str, str] | None, message: str
) -> None:
    folder = tmp_path / "iteration_2"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_measured(folder, first_pid=0)
    assert "\n" not in str(caught.value)
