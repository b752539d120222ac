"""What a search leaves out, since it would not be better; and what it must not leave out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from math import ceil, log2

import device_problems
import pytest
from hypothesis import given
from hypothesis import strategies as st
from searched_problems import draw_problem, make_decoder

from zorselike.cli.assumed_profile import assume_profile
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.choice import Choice, GroupChoice
from zorselike.planner.candidate.modes import Mode, list_families
from zorselike.planner.layers.split_layers import visit_in_turn
from zorselike.planner.layers.waits import MOST_ROUNDS
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search import local_search, search
from zorselike.planner.search.budget import TINY_ACTIONS
from zorselike.planner.search.builder import CandidateBuilder
from zorselike.planner.search.coarse_search import CoarseSearch
from zorselike.planner.search.evaluator import CandidateEvaluator, EstimatedCandidate
from zorselike.planner.search.neighbours import (
    LayerMove,
    change_choice,
    list_first_moves,
    list_layer_moves,
    move_groups,
    move_layer,
)
from zorselike.planner.search.refiner import Refiner
from zorselike.planner.search.top_k import NEAR, _Task

from planner_oracle.workloads import REAL_DECODERS, Decoder, make_workload


@pytest.fixture
def looking() -> search._Search:
    """A search that has looked at one grouping."""
    nodes = device_problems.make_nodes("a", "A100-40 A100-40", 2, 4.0)
    found = search._Search(device_problems.make_problem(nodes, global_batch=16), 100.0, 0, None)
    found._looks.begin(search.propose_devices(found._problem, bounds=found._bounds))
    while not len(found._found):
        assert found._looks.peek() is not None
        found._looks.advance()
    return found


def test_only_what_comes_near_the_best_is_simulated_where_that_takes_long(looking: search._Search) -> None:
    estimates, found = looking._estimates, looking._found
    while estimates.peek() is not None:
        estimates.advance()
    best = looking._top_k.best
    assert best is not None
    looking._budget.actions = TINY_ACTIONS + 1
    like = best.estimated

    def keep(times: float, number: int) -> EstimatedCandidate:
        """One that takes so many times as long as the best, as simulations have come out."""
        wanted = times * best.score.wanted * like.score.wanted / found.expect(like)
        candidate = replace(like.candidate, ends=(*like.candidate.ends[:-1], 10**number))
        estimated = replace(like, candidate=candidate, score=replace(like.score, wanted=wanted))
        found.keep(estimated)
        return estimated

    keep(NEAR + 0.01, 4)
    assert estimates.peek() is None
    near = keep(NEAR - 0.01, 5)
    assert estimates.peek() is not None and found.peek() is near
    # Of devices of which much was simulated others come first, if they come near.
    found._num_taken.update(dict.fromkeys(found._num_taken, 50))
    in_flight = tuple(replace(group, max_in_flight=1) for group in like.candidate.groups)
    far = (NEAR + 0.01) * best.score.wanted
    found.keep(
        replace(
            like,
            candidate=replace(like.candidate, groups=in_flight),
            score=replace(like.score, wanted=far),
        )
    )
    assert found.peek() is not near and estimates._next() is near
    found.take(near)
    assert estimates.peek() is None
    looking._budget.actions = 0
    assert estimates.peek() is not None


@pytest.mark.parametrize("would_fit", [False, True])
def test_of_a_family_two_modes_that_are_no_better_are_enough(
    looking: search._Search, monkeypatch: pytest.MonkeyPatch, *, would_fit: bool
) -> None:
    """Not where they are only known not to fit: the next one needs less memory."""
    evaluator, tried = looking._evaluator, list[Mode]()
    start = looking._looks.looks[0].coarse[0]
    now = start.choice.groups[0].mode
    monkeypatch.setattr(evaluator, "try_choice", lambda choice, *_: tried.append(choice.groups[0].mode))
    monkeypatch.setattr(evaluator, "is_too_slow", lambda choice: would_fit)
    assert all(own is start for own in Refiner(looking._problem, evaluator)._improve_mode(start, [0]))
    numbers = [sum(mode in family for mode in tried) for family in evaluator.families]
    of_its_own = next(family for family in evaluator.families if now in family)
    assert max(numbers) == (2 if would_fit else len(of_its_own) - 1)
    assert now not in tried


def test_the_first_mode_that_fits_is_found_by_halves(
    looking: search._Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator: CandidateEvaluator = looking._evaluator
    start = looking._looks.looks[0].coarse[0]
    groups = tuple(group.devices for group in start.choice.groups)
    coarse, tried = CoarseSearch(evaluator, groups, "by node"), list[int]()
    family = max(evaluator.families, key=len)
    for first in range(len(family) + 1):

        def try_one(mode: Mode, *_: object, first: int = first) -> EstimatedCandidate | None:
            position = family.index(mode)
            tried.append(position)
            return replace(start, grouping=str(position)) if position >= first else None

        tried.clear()
        monkeypatch.setattr(coarse, "_try_in_flight", try_one)
        found = coarse._find_fastest(family, 4, 1.0)
        assert (None if found is None else int(found.grouping)) == (first if first < len(family) else None)
        assert len(tried) <= 1 + ceil(log2(len(family)))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
def test_groups_are_moved_to_every_other_place_once(kinds: list[str]) -> None:
    """Of those that are alike it makes no difference which comes where."""
    mode = next(iter(list_families(Fixed())))[0]
    choice = Choice.alike(tuple((device,) for device in range(len(kinds))), mode, 4, len(kinds))

    def read(own: Choice) -> str:
        return "".join(kinds[group.devices[0]] for group in own.groups)

    def is_a_move(order: tuple[str, ...]) -> bool:
        letters = [*"".join(kinds)]
        return any(
            [*letters[:i], *letters[i + 1 :]] == [*order[:j], *order[j + 1 :]] and letters[i] == order[j]
            for i in range(len(kinds))
            for j in range(len(kinds))
        )

    moved = [read(own) for own in move_groups(choice, kinds)]
    expected = {"".join(order) for order in permutations(kinds) if is_a_move(order)} - {"".join(kinds)}
    assert len(moved) == len({*moved}) and {*moved} == expected


def test_a_refined_grouping_is_in_the_best_order_that_one_move_leads_to() -> None:
    """Of five groups, which have more orders than are all tried. Those that come first keep the most
    microbatches: not where there is little memory."""
    kinds = ("T4", "A100-40 A100-40", "V100-16 V100-16", "T4 T4", "A100-40")
    little = {"T4": 40_000_000, "V100-16": 80_000_000, "A100-40": 160_000_000}
    nodes = [
        device_problems.make_nodes(f"n{i}-", own, memory_bytes=tuple(little[kind] for kind in own.split()))
        for i, own in enumerate(kinds)
    ]
    fixed = Fixed(bounds_in_flight=True, offload=())
    problem = device_problems.make_problem(*nodes, global_batch=48, fixed=fixed)
    evaluator = search._Search(problem, 100.0, 0, None)._evaluator
    (start, *_) = CoarseSearch(evaluator, ((0,), (1, 2), (3, 4), (5, 6), (7,)), "by node").run()
    best = [start, *Refiner(problem, evaluator).refine(start)][-1]
    moved = [evaluator.try_choice(own, "") for own in move_groups(best.choice, evaluator.node_kinds)]
    assert any(moved) and all(found is None or not found.score < best.score for found in moved)


def test_what_is_tied_stays_with_one_group_where_the_wires_are_slow() -> None:
    """More ministages were found in whole rounds of all groups alone, so that the last had the head."""
    nodes = (Node(name="desk", devices=("A100-40",) * 2, fabric=Link(1e9)),)
    problem = draw_problem(
        random.Random(0),
        cluster=Cluster(nodes=nodes, default_link=Link(1e9)),
        workload=make_decoder(22, tokens=1024, ties=True),
        global_batch=16,
    )
    evaluator = search._Search(problem, 100.0, 0, None)._evaluator
    (first, *_) = CoarseSearch(evaluator, ((0,), (1,)), "two").run()
    *_, best = Refiner(problem, evaluator).refine(first)
    owners = best.candidate.owners
    assert {*owners} == {0, 1} and owners[0] == owners[-1]


def test_worse_structures_are_changed_too_once_all_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, until so many in a row led to nothing better."""
    nodes = tuple(Node(name=name, devices=(device,)) for name, device in (("a", "A100-40"), ("b", "V100-16")))
    problem = draw_problem(
        random.Random(0),
        cluster=Cluster(nodes=nodes, default_link=Link(3e9)),
        workload=make_decoder(2, tokens=256),
        global_batch=2,
    )
    monkeypatch.setattr(local_search, "MOST_VAIN", 3)
    looking = search._Search(problem, 300.0, 0, None)
    looking._look()
    local, top_k = looking._local_search, looking._top_k
    begun = [own for own in local._more if len(own) == 3 and isinstance(own[2], bool)]
    described = {local_search._describe_structure(found) for found in top_k.sort()}
    assert len(begun) >= 3 and {*begun} < described
    assert not local.begin_another() and local.peek() is None
    monkeypatch.setattr(local_search, "MOST_VAIN", 1000)
    assert local.begin_another() and local.peek() is not None


def test_modes_of_few_devices_change_with_the_same_layers_and_rows(looking: search._Search) -> None:
    """Cut anew for another mode, what was cut well for the present one is lost."""
    start = looking._found.best
    assert start is not None
    kept = []
    for (way, _), found in looking._local_search._neighbours(start):
        if way == "mode":
            kept.append(found)
            pairs = [*zip(found.candidate.groups, start.candidate.groups, strict=True)]
            assert found.candidate.ends == start.candidate.ends
            assert all(own.sizes == before.sizes for own, before in pairs)
            assert sum(own.mode != before.mode for own, before in pairs) == 1
            assert [own.mode for own in found.choice.groups] == [own.mode for own, _ in pairs]
    assert len(kept) > 5


@pytest.fixture
def desk() -> PlanProblem:
    """Two unlike cards in one machine, and a model that either has too little memory to keep whole."""
    node = Node(
        name="desk",
        devices=("RTX3090", "RTX3070"),
        fabric=Link(6e9),
        host_link=Link(12e9),
        host_memory_bytes=2**36,
    )
    shape = next(own for own in REAL_DECODERS if own.name == "llama 1b")
    workload = make_workload(shape, sequence_length=2048, dtype="bfloat16")
    return PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=(node,)),
        profile=assume_profile(workload),
        global_batch=32,
    )


def test_layers_of_few_devices_are_cut_so_that_groups_wait_least(
    desk: PlanProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even ministages took a tenth longer, as the head takes as long as several layers."""
    mode = Mode(recompute="layer", offload=("optimizer", "activations"))
    groups = GroupChoice((0,), Mode(recompute="layer"), 32), GroupChoice((1,), mode, 32)

    def build() -> EstimatedCandidate:
        evaluator = search._Search(desk, 100.0, 0, None)._evaluator
        found = evaluator.try_choice(Choice(groups, 8), "by node")
        assert found is not None and evaluator.builder.room.has_room(found.candidate)
        return found

    cut = build()
    monkeypatch.setattr(CandidateBuilder, "_shorten_waits", lambda _, candidate: candidate)
    assert cut.score.wanted < 0.9 * build().score.wanted


def test_of_few_devices_modes_are_found_that_more_ministages_alone_have_room_for(desk: PlanProblem) -> None:
    """The smaller card keeps its activations on the host in eleven ministages, and has room for none in ten
    beside all that the larger one would keep."""
    evaluator = search._Search(desk, 100.0, 0, None)._evaluator
    modes = Mode(recompute="layer"), Mode(recompute="layer", offload=("optimizer", "activations"))
    groups = tuple(GroupChoice((device,), mode, 32) for device, mode in enumerate(modes))
    start = evaluator.try_choice(Choice(groups, 10), "by node")
    assert start is not None
    refiner = Refiner(desk, evaluator)
    *_, before = refiner._change_modes_of_kinds(start)
    *_, best = refiner._change_modes_and_ministages(before)
    assert best.score.wanted < 0.98 * before.score.wanted and best.choice.num_ministages > 10
    assert [group.mode.recompute for group in best.choice.groups] == ["layer", "none"]


def test_one_stage_alone_is_tried_in_groups_of_one_device(desk: PlanProblem) -> None:
    """Lower ones shard nothing there either, and keep gathered what ZeRO 2 lets go."""
    evaluator = search._Search(desk, 100.0, 0, None)._evaluator
    for zero in (0, 1, 2):
        mode = Mode(zero=zero, recompute="layer", offload=("activations",))
        alone = evaluator.try_choice(Choice.alike(((0,), (1,)), mode, 32, 9), "by node")
        assert alone is not None and [group.mode.zero for group in alone.candidate.groups] == [2, 2]
    both = Choice.alike(((0, 1),), Mode(zero=1, offload=("optimizer",)), 32, 9)
    assert evaluator.shard_alone(both) == both
    fixed = search._Search(replace(desk, fixed=Fixed(zero=0)), 100.0, 0, None)._evaluator
    kept = Choice.alike(((0,), (1,)), Mode(zero=0), 32, 9)
    assert fixed.shard_alone(kept) == kept


def test_some_groups_offload_where_hosts_have_no_room_for_all() -> None:
    """Nothing fitted, it was said: with the optimizer's state of all cards on the host, or of none."""
    node = Node(
        name="desk",
        devices=("RTX4060Ti-16",) * 3,
        fabric=Link(3e9),
        host_link=Link(4.5e9),
        host_memory_bytes=2**35,
    )
    shape = Decoder(
        name="decoder",
        num_layers=32,
        width=2560,
        inner=10240,
        num_words=50272,
        num_matrices=2,
        ties_head=True,
    )
    workload = make_workload(shape, sequence_length=2048, dtype="bfloat16")
    problem = PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=(node,)),
        profile=assume_profile(workload),
        global_batch=1,
        defer_updates=True,
    )
    evaluator = search._Search(problem, 100.0, 0, None)._evaluator
    (found, *_) = CoarseSearch(evaluator, ((0,), (1,), (2,)), "three").run()
    assert len({group.mode.offload for group in found.candidate.groups}) == 2
    assert evaluator.builder.room.has_room(found.candidate)


def test_all_groups_are_cut_finer_together_with_all_else_as_it_is() -> None:
    """One by one their rows no longer match; with bounds on microbatches in flight that is never better."""
    choice = Choice.alike(((0,), (1,)), Mode(0), 16, 5, 1.5)
    changed = change_choice(choice, (), num_layers=24, most_rows=[32, 32], regroup=False)
    assert Choice.alike(((0,), (1,)), Mode(0), 32, 5, 1.5) in [*changed]


@given(st.integers(2, 4), st.data())
def test_layers_move_between_all_ministages_of_a_group(num_groups: int, data: st.DataObject) -> None:
    sizes = data.draw(
        st.lists(st.integers(1, 4), min_size=num_groups + 1, max_size=(MOST_ROUNDS + 1) * num_groups)
    )
    mode = next(iter(list_families(Fixed())))[0]
    groups = tuple(CandidateGroup((g,), mode, ((1,),)) for g in range(num_groups))
    owners = visit_in_turn(num_groups, len(sizes))
    candidate = CandidatePlan(groups, owners, tuple(accumulate(sizes)))

    def find_changes(moves: list[LayerMove]) -> set[tuple[int, int]]:
        """From which ministage to which a layer goes."""
        found = set()
        for move in moves:
            if (moved := move_layer(candidate, move)) is not None:
                pairs = zip(pairwise((0, *moved.ends)), sizes, strict=True)
                change = [end - start - size for (start, end), size in pairs]
                assert sorted(change)[:: len(change) - 1] == [-1, 1] and sum(map(abs, change)) == 2
                found.add((change.index(-1), change.index(1)))
        return found

    numbers = range(len(sizes))
    of_a_group = {
        (a, b) for a in numbers for b in numbers if a != b and owners[a] == owners[b] and sizes[a] > 1
    }
    next_to = {(a, b) for a in numbers for b in numbers if abs(a - b) == 1 and sizes[a] > 1}
    assert find_changes(list_layer_moves(candidate)) >= of_a_group | next_to
    firsts = {(a, b) for a, b in of_a_group if a < num_groups}
    assert find_changes(list_first_moves(candidate)) == firsts


def make_rounds(num_rounds: int, num_alike: int = 2) -> PlanProblem:
    """A fast, a slower and a slow node, one row a microbatch, and 24 layers in so many rounds."""
    workload = replace(device_problems.WORKLOAD, layers=tuple((f"layers.{i}", "layer") for i in range(24)))
    nodes = [
        device_problems.make_nodes(device, " ".join([device] * num_alike), 1, 4.0)
        for device in ("A100-40", "V100-16", "T4")
    ]
    devices = range(3 * num_alike)
    fixed = Fixed(
        groups=tuple(tuple(devices[g * num_alike : (g + 1) * num_alike]) for g in range(3)),
        ministages=3 * num_rounds,
        rows_per_microbatch=1,
        bounds_in_flight=False,
        zero=1,
        recompute="none",
        offload=(),
        grad_reduce="once",
    )
    profile = device_problems.make_profile(workload)
    return device_problems.make_problem(
        *nodes, workload=workload, profile=profile, global_batch=16, fixed=fixed
    )


@pytest.mark.parametrize("is_long", [False, True])
def test_first_ministages_are_shortened_before_a_long_simulation(*, is_long: bool) -> None:
    """Else that of the fast group, even with its others, makes all others wait."""
    problem = replace(make_rounds(3, num_alike=4), global_batch=128 if is_long else 32)
    looking = search._Search(problem, 100.0, 0, None)
    looking._looks.begin(search.propose_devices(problem, bounds=looking._bounds))
    assert looking._looks.peek() is not None
    looking._looks.advance()
    even = looking._found.best
    assert even is not None and looking._estimates.peek() is not None
    looking._estimates.advance()
    (simulated,) = looking._estimates.simulated
    found = simulated.estimated
    assert (found.candidate != even.candidate) == is_long
    if is_long:
        task = _Task.of(even.candidate, problem, looking._table)
        assert simulated.iteration_s < 0.995 * looking._top_k._simulate(task).simulation.iteration_s
        assert looking._evaluator.move_layers(found, list_first_moves(found.candidate)) is found


@pytest.mark.parametrize(("num_rounds", "most_s"), [(3, 1.225), (4, 1.37)])
def test_ministages_of_a_group_become_as_uneven_as_it_takes(num_rounds: int, most_s: float) -> None:
    """With layers that go to neighbours alone 1.261 and 1.396 s are the end."""
    answer = search.search_plans(make_rounds(num_rounds), budget_s=60.0, top=1)
    assert answer.ending == "finished" and answer.best.case.simulation.iteration_s < most_s
