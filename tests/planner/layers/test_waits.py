"""Layers are cut so that groups wait least for each other."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.planner.layers.split_layers import visit_in_turn
from zorselike.planner.layers.waits import WORTH_MOVING, GroupTimes, Waits

_seconds = st.floats(0.1, 8.0)


@st.composite
def _pipelines(draw: st.DrawFn, *, most_layers: int = 12) -> tuple[tuple[int, ...], list[GroupTimes]]:
    """Owners of ministages, and what layers take their groups."""
    num_groups = draw(st.integers(1, 3))
    num_layers = draw(st.integers(num_groups + 1, most_layers))
    owners = visit_in_turn(num_groups, draw(st.integers(num_groups, num_layers - 1)))
    number = draw(st.integers(1, 9))
    layers = st.lists(_seconds, min_size=num_layers, max_size=num_layers)
    return owners, [GroupTimes(draw(layers), draw(layers), number) for _ in range(num_groups)]


def _simulate(owners: tuple[int, ...], groups: list[GroupTimes], ends: tuple[int, ...]) -> float:
    """Each microbatch by itself, one after the other."""
    number, last = groups[0].num_microbatches, len(owners) - 1
    layers = [range(start, end) for start, end in pairwise((0, *ends))]
    ahead = [sum(groups[g].forward_s[k] for k in own) for g, own in zip(owners, layers, strict=True)]
    back = [sum(groups[g].backward_s[k] for k in own) for g, own in zip(owners, layers, strict=True)]
    phases = [*enumerate(ahead[:-1]), (last, ahead[-1] + back[-1]), *reversed([*enumerate(back[:-1])])]
    busy = [0.0] * len(groups)
    ready = [0.0] * number
    for i, seconds in phases:
        for m in range(number):
            ready[m] = busy[owners[i]] = max(ready[m], busy[owners[i]]) + seconds / number
    return max(busy)


def _list_cuts(num_layers: int, num_ministages: int) -> list[tuple[int, ...]]:
    return [(*cut, num_layers) for cut in combinations(range(1, num_layers), num_ministages - 1)]


@given(_pipelines(), st.data())
def test_a_step_takes_what_its_microbatches_take_one_by_one(
    pipeline: tuple[tuple[int, ...], list[GroupTimes]], data: st.DataObject
) -> None:
    owners, groups = pipeline
    ends = data.draw(st.sampled_from(_list_cuts(len(groups[0].forward_s), len(owners))))
    assert Waits(owners, groups).find_step_s(ends) == pytest.approx(_simulate(owners, groups, ends), 1e-9)


@given(_pipelines(), st.data())
def test_single_moves_lead_to_a_cut_that_none_makes_faster(
    pipeline: tuple[tuple[int, ...], list[GroupTimes]], data: st.DataObject
) -> None:
    owners, groups = pipeline
    cuts = _list_cuts(len(groups[0].forward_s), len(owners))
    start = data.draw(st.sampled_from(cuts))
    waits = Waits(owners, groups)
    found = waits.shorten(start)
    assert found in cuts and not waits.list_better(found)
    found_s = waits.find_step_s(found)
    assert found_s <= waits.find_step_s(start)
    for way in (-1, 1):
        for i in range(len(owners) - 1):
            moved = (*found[:i], found[i] + way, *found[i + 1 :])
            if moved in cuts:
                assert waits.find_step_s(moved) >= (1 - WORTH_MOVING) * found_s
    better = waits.list_better(start)
    seconds = [waits.find_step_s(ends) for ends in better]
    assert seconds == sorted(seconds) and all(own < waits.find_step_s(start) for own in seconds)


def test_beside_a_long_head_the_other_group_computes_several_layers() -> None:
    """Shared out evenly the groups waited for each other in every round, a quarter longer in all."""
    owners = visit_in_turn(2, 10)
    groups = [GroupTimes([1.0] * 12 + [4.0], [2.0] * 12 + [8.0], 16) for _ in range(2)]
    even = tuple(accumulate((2, 2, 2, 1, 1, 1, 1, 1, 1, 1)))
    waits = Waits(owners, groups)
    found = waits.shorten(even)
    best_s = min(map(waits.find_step_s, _list_cuts(13, 10)))
    assert waits.find_step_s(even) > 1.2 * best_s
    assert waits.find_step_s(found) == pytest.approx(best_s)
    assert [end - start for start, end in pairwise((0, *found))] == [1, 1, 1, 1, 1, 1, 1, 1, 4, 1]


def test_the_first_of_fewer_microbatches_has_rows_of_several() -> None:
    """Of four microbatches two each are one of the next group's, which begins when both are there."""
    groups = [GroupTimes([4.0, 4.0], [0.0, 0.0], 4), GroupTimes([4.0, 4.0], [0.0, 0.0], 2)]
    assert Waits((0, 1), groups).find_step_s((1, 2)) == pytest.approx(2 + 4)
