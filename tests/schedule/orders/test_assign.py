from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.errors import PlanError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule.assign import assign_microbatches, completion_times

_seconds = st.floats(0.01, 100.0)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[Microbatch], dict[int, float], dict[int, float]]:
    """An earlier group's microbatches of some rows, and the seconds of both groups' ranks."""
    earlier = dict(enumerate(draw(st.lists(_seconds, min_size=1, max_size=5))))
    later = dict(enumerate(draw(st.lists(_seconds, min_size=1, max_size=5)), start=len(earlier)))
    sizes = draw(st.lists(st.integers(1, 6), max_size=20))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    microbatches = [
        Microbatch(draw(st.sampled_from(sorted(earlier))), start, start + size)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return draw(st.permutations(microbatches)), earlier, later


@given(_cases(), st.data())
def test_every_row_is_assigned_once(
    case: tuple[list[Microbatch], dict[int, float], dict[int, float]], data: st.DataObject
) -> None:
    earlier, earlier_s, later_s = case
    limits = data.draw(st.dictionaries(st.sampled_from(sorted(later_s)), st.integers(1, 7)))
    later = assign_microbatches(earlier, earlier_s, later_s, max_rows=limits)
    rows = Counter(row for mb in later for row in range(mb.start, mb.stop))
    assert rows == Counter(row for mb in earlier for row in range(mb.start, mb.stop))
    assert all(mb.num_rows <= limits.get(mb.rank, mb.num_rows) for mb in later)
    assert {mb.rank for mb in later} <= set(later_s)


@given(_cases())
def test_loads_are_balanced_to_within_one_microbatch(
    case: tuple[list[Microbatch], dict[int, float], dict[int, float]],
) -> None:
    earlier, earlier_s, later_s = case
    later = assign_microbatches(earlier, earlier_s, later_s)
    loads_s = dict.fromkeys(later_s, 0.0)
    last_s = dict.fromkeys(later_s, 0.0)
    for mb in later:
        last_s[mb.rank] = mb.num_rows * later_s[mb.rank]
        loads_s[mb.rank] += last_s[mb.rank]
    lightest = min(loads_s.values())
    assert all(loads_s[rank] - last_s[rank] <= lightest * (1 + 1e-9) + 1e-9 for rank in later_s)


@given(_cases())
def test_order_is_that_of_completion(
    case: tuple[list[Microbatch], dict[int, float], dict[int, float]],
) -> None:
    earlier, earlier_s, later_s = case
    done_s = dict(zip(earlier, completion_times(earlier, earlier_s), strict=True))
    by_rows = {(mb.start, mb.stop): done_s[mb] for mb in earlier}
    times = [by_rows[mb.start, mb.stop] for mb in assign_microbatches(earlier, earlier_s, later_s)]
    assert times == sorted(times)
    own: defaultdict[int, float] = defaultdict(float)
    for mb in earlier:
        own[mb.rank] += mb.num_rows * earlier_s[mb.rank]
        assert done_s[mb] == pytest.approx(own[mb.rank])


def test_by_hand() -> None:
    # Rank 0 is twice as fast as rank 1, rank 3 three times as fast as rank 2.
    earlier = [Microbatch(0, 0, 2), Microbatch(1, 2, 4), Microbatch(0, 4, 6), Microbatch(0, 6, 8)]
    later = assign_microbatches(earlier, {0: 1.0, 1: 2.0}, {2: 3.0, 3: 1.0})
    # Done at 2 (rows 0:2), 4 (2:4 and 4:6, in the order of the list), 6 (6:8). All start with six
    # seconds: rank 2 wins the tie and has none left; rank 3 takes two seconds each time.
    assert later == (Microbatch(2, 0, 2), Microbatch(3, 2, 4), Microbatch(3, 4, 6), Microbatch(3, 6, 8))


def test_a_microbatch_over_the_limit_is_cut_into_even_pieces_for_whoever_has_time() -> None:
    later = assign_microbatches([Microbatch(0, 0, 6)], {0: 1.0}, {1: 1.0, 2: 1.0}, max_rows={1: 4, 2: 4})
    assert later == (Microbatch(1, 0, 3), Microbatch(2, 3, 6))
    alone = assign_microbatches([Microbatch(0, 0, 7)], {0: 1.0}, {1: 1.0}, max_rows={1: 3})
    assert alone == (Microbatch(1, 0, 3), Microbatch(1, 3, 5), Microbatch(1, 5, 7))


def test_the_result_is_a_group() -> None:
    earlier = tuple(Microbatch(0, row, row + 1) for row in range(12))
    later = assign_microbatches(earlier, {0: 0.5}, {1: 1.0, 2: 2.0})
    groups = (Group((0,), earlier), Group((1, 2), later))
    plan = Plan(12, groups, (Ministage(0, ("a",)), Ministage(1, ("b",)))).validate()
    assert [sum(mb.num_rows for mb in plan.microbatches_of_rank(rank)) for rank in (1, 2)] == [8, 4]


@pytest.mark.parametrize(
    ("earlier_s", "later_s", "limits", "named"),
    [
        ({}, {1: 1.0}, None, "rank 0"),
        ({0: 1.0}, {}, None, "later_seconds_per_row"),
        ({0: 0.0}, {1: 1.0}, None, r"earlier_seconds_per_row\[0\]"),
        ({0: 1.0}, {1: float("nan")}, None, r"later_seconds_per_row\[1\]"),
        ({0: 1.0}, {1: 1.0}, {1: 0}, r"max_rows\[1\]"),
    ],
)
def test_bad_input_is_named(
    earlier_s: dict[int, float], later_s: dict[int, float], limits: dict[int, int] | None, named: str
) -> None:
    with pytest.raises(PlanError, match=named):
        assign_microbatches([Microbatch(0, 0, 2)], earlier_s, later_s, max_rows=limits)


def test_no_rows_no_microbatches() -> None:
    assert assign_microbatches([], {}, {1: 1.0}) == ()
