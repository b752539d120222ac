"""Plans of the planner for emulated clusters, run by the real runtime: what it promises must come true.

    python tools/check_planned.py --json result.json       # two clusters, ten plans each, about 15 minutes
    python tools/check_planned.py --only "two nodes" --plans 5

Ranks are processes that sleep instead of computing, over links that are slept in the transport
(tools/emulation); what this machine itself adds is measured first. The planner is asked for the same work
under different wishes, so that its plans spread over a factor of two in predicted time. Run and prediction
may differ by 5 % on average; their ranks must agree (Spearman 0.9); and the plan predicted to be the fastest
must be within 3 % of the fastest run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import log
from pathlib import Path
from statistics import fmean

# Before torch is imported, here and in every rank forked from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.emulation.constants import HostConstants, measure_constants
from tools.emulation.emulation import Emulation, run
from tools.emulation.noise import Moment, is_busy
from tools.emulation.predict import add_host, predict_emulation
from tools.emulation.scenarios import (
    MIN_SLEEP_S,
    RUNS,
    SPEEDS,
    Scenario,
    find_shortest_s,
    make_cluster,
    make_profile,
    make_workload,
)
from tools.report import choose_named, describe_machine, make_parser, positive, positive_s, write_json
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Estimates, Plan
from zorselike.planner.answer import NothingFitsError
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans

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


NUM_PLANS = 10
NUM_STEPS = 3
BUDGET_S = 4.0
MAX_MEAN_ERROR = 0.05
MIN_SPEARMAN = 0.9
MAX_REGRET = 0.03


@dataclass(frozen=True)
class PlanRun:
    """One plan that was run."""

    candidate: Candidate
    step_s: tuple[float, ...]
    measured_s: float
    """The median step."""
    others_share: float | None
    """Share of the cores that other processes used meanwhile."""

    @property
    def error(self) -> float:
        return self.candidate.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Score:
    """What the runs on one cluster come to."""

    mean_error: float
    spearman: float
    regret: float
    """How much slower the plan predicted best was than the best run."""
    spread: float
    """The slowest prediction over the fastest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans and runs; the exit status says whether every target was met."""
    options = parse(arguments)
    scenarios = choose_named(CLUSTERS, options.only)
    begin_s = time.monotonic()
    print("measuring what this machine adds ...", flush=True)
    constants = measure_constants()
    results: dict[str, list[PlanRun]] = {}
    misses: list[str] = []
    for scenario in scenarios:
        machines = make_machines(scenario, constants, options.steps)
        proposed = propose(machines, budget_s=options.budget)
        chosen = choose(proposed, options.plans)
        print(f"{scenario.name}: {len(proposed)} different plans, {len(chosen)} of them are run", flush=True)
        runs = results[scenario.name] = [run_plan(candidate) for candidate in chosen]
        score = find_score(runs)
        print(format_score(score), flush=True)
        misses += [f"{scenario.name}: {miss}" for miss in list_misses(score)]
    shares = [own.others_share for runs in results.values() for own in runs]
    if is_busy(shares):
        print("note: other processes used the cores during most runs: measured times are too long")
    print("\n".join([f"{time.monotonic() - begin_s:.0f} s", *(f"MISSED: {miss}" for miss in misses)]))
    plans = {own.candidate.name: own.candidate.plan.explain() for runs in results.values() for own in runs}
    report = {"misses": misses, "clusters": results, "plans": plans, "machine": describe_machine()}
    write_json(options.json, report)
    return int(bool(misses))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--plans", type=positive, default=NUM_PLANS, metavar="N", help=f"default {NUM_PLANS}")
    parser.add_argument("--steps", type=positive, default=NUM_STEPS, metavar="N", help="timed steps of each")
    parser.add_argument("--budget", type=positive_s, default=BUDGET_S, metavar="S", help="of each search")
    parser.add_argument("--only", metavar="TEXT", help="clusters whose names hold this")
    return parser.parse_args(arguments)


def run_plan(candidate: Candidate) -> PlanRun:
    """Runs one, and prints it beside its prediction."""
    before = Moment.now()
    measured = run(candidate.emulation)
    own = PlanRun(candidate, measured.step_s, measured.median_s, Moment.now().others_share(before))
    others = "" if own.others_share is None else f", others {own.others_share:.0%}"
    plan = candidate.plan
    print(
        f"  {candidate.name:28} {plan.num_ranks} ranks, {len(plan.groups)} groups, {plan.num_ministages} "
        f"ministages: predicted {candidate.predicted_s:6.3f} s, run {own.measured_s:6.3f} s {own.error:+6.1%}"
        f"{others}",
        flush=True,
    )
    return own


def find_score(runs: Sequence[PlanRun]) -> Score:
    """The score of several runs on one cluster."""
    from scipy.stats import spearmanr

    predicted = [own.candidate.predicted_s for own in runs]
    measured = [own.measured_s for own in runs]
    best = min(runs, key=lambda own: own.candidate.predicted_s)
    return Score(
        mean_error=fmean(abs(own.error) for own in runs),
        spearman=float(spearmanr(predicted, measured).statistic),
        regret=best.measured_s / min(measured) - 1,
        spread=max(predicted) / min(predicted),
    )


def list_misses(score: Score) -> list[str]:
    """What is not as it should be, a line each."""
    misses = []
    if score.mean_error > MAX_MEAN_ERROR:
        misses.append(f"mean error {score.mean_error:.1%}, not at most {MAX_MEAN_ERROR:.0%}")
    if not score.spearman >= MIN_SPEARMAN:
        misses.append(f"Spearman {score.spearman:.3f}, not at least {MIN_SPEARMAN:g}")
    if score.regret > MAX_REGRET:
        misses.append(f"the plan predicted best is {score.regret:.1%} slower than the best run")
    if score.spread < SPREAD:
        misses.append(f"predictions spread over a factor of {score.spread:.2f}, not at least {SPREAD:g}")
    return misses


def format_score(score: Score) -> str:
    return (
        f"  mean error {score.mean_error:.1%}, Spearman {score.spearman:.3f}, the plan predicted best is "
        f"{score.regret:.1%} slower than the best run, predictions spread over a factor of {score.spread:.2f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
