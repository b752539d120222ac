"""What a run says of its memory."""

from __future__ import annotations

from zorselike import Group, Microbatch, Ministage, Plan
from zorselike.runtime.memory_report import MemoryLine, MemoryReport
from zorselike.train.report.memory import describe_deferral, describe_fullest

MIB = 2**20
PLAN = Plan(
    global_batch=3,
    groups=(
        Group(ranks=(2, 0), microbatches=(Microbatch(0, 0, 2), Microbatch(2, 2, 3))),
        Group(ranks=(1,), microbatches=(Microbatch(1, 0, 3),), offload=("optimizer",)),
    ),
    ministages=(Ministage(0, ("a",)), Ministage(1, ("b",))),
)


def report(rank: int, *, device: int, host: int, planned: int) -> MemoryReport:
    """`device` and `host`: MiB of gradient shards; `planned`: of all on the device."""
    lines = (
        MemoryLine("parameter shards", 7 * MIB, 7 * MIB, 0, 0),
        MemoryLine("gradient shards", device * MIB, None, host * MIB, None),
    )
    return MemoryReport(rank, lines, planned * MIB, None, 0, 0)


# As the processes come up, not by rank.
REPORTS = [
    report(1, device=2, host=9, planned=50),
    report(2, device=5, host=0, planned=80),
    report(0, device=6, host=0, planned=70),
]


def test_deferred_updates_say_what_they_keep_and_where() -> None:
    line = describe_deferral(PLAN, REPORTS, in_fp16=False)
    assert line.endswith(": group 0 6.0 MiB on the device, group 1 9.0 MiB in host memory")
    assert "max_norm" in line
    assert "\n" not in line
    assert "float16 skips a step" in describe_deferral(PLAN, REPORTS, in_fp16=True)


def test_of_each_group_the_fullest_rank_is_shown() -> None:
    text = describe_fullest(PLAN, REPORTS)
    assert [text.count(f"memory of rank {rank}") for rank in range(3)] == [0, 1, 1]
    assert text.index("rank 2") < text.index("rank 1")
