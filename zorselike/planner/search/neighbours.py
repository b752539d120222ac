"""Small changes of a candidate plan or of the choices behind it: what a local search tries next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zorselike.planner.candidate.candidate import CandidatePlan, Sizes
from zorselike.planner.candidate.choice import Choice, GroupChoice, find_nearest, list_microbatch_counts
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.groups.replicas import DEGREES, ReplicaCuts, merge_degrees, with_degree
from zorselike.planner.layers.waits import list_lengths

MOST_KINDS = 6
"""Kinds of devices of a group (alike, with the same rows) between which rows are moved, at most."""

FEW_EDGES = 8
"""Of fewer boundaries of ministages, layers move across any number of them at once."""

FEW_LAYERS = 12
"""Up to so many, one ministage more or fewer is tried with every number of microbatches."""

MOST_COMPLEX = 2
"""How much more complex than a group's mode those are that are tried in its place."""

LayerMove = tuple[range, int]
"""Boundaries of ministages that move together, and by how many layers."""


def list_layer_moves(candidate: CandidatePlan) -> list[LayerMove]:
    """One layer across each boundary of ministages, either way; across several that follow each other, from
    one ministage of a group to its next ones, so that those between keep their number of layers; and of few
    ministages across any number of boundaries."""
    num_edges, num_groups = len(candidate.ends) - 1, len(candidate.groups)
    return [
        (range(first, first + length), way)
        for length in list_lengths(num_edges, num_groups, few=FEW_EDGES)
        for first in range(num_edges - length + 1)
        for way in (-1, 1)
    ]


def list_first_moves(candidate: CandidatePlan) -> list[LayerMove]:
    """Of these, those that take a layer from a group's first ministage to a later one."""
    num_groups = len(candidate.groups)
    return [
        (moved, way)
        for moved, way in list_layer_moves(candidate)
        if way < 0 and moved.start < num_groups and not len(moved) % num_groups
    ]


def move_layer(candidate: CandidatePlan, move: LayerMove) -> CandidatePlan | None:
    """None where a ministage would be left without a layer."""
    moved, way = move
    ends = tuple(end + way * (i in moved) for i, end in enumerate(candidate.ends))
    return replace(candidate, ends=ends) if all(a < b for a, b in pairwise((0, *ends))) else None


def move_layers(candidate: CandidatePlan) -> Iterator[CandidatePlan]:
    """All that `list_layer_moves` leads to."""
    found = (move_layer(candidate, move) for move in list_layer_moves(candidate))
    return (changed for changed in found if changed is not None)


def move_rows(
    candidate: CandidatePlan, kinds: Sequence[Sequence[object]], most_at_once: int, num_blocks: int = 1
) -> Iterator[CandidatePlan]:
    """One row from a device of each kind to one of each other of its group; and the rows of all devices of
    a kind into one microbatch more or fewer.

    Args:
        kinds: what tells the devices of each group apart, apart from their rows.
        most_at_once: rows of a microbatch.
        num_blocks: in how many blocks rows are dealt; these stay alike.
    """
    for g, (group, group_kinds) in enumerate(zip(candidate.groups, kinds, strict=True)):
        alike: dict[object, list[int]] = {}
        for position, kind in enumerate(group_kinds):
            alike.setdefault((kind, group.sizes[position]), []).append(position)
        few = list(alike.values())[:MOST_KINDS]
        for givers in few:
            if not group.sizes[givers[-1]]:
                continue
            for takers in few:
                if len(takers) >= (num_blocks if takers is not givers else 2 * num_blocks):
                    pairs = [*zip(givers[-num_blocks:], takers[:num_blocks], strict=False)]
                    yield from _with_rows(candidate, g, pairs, most_at_once)
                if takers is not givers and len(givers) + len(takers) > 2:
                    yield _shift_rows(candidate, g, givers, takers, most_at_once)
        for positions in few:
            for sizes in _recut(group.sizes[positions[0]], most_at_once):
                yield _with_sizes(candidate, g, dict.fromkeys(positions, sizes))
        if len(few) > 1:
            for more in (1, -1):
                changed = {
                    position: sizes
                    for positions in few
                    for position in positions
                    for sizes in [_cut_evenly(group.sizes[position], len(group.sizes[position]) + more)]
                    if sizes and max(sizes) <= most_at_once
                }
                if changed:
                    yield _with_sizes(candidate, g, changed)


def _with_rows(
    candidate: CandidatePlan, g: int, pairs: Sequence[tuple[int, int]], most_at_once: int
) -> Iterator[CandidatePlan]:
    """A row from each giver to its taker; givers are alike, and so are takers."""
    sizes = candidate.groups[g].sizes
    giver, taker = pairs[0]
    for given in _fewer(sizes[giver]):
        for taken in _more(sizes[taker], most_at_once):
            changed = {giver: given for giver, _ in pairs} | {taker: taken for _, taker in pairs}
            yield _with_sizes(candidate, g, changed)


def _shift_rows(
    candidate: CandidatePlan, g: int, givers: Sequence[int], takers: Sequence[int], most_at_once: int
) -> CandidatePlan:
    """A row from each of some devices, dealt out among others: a step waits for the slowest of each."""
    changed = {giver: _fewer(candidate.groups[g].sizes[giver])[-1] for giver in givers}
    for number in range(len(givers)):
        taker = takers[number % len(takers)]
        sizes = changed.get(taker, candidate.groups[g].sizes[taker])
        changed[taker] = _more(sizes, most_at_once)[-1]
    return _with_sizes(candidate, g, changed)


def _with_sizes(candidate: CandidatePlan, g: int, changed: dict[int, Sizes]) -> CandidatePlan:
    group = candidate.groups[g]
    sizes = tuple(changed.get(position, own) for position, own in enumerate(group.sizes))
    groups = (*candidate.groups[:g], replace(group, sizes=sizes), *candidate.groups[g + 1 :])
    return replace(candidate, groups=groups)


def _fewer(sizes: Sizes) -> list[Sizes]:
    """A row less: from the last microbatch, or with all cut evenly."""
    last = (*sizes[:-1], sizes[-1] - 1) if sizes[-1] > 1 else sizes[:-1]
    return list(dict.fromkeys([last, _cut_evenly(sizes, min(len(sizes), sum(sizes) - 1), -1)]))


def _more(sizes: Sizes, most_at_once: int) -> list[Sizes]:
    """A row more: in the smallest microbatch, or in one of its own."""
    grown = [(*sizes, 1)]
    if sizes and min(sizes) < most_at_once:
        smallest = len(sizes) - 1 - sizes[::-1].index(min(sizes))
        grown.append((*sizes[:smallest], sizes[smallest] + 1, *sizes[smallest + 1 :]))
    return [tuple(sorted(own, reverse=True)) for own in grown]


def _recut(sizes: Sizes, most_at_once: int) -> list[Sizes]:
    cuts = [_cut_evenly(sizes, len(sizes) + more) for more in (1, -1)]
    return [own for own in cuts if own and own != sizes and max(own) <= most_at_once]


def _cut_evenly(sizes: Sizes, num_microbatches: int, more: int = 0) -> Sizes:
    """The same rows, or so many more, in microbatches that differ by one at most; `()` if that cannot be."""
    rows = sum(sizes) + more
    if not 1 <= num_microbatches <= rows:
        return ()
    each, extra = divmod(rows, num_microbatches)
    return (each + 1,) * extra + (each,) * (num_microbatches - extra)


# -- choices -------------------------------------------------------------------------------


def change_choice(
    choice: Choice,
    modes: Sequence[Mode],
    *,
    num_layers: int,
    most_rows: Sequence[int],
    regroup: bool,
) -> Iterator[Choice]:
    """Other modes, microbatches and numbers of ministages; and with `regroup` groups swapped, merged, split,
    without a device, or with one from another group. `most_rows`: of a replica of each group."""
    groups = choice.groups
    if len(groups) > 1:
        for in_flight_factor in (None, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0):
            yield choice.bound(in_flight_factor, choice.num_ministages)
    for number in dict.fromkeys((1, -1, len(groups), -len(groups))):
        if len(groups) <= choice.num_ministages + number <= num_layers:
            yield choice.bound(choice.in_flight_factor, choice.num_ministages + number)
    for together in list_microbatch_counts(max(most_rows)):
        cut = tuple(replace(group, microbatches_per_device=together) for group in groups)
        if cut != groups:
            yield replace(choice, groups=cut)
        steps = dict.fromkeys((len(groups), 1) if num_layers <= FEW_LAYERS else (len(groups),))
        for number in (choice.num_ministages + way * step for step in steps for way in (-1, 1)):
            if len(groups) <= number <= num_layers:
                yield Choice(cut, number)
    for g, own in enumerate(groups):
        microbatch_counts = list_microbatch_counts(most_rows[g])
        for number in (own.microbatches_per_device - 1, own.microbatches_per_device + 1, *microbatch_counts):
            if 1 <= number <= microbatch_counts[-1] and number != own.microbatches_per_device:
                yield choice.change(g, microbatches_per_device=number)
    yield from (changed for _, changed in change_modes(choice, modes))
    if regroup:
        yield from _regroup(choice, num_layers)


def change_modes(choice: Choice, modes: Sequence[Mode]) -> Iterator[tuple[int, Choice]]:
    """Another mode of one group, whose number comes with it."""
    for g, own in enumerate(choice.groups):
        for mode in modes:
            if mode != own.mode and mode.complexity <= own.mode.complexity + MOST_COMPLEX:
                yield g, choice.change(g, mode=mode)


def change_degrees(
    choice: Choice, changed: Sequence[int], replicas: ReplicaCuts, global_batch: int
) -> Iterator[Choice]:
    """Other tensor-parallel degrees in some groups: one for all of their devices, or for those of a type;
    with as many microbatches, and with microbatches of as many rows."""
    types = {
        device: most
        for g in changed
        for device, most in replicas.most_by_type(choice.groups[g].devices).items()
    }
    wanted: list[tuple[str | None, int]] = [(None, degree) for degree in DEGREES]
    if len(types) > 1:
        wanted += [(device, degree) for device in types for degree in DEGREES]
    for device, degree in wanted if types else ():
        if degree > max(types.values()):
            continue
        found = choice
        for g in changed:
            found = _with_degree(found, g, replicas, device, degree)
        if found == choice:
            continue
        yield found
        finer = found
        for g in changed:
            before, after = choice.groups[g], found.groups[g]
            num_before, num_after = (len(replicas.cut(own.devices, own.degrees)) for own in (before, after))
            counts = list_microbatch_counts(-(-global_batch // num_after))
            number = round(before.microbatches_per_device * num_before / num_after)
            finer = finer.change(g, microbatches_per_device=counts[find_nearest(counts, number)])
        if finer != found:
            yield finer


def _with_degree(choice: Choice, g: int, replicas: ReplicaCuts, device: str | None, degree: int) -> Choice:
    """Of devices of a type, or of all where it is None."""
    group = choice.groups[g]
    limit = replicas.limit(group.devices, degree)
    if device is not None:
        limit = with_degree(group.degrees, device, dict(limit).get(device, 1))
    return choice if limit == group.degrees else choice.change(g, degrees=limit)


def _regroup(choice: Choice, num_layers: int) -> Iterator[Choice]:
    groups = choice.groups
    for a in range(len(groups)):
        for b in range(a + 1, len(groups)):
            yield _with_groups(choice, _replaced(groups, {a: groups[b], b: groups[a]}), num_layers)
            merged = replace(
                groups[a],
                devices=tuple(sorted(groups[a].devices + groups[b].devices)),
                degrees=merge_degrees(groups[a].degrees, groups[b].degrees),
            )
            yield _with_groups(choice, _replaced(groups, {a: merged, b: None}), num_layers)
    for a, group in enumerate(groups):
        if len(groups) > 1:
            yield _with_groups(choice, _replaced(groups, {a: None}), num_layers)
        if len(group.devices) == 1:
            continue
        half = len(group.devices) // 2
        parts = [replace(group, devices=group.devices[:half]), replace(group, devices=group.devices[half:])]
        for first, second in (parts, parts[::-1]):
            yield _with_groups(choice, (*groups[:a], first, second, *groups[a + 1 :]), num_layers)
        for device in (group.devices[0], group.devices[-1]):
            rest = replace(group, devices=tuple(d for d in group.devices if d != device))
            yield _with_groups(choice, _replaced(groups, {a: rest}), num_layers)
            for b, other in enumerate(groups):
                if b != a:
                    larger = replace(other, devices=tuple(sorted((*other.devices, device))))
                    yield _with_groups(choice, _replaced(groups, {a: rest, b: larger}), num_layers)
    yield from _swap_devices(choice)


def move_groups(choice: Choice, kind_of: Sequence[object]) -> Iterator[Choice]:
    """One group earlier or later in the pipeline; of orders that differ in which of several groups that are
    alike comes when, one. `kind_of`: by device; those of nodes of a kind are alike."""
    groups = choice.groups
    kinds = [replace(group, devices=()) for group in groups]
    alike = [(tuple(kind_of[d] for d in own.devices), kind) for own, kind in zip(groups, kinds, strict=True)]
    seen = {tuple(alike)}
    for moved in range(len(groups)):
        others = [g for g in range(len(groups)) if g != moved]
        for place in range(len(groups)):
            order = (*others[:place], moved, *others[place:])
            pattern = tuple(alike[g] for g in order)
            if pattern not in seen:
                seen.add(pattern)
                yield replace(choice, groups=tuple(groups[g] for g in order))


def drop_nodes(
    choice: Choice, node_of: Sequence[int], kind_of: Sequence[object], num_layers: int
) -> Iterator[Choice]:
    """Without a group; and without one node, or half of the nodes, of each kind in each group, the last ones.

    Args:
        node_of: by device.
        kind_of: by device; those of nodes of a kind are alike.
    """
    groups = choice.groups
    for a, group in enumerate(groups):
        if len(groups) > 1:
            yield _with_groups(choice, _replaced(groups, {a: None}), num_layers)
        nodes: dict[object, dict[int, None]] = {}
        for device in group.devices:
            nodes.setdefault(kind_of[device], {})[node_of[device]] = None
        for kind, own in nodes.items():
            for number in dict.fromkeys((1, len(own) // 2, len(own))):
                dropped = [*own][len(own) - number :]
                left = tuple(d for d in group.devices if kind_of[d] != kind or node_of[d] not in dropped)
                if number and left:
                    yield choice.change(a, devices=left)


def _swap_devices(choice: Choice) -> Iterator[Choice]:
    """The last device of a group against the first of another."""
    groups = choice.groups
    for a in range(len(groups)):
        for b in range(len(groups)):
            if a != b and len(groups[a].devices) + len(groups[b].devices) > 2:
                given, taken = groups[a].devices[-1], groups[b].devices[0]
                first = replace(groups[a], devices=tuple(sorted((*groups[a].devices[:-1], taken))))
                second = replace(groups[b], devices=tuple(sorted((*groups[b].devices[1:], given))))
                yield replace(choice, groups=_replaced(groups, {a: first, b: second}))


def _replaced(
    groups: Sequence[GroupChoice], changed: dict[int, GroupChoice | None]
) -> tuple[GroupChoice, ...]:
    new = [changed.get(g, own) for g, own in enumerate(groups)]
    return tuple(own for own in new if own is not None)


def _with_groups(choice: Choice, groups: tuple[GroupChoice, ...], num_layers: int) -> Choice:
    """About as many ministages of each group as before."""
    per_group = choice.num_ministages / len(choice.groups)
    number = max(len(groups), min(num_layers, round(per_group * len(groups))))
    return replace(choice, groups=groups).bound(choice.in_flight_factor, number)
