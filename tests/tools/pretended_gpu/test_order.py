"""Calls of NCCL that differ between ranks, come late or wait for ever are found in logs of ranks."""

from __future__ import annotations

import pytest

from tools.pretended_gpu.order import Process, compare, find_deadlock, read_log

MADE = ["nccl init a rank 0 of 2 device 0", "nccl init b rank 0 of 2 device 0", "note built"]


def call(communicator: str, stream: str = "s", *, name: str = "allreduce", count: int = 4) -> str:
    return f"nccl {name} {communicator} {count} 7 stream {stream} tid 1"


def two_ranks(*logs: list[str]) -> list[Process]:
    return [read_log(rank, [*MADE, *log]) for rank, log in enumerate(logs)]


def test_what_matches_is_no_fault() -> None:
    ranks = two_ranks(
        [call("a"), "rec e s tid 1", "wait e t tid 1", call("b", "t", name="send"), "sync device tid 1"],
        [call("a"), call("b", "t", name="recv"), "sync stream t tid 1", "sync event never tid 1"],
    )
    assert compare(ranks) == [] and find_deadlock(ranks) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([call("a", count=5)], "differ in call 0: allreduce of 4 (dtype 7), allreduce of 5 (dtype 7)"),
        (
            [call("a", name="allgather")],
            "differ in call 0: allreduce of 4 (dtype 7), allgather of 4 (dtype 7)",
        ),
        ([call("a"), call("a")], "make 1 and 2 calls"),
    ],
)
def test_calls_that_differ_are_named(other: list[str], said: str) -> None:
    assert compare(two_ranks([call("a")], other)) == [f"communicator a: ranks 0 and 1 {said}"]


def test_two_that_send_to_each_other_differ() -> None:
    assert compare(two_ranks([call("a", name="send")], [call("a", name="send")]))
    assert not compare(two_ranks([call("a", name="send")], [call("a", name="recv")]))


def test_of_ranks_that_broke_off_only_the_beginning_must_match() -> None:
    ranks = two_ranks([call("a"), call("b")], [call("a")])
    assert compare(ranks) and not compare(ranks, is_cut=True)
    assert compare(two_ranks([call("a")], [call("a", count=5)]), is_cut=True)


def test_communicators_made_in_a_step_or_by_some_ranks_are_named() -> None:
    late = "nccl init c rank 0 of 2 device 0"
    assert compare(two_ranks([late], ["note ended", late])) == ["rank 0 makes communicator c in a step"]
    assert compare(two_ranks([], ["note ended", late])) == ["1 ranks have communicator c of 2 ranks"]


def test_opposite_orders_on_one_stream_wait_for_ever() -> None:
    ranks = two_ranks([call("a"), call("b")], [call("b"), call("a")])
    assert compare(ranks) == []
    assert find_deadlock(ranks) == [
        "deadlock: rank 0, stream s stands at call 0 of communicator a, allreduce of 4 (dtype 7)",
        "deadlock: rank 1, stream s stands at call 0 of communicator b, allreduce of 4 (dtype 7)",
    ]


def test_opposite_orders_on_two_streams_wait_for_ever_only_if_something_orders_them() -> None:
    first = [call("a"), call("b", "t")]
    assert find_deadlock(two_ranks(first, [call("b", "t"), call("a")])) == []
    for between in (["rec e {} tid 1", "wait e {} tid 1"], ["sync stream {} tid 1"], ["sync device tid 1"]):
        logs = [
            [call("a"), *(text.format(on) for text, on in zip(between, "st", strict=False)), call("b", "t")],
            [call("b", "t"), *(text.format(on) for text, on in zip(between, "ts", strict=False)), call("a")],
        ]
        assert find_deadlock(two_ranks(*logs)), between


def test_an_event_is_waited_for_as_it_was_recorded_last() -> None:
    """What is recorded again later holds nobody up."""
    log = ["rec e t tid 1", "wait e s tid 1", call("a"), "rec e s tid 1"]
    assert find_deadlock(two_ranks(log, log)) == []
