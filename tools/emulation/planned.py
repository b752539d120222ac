"""Plans that the planner makes for emulated clusters, to be run by the real runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import log

from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Estimates, Plan
from zorselike.planner.answer import NothingFitsError
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans

from .constants import HostConstants
from .emulation import Emulation
from .predict import add_host, predict_emulation
from .scenarios import (
    MIN_SLEEP_S,
    RUNS,
    SPEEDS,
    Scenario,
    find_shortest_s,
    make_cluster,
    make_profile,
    make_workload,
)

SPREAD = 2.0
"""The least ratio of the slowest predicted time to the fastest among the plans that are run."""
MOST_SPREAD = 3.0
"""Slower plans than that times the fastest are not run."""

NUM_PARTS = 5
"""About so many parts of a cluster are planned for."""

CLUSTERS = RUNS["planned"]


@dataclass(frozen=True)
class Candidate:
    """A plan, by what was asked for, and how long a step of it should take on this machine."""

    name: str
    emulation: Emulation = field(repr=False)
    predicted_s: float

    @property
    def plan(self) -> Plan:
        return self.emulation.plan


@dataclass(frozen=True)
class Machines:
    """An emulated cluster, its model and times."""

    scenario: Scenario
    constants: HostConstants
    profile: Profile
    """Times of the devices, without what this machine adds."""
    num_steps: int

    def make_problem(self) -> PlanProblem:
        """The planner's question, with the times that layers take here."""
        workload = make_workload(self.scenario)
        return PlanProblem(
            workload=workload,
            cluster=make_cluster(self.scenario),
            profile=add_host(self.profile, self.constants, sleeps=True),
            global_batch=self.scenario.num_rows,
        )

    def predict(self, name: str, plan: Plan) -> Candidate:
        workload = make_workload(self.scenario)
        settled, cluster = settle(plan, make_cluster(self.scenario))
        emulation = Emulation(
            plan=settled, workload=workload, cluster=cluster, profile=self.profile, num_steps=self.num_steps
        )
        return Candidate(name, emulation, predict_emulation(emulation, self.constants).step_s)

    def sleeps_long(self, plan: Plan) -> bool:
        """Whether every computation takes long beside what the ranks' processes need of two cores."""
        shortest_s = find_shortest_s(
            plan, make_workload(self.scenario), make_cluster(self.scenario), self.profile
        )
        return shortest_s > 0.99 * MIN_SLEEP_S


def settle(plan: Plan, cluster: Cluster) -> tuple[Plan, Cluster]:
    """The same plan on only the devices that it uses, ranks in their order and devices not named: emulated
    ranks are all on one machine, whose name no device has."""
    places = cluster.place_ranks(plan)
    order = sorted(range(plan.num_ranks), key=lambda rank: places[rank])
    number = {rank: i for i, rank in enumerate(order)}
    groups = tuple(
        replace(
            group,
            ranks=tuple(sorted(number[rank] for rank in group.flat_ranks)),
            microbatches=tuple(replace(own, rank=number[own.rank]) for own in group.microbatches),
        )
        for group in plan.groups
    )
    used: dict[int, list[str]] = {}
    for rank in order:
        used.setdefault(places[rank].node, []).append(cluster.device_type(places[rank]))
    nodes = tuple(replace(cluster.nodes[node], devices=tuple(devices)) for node, devices in used.items())
    settled = replace(plan, groups=groups, devices=(), cluster_fingerprint=None, estimates=Estimates())
    return settled.validate(), replace(cluster, nodes=nodes)


def make_machines(scenario: Scenario, constants: HostConstants, num_steps: int) -> Machines:
    """Machines whose layers sleep as long as they must, a row at once on the fastest device."""
    fastest = max(map(scenario.speed, scenario.types))
    profile = make_profile(scenario, make_workload(scenario), MIN_SLEEP_S * fastest / 1.5)
    return Machines(scenario, constants, profile, num_steps)


def list_wishes(problem: PlanProblem) -> Iterator[tuple[str, PlanProblem]]:
    """Questions whose best plans differ: with fewer devices, other groups, stages, sizes and ministages."""
    cluster = problem.cluster
    nodes = [
        tuple(i for i, place in enumerate(cluster.places) if place.node == node)
        for node in range(len(cluster.nodes))
    ]
    yield "free", problem
    for devices in _list_parts(problem, nodes):
        used = " ".join(cluster.device_type(cluster.places[device]) for device in devices)
        yield f"only {used}", replace(problem, devices=devices)
    groupings = {
        "one group": (tuple(range(cluster.num_devices)),),
        "by node": tuple(nodes),
        "by node, last first": tuple(reversed(nodes)),
        "each alone": tuple((i,) for i in range(cluster.num_devices)),
    }
    for name, groups in groupings.items():
        for zero in (2, 3):
            fixed = Fixed(groups=groups, zero=zero)
            yield f"{name}, ZeRO {zero}", replace(problem, fixed=fixed)
    yield "few in flight", replace(problem, fixed=Fixed(bounds_in_flight=True))
    yield (
        "each alone, few in flight",
        replace(problem, fixed=Fixed(groups=groupings["each alone"], bounds_in_flight=True)),
    )
    for ministages in (2, 4, 6):
        yield f"{ministages} ministages", replace(problem, fixed=Fixed(ministages=ministages))
    for rows in (1, 2):
        yield f"{rows} rows at once", replace(problem, fixed=Fixed(rows_per_microbatch=rows))


def _list_parts(problem: PlanProblem, nodes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Some of the devices, which together are slow enough for plans to spread, and no slower."""
    speed_of = [SPEEDS[problem.cluster.device_type(place)] for place in problem.cluster.places]
    counts = product(*(range(len(node) + 1) for node in nodes))
    parts = [tuple(i for node, n in zip(nodes, own, strict=True) for i in node[:n]) for own in counts]
    slowdown = {part: sum(speed_of) / sum(speed_of[i] for i in part) for part in parts if part}
    wanted = sorted(
        (part for part, times in slowdown.items() if 1 < times <= MOST_SPREAD),
        key=lambda part: slowdown[part],
    )
    return list(dict.fromkeys([*wanted[:: max(1, len(wanted) // NUM_PARTS)], *wanted[-1:]]))


def propose(machines: Machines, *, budget_s: float) -> list[Candidate]:
    """Different plans for the same work, the fastest first by what is predicted here."""
    found: dict[str, Candidate] = {}
    for name, problem in list_wishes(machines.make_problem()):
        try:
            answer = search_plans(problem, budget_s=budget_s, top=3)
        except NothingFitsError:
            continue
        for number, planned in enumerate(answer.plans):
            plan = planned.case.plan
            if plan.fingerprint not in found and machines.sleeps_long(plan):
                found[plan.fingerprint] = machines.predict(f"{name} #{number + 1}", plan)
    return sorted(found.values(), key=lambda candidate: candidate.predicted_s)


def choose(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """The fastest, the slowest within bounds, the fastest with bounds on microbatches in flight, and between
    them those that lie most evenly: from all, one of the two that are nearest to each other is left out until
    so many are left."""
    chosen = [own for own in candidates if own.predicted_s <= MOST_SPREAD * candidates[0].predicted_s]
    kept = next((own for own in chosen if own.plan.bounds_in_flight), None)
    while len(chosen) > max(number, 3):
        gaps = [log(b.predicted_s / a.predicted_s) for a, b in pairwise(chosen)]
        # An inner one whose neighbours are nearest to each other.
        inner = [i for i in range(1, len(chosen) - 1) if chosen[i] is not kept]
        del chosen[min(inner, key=lambda i: gaps[i - 1] + gaps[i])]
    return chosen
