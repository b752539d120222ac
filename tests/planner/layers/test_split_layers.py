"""Layers to ministages: never worse than any other cut, memory kept, even where that costs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.errors import PlanError
from zorselike.planner.layers import split_layers as layers
from zorselike.planner.layers.split_layers import (
    GroupCosts,
    LayerSplit,
    bound_slowest_s,
    shorten_first,
    split_layers,
    visit_in_turn,
)

KINDS = ("embedding", "layer", "head")
LLAMA = ("embedding", *["layer"] * 32, "norm", "head")


def costs(layer: float, *, head: float = 2.0, **limits: float) -> GroupCosts:
    """A group that takes so long for a layer, more or less for others, each of a size of one."""
    relative = {"embedding": 0.1, "layer": 1.0, "norm": 0.01, "head": head}
    return GroupCosts(
        {kind: layer * factor for kind, factor in relative.items()}, dict.fromkeys(relative, 1.0), **limits
    )


def every_cut(num_layers: int, num_ministages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_layers), num_ministages - 1):
        yield (*inner, num_layers)


def measure(
    kinds: Sequence[str], owners: Sequence[int], groups: Sequence[GroupCosts], ends: Sequence[int]
) -> tuple[float, float] | None:
    """The slowest group and the evenness of one cut; None where it does not fit."""
    loads, held, squares = [0.0] * len(groups), [0.0] * len(groups), 0.0
    for g, (start, end) in zip(owners, pairwise((0, *ends)), strict=True):
        own = math.fsum(groups[g].seconds[kind] for kind in kinds[start:end])
        own_bytes = sum(groups[g].num_bytes.get(kind, 0) for kind in kinds[start:end])
        loads[g] += own
        held[g] += own_bytes
        squares += own**2
    if any(own > group.max_bytes for own, group in zip(held, groups, strict=True)):
        return None
    return max(loads), squares


def best_of_all(
    kinds: Sequence[str], owners: Sequence[int], groups: Sequence[GroupCosts]
) -> tuple[float, float] | None:
    found = [measure(kinds, owners, groups, ends) for ends in every_cut(len(kinds), len(owners))]
    fitting = [each for each in found if each is not None]
    if not fitting:
        return None
    slowest = min(each[0] for each in fitting)
    return slowest, min(squares for own, squares in fitting if own <= slowest * (1 + 1e-9))


def make_case(rng: Random) -> tuple[list[str], list[int], list[GroupCosts]]:
    """Kinds in any order or with a long run, owners in turn or as they come, limits on some groups."""
    num_groups = rng.randint(1, 3)
    num_layers = rng.randint(num_groups + 1, 9)
    kinds = ["embedding", *["layer"] * (num_layers - 2), "head"]
    if rng.random() < 0.6:
        kinds = rng.choices(KINDS, k=num_layers)
    num_ministages = rng.randint(num_groups, min(6, num_layers))
    owners = list(visit_in_turn(num_groups, num_ministages))
    if rng.random() < 0.5:
        rng.shuffle(owners)
    groups = [
        GroupCosts(
            {kind: rng.choice([0, 1, 2, 3, 5, 8, 13]) * 0.1 for kind in KINDS},
            {kind: rng.randint(0, 3) for kind in KINDS},
            rng.choice([math.inf, math.inf, 4, 6, 9]),
        )
        for _ in range(num_groups)
    ]
    return kinds, owners, groups


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_better(seed: int) -> None:
    """Of all cuts, tried one by one, none is faster or, if as fast, more even."""
    rng = Random(seed)
    num_fitting = 0
    for _ in range(150):
        kinds, owners, groups = make_case(rng)
        split = split_layers(kinds, owners, groups)
        wanted = best_of_all(kinds, owners, groups)
        if split is None or wanted is None:
            assert split is None and wanted is None
            continue
        num_fitting += 1
        assert split.is_exact
        assert measure(kinds, owners, groups, split.ends) == pytest.approx(wanted)
        assert split.slowest_s == pytest.approx(wanted[0])
        assert bound_slowest_s(kinds, groups) <= split.slowest_s * (1 + 1e-9)
        assert split.owners == tuple(owners) and min(split.sizes) >= 1 and split.ends[-1] == len(kinds)
    assert num_fitting > 50


@given(st.randoms(use_true_random=False), st.integers(0, 2), st.floats(0.1, 1))
def test_a_faster_group_or_more_room_never_makes_it_worse(rng: Random, which: int, factor: float) -> None:
    kinds, owners, groups = make_case(rng)
    before = split_layers(kinds, owners, groups)
    g = which % len(groups)
    groups[g] = replace(
        groups[g],
        seconds={kind: own * factor for kind, own in groups[g].seconds.items()},
        max_bytes=groups[g].max_bytes + 1,
    )
    after = split_layers(kinds, owners, groups)
    if before is not None:
        assert after is not None
        assert after.slowest_s <= before.slowest_s * (1 + 1e-9)


def llama(num_ministages: int, *groups: GroupCosts) -> LayerSplit:
    split = split_layers(LLAMA, visit_in_turn(len(groups), num_ministages), groups)
    assert split is not None and split.is_exact
    return split


def test_layers_follow_speed_and_the_head_counts_as_what_it_is() -> None:
    # 34.11 layers' worth at speeds 3 and 1: 25.6 to 8.5; the head's two belong to the slow group's.
    assert llama(2, costs(1), costs(3)).sizes == (27, 8)
    assert llama(2, costs(1, head=0.01), costs(3, head=0.01)).sizes == (25, 10)


def test_the_bound_is_what_could_be_reached_if_layers_could_be_cut() -> None:
    groups = [costs(1), costs(3)]
    # 34.11 layers' worth at a speed of 4/3.
    assert bound_slowest_s(LLAMA, groups) == pytest.approx(34.11 / (4 / 3))
    assert bound_slowest_s(LLAMA, groups) <= llama(2, *groups).slowest_s < 34.11 / (4 / 3) + 3


def test_ministages_of_a_group_are_even() -> None:
    split = llama(8, costs(1), costs(3))
    assert split.group_s == pytest.approx(llama(2, costs(1), costs(3)).group_s)
    assert split.sizes == (7, 2, 7, 2, 7, 2, 6, 2)


@given(st.data())
def test_first_ministages_are_shortened_and_the_others_of_their_groups_are_longer(
    data: st.DataObject,
) -> None:
    num_groups = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=num_groups, max_size=4 * num_groups))
    shares = data.draw(
        st.lists(st.sampled_from([0.2, 0.5, 0.8, 1.0]), min_size=num_groups, max_size=num_groups)
    )
    owners = visit_in_turn(num_groups, len(sizes))
    ends = shorten_first([*accumulate(sizes)], owners, shares)
    found = [b - a for a, b in pairwise((0, *ends))]
    for g, share in enumerate(shares):
        before, after = (own[g::num_groups] for own in (sizes, found))
        assert sum(before) == sum(after)
        first = max(1, round(share * before[0])) if len(before) > 1 else before[0]
        assert after[0] == first and all(a >= b for a, b in zip(after[1:], before[1:], strict=True))
        longer = [a for a, b in zip(after[1:], before[1:], strict=True) if a > b]
        assert max(longer, default=0) <= min(after[1:], default=0) + 1


def test_what_one_group_has_no_room_for_goes_to_the_other() -> None:
    assert llama(2, costs(1, max_bytes=20), costs(3)).sizes == (20, 15)
    assert split_layers(LLAMA, (0, 1), [costs(1, max_bytes=20), costs(3, max_bytes=14)]) is None


def test_many_groups_and_ministages_of_a_large_model() -> None:
    """In any less time the groups together could not compute so many layers, however they were cut."""
    speeds = [6.0, 5.2, 4.7, 3.1, 2.4, 1.9, 1.3, 1.0]
    groups = [costs(speed) for speed in speeds]
    split = split_layers(("embedding", *["layer"] * 126, "head"), visit_in_turn(8, 32), groups)
    assert split is not None and split.is_exact
    special_s = [groups[0].seconds["embedding"], *[0.0] * 6, groups[7].seconds["head"]]
    less_s = split.slowest_s * (1 - 1e-9)
    assert sum(int((less_s - own) / speed) for own, speed in zip(special_s, speeds, strict=True)) < 126


def test_that_nothing_fits_is_proven_and_what_fits_is_found_with_few_partial_cuts() -> None:
    rng = Random(0)
    found = 0
    for _ in range(300):
        kinds, owners, groups = make_case(rng)
        few = split_layers(kinds, owners, groups, most_kept=1)
        assert (few is None) == (split_layers(kinds, owners, groups) is None)
        found += few is not None and not few.is_exact
    assert found > 0


def test_where_a_proof_would_take_for_ever_a_cut_that_fits_is_found_by_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no more cuts kept than a few, and those the fastest, that are too large for their groups."""
    monkeypatch.setattr(layers, "MOST_WORK", 0)
    monkeypatch.setattr(layers, "FEW_KEPT", 1)
    rng = Random(1)
    by_bytes = missed = 0
    for _ in range(300):
        kinds, owners, groups = make_case(rng)
        found, best = split_layers(kinds, owners, groups), best_of_all(kinds, owners, groups)
        missed += found is None and best is not None
        if found is None:
            continue
        assert best is not None and found.slowest_s >= best[0] * (1 - 1e-9)
        by_bytes += found.slowest_s > best[0] * (1 + 1e-9)
    assert missed <= 15 and by_bytes > 0


def test_numbers_of_partial_cuts_to_keep_stay_within_what_they_may_take() -> None:
    assert layers._list_widths(64, 10) == [8, 10]
    assert layers._list_widths(64, 5) == [8]
    assert layers._list_widths(64, 5000) == [8, 64, 256, 1024, 4096, 5000]
    assert layers._list_widths(1, 5) == [1, 4, 5]


def test_kinds_that_alternate_are_cut_well_and_it_says_whether_exactly() -> None:
    kinds = ["embedding", *["layer", "norm", "head"] * 8]
    speeds = [1.0, 1.7, 2.9, 3.3]
    groups = [costs(speed) for speed in speeds]
    split = split_layers(kinds, visit_in_turn(4, 12), groups)
    assert split is not None
    assert not split.is_exact
    assert split.slowest_s <= 1.1 * bound_slowest_s(kinds, groups)
    # Two groups leave few partial cuts, and those are all kept.
    few = split_layers(kinds[:13], visit_in_turn(2, 4), groups[:2], most_kept=1000)
    assert few is not None and few.is_exact
    found = best_of_all(kinds[:13], visit_in_turn(2, 4), groups[:2])
    assert found is not None and few.slowest_s == pytest.approx(found[0])


@pytest.mark.parametrize(
    ("owners", "groups", "message"),
    [
        ([], [], "no ministages"),
        ([0, 1] * 3, [costs(1), costs(1)], "6 ministages and 5 layers"),
        ([0, 0], [costs(1), costs(1)], "group 1 without a ministage"),
        ([0, 2], [costs(1)], "ministages for group 2 of 1"),
        ([0], [GroupCosts({"layer": 1.0})], "embedding takes nan s in group 0"),
        ([0], [costs(-1)], "takes -0.1 s in group 0"),
    ],
)
def test_contradictions_are_refused(owners: list[int], groups: list[GroupCosts], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_layers(LLAMA[:5], owners, groups)
