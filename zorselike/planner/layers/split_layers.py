"""Layers to ministages: integer and exact (Zorse, section 4.3.3, which rounds proportions).

In the steady state a group is busy with all of its ministages in each step, so the slowest group counts, and
its ministages only in sum. Of cuts that are equally good for the slowest group the most even one is taken.

A dynamic programme over boundaries keeps, for each layer and ministage, the partial cuts than which no other
is better in everything that still matters: the seconds and bytes of each group with ministages to come, the
most seconds of the others, the open ministage, and the evenness so far. It runs from both ends of the model
towards its longest run of equal layers, which is shared out last (`planner/layers/equal_layers.py`): there
only numbers of layers count, and giving one layer at a time to whoever is best off with it is exact.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from zorselike.errors import PlanError
from zorselike.planner.layers.equal_layers import Piece, Run, share_evenly, slowest_load
from zorselike.planner.rows.microbatch_sums import ROUND_OFF
from zorselike.text.wording import count, list_few

FEW_KEPT = 8
MOST_KEPT = 64
"""Partial cuts kept for each layer and ministage. The larger number is tried, with what the smaller one found
as a bound, only where the smaller one was not enough for all that matter; ever larger ones where nothing that
was kept fits, to prove that nothing does."""
MOST_WORK = 30_000
"""Layers times ministages times partial cuts, about a tenth of a second, up to which more are kept."""


@dataclass(frozen=True)
class GroupCosts:
    """What layers of each kind cost a group, and what it has room for."""

    seconds: Mapping[str, float]
    """Time of one layer of each kind, for all of the group's work on it in a step."""
    num_bytes: Mapping[str, float] = field(default_factory=dict)
    """Memory of one layer of each kind, on the device with least room; a kind not named takes none."""
    max_bytes: float = math.inf
    """For all layers of the group."""


@dataclass(frozen=True)
class LayerSplit:
    """Consecutive layers to ministages."""

    owners: tuple[int, ...]
    """The group of each ministage."""
    ends: tuple[int, ...]
    """Ministage `i` has the layers `[ends[i - 1], ends[i])`."""
    group_s: tuple[float, ...]
    """Seconds of each group in a step."""
    is_exact: bool
    """Whether nothing better exists; False where too many partial cuts had to be kept (several kinds of
    layers that alternate, many groups, many ministages)."""

    @property
    def slowest_s(self) -> float:
        """Time of the slowest group."""
        return max(self.group_s)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers of each ministage."""
        return tuple(end - start for start, end in zip((0, *self.ends), self.ends, strict=False))


def visit_in_turn(num_groups: int, num_ministages: int) -> tuple[int, ...]:
    """The owners of ministages that visit the groups round-robin."""
    return tuple(i % num_groups for i in range(num_ministages))


def split_layers(
    kinds: Sequence[str], owners: Sequence[int], groups: Sequence[GroupCosts], *, most_kept: int = MOST_KEPT
) -> LayerSplit | None:
    """The cut in which the slowest group is fastest and then the squares of the ministages' seconds add up to
    least; None where nothing fits, or nothing that was found does (`MOST_KEPT`).

    Args:
        kinds: of each layer in model order; embedding and head are layers of their own kinds.
        owners: the group of each ministage in model order. Every ministage gets a layer, every group a
            ministage.
        most_kept: of the partial cuts for each layer and ministage, at least 1; more take longer where kinds
            alternate, and make no difference where most layers are equal and follow each other.

    Raises:
        PlanError: More ministages than layers, a group without a ministage or an owner that is none, a kind
            whose seconds are missing, negative or not finite.
    """
    _check(kinds, owners, groups)
    best: LayerSplit | None = None
    for width in _list_widths(most_kept, MOST_WORK // (len(kinds) * len(owners))):
        if best is not None and width > most_kept:
            break  # More are kept only where nothing fits, for one that was not kept may.
        search = _Search(kinds, owners, groups, width, math.inf if best is None else best.slowest_s)
        best = search.run() or best
        if search.is_exact:
            return best
    return best or _split_by_bytes(kinds, owners, groups)


def _list_widths(most_kept: int, most_afforded: int) -> list[int]:
    """Numbers of partial cuts to keep, one after the other."""
    widths = [min(FEW_KEPT, most_kept)]
    wanted = most_kept if most_kept > widths[0] else 4 * most_kept
    while widths[-1] < min(wanted, most_afforded):
        widths.append(min(wanted, most_afforded))
        wanted *= 4
    return widths


def _split_by_bytes(
    kinds: Sequence[str], owners: Sequence[int], groups: Sequence[GroupCosts]
) -> LayerSplit | None:
    """A cut that fits where none of the fast ones that were kept does: the one that leaves the fullest group
    most room. To prove that there is none would take for ever where kinds alternate."""
    shares = [
        replace(
            group,
            seconds={kind: group.num_bytes.get(kind, 0.0) / max(group.max_bytes, 1.0) for kind in kinds},
        )
        for group in groups
    ]
    found = _Search(kinds, owners, shares, FEW_KEPT, 1.0).run()
    return None if found is None else _describe(kinds, owners, groups, found.sizes, is_exact=False)


def shorten_first(ends: Sequence[int], owners: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """The same with so large a share, by group, of the layers of its first ministage, and the others in its
    shortest later ones: a group waits for the first microbatch to pass the first ministages of those before
    it, and in the end for gradients to pass them back."""
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    for g, share in enumerate(shares):
        first, *later = (i for i, owner in enumerate(owners) if owner == g)
        for _ in range(sizes[first] - max(1, round(share * sizes[first])) if later else 0):
            sizes[first] -= 1
            sizes[min(later, key=sizes.__getitem__)] += 1
    return tuple(accumulate(sizes))


def bound_slowest_s(kinds: Sequence[str], groups: Sequence[GroupCosts]) -> float:
    """Seconds that the slowest group takes at least, however layers are cut and ministages visited.

    With each group's time measured in what the whole model would take it, a layer takes at least the least
    of its shares over all groups, and all of them must find room.
    """
    whole = [math.fsum(group.seconds[kind] for kind in kinds) for group in groups]
    if min(whole) <= 0:
        return 0.0
    shares = (
        min(group.seconds[kind] / own for group, own in zip(groups, whole, strict=True)) for kind in kinds
    )
    return math.fsum(shares) / math.fsum(1 / own for own in whole)


def _check(kinds: Sequence[str], owners: Sequence[int], groups: Sequence[GroupCosts]) -> None:
    if not owners:
        raise PlanError("layers: no ministages; give at least one")
    if len(owners) > len(kinds):
        raise PlanError(
            f"layers: {count(len(owners), 'ministage')} and {count(len(kinds), 'layer')}; "
            "give every ministage at least one"
        )
    if missing := sorted({*range(len(groups))} - {*owners}):
        raise PlanError(f"layers: {list_few(missing, 'group')} without a ministage; leave them out")
    if unknown := sorted({*owners} - {*range(len(groups))}):
        raise PlanError(f"layers: ministages for {list_few(unknown, 'group')} of {len(groups)}")
    for g, group in enumerate(groups):
        for kind in sorted({*kinds}):
            seconds = group.seconds.get(kind, math.nan)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise PlanError(f"layers: {kind} takes {seconds} s in group {g}; give 0 or more")


@dataclass(frozen=True)
class _Part:
    """A cut of the first layers (or, looked at from the end, of the last)."""

    sizes: tuple[int, ...]
    """Layers of each ministage so far; the last is open."""
    loads: tuple[float, ...]
    """Seconds of each group."""
    held: tuple[float, ...]
    """Bytes of each group."""
    open_s: float
    squares: float
    """Sum of the squared seconds of ministages that are not open."""

    def evenness(self) -> float:
        return self.squares + self.open_s**2


class _Search:
    """One pass of the dynamic programme."""

    def __init__(
        self,
        kinds: Sequence[str],
        owners: Sequence[int],
        groups: Sequence[GroupCosts],
        width: int,
        limit_s: float,
    ) -> None:
        self._kinds, self._owners, self._groups = kinds, owners, groups
        self._width, self._limit_s = width, limit_s * (1 + ROUND_OFF)
        self.is_exact = True

    def run(self) -> LayerSplit | None:
        """The best cut within the limit, if there is any."""
        start, stop = _longest_run(self._kinds)
        run = Run(
            stop - start,
            tuple(group.seconds[self._kinds[start]] for group in self._groups),
            tuple(group.num_bytes.get(self._kinds[start], 0.0) for group in self._groups),
        )
        below = self._cut(self._kinds[:start], self._owners)
        above = self._cut(self._kinds[stop:][::-1], self._owners[::-1])
        found: list[tuple[float, _Part, _Part]] = []
        best = self._limit_s
        for low in below:
            for high in above:
                slowest = self._fill(run, low, high)
                if slowest <= best and math.isfinite(slowest):
                    found.append((slowest, low, high))
                    best = min(best, slowest * (1 + ROUND_OFF))
        cuts = [self._finish(run, low, high, best) for slowest, low, high in found if slowest <= best]
        if not cuts:
            return None
        _, sizes = min(cuts)
        return _describe(self._kinds, self._owners, self._groups, sizes, is_exact=self.is_exact)

    # -- partial cuts ----------------------------------------------------------------------

    def _cut(self, kinds: Sequence[str], owners: Sequence[int]) -> list[_Part]:
        """Cuts of the first layers that no other one is better than in everything."""
        nothing = (0.0,) * len(self._groups)
        parts = [_Part((), nothing, nothing, 0.0, 0.0)]
        for number, kind in enumerate(kinds, start=1):
            by_ministage: defaultdict[int, list[_Part]] = defaultdict(list)
            for part in parts:
                for opens in (False, True):
                    longer = self._extend(part, kind, owners, opens=opens)
                    if longer and len(owners) - len(longer.sizes) <= len(self._kinds) - number:
                        by_ministage[len(longer.sizes)].append(longer)
            parts = [part for own in by_ministage.values() for part in self._keep(own, owners)]
        return parts

    def _extend(self, part: _Part, kind: str, owners: Sequence[int], *, opens: bool) -> _Part | None:
        """One more layer, in the open ministage or in the next; None where it does not fit."""
        if len(part.sizes) == len(owners) if opens else not part.sizes:
            return None
        sizes = (*part.sizes, 1) if opens else (*part.sizes[:-1], part.sizes[-1] + 1)
        g = owners[len(sizes) - 1]
        group = self._groups[g]
        seconds, num_bytes = group.seconds[kind], group.num_bytes.get(kind, 0.0)
        loads = _add(part.loads, g, seconds)
        held = _add(part.held, g, num_bytes)
        if loads[g] > self._limit_s or held[g] > group.max_bytes:
            return None
        squares = part.squares + (part.open_s**2 if opens else 0.0)
        return _Part(sizes, loads, held, seconds + (0.0 if opens else part.open_s), squares)

    def _keep(self, parts: list[_Part], owners: Sequence[int]) -> list[_Part]:
        """Those of one ministage that matter, or as many of the most even ones as there is room for."""
        ahead = sorted({*owners[len(parts[0].sizes) - 1 :]})
        limited = [g for g in ahead if math.isfinite(self._groups[g].max_bytes)]

        def matters(part: _Part) -> tuple[float, ...]:
            behind = (load for g, load in enumerate(part.loads) if g not in ahead)
            return (
                part.open_s,
                max(behind, default=0.0),
                *(part.loads[g] for g in ahead),
                *(part.held[g] for g in limited),
            )

        # A part that is more even now, with fewer seconds in the open ministage, stays so whatever is added:
        # squares grow by (2 * open_s + more) * more. So those kept before are no worse in that either.
        kept: list[tuple[tuple[float, ...], _Part]] = []
        for part in sorted(parts, key=lambda part: (part.evenness(), part.sizes)):
            values = matters(part)
            if any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
                continue
            if len(kept) == self._width:
                self.is_exact = False
                break
            kept.append((values, part))
        return [part for _, part in kept]

    # -- the longest run -------------------------------------------------------------------

    def _pieces(self, run: Run, low: _Part, high: _Part) -> list[Piece] | None:
        """The ministages that get layers of the run; None where the two parts do not belong together."""
        first = len(low.sizes) - 1
        last = len(self._owners) - len(high.sizes)
        if first > last:
            return None
        pieces = []
        for i in range(max(first, 0), min(last, len(self._owners) - 1) + 1):
            open_s = (low.open_s if i == first else 0.0) + (high.open_s if i == last else 0.0)
            pieces.append(Piece(i, self._owners[i], open_s, 0 if i in (first, last) else 1))
        return pieces

    def _room(self, run: Run, low: _Part, high: _Part) -> list[int]:
        """Layers of the run that each group has room for."""
        return [
            _fit(group.max_bytes - low.held[g] - high.held[g], run.num_bytes[g], run.num_layers)
            for g, group in enumerate(self._groups)
        ]

    def _fill(self, run: Run, low: _Part, high: _Part) -> float:
        """The least seconds of the slowest group with both parts; infinite where they do not fit."""
        pieces = self._pieces(run, low, high)
        if pieces is None:
            return math.inf
        return slowest_load(run, pieces, _sum(low.loads, high.loads), self._room(run, low, high))

    def _finish(self, run: Run, low: _Part, high: _Part, limit_s: float) -> tuple[float, tuple[int, ...]]:
        """The most even cut with both parts in which no group takes longer: its squares and its sizes."""
        pieces = self._pieces(run, low, high)
        assert pieces is not None
        loads = _sum(low.loads, high.loads)
        given = share_evenly(run, pieces, loads, self._room(run, low, high), limit_s)
        sizes = [0] * len(self._owners)
        for i, size in enumerate(low.sizes):
            sizes[i] += size
        for i, size in enumerate(high.sizes, start=1):
            sizes[-i] += size
        squares = low.squares + high.squares
        for piece, number in zip(pieces, given, strict=True):
            sizes[piece.ministage] += number
            squares += (piece.open_s + number * run.seconds[piece.group]) ** 2
        return squares, tuple(sizes)


def _describe(
    kinds: Sequence[str],
    owners: Sequence[int],
    groups: Sequence[GroupCosts],
    sizes: Sequence[int],
    *,
    is_exact: bool,
) -> LayerSplit:
    ends = tuple(accumulate(sizes))
    ministage_s = [
        math.fsum(groups[g].seconds[kind] for kind in kinds[end - size : end])
        for g, size, end in zip(owners, sizes, ends, strict=True)
    ]
    group_s = tuple(
        math.fsum(own for owner, own in zip(owners, ministage_s, strict=True) if owner == g)
        for g in range(len(groups))
    )
    return LayerSplit(tuple(owners), ends, group_s, is_exact)


def _longest_run(kinds: Sequence[str]) -> tuple[int, int]:
    """Where most equal layers in a row are; of equally long runs the last, so that little lies behind it."""
    lengths = [len(list(own)) for _, own in groupby(kinds)]
    stops = list(accumulate(lengths))
    stop, length = max(zip(stops, lengths, strict=True), key=lambda run: (run[1], run[0]))
    return stop - length, stop


def _add(values: Sequence[float], g: int, more: float) -> tuple[float, ...]:
    return (*values[:g], values[g] + more, *values[g + 1 :])


def _sum(first: Iterable[float], second: Iterable[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _fit(room: float, each: float, most: int) -> int:
    """How many things fit, at most `most`; -1 where there is less than no room."""
    if room < 0:
        return -1
    return most if each * most <= room else int(room / each * (1 + ROUND_OFF))
