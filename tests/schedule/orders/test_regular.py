"""Of two orders that bound microbatches in flight the one that takes less nominal time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from zorselike.schedule.orders.nominal_time import (
    Computation,
    Needs,
    Stage,
    StageNeeds,
    make_stages,
    run_in_nominal_time,
    run_one_each,
    run_several,
)
from zorselike.schedule.orders.regular import order_computations


def make_needs(sizes: Sequence[Sequence[int]], owners: Sequence[int]) -> StageNeeds:
    """Of groups with microbatches of these rows."""
    numbers = [[m for m, rows in enumerate(own) for _ in range(rows)] for own in sizes]

    def last_of(a: int, b: int) -> list[int]:
        """Per microbatch of `a`, the last of `b` that has rows of it."""
        by_row = dict(zip(numbers[a], numbers[b], strict=True))  # Later rows win.
        return [by_row[m] for m in range(len(sizes[a]))]

    return StageNeeds.among(owners, len(sizes[owners[-1]]), lambda a, b: Needs(last_of(b, a), last_of(a, b)))


def make(
    sizes: Sequence[Sequence[int]],
    owners: Sequence[int] | None = None,
    lowest: int = 0,
    transfer_passes: int = 0,
) -> tuple[list[Stage], StageNeeds, list[int]]:
    """Stages, what they wait for, and the least bounds."""
    owners = range(len(sizes)) if owners is None else owners
    needs = make_needs(sizes, owners)
    passes = [2 if i >= lowest else 0 for i in range(len(owners))]
    owned = [[i for i, owner in enumerate(owners) if owner == g] for g in range(len(sizes))]
    stages = make_stages(owners, sizes, passes, needs, transfer_passes=transfer_passes)
    return stages, needs, list(needs.find_least(owned, lowest))


def measure(computations: Sequence[Computation], stages: Sequence[Stage]) -> int:
    """When all is done; asserts that everything comes after what it waits for, and once."""
    ends: dict[Computation, int] = {}
    free_at = [0] * (1 + max(stage.group for stage in stages))
    for computation in computations:
        s, is_forward, m = computation
        stage, start = stages[s], free_at[stages[s].group]
        if not is_forward:
            assert ends[Computation(s, True, m)] <= start
        if (needed := stage.needs[is_forward]) is not None:
            start = max(start, ends[Computation(s - 1 if is_forward else s + 1, is_forward, needed[m])])
        assert computation not in ends
        free_at[stage.group] = ends[computation] = start + stage.times[is_forward][m]
    assert len(ends) == sum(len(times) for stage in stages for times in stage.times)
    return max(free_at)


def list_ways(computations: Sequence[Computation], s: int) -> str:
    return "".join("BF"[own.is_forward] for own in computations if own.ministage == s)


def test_where_rows_do_not_match_groups_hold_what_they_may() -> None:
    sizes = [[4] * 24, [4] * 24, [3] * 32, [3] * 32]
    bounds = (4, 3, 2, 1)
    stages, needs, least = make(sizes)
    assert all(bound >= own for bound, own in zip(bounds, least, strict=True))
    found = order_computations(stages, needs, bounds)
    assert [list_ways(found.computations, s) for s in range(4)] == [
        "FFFF" + "BF" * 20 + "BBBB",
        "FFF" + "BF" * 21 + "BBB",
        "FF" + "BF" * 30 + "BB",
        "FB" * 32,
    ]
    assert found.most_in_flight == bounds
    other = run_in_nominal_time(make(sizes)[0], needs, bounds)
    assert measure(found.computations, stages) < 0.92 * measure(other.computations, stages)


def test_where_it_would_take_longer_what_can_start_first_does() -> None:
    # A group in the middle with half as many microbatches, and more in flight than fill the pipeline.
    sizes = [*[[1] * 64] * 6, [2] * 32, *[[1] * 64] * 8]
    bounds = (24, 23, 21, 20, 18, 17, 8, 12, 11, 9, 8, 6, 5, 3, 1)
    stages, needs, _ = make(sizes)
    found = order_computations(stages, needs, bounds)
    assert found == run_in_nominal_time(make(sizes)[0], needs, bounds)


def draw_sizes(num_groups: int, rng: random.Random) -> list[list[int]]:
    """Microbatches of groups, of 24 rows together."""
    sizes = []
    for _ in range(num_groups):
        whole = rng.choice((1, 2, 3, 4, 6))
        own = [whole] * (24 // whole)
        if rng.random() < 0.3:
            own = [1, 2, *own[: (24 - 3) // whole]]
            own.append(24 - sum(own))
        sizes.append([rows for rows in own if rows])
    return sizes


@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_one_ministage_a_group_is_ordered_as_several_are(num_groups: int, rng: random.Random) -> None:
    sizes, owners = draw_sizes(num_groups, rng), rng.sample(range(num_groups), num_groups)
    lowest, transfer_passes = rng.choice((0, 0, num_groups // 2)), rng.choice((0, 0, 1, 3))
    stages, needs, least = make(sizes, owners, lowest, transfer_passes)
    bounds = [rng.choice((None, own, own + 1, own + 3)) for own in least]
    found = run_one_each(stages, bounds)
    others, *_ = make(sizes, owners, lowest, transfer_passes)
    assert found == run_several(others, needs, bounds)
    assert [own.ends for own in stages] == [own.ends for own in others]


@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_it_never_takes_longer_nor_holds_more(num_groups: int, rng: random.Random) -> None:
    sizes = draw_sizes(num_groups, rng)
    owners = list(range(num_groups)) + [rng.randrange(num_groups)] * rng.randrange(2)
    if len(owners) > 1 and owners[-1] == owners[-2]:
        del owners[-1]
    lowest = rng.choice((0, 0, len(owners) // 2))
    stages, needs, least = make(sizes, owners, lowest)
    bounds = [own + rng.randrange(4) for own in least]
    found = order_computations(stages, needs, bounds)
    other = run_in_nominal_time(make(sizes, owners, lowest)[0], needs, bounds)
    assert measure(found.computations, stages) <= measure(other.computations, stages)
    held = [0] * num_groups
    for s, is_forward, _ in found.computations:
        if s >= lowest:
            held[owners[s]] += 1 if is_forward else -1
            assert held[owners[s]] <= found.most_in_flight[owners[s]] <= bounds[owners[s]]
