"""The page on a step: its numbers, who limits, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import CLUSTER, GIB, PLAN, TIMES, make_case, make_simulation, make_spans

from zorselike.plan.cluster.cluster import Node
from zorselike.plan.plan import Group, Microbatch
from zorselike.simulator.report.limits import describe_limit
from zorselike.simulator.report.page import format_report
from zorselike.simulator.result import RankTimes, Track
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan


def make_times(*, busy: float = 0.0, data: float = 0.0, wires: float = 0.0, copies: float = 0.0) -> RankTimes:
    assert busy + data + wires + copies == 10.0
    return RankTimes(
        busy_s=busy,
        waiting_for_data_s=data,
        exposed_communication_s=wires,
        exposed_copies_s=copies,
        forward_s=busy / 2,
        backward_s=busy / 2,
        update_s=0.0,
    )


def limit_of(*times: RankTimes, bytes_by_link: dict[str, float] | None = None) -> str:
    case = make_case(make_simulation(times=times, bytes_by_link=bytes_by_link))
    return " ".join(describe_limit(case))


def baselines() -> list[Baseline]:
    slower = make_case()
    slower = replace(slower, simulation=replace(slower.simulation, iteration_s=15.0))
    return [
        Baseline(name="1 x A100-40 alone", how="1 rank, 4 rows at once", simulated=slower),
        Baseline(name="even shares", how="", simulated=None, reason="OUT OF MEMORY: T4 needs 20 of 16 GiB"),
    ]


def report(case: SimulatedPlan, *, width: int = 100) -> str:
    return format_report(case, baselines(), ideal_s=4.0, notes=["a note"], width=width)


def test_a_narrow_page_breaks_the_comparison_before_its_words() -> None:
    wide = report(make_case(), width=200).split("\n\n")[1]
    narrow = report(make_case(), width=60).split("\n\n")[1]
    assert max(map(len, wide.splitlines())) > 60 >= max(map(len, narrow.splitlines()))
    assert narrow.split() == wide.split()


def test_the_comparison_comes_first() -> None:
    sections = report(make_case()).split("\n\n")
    assert sections[0].splitlines() == [
        f"plan {make_case().plan.fingerprint} on cluster home: chain, bfloat16, 4 rows of 100 tokens a step, "
        "3 ranks in 2",
        "  groups, 2 ministages",
        "a note",
    ]
    assert sections[1].splitlines() == [
        "  this plan          10 s per step  40 tokens/s",
        "  1 x A100-40 alone  15 s per step  27 tokens/s  plan is 1.50 x as fast (1 rank, 4 rows at once)",
        f"  even shares        {' ' * 28}OUT OF MEMORY: T4 needs 20 of 16 GiB",
    ]


def test_the_share_of_the_ideal_and_money() -> None:
    assert "share of the ideal: 40.0% (4 s if" in report(make_case())
    assert "money" not in report(make_case())
    priced = report(make_case(make_simulation(cost=0.02)))
    assert (
        "money: 0.02 USD per step, of it 0.005 for traffic between zones; 50,000.00 USD per 10^9 tokens"
        in " ".join(priced.split())
    )


def test_every_rank_s_time_and_memory_against_its_limit() -> None:
    lines = report(make_case()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  rank "))
    assert [" ".join(line.split()) for line in lines[start : start + 3]] == [
        "rank device group computes data links copies memory",
        "0 A100-40 0 50% 30% 20% 0% [#####---------------] 10.0 GiB of 40.0 GiB",
        "1, 2 T4 1 40% 40% 20% 0% [##########----------] 8.0 GiB of 16.0 GiB",
    ]
    assert "Fullest is rank 1 (T4 of node b) at 0B0: gradients 8.0 GiB." in " ".join(
        report(make_case()).split()
    )


def test_what_does_not_fit_is_said_twice() -> None:
    text = report(make_case(make_simulation(peaks=(10 * GIB, 8 * GIB, 24 * GIB))))
    first = text.split("\n\n")[1].splitlines()[0]
    assert first.endswith("OUT OF MEMORY on rank 2")
    (line,) = (line for line in text.splitlines() if line.startswith("  2 "))
    assert line.endswith("[####################!  24.0 GiB  of 16.0 GiB OUT OF MEMORY")


def test_what_is_offloaded_against_each_host_s_memory() -> None:
    simulation = make_simulation()
    walks = [replace(walk, host={"optimizer state": 3 * GIB}) for walk in simulation.memory]
    small = tuple(replace(node, host_memory_bytes=4 * GIB) for node in CLUSTER.nodes)
    case = make_case(replace(simulation, memory=walks))
    text = report(replace(case, cluster=replace(CLUSTER, nodes=small)))
    assert "  offloaded to host a: 3.0 GiB of 4.0 GiB\n" in text
    assert "  offloaded to host b: 6.0 GiB of 4.0 GiB OUT OF MEMORY\n" in text
    assert text.split("\n\n")[1].splitlines()[0].endswith("OUT OF MEMORY on host b")
    unknown = report(case)
    assert "  offloaded to host a: 3.0 GiB\n" in unknown and "OUT OF MEMORY on" not in unknown
    assert "offloaded" not in report(make_case())


def test_memory_without_a_limit_has_no_bar() -> None:
    case = make_case()
    text = report(replace(case, costs=replace(case.costs, memory_bytes=())))
    assert "[#" not in text and "of 40.0 GiB" not in text
    assert "10.0" in text


def test_what_was_assumed_is_listed() -> None:
    text = report(make_case(assumptions=("T4: nothing was measured on it", "no updates")))
    assert text.endswith("\n\nNot measured, so assumed:\n- T4: nothing was measured on it\n- no updates")
    assert "assumed" not in report(make_case())


def test_prose_keeps_to_the_width() -> None:
    for width in (60, 90):
        lines = report(make_case(assumptions=("word " * 60,)), width=width).splitlines()
        assert max(len(line) for line in lines if not line.startswith("  ")) <= width


def test_many_different_ranks_are_cut_to_the_fullest() -> None:
    number = 60
    plan = replace(
        PLAN,
        global_batch=number,
        groups=(
            Group((0,), (Microbatch(0, 0, number),)),
            Group(tuple(range(1, number)), (Microbatch(1, 0, number),)),
        ),
    )
    cluster = replace(
        CLUSTER, nodes=(Node(name="a", devices=("T4",) * number, fabric=CLUSTER.nodes[1].fabric),)
    )
    simulation = make_simulation(
        spans=make_spans([(rank, "compute", 0.0, 5.0, "0F0") for rank in range(number)]),
        times=(TIMES[0],) * number,
        peaks=[(1 + rank) * GIB // 8 for rank in range(number)],
    )
    case = make_case(simulation)
    costs = replace(case.costs, places=cluster.places, memory_bytes=(16 * GIB,) * number)
    text = report(replace(case, plan=plan, cluster=cluster, costs=costs))
    assert "36 more ranks, each with more room than these" in text
    shown = [line.split()[0] for line in text.splitlines() if " T4 " in line and "[" in line]
    assert shown == [str(rank) for rank in range(36, 60)]


# -- who limits --------------------------------------------------------------------------------


def test_a_rank_that_computes_all_the_time_limits() -> None:
    text = limit_of(make_times(busy=9.5, wires=0.5), *[make_times(busy=5, data=5)] * 2)
    assert text.startswith(
        "rank 0 (A100-40 of node a) limits: it computes 95% of the step, the other ranks 50% on average: "
        "with fewer rows or layers on it"
    )


def test_where_all_compute_only_shorter_computing_helps() -> None:
    text = limit_of(*[make_times(busy=9.5, data=0.5)] * 3)
    assert "all are busy, and only faster computing would help: larger microbatches, " in text
    assert "less recomputation" in text


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        (
            "wires",
            "bytes on links, or the other ranks of a collective; longest, 7 s, does rank 2 (T4 of node b)",
        ),
        ("copies", "copies between host and device; longest, 7 s, does rank 2 (T4 of node b)"),
        ("data", "have not computed yet; longest, 7 s, does rank 2 (T4 of node b)"),
    ],
)
def test_the_longest_wait_is_named(wait: str, words: str) -> None:
    times = [
        make_times(busy=7, **{wait: 3}),
        make_times(busy=7, **{wait: 3}),
        make_times(busy=3, **{wait: 7}),
    ]
    text = limit_of(*times)
    assert "no rank computes more than 70% of the step" in text
    assert (
        f"Ranks wait 43% of the step on average for {'rows or gradients' if wait == 'data' else ''}" in text
    )
    assert words in text


def test_a_pipeline_out_of_balance_says_which_group_has_too_much() -> None:
    text = limit_of(make_times(busy=8, data=2), *[make_times(busy=4, data=6)] * 2)
    assert "Group 0 computes 80% of the step and group 1 40%: layers moved from 0 to 1" in text
    text = limit_of(make_times(busy=6, data=4), *[make_times(busy=5.5, data=4.5)] * 2)
    assert "The groups are balanced: more microbatches or more ministages" in text


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [(0, "gather", 0.0, 2.0, "0UNSHARD"), (0, "reduce", 1.0, 4.0, "0REDUCE_GRAD")],
            "Its collectives take 4 s, its transfers 0 s: a lower ZeRO stage",
        ),
        (
            [
                (0, "gather", 0.0, 2.0, "0UNSHARD"),
                (0, "send", 1.0, 3.0, "0SEND_F0@1[0:2]"),
                (0, "receive", 5.0, 6.0, "0RECV_B0@1[0:2]"),
                (1, "send", 6.0, 9.0, "1SEND_B0@0[0:2]"),
            ],
            "Its collectives take 2 s, its transfers 3 s: fewer ministages",
        ),
    ],
)
def test_collectives_and_transfers_are_told_apart(
    rows: list[tuple[int, Track, float, float, str]], words: str
) -> None:
    times = [make_times(busy=2, wires=8), *[make_times(busy=5, wires=5)] * 2]
    case = make_case(make_simulation(times=times, spans=make_spans(rows)))
    assert words in " ".join(describe_limit(case))


def test_a_full_link_is_named() -> None:
    times = [make_times(busy=5, wires=5)] * 3
    text = limit_of(*times, bytes_by_link={"node a, out": 9e9, "node b, in": 7e9, "node a, in": 1e9})
    assert "The link 'node a, out' and 1 more like it is full 90% of the step." in text
    assert "The link" not in limit_of(*times, bytes_by_link={"node a, out": 3e9})
