"""What is decided from what members say: plans for who is left, the step to go on from, who mirrors whom."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from device_problems import make_nodes, make_problem
from hypothesis import given
from hypothesis import strategies as st
from plans import random_plan, with_replicas

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.elastic.contingency import Contingencies, each_node_lost, pays_back
from zorselike.elastic.contract import Generation, Member, Request
from zorselike.elastic.deciding.decisions import (
    Placement,
    Situation,
    find_givers,
    find_source,
    keep_groups,
    relieve,
    seat,
)
from zorselike.elastic.deciding.leader import Leader
from zorselike.elastic.deciding.memory_left import with_less_memory
from zorselike.elastic.deciding.same_groups import (
    divide_replicas,
    with_smaller_microbatches,
    without_ranks,
)
from zorselike.elastic.mirror_rules import choose_interval
from zorselike.errors import ClusterError, PlanError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.simulator.mirrors import assign_mirrors

SEEDS = st.integers(0, 10_000)


def make_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    return random_plan(
        rng, max_groups=4, max_ranks_per_group=4, max_ministages_per_group=3, max_rows=10, round_robin=True
    )


def make_member(number: int, node: str = "a", memory_bytes: int = 2**30) -> Member:
    return Member(f"id{number}", number, "host", 1, node, 0, "cpu", memory_bytes)


@given(SEEDS, st.data())
def test_a_plan_for_who_is_left_computes_the_same(seed: int, data: st.DataObject) -> None:
    plan = make_plan(seed)
    ranks = sorted(plan.group_of_rank)
    gone = data.draw(st.sets(st.sampled_from(ranks), max_size=len(ranks) - 1))
    smaller, old_ranks = without_ranks(plan, gone)
    assert old_ranks == tuple(rank for rank in ranks if rank not in gone)
    modules = [[name for m in each.ministages for name in m.modules] for each in (plan, smaller)]
    assert modules[0] == modules[1]
    for new, old in enumerate(old_ranks):  # What a rank had it keeps, in microbatches no larger.
        had = {(m.start, m.stop) for m in plan.microbatches_of_rank(old)}
        has = {(m.start, m.stop) for m in smaller.microbatches_of_rank(new)}
        assert had <= has
        if had:
            assert max(b - a for a, b in has) == max(b - a for a, b in had)
    if not gone:
        assert replace(smaller, estimates=plan.estimates) == plan


@given(SEEDS, st.data())
def test_a_plan_of_replicas_for_who_is_left_is_one(seed: int, data: st.DataObject) -> None:
    """Replicas that lost nobody stay, where those beside them allow it, with what they computed."""
    plan = with_replicas(make_plan(seed), random.Random(seed))
    ranks = sorted(plan.group_of_rank)
    gone = data.draw(st.sets(st.sampled_from(ranks), max_size=len(ranks) - 1))
    apart = data.draw(st.sets(st.sampled_from(ranks), max_size=2))
    smaller, old_ranks = without_ranks(plan, gone, apart)  # Validated.
    assert old_ranks == tuple(rank for rank in ranks if rank not in gone)
    new_of = {old: new for new, old in enumerate(old_ranks)}
    for group in plan.groups:
        for replica in group.replicas:
            left = [rank for rank in replica.ranks if rank not in gone]
            for rank in left:
                now = smaller.replica_of(new_of[rank])
                assert {old_ranks[new] for new in now.ranks} <= set(left)
                assert now.degree == 1 or rank not in apart or replica.degree == 1
                if len(now.ranks) == replica.degree:
                    had = {(m.start, m.stop) for m in plan.microbatches_of_rank(rank)}
                    assert had <= {(m.start, m.stop) for m in smaller.microbatches_of_rank(new_of[rank])}
    if not gone and not apart:
        assert replace(smaller, estimates=plan.estimates) == plan


@pytest.mark.parametrize(
    ("before", "left", "after"),
    [
        ((2, 1), (1, 1), [[1], [1]]),
        ((4, 2, 1), (3, 2, 1), [[2, 1], [2], [1]]),
        ((4,), (3,), [[3]]),
        ((6, 3, 2), (5, 3, 2), [[4, 1], [2, 1], [2]]),
        ((4, 4), (4, 1), [[4], [1]]),
        ((4, 4), (4, 3), [[4], [2, 1]]),
        ((2, 2), (0, 2), [[], [2]]),
    ],
)
def test_degrees_of_who_is_left(before: tuple[int, ...], left: tuple[int, ...], after: list[object]) -> None:
    assert divide_replicas(before, left) == after


def replica_plan() -> Plan:
    group = Group(((0, 1), 2), (Microbatch(0, 0, 4), Microbatch(2, 4, 6)))
    return Plan(6, (group,), (Ministage(0, ("layers.0",)),), sequence_length=4).validate()


def test_a_replica_takes_in_who_is_in_its_node_alone() -> None:
    plan = replica_plan()
    there = [make_member(0, "a"), None, make_member(2, "b")]
    near, far = make_member(3, "a"), make_member(4, "b")
    # Whoever is near takes the place; else somebody computes rows alone, half of what the replica had.
    assert keep_groups(Situation(plan, tuple(there), (far, near))) == (plan, ("id0", "id3", "id2"))
    alone, ids = keep_groups(Situation(plan, tuple(there), (far,)))
    assert (alone.groups[0].ranks, ids) == ((0, 1, 2), ("id0", "id4", "id2"))
    rows = {rank: sum(m.num_rows for m in own) for rank, own in alone.groups[0].microbatches_by_rank.items()}
    assert rows == {0: 2, 1: 2, 2: 2}
    # Who was in the replica's place makes room once somebody near comes.
    seats = (there[0], far, there[2])
    assert keep_groups(Situation(plan, seats, (near,))) == (plan, ("id0", "id3", "id2"))
    assert keep_groups(Situation(plan, seats, ())).plan == alone


def test_the_ranks_of_a_replica_are_seated_in_one_node() -> None:
    plan = replica_plan()
    members = [make_member(0, "a"), make_member(1, "b"), make_member(2, "a")]
    assert seat(plan, members) == (members[0], members[2], members[1])
    unlike = replace(members[2], device_type="T4")
    assert keep_groups(Situation(plan, seat(plan, [*members[:2], unlike]), ())).plan.groups[0].degree == 1


def test_nobody_left_is_refused() -> None:
    plan = make_plan(3)
    with pytest.raises(PlanError, match="no rank of the plan is left"):
        without_ranks(plan, set(plan.group_of_rank))


@given(SEEDS)
def test_smaller_microbatches_hold_less_until_they_cannot(seed: int) -> None:
    plan = make_plan(seed)
    sizes = [max(m.num_rows for m in plan.groups[0].microbatches)]
    for _ in range(20):
        try:
            plan = with_smaller_microbatches(plan, 0)
        except PlanError:
            break
        sizes.append(max(m.num_rows for m in plan.groups[0].microbatches))
    assert sizes[-1] == 1 and plan.groups[0].recompute == "layer"
    assert all(b <= a for a, b in pairwise(sizes))


@given(SEEDS, st.integers(0, 3))
def test_a_spare_takes_the_place_of_who_is_gone(seed: int, num_spares: int) -> None:
    plan = make_plan(seed)
    players = [make_member(rank) for rank in range(plan.num_ranks)]
    gone = seed % plan.num_ranks
    seats = tuple(None if rank == gone else player for rank, player in enumerate(players))
    spares = tuple(make_member(100 + i, memory_bytes=2**30 - (i == 0)) for i in range(num_spares))
    if plan.num_ranks == 1 and not num_spares:
        return
    found = keep_groups(Situation(plan, seats, spares))
    mates = len(plan.groups[plan.group_of_rank[gone]].flat_ranks) - 1
    if num_spares >= 2 or (num_spares and not mates):
        taken = spares[1 if mates else 0].id
        expected = tuple(taken if player is None else player.id for player in seats)
        assert found == Placement(plan, expected)
    else:
        assert found.ids == tuple(player.id for player in seats if player is not None)


def test_memory_that_did_not_suffice_changes_the_plan() -> None:
    plan = make_plan(5)
    players = tuple(make_member(rank) for rank in range(plan.num_ranks))
    relieved = relieve(Situation(plan, players, ()), [players[0].id])
    assert relieved.plan.groups[plan.group_of_rank[0]] != plan.groups[plan.group_of_rank[0]]


HOLDS = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(0, 2)), max_size=6)


@given(st.lists(HOLDS, min_size=1, max_size=4))
def test_the_newest_step_that_is_whole_is_found(held: list[list[tuple[int, int, int]]]) -> None:
    offers = {
        f"id{i}": {"holds": [[generation, step, rank, 3] for generation, step, rank in own]}
        for i, own in enumerate(held)
    }
    known = {entry for own in held for entry in own}
    whole = [
        (step, generation)
        for generation in (1, 2)
        for step in (1, 2, 3)
        if {(generation, step, rank) for rank in range(3)} <= known
    ]
    found = find_source(offers)
    assert (found and (found.step, found.generation)) == max(whole, default=None)
    if found is not None:
        givers = find_givers(offers, found)
        ranks = {rank for id in givers for g, s, rank, _ in offers[id]["holds"] if (g, s) == found}
        assert ranks == {0, 1, 2}


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), SEEDS)
def test_mirrors_are_elsewhere_and_spread(nodes: list[str], seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 100) for _ in nodes]
    holders = assign_mirrors(nodes, sizes)
    assert set(holders) == (set(range(len(nodes))) if len(nodes) > 1 else set())
    for rank, holder in holders.items():
        assert holder != rank
        assert nodes[holder] != nodes[rank] or set(nodes) == {nodes[rank]}
    if len(set(nodes)) == 1 and len(nodes) > 1:
        assert max(Counter(holders.values()).values()) <= len(nodes) - 1


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.floats(0.01, 1))
def test_mirrors_take_no_more_than_their_share(mirror_s: float, step_s: float, share: float) -> None:
    k = choose_interval(mirror_s, step_s, share)
    assert mirror_s <= share * step_s * k * (1 + 1e-6)
    assert k == 1 or mirror_s > share * step_s * (k - 1)


def test_plans_for_lost_nodes_are_found_beforehand() -> None:
    plan = make_plan(12)
    players = tuple(make_member(rank, node="ab"[rank % 2]) for rank in range(plan.num_ranks))
    situation = Situation(plan, players, ())
    assert len(list(each_node_lost(situation))) == len({player.node for player in players}) == 2
    asked: list[Situation] = []

    def think(situation: Situation) -> Placement:
        asked.append(situation)
        kept = keep_groups(situation)
        return Placement(replace(kept.plan, model="thought about"), kept.ids)

    def refuse_alone(placement: Placement) -> None:
        if placement.plan.num_ranks == 1:
            raise PlanError("the model refuses it")

    contingencies = Contingencies(think, draw=refuse_alone)
    lost = next(each_node_lost(situation))
    assert contingencies.find(lost) is None and contingencies.place(lost) == keep_groups(lost)
    heard: list[bool] = []
    contingencies.prepare(situation, lambda: heard.append(True))
    assert contingencies.wait(20) and heard == [True] and len(asked) == 3
    assert contingencies.place(lost).plan.model == "thought about"
    refused = replace(lost, refused=("no",))
    assert contingencies.place(refused) == keep_groups(refused)
    contingencies.prepare(situation)
    assert contingencies.wait(20) and len(asked) == 3  # Known already.


def test_a_search_is_told_of_whoever_comes_while_another_one_runs() -> None:
    """What follows from the second was forgotten, as the thread of the first ran still."""
    plan = make_plan(12)
    players = tuple(make_member(rank) for rank in range(plan.num_ranks))
    first, second = Situation(plan, players, ()), Situation(plan, players, (make_member(100),))
    goes_on, is_asked = threading.Event(), threading.Event()

    def think(situation: Situation) -> Placement:
        is_asked.set()
        assert goes_on.wait(20)
        return keep_groups(situation)

    contingencies = Contingencies(think)
    heard: list[str] = []
    contingencies.prepare(first, lambda: heard.append("first"))
    assert is_asked.wait(20)
    contingencies.prepare(second, lambda: heard.append("second"))
    goes_on.set()
    assert contingencies.wait(20) and heard == ["second"]
    assert contingencies.knows(second)


class LeaderOfAll:
    """Leads members of one node each, with a planner that the test answers for."""

    def __init__(self, *, payback_s: float = 600.0) -> None:
        self.plan = make_plan(12)
        self.members = tuple(make_member(rank, node=f"n{rank}") for rank in range(self.plan.num_ranks))
        self.asked: list[Situation] = []
        self.answers: dict[int, Placement] = {}
        """By how many members there are."""
        self.contingencies = Contingencies(self._think)
        self.leader = Leader(self.plan, self.contingencies, payback_s=payback_s)
        self.num_decisions = 0
        self._begin(Placement(self.plan, tuple(member.id for member in self.members)))

    def _think(self, situation: Situation) -> Placement:
        self.asked.append(situation)
        if len(situation.members) not in self.answers:
            raise PlanError("nothing is better")
        return self.answers[len(situation.members)]

    def _begin(self, placement: Placement, **more: Any) -> None:
        decision = {"base": self.plan.format(), "plan": placement.plan.format(), "seats": list(placement.ids)}
        decision |= {"job": "", "slower": {}, "exhausted": {}, **more}
        self.leader.note(Generation(1, self.members, (), placement.ids, "", 0, "start", decision, None))

    def run(self) -> None:
        """A generation runs, and a step of it has been measured."""
        self.leader.look_ahead(self._ask)
        assert self.contingencies.wait(20)
        self.leader.note_step_time(1.0)

    def _ask(self) -> None:
        self.num_decisions += 1

    def decide(self, reason: str, *, failed: dict[str, str] | None = None, arrived: Any = ()) -> Any:
        offers = {m.id: {"holds": [[1, 3, i, self.plan.num_ranks]]} for i, m in enumerate(self.members)}
        offers |= {member.id: {} for member in arrived}
        there = (*self.members, *arrived)
        request = Request(reason, there, (), (), tuple(arrived), failed or {}, offers, ())  # type: ignore[arg-type]
        decided = self.leader.decide(request)
        assert self.contingencies.wait(20)
        return decided


def estimated(plan: Plan, seconds: float) -> Plan:
    return replace(plan, estimates=replace(plan.estimates, iteration_s=seconds))


@pytest.mark.parametrize("seconds, is_worth_it", [(0.5, True), (0.9999, False)])
def test_an_arrival_is_planned_for_where_it_pays_back_and_else_waits(
    seconds: float, is_worth_it: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A planner was never asked about who had come: they waited for the next loss."""
    caplog.set_level("INFO")
    job = LeaderOfAll()
    job.run()
    caplog.clear()
    arrived = make_member(100, node="new")
    better = estimated(replace(job.plan, model="with it"), seconds)
    job.answers[job.plan.num_ranks + 1] = Placement(better, (*(m.id for m in job.members[1:]), arrived.id))
    assert job.decide("arrival", arrived=[arrived]) is None
    assert job.asked[-1].spares or job.asked[0].spares
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "elastic: new local rank 0 waits as a spare: a plan with it is being looked for"
    assert job.num_decisions == is_worth_it
    decided = job.decide("change", arrived=[arrived])
    if is_worth_it:
        assert decided is not None and Plan.parse(decided[1]["plan"]).model == "with it"
    else:
        assert decided is None
        assert "the best plan with it (1 s a step) does not pay back within 600 s" in said[1]


def test_a_spare_that_no_planner_places_waits_and_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    job = LeaderOfAll()
    job.leader.contingencies = None
    assert job.decide("arrival", arrived=[make_member(100, node="new")]) is None
    assert "new local rank 0 waits as a spare: the plan's ranks are all there" in caplog.text


def test_a_plan_that_ran_out_of_memory_is_not_taken_again() -> None:
    """A planner's answer for the same members was."""
    job = LeaderOfAll()
    too_large = estimated(replace(job.plan, model="too large"), 0.1)
    ids = tuple(member.id for member in job.members)
    job.answers[job.plan.num_ranks] = Placement(too_large, ids)
    job.run()
    job._begin(Placement(too_large, ids))
    ran, decision = job.decide("loss", failed={ids[0]: "OutOfMemoryError: of the device"})
    plan = Plan.parse(decision["plan"])
    group = too_large.group_of_rank[0]
    assert ran == ids and plan.groups[group] != too_large.groups[group]
    assert decision["exhausted"] == {ids[0]: 1}
    # Nor is it gone back to: it was found for members whose memory sufficed.
    job._begin(Placement(plan, ids), exhausted=decision["exhausted"])
    job.answers.clear()
    job.run()
    assert job.num_decisions == 1  # When it was first found.
    assert job.asked[-1].exhausted == {ids[0]: 1} or job.asked[-2].exhausted == {ids[0]: 1}


def test_a_device_that_ran_out_of_memory_is_planned_for_with_less() -> None:
    problem = make_problem(make_nodes("n", "T4 T4", copies=2), global_batch=8)
    less = with_less_memory(problem, {1: 2})
    sizes = [find_memory_bytes(less.cluster, place) for place in less.cluster.places]
    whole = [find_memory_bytes(problem.cluster, place) for place in problem.cluster.places]
    assert whole[1] and sizes[1] == round(whole[1] * 0.81)
    assert [*sizes[:1], *sizes[2:]] == [*whole[:1], *whole[2:]]
    assert with_less_memory(problem, {}) == problem


def test_a_better_plan_is_taken_where_it_pays_back() -> None:
    assert pays_back(1.0, 0.9, switch_s=2.0, payback_s=60.0)
    assert not pays_back(1.0, 0.9, switch_s=2.0, payback_s=10.0)
    assert not pays_back(1.0, 1.1, switch_s=0.0, payback_s=60.0)


def test_who_leads_after_the_founder_is_lost_before_the_first_generation_begins_it() -> None:
    """It has heard of no generation yet, and who is there has not arrived but founded the job."""
    plan = next(plan for plan in map(make_plan, range(100)) if plan.num_ranks > 2)
    founder, *left = [make_member(number) for number in range(plan.num_ranks)]
    offers: dict[str, Any] = {member.id: {"step": 0, "has_state": False} for member in left}
    decided = Leader(plan).decide(Request("loss", tuple(left), (founder,), (), (), {}, offers, ()))
    assert decided is not None
    ranks, decision = decided
    assert set(ranks) == {member.id for member in left}
    assert Plan.parse(decision["plan"]).num_ranks == plan.num_ranks - 1


def test_who_comes_and_refuses_every_plan_waits() -> None:
    """Such as one that cannot build the model: it ended the job of those who ran."""
    plan = next(plan for plan in map(make_plan, range(100)) if plan.num_ranks > 2)
    founders = [make_member(number) for number in range(plan.num_ranks)]
    (*left, lost), comes = founders, make_member(plan.num_ranks)
    ids = tuple(member.id for member in founders)
    offers: dict[str, Any] = {id: {"holds": [[1, 3, rank, len(ids)]]} for rank, id in enumerate(ids)}
    offers[ids[0]]["holds"] += offers.pop(lost.id)["holds"]
    offers[comes.id] = {}

    def decide(reason: str, members: list[Member], refusing: tuple[str, ...], count: int) -> Any:
        leader = Leader(plan)
        begun = {"job": "", "base": plan.format(), "plan": plan.format(), "seats": ids, "slower": {}}
        begun |= {"exhausted": {}}
        leader.note(Generation(1, tuple(founders), (), ids, "", 0, "start", begun, None))
        arrived = tuple(member for member in members if member is comes)
        gone = () if reason == "arrival" else (lost,)
        request = Request(reason, tuple(members), gone, (), arrived, {}, offers, ("no",) * count)  # type: ignore[arg-type]
        return leader.decide(replace(request, refusing=(refusing,) * count))

    for count in range(3):
        assert comes.id in decide("loss", [*left, comes], (comes.id,), count)[0]
    ranks, decision = decide("loss", [*left, comes], (comes.id,), 3)
    alone = decide("loss", left, (), 0)
    assert (ranks, decision["plan"]) == (alone[0], alone[1]["plan"])
    with pytest.raises(ClusterError, match="members refuse every plan for who is left: no"):
        decide("loss", [*left, comes], (ids[0], comes.id), 3)
    assert decide("arrival", [*left, comes], (comes.id,), 2) is not None
    for refusing in ((comes.id,), (ids[0], comes.id)):
        assert decide("arrival", [*left, comes], refusing, 3) is None


def test_who_comes_and_runs_out_of_memory_waits_and_the_others_hold_as_much_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Plans for it became smaller, for good, until there was none: the job ended."""
    plan = next(plan for plan in map(make_plan, range(100)) if plan.num_ranks > 2)
    founders = [make_member(number) for number in range(plan.num_ranks)]
    (*left, lost), comes = founders, make_member(plan.num_ranks)
    offers: dict[str, Any] = {
        m.id: {"holds": [[1, 3, rank, plan.num_ranks]], "has_begun": m in founders}
        for rank, m in enumerate([*left, comes])
    }
    leader = Leader(plan)
    ids = tuple(member.id for member in founders)
    decision = {"job": "", "base": plan.format(), "plan": plan.format(), "seats": ids, "slower": {}}
    decision |= {"exhausted": {}}

    def decide(members: list[Member], failed: dict[str, str], gone: tuple[Member, ...] = ()) -> Any:
        nonlocal ids, decision
        leader.note(Generation(1, tuple(members), (), ids, "", 0, "start", decision, None))
        there = {member.id: offers[member.id] for member in members}
        decided = leader.decide(Request("loss", tuple(members), gone, (), (), failed, there, ()))
        assert decided is not None
        ids, decision = decided
        return ids

    assert comes.id in decide([*left, comes], {}, (lost,))
    failed = {comes.id: "OutOfMemoryError: of the device"}
    assert comes.id in decide([*left, comes], failed) and decision["plan"] == plan.format()
    for _ in range(2):
        alone = decide([*left, comes], failed)
        assert alone == tuple(member.id for member in left)
        failed = {}
    assert [text for text in caplog.messages if "waits as a spare: its memory did not suffice" in text]
    offers[comes.id]["has_begun"] = True
    assert comes.id in decide([*left, comes], {})  # Who has done a step had enough.


def test_machines_of_one_name_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """They counted as one node without a word."""
    plan = next(plan for plan in map(make_plan, range(100)) if plan.num_ranks > 2)
    members = [replace(make_member(i, node=f"n{i}"), host=f"10.0.0.{i}") for i in range(plan.num_ranks)]
    here = replace(members[-1], host=members[0].host, node=members[0].node, local_rank=0)
    leader = Leader(plan)

    def begin(*members: Member) -> None:
        offers: dict[str, Any] = {member.id: {} for member in members}
        assert leader.decide(Request("start", members, (), (), (), {}, offers, ())) is not None

    begin(*members[:-1], here)  # Two processes of one machine.
    assert not caplog.messages
    for _ in range(2):
        begin(*members[:-1], replace(members[-1], node="n0"))
    (said,) = caplog.messages
    where = [f"{member.host}:{member.port}" for member in (members[0], members[-1])]
    assert f"at {where[0]} and {where[1]} are both local rank 0 of node n0" in said
