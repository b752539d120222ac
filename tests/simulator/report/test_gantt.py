"""A step as text: every column shows what took most of its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import PLAN, SPANS, make_simulation, make_spans

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.simulator.report.gantt import draw_gantt

TYPES = ("A100-40", "T4", "T4")


def rows_of(drawing: str) -> list[str]:
    """The lines of ranks, without the axis above and the legend below."""
    return drawing.split("\n\n")[0].splitlines()[1:]


def test_a_column_a_second() -> None:
    drawing = draw_gantt(PLAN, make_simulation(), device_types=TYPES, width=11 + 20)
    assert rows_of(drawing) == [
        "0 A100-40  aaaa--......--AAAA++",
        "1 T4       ....--bbBBBB-=++....",
        "2 T4       ....--bbBBBB--++....",
    ]


def test_axis_and_legend_say_what_is_drawn() -> None:
    drawing = draw_gantt(PLAN, make_simulation(), device_types=TYPES, width=71)
    axis, legend = drawing.splitlines()[0], " ".join(drawing.split("\n\n")[1].split())
    assert axis == f"{' ' * 11}|0{' ' * 13}|2.5{' ' * 11}|5{' ' * 13}|7.5{' ' * 6}10 s|"
    assert legend == (
        "a and A forward and backward of ministage 0 ... b and B of 1, + update, = collective that nothing "
        "hides, - rows on a link, . idle; a column is 167 ms"
    )
    assert "%" not in legend
    assert max(map(len, drawing.splitlines())) <= 71


def test_only_ranks_that_do_the_same_at_the_same_times_share_a_line() -> None:
    same = [row for row in SPANS if row[4] not in ("1SEND_B0@0[0:2]", "1SEND_B0@0[2:4]")]
    merged = rows_of(draw_gantt(PLAN, make_simulation(spans=make_spans(same)), device_types=TYPES))
    assert [row.split()[0] for row in merged] == ["0", "1,"]
    assert merged[1].startswith("1, 2 T4  ")
    moved = [(rank, track, start + 1e-3 * (rank == 2), stop, text) for rank, track, start, stop, text in same]
    apart = rows_of(draw_gantt(PLAN, make_simulation(spans=make_spans(moved)), device_types=TYPES))
    assert len(apart) == 3
    other_type = rows_of(
        draw_gantt(PLAN, make_simulation(spans=make_spans(same)), device_types=("A100-40", "T4", "L4"))
    )
    assert len(other_type) == 3


def test_many_ranks_that_are_alike_have_a_short_label() -> None:
    ranks = tuple(range(0, 40, 2))
    plan = Plan(
        global_batch=20,
        groups=(
            Group(ranks, tuple(Microbatch(rank, i, i + 1) for i, rank in enumerate(ranks))),
            Group(
                tuple(range(1, 40, 2)), tuple(Microbatch(rank + 1, i, i + 1) for i, rank in enumerate(ranks))
            ),
        ),
        ministages=(Ministage(0, ("a",)), Ministage(1, ("b",))),
    )
    spans = make_spans([(rank, "compute", rank % 2, 5.0, f"{rank % 2}F0") for rank in range(40)])
    drawing = draw_gantt(plan, replace(make_simulation(), spans=spans), width=60)
    assert [row.split("  ")[0] for row in rows_of(drawing)] == ["0 and 19 alike", "1 and 19 alike"]
    assert max(map(len, drawing.splitlines())) <= 60


@pytest.mark.parametrize(
    ("rows", "drawn"),
    [
        ([(0, "compute", 0.0, 0.3, "0F0"), (0, "compute", 0.3, 0.5, "0B0")], "a"),  # Half of a column.
        ([(0, "compute", 0.0, 0.2, "0F0")], "."),
        ([(0, "to host", 0.0, 1.0, "0OFFLOAD0")], "%"),
        ([(0, "to host", 0.0, 1.0, "0OFFLOAD0"), (0, "compute", 0.4, 1.0, "0F0")], "a"),
        ([(0, "host", 0.0, 1.0, "0RESHARD")], "^"),
    ],
)
def test_what_a_column_shows(rows: list[tuple[int, str, float, float, str]], drawn: str) -> None:
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, ("a",)),))
    simulation = replace(make_simulation(), iteration_s=20.0, spans=make_spans(rows))  # type: ignore[arg-type]
    (line,) = rows_of(draw_gantt(plan, simulation, width=3 + 20))
    assert line == f"0  {drawn}{'.' * 19}"


def test_more_ministages_than_letters() -> None:
    ministages = tuple(Ministage(0, (f"layers.{i}",)) for i in range(30))
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), ministages)
    simulation = replace(
        make_simulation(),
        spans=make_spans([(0, "compute", 0.0, 5.0, "25F0"), (0, "compute", 5.0, 10.0, "27B0")]),
    )
    drawing = draw_gantt(plan, simulation, width=3 + 20)
    assert rows_of(drawing) == [f"0  {'z' * 10}{'B' * 10}"]
    assert "... z and Z of 25, then a again for 26" in " ".join(drawing.split())


def test_what_a_rank_begins_early_is_seen_at_the_end_of_the_step_before() -> None:
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, ("a",)),))
    early = make_spans([(0, "compute", -3.0, 4.0, "0F0"), (0, "to host", 18.0, 22.0, "0OFFLOAD_STATE")])
    simulation = replace(make_simulation(), iteration_s=20.0, spans=early)
    (line,) = rows_of(draw_gantt(plan, simulation, width=3 + 20))
    assert line == f"0  aaaa{'.' * 13}aaa"
    assert [(span.start_s, span.stop_s) for span in simulation.folded_spans()] == [
        (0.0, 4.0),
        (17.0, 20.0),
        (0.0, 2.0),
        (18.0, 20.0),
    ]
