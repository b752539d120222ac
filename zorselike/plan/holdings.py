"""Who holds which part of which tensor: what checkpoints, changes of plan and tied weights are made of.

A tensor is known by its global name and a kind: its values, or a state that the optimizer keeps of it. Its
parts are boxes, of rows alone unless tensor parallelism cuts it into pieces by columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from zorselike.plan.pieces import Cut, holders_of, pieces_of
from zorselike.plan.plan import Plan

VALUE = "value"
"""The kind of a parameter's or buffer's values; other kinds are keys of an optimizer's state."""

Rows = tuple[int, int]
"""First row, and the one after the last."""


@dataclass(frozen=True, order=True)
class Box:
    """A part of a named tensor: `[start, stop)` in every dimension."""

    name: str
    kind: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, kind: str, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls(name, kind, (0,) * len(shape), tuple(shape))

    @classmethod
    def of_rows(cls, name: str, kind: str, shape: Sequence[int], rows: Rows) -> Box:
        """Rows of a tensor of at least one dimension; the whole of a number."""
        if not shape:
            return cls(name, kind, (), ())
        return cls(name, kind, (rows[0], *(0 for _ in shape[1:])), (rows[1], *shape[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        if (self.name, self.kind, len(self.starts)) != (other.name, other.kind, len(other.starts)):
            return None
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        box = Box(self.name, self.kind, starts, stops)
        return box if all(map(int.__lt__, starts, stops)) else None


class Copy(NamedTuple):
    """What one rank gives to another, or keeps."""

    source: int
    target: int
    box: Box


def rows_of_chunks(num_rows: int, num_chunks: int) -> list[Rows]:
    """Rows of each part, as `torch.chunk` and so FSDP2 cut dimension 0: ragged, the last ones perhaps
    empty."""
    size = -(-num_rows // num_chunks)
    return [(min(i * size, num_rows), min((i + 1) * size, num_rows)) for i in range(num_chunks)]


def rows_held(plan: Plan, ministage: int, num_rows: int, *, process_of: Sequence[int]) -> dict[int, Rows]:
    """Rows of one of a ministage's tensors that each rank of its group holds: all with ZeRO 0, else shards
    over the processes in ascending order."""
    group = plan.group_of(ministage)
    if group.zero == 0:
        return dict.fromkeys(group.flat_ranks, (0, num_rows))
    return rows_written(plan, ministage, num_rows, process_of=process_of)


def rows_written(plan: Plan, ministage: int, num_rows: int, *, process_of: Sequence[int]) -> dict[int, Rows]:
    """Rows that each rank answers for, none of them twice: with ZeRO 0, where all hold all, they share."""
    ranks = sorted(plan.group_of(ministage).flat_ranks, key=lambda rank: process_of[rank])
    return dict(zip(ranks, rows_of_chunks(num_rows, len(ranks)), strict=True))


def boxes_held(
    plan: Plan,
    ministage: int,
    name: str,
    kind: str,
    shape: Sequence[int],
    *,
    process_of: Sequence[int],
    cut: Cut | None = None,
) -> dict[int, tuple[Box, ...]]:
    """The boxes of one of a ministage's tensors that each rank of its group holds, perhaps empty ones.

    Not cut, as `rows_held`: one. Cut: one of each of the rank's pieces, in their order, which is whole with
    ZeRO 0, and else the rank's part of the piece's rows among its holders, one of each replica, in ascending
    order of processes.

    Args:
        plan: a valid plan.
        ministage: whose tensor it is.
        name: of the tensor.
        kind: of the tensor.
        shape: of the whole tensor, of one dimension or more.
        process_of: the process of each rank.
        cut: how tensor parallelism cuts it, if it does.
    """
    shared = plan.group_of(ministage).zero > 0
    return _boxes(plan, ministage, Box.whole(name, kind, shape), process_of, cut, shared=shared)


def boxes_written(
    plan: Plan,
    ministage: int,
    name: str,
    kind: str,
    shape: Sequence[int],
    *,
    process_of: Sequence[int],
    cut: Cut | None = None,
) -> dict[int, tuple[Box, ...]]:
    """The boxes that each rank answers for, none of them twice: with ZeRO 0 all holders of a piece share
    its rows. See `boxes_held`."""
    return _boxes(plan, ministage, Box.whole(name, kind, shape), process_of, cut, shared=True)


def _boxes(
    plan: Plan, ministage: int, whole: Box, process_of: Sequence[int], cut: Cut | None, *, shared: bool
) -> dict[int, tuple[Box, ...]]:
    group = plan.group_of(ministage)
    if cut is None:
        return {rank: (box,) for rank, box in _share_rows(whole, group.flat_ranks, process_of, shared)}
    pieces = [
        dict(_share_rows(piece_of(whole, cut, piece), holders_of(group, piece), process_of, shared))
        for piece in range(group.degree)
    ]
    return {rank: tuple(pieces[piece][rank] for piece in pieces_of(group, rank)) for rank in group.flat_ranks}


def piece_of(whole: Box, cut: Cut, piece: int) -> Box:
    """A piece of a tensor that is cut."""
    starts, stops = list(whole.starts), list(whole.stops)
    starts[cut.dim], stops[cut.dim] = cut.edges[piece : piece + 2]
    return Box(whole.name, whole.kind, tuple(starts), tuple(stops))


def _share_rows(
    box: Box, ranks: Sequence[int], process_of: Sequence[int], shared: bool
) -> Iterator[tuple[int, Box]]:
    """Each rank's rows of a box, in the order of their processes; without sharing all."""
    ordered = sorted(ranks, key=lambda rank: process_of[rank])
    if not shared:
        yield from ((rank, box) for rank in ordered)
        return
    first = box.starts[0]
    for rank, (start, stop) in zip(ordered, rows_of_chunks(box.shape[0], len(ordered)), strict=True):
        starts, stops = (first + start, *box.starts[1:]), (first + stop, *box.stops[1:])
        yield rank, Box(box.name, box.kind, starts, stops)


def copies(source: Mapping[int, Sequence[Box]], target: Mapping[int, Sequence[Box]]) -> Iterator[Copy]:
    """Who gives what to whom so that every rank has its boxes of `target`, in an order that all ranks
    derive alike; nobody's element comes twice, even where several sources hold it. What a rank has
    already it gives itself."""
    holders: dict[tuple[str, str], list[tuple[int, Box]]] = {}
    for rank in sorted(source):
        for box in source[rank]:
            holders.setdefault((box.name, box.kind), []).append((rank, box))
    for number, rank in enumerate(sorted(target)):
        for wanted in target[rank]:
            held = holders.get((wanted.name, wanted.kind), [])
            # Own parts first; those of others from another one for every receiver.
            turn = number % len(held) if held else 0
            ordered = sorted(held[turn:] + held[:turn], key=lambda entry: entry[0] != rank)
            missing = [wanted]
            for giver, box in ordered:
                left = []
                for part in missing:
                    common = part.intersect(box)
                    if common is None:
                        left.append(part)
                    else:
                        yield Copy(giver, rank, common)
                        left += subtract(part, common)
                missing = left


def subtract(box: Box, other: Box) -> list[Box]:
    """What of `box` lies outside `other`, as boxes apart from each other."""
    inner = box.intersect(other)
    if inner is None:
        return [box]
    rest = []
    starts, stops = list(box.starts), list(box.stops)
    for axis, (low, high) in enumerate(zip(inner.starts, inner.stops, strict=True)):
        for first, last in ((starts[axis], low), (high, stops[axis])):
            if first < last:
                rest.append(
                    Box(
                        box.name,
                        box.kind,
                        (*starts[:axis], first, *starts[axis + 1 :]),
                        (*stops[:axis], last, *stops[axis + 1 :]),
                    )
                )
        starts[axis], stops[axis] = low, high
    return rest
