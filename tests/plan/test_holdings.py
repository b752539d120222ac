"""Boxes, and who gives which to whom."""

from __future__ import annotations

import random
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from plans import random_plan, with_replicas

from zorselike.plan.holdings import (
    VALUE,
    Box,
    boxes_held,
    boxes_written,
    copies,
    rows_held,
    rows_of_chunks,
    rows_written,
    subtract,
)
from zorselike.plan.pieces import Cut, cut_evenly, holders_of, pieces_of, positions_of
from zorselike.plan.plan import Replica


@st.composite
def boxes(draw: st.DrawFn, dimensions: int) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))) for _ in range(dimensions)]
    return Box("w", VALUE, tuple(a for a, _ in ends), tuple(b for _, b in ends))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*map(range, box.starts, box.stops)))


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n))))
def test_intersection_and_rest_make_up_the_box(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    if common is not None:
        rest = subtract(a, common)
        assert set().union(*map(elements, rest)) == elements(a) - elements(common)
        assert sum(box.num_elements for box in rest) == len(elements(a)) - len(elements(common))


def test_other_tensors_have_nothing_in_common() -> None:
    box = Box("w", VALUE, (0,), (4,))
    assert box.intersect(Box("v", VALUE, (0,), (4,))) is None
    assert box.intersect(Box("w", "exp_avg", (0,), (4,))) is None
    number = Box("n", VALUE, (), ())
    assert number.intersect(number) == number
    assert number.num_elements == 1


def test_rows_are_cut_as_torch_does() -> None:
    assert rows_of_chunks(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert rows_of_chunks(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


@given(st.integers(0, 2**32), st.integers(0, 9))
def test_every_row_is_written_once(seed: int, num_rows: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, max_groups=3)
    process_of = list(range(plan.num_ranks))
    rng.shuffle(process_of)
    for i in range(plan.num_ministages):
        held = rows_held(plan, i, num_rows, process_of=process_of)
        written = rows_written(plan, i, num_rows, process_of=process_of)
        assert sorted(row for rows in written.values() for row in range(*rows)) == list(range(num_rows))
        for rank, (start, stop) in written.items():
            assert held[rank][0] <= start <= stop <= held[rank][1] or start == stop


@given(st.integers(0, 2**32), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from((None, 0, 1)))
def test_pieces_make_up_the_tensor(seed: int, extra: tuple[int, int], dim: int | None) -> None:
    rng = random.Random(seed)
    plan = with_replicas(random_plan(rng, max_groups=2, max_ministages_per_group=1), rng)
    process_of = list(range(plan.num_ranks))
    rng.shuffle(process_of)
    for i in range(plan.num_ministages):
        group = plan.group_of(i)
        shape = (group.degree + extra[0], group.degree + extra[1])
        cut = None if dim is None else Cut(dim, cut_evenly(shape[dim], group.degree))
        found = [
            boxes(plan, i, "w", VALUE, shape, process_of=process_of, cut=cut)
            for boxes in (boxes_held, boxes_written)
        ]
        held, written = (
            {rank: [e for b in own for e in elements(b)] for rank, own in f.items()} for f in found
        )
        whole = sorted(elements(Box.whole("w", VALUE, shape)))
        assert sorted(e for own in written.values() for e in own) == whole
        assert all(set(written[rank]) <= set(held[rank]) for rank in group.flat_ranks)
        if cut is None:
            for by_rows, boxes in zip((rows_held, rows_written), found, strict=True):
                rows = by_rows(plan, i, shape[0], process_of=process_of)
                assert boxes == {r: (Box.of_rows("w", VALUE, shape, own),) for r, own in rows.items()}
            continue
        for replica in group.replicas:  # Whole with ZeRO 0, else a share of its own.
            parts = [e for rank in replica.ranks for e in held[rank]]
            assert len(parts) == len(set(parts))
            assert group.zero or sorted(parts) == whole
        for rank in group.flat_ranks:
            edges = [cut.edges[p : p + 2] for p in pieces_of(group, rank)]
            assert len(found[0][rank]) == len(edges)
            assert all(any(a <= e[cut.dim] < b for a, b in edges) for e in held[rank])
            assert all(rank in holders_of(group, piece) for piece in pieces_of(group, rank))


@given(st.integers(1, 8), st.integers(0, 30))
def test_positions_are_cut_without_gaps(degree: int, extra: int) -> None:
    replica = Replica(tuple(range(10, 10 + degree)))
    slices = [positions_of(replica, rank, degree + extra) for rank in replica.ranks]
    assert [p for own in slices for p in range(*own)] == list(range(degree + extra))
    sizes = [stop - start for start, stop in slices]
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1


@given(st.data(), st.integers(1, 2))
def test_copies_bring_every_element_once(data: st.DataObject, dimensions: int) -> None:
    whole = Box("w", VALUE, (0,) * dimensions, (6,) * dimensions)
    wanted = {rank: [data.draw(boxes(dimensions))] for rank in range(3)}
    source: dict[int, list[Box]] = {0: [], 1: [], 2: [], 3: []}
    missing = [whole]
    while missing:  # Cut at random, some parts held twice.
        part = missing.pop()
        piece = part.intersect(data.draw(boxes(dimensions))) or part
        missing += subtract(part, piece)
        for rank in data.draw(st.sets(st.integers(0, 3), min_size=1)):
            source[rank].append(piece)
    for rank, (box,) in wanted.items():
        own = [copy for copy in copies(source, wanted) if copy.target == rank]
        brought = [element for copy in own for element in elements(copy.box)]
        assert sorted(brought) == sorted(elements(box))
        for copy in own:
            assert any(copy.box.intersect(held) == copy.box for held in source[copy.source])
            here = any(copy.box.intersect(held) for held in source[rank])
            assert copy.source == rank or not here
