"""Communicators that a candidate's devices need, by how its rows are dealt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searched_problems import Bench, make_decoder

from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.computers import list_computers
from zorselike.planner.candidate.deal_rows import count_peers
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.estimate.communicators import Communicators
from zorselike.planner.problem import PlanProblem
from zorselike.schedule.transfers import match_rows

EACH = 10**7
SHARE = 0.5


def make_bench(communicator_bytes: int = EACH) -> Bench:
    nodes = tuple(Node(name=f"n{i}", devices=("A100-40",) * 4, fabric=Link(100e9)) for i in range(4))
    overheads = Overheads(
        communicator_bytes=communicator_bytes, allocator_share=SHARE, source=Source("given", note="assumed")
    )
    return Bench(
        PlanProblem(
            workload=make_decoder(6),
            cluster=Cluster(nodes=nodes, default_link=Link(10e9)),
            profile=Profile(model="decoder", overheads=overheads),
            global_batch=32,
        )
    )


def make_candidate(sizes: list[tuple[tuple[int, ...], ...]], num_ministages: int, **changes) -> CandidatePlan:
    first, groups = 0, []
    for own in sizes:
        groups.append(CandidateGroup(tuple(range(first, first + len(own))), Mode(), own))
        first += len(own)
    owners = tuple(i % len(groups) for i in range(num_ministages))
    return CandidatePlan(tuple(groups), owners, (*range(1, num_ministages), 8), **changes)


ALIGNED = [((4, 4),) * 4, ((4, 4),) * 4]
ASKEW = [((11, 5), (9, 7)), ((2, 2, 2),) * 2 + ((2, 2),) * 5, ((16,), (16,))]


@pytest.mark.parametrize("sizes", [ALIGNED, ASKEW])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("deals_otherwise", [False, True])
def test_peers_are_those_of_the_plan(sizes, turns, deals_otherwise):
    bench = make_bench()
    candidate = make_candidate(sizes, turns * len(sizes), deals_otherwise=deals_otherwise)
    plan = make_plan(candidate, bench.problem, bench.table).validate()
    computers = [list_computers(group, bench.problem) for group in candidate.groups]
    counted = count_peers(candidate, bench.table, bench.problem.nodes, computers)
    for g, group in enumerate(plan.groups):
        pairs = [
            (a, b)
            for h in (g - 1, g)
            if 0 <= h < len(sizes) - 1
            for a, b in [(plan.groups[h], plan.groups[h + 1])]
        ]
        met = {
            ends for pair in pairs for rows in match_rows(*pair) for ends in permute(rows.source, rows.target)
        }
        assert counted[g] == [len({b for a, b in met if a == rank}) for rank in group.flat_ranks]


def permute(a: int, b: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (a, b), (b, a)


@pytest.mark.parametrize("sizes", [ALIGNED, ASKEW])
@pytest.mark.parametrize("turns", [1, 2])
def test_they_are_as_many_as_the_whole_plan_has(sizes, turns):
    bench, free = make_bench(), make_bench(0)
    candidate = make_candidate(sizes, turns * len(sizes))
    plan = make_plan(candidate, bench.problem, bench.table).validate()
    with_all, without = (own.problem.setting.simulate(plan).peak_bytes for own in (bench, free))
    communicators = Communicators(bench.problem, bench.table)
    for g, group in enumerate(plan.groups):
        whole = max(with_all[rank] - without[rank] for rank in group.flat_ranks)
        # What a walk of one device knows: its group's, and one rank before and after it.
        known = len(group.flat_ranks) > 1
        known += 2 * (turns > 1 or g > 0) + 2 * (turns > 1 or g < len(sizes) - 1)
        num_others = [len(sizes[h]) for h in (g - 1, g + 1) if 0 <= h < len(sizes)]
        most = round((2 * sum(num_others) - (known - (len(group.flat_ranks) > 1))) * EACH * (1 + SHARE))
        exact = communicators.add_to(0, candidate, g, max(0, most - 1))
        found = exact + round(known * EACH * (1 + SHARE))
        assert found >= whole
        if turns == 1:
            assert found == pytest.approx(whole, abs=2)


def test_few_ask_how_rows_are_dealt(monkeypatch):
    """Only where it decides whether there is room."""
    asked = []
    monkeypatch.setattr(
        "zorselike.planner.estimate.communicators.count_peers",
        lambda *given: asked.append(given) or [[2] * 2, [2] * 7, [7] * 2],
    )
    bench = make_bench()
    candidate = make_candidate(ASKEW, 3)
    each = EACH * (1 + SHARE)
    add_to = Communicators(bench.problem, bench.table).add_to
    assert add_to(1000, candidate, 0, 10**12) == 1000 and add_to(1000, candidate, 0, 500) == 1000
    assert not asked
    assert add_to(1000, candidate, 0, 1001) == 1000 + 2 * each and len(asked) == 1
    assert add_to(1000, candidate, 2, 1001 + round(11 * each)) == 1000 + 12 * each and len(asked) == 1
    assert add_to(1000, replace(candidate, deals_otherwise=True), 0, 1001) and len(asked) == 2
    for mode, number in ((Mode(zero=1, offload=("optimizer",)), 2), (Mode(recompute="layer"), 3)):
        assert add_to(1000, candidate.with_mode(0, mode), 0, 1001) and len(asked) == number
    free = make_bench(0)
    assert Communicators(free.problem, free.table).add_to(1000, candidate, 0, 1001) == 1000
