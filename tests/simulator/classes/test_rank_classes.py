"""One rank of each class takes the time of all, whatever the plan and the wires."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import volume
from plain_costs import PlainNetwork, make_costs
from plans import random_plan, with_bounds
from schedules import spec_of

from zorselike.cost.network import Network
from zorselike.cost.step_costs import StepCosts
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place
from zorselike.plan.plan import Microbatch, Plan
from zorselike.schedule import build
from zorselike.schedule.spec import ScheduleSpec
from zorselike.simulator import Simulation, simulate
from zorselike.simulator.classes.class_actions import ActionsByClass, put_firsts_for_peers
from zorselike.simulator.classes.rank_classes import NotAlikeError, find_rank_classes

PER_BLOCK = 500


def repeat(plan: Plan, times: int) -> Plan:
    """The plan so many times side by side, group by group: ranks and rows of one after those of the other."""
    num_ranks, num_rows = plan.num_ranks, plan.global_batch
    groups = []
    for group in plan.groups:
        ranks = tuple(rank + k * num_ranks for k in range(times) for rank in group.flat_ranks)
        microbatches = tuple(
            Microbatch(own.rank + k * num_ranks, own.start + k * num_rows, own.stop + k * num_rows)
            for k in range(times)
            for own in group.microbatches
        )
        groups.append(replace(group, ranks=ranks, microbatches=microbatches))
    return replace(plan, global_batch=times * num_rows, groups=tuple(groups))


class Case:
    """A plan that repeats, with costs and wires that repeat with it, or nearly."""

    def __init__(self, seed: str) -> None:
        rng = random.Random(seed)
        plan = random_plan(
            rng, max_groups=4, max_ranks_per_group=3, max_ministages_per_group=3, max_rows=8, round_robin=True
        )
        self.times = rng.randint(2, 4)
        self.plan = repeat(plan, self.times)
        if len(self.plan.groups) > 1 and rng.random() < 0.4:
            bounded = replace(plan, groups=tuple(replace(group, max_in_flight=None) for group in plan.groups))
            self.plan = repeat(with_bounds(bounded, rng), self.times)
        self.spec: ScheduleSpec = replace(spec_of(rng, self.plan), ties=())
        self.costs = self._make_costs(rng, plan.num_ranks)

    def _make_costs(self, rng: random.Random, period: int) -> StepCosts:
        speed = [rng.choice([1.0, 1.0, 1.7, 3.1]) for _ in range(period)] * self.times
        if rng.random() < 0.15:
            speed[rng.randrange(len(speed))] = 2.3
        num_nodes = rng.randint(1, period)
        base = [rng.randrange(num_nodes) for _ in range(period)]
        apart = rng.random() < 0.6
        nodes = [node + k * num_nodes * apart for k in range(self.times) for node in base]
        if rng.random() < 0.1:
            rng.shuffle(nodes)
        nodes = [sorted({*nodes}).index(node) for node in nodes]
        rate = rng.choice([0.7, 5.0, 50.0])
        if rng.random() < 0.5:
            network = PlainNetwork(
                nodes, rate=rate, host_rate=rng.choice([1.3, 40.0]), latency_s=rng.choice([0.0, 0.01])
            )
        else:
            network = real_network(rng, nodes, period, rate)  # type: ignore[assignment]
        prices = {
            (a, b): float(rng.random() < 0.5) * 1e9 for a in range(len(nodes)) for b in range(a) if apart
        }
        return make_costs(
            self.plan,
            forward=lambda rank, i, rows: speed[rank] * (0.1 + rows),
            update=lambda rank, i: 0.3 * speed[rank],
            network=network,
            row_bytes=rng.choice([0, 2]),
            unit_bytes=rng.choice([0, 4]),
            num_units=rng.randint(1, 3),
            cpu=rng.random() < 0.4,
            eager_bytes=rng.choice([0, 0, math.inf]),
            host_s={"F": 0.02} if rng.random() < 0.3 else {},
            overlap_slowdown=rng.choice([1.0, 1.0, 1.25]),
            egress_price_per_gb=prices if rng.random() < 0.3 else {},
        )


def real_network(rng: random.Random, nodes: list[int], period: int, rate: float) -> Network:
    """Nodes of one or two regions, with what one region sends to the other on one wire."""
    counts = [nodes.count(node) for node in range(max(nodes) + 1)]
    by_ranks = [
        {rank % period for rank, own in enumerate(nodes) if own == node} for node in range(len(counts))
    ]
    regions = [("eu", "us")[min(own) % 2 if rng.random() < 0.95 else 0] for own in by_ranks]
    total = rng.choice([None, 3 * rate])
    cluster = Cluster(
        nodes=tuple(
            Node(
                name=f"n{node}",
                devices=("A100-40",) * count,
                region=region,
                fabric=Link(2 * rate, 0.001),
                fabric_total_bytes_per_s=total,
                nic=Link(rate),
                host_link=Link(rate, 0.002),
                host_link_both_bytes_per_s=1.5 * rate,
            )
            for node, (count, region) in enumerate(zip(counts, regions, strict=True))
        ),
        default_link=Link(rate, 0.01),
        shared_links={("eu", "us"): rate} if rng.random() < 0.5 else {},
    )
    seen = [0] * len(counts)
    places = []
    for node in nodes:
        places.append(Place(node, seen[node]))
        seen[node] += 1
    return make_network(cluster, places)


def simulate_classes(case: Case) -> Simulation | None:
    """None where too few ranks are alike."""
    classes = find_rank_classes(case.plan, case.costs, with_norm=case.spec.defer_steps)
    if classes is None:
        return None
    firsts = build(case.spec, ranks=classes.members.keys())
    every = build(case.spec)
    lists = ActionsByClass(case.plan, firsts, classes)
    assert {rank: [*lists[rank]] for rank in lists} == every
    try:
        return simulate(case.plan, put_firsts_for_peers(firsts, classes), case.costs, classes=classes)
    except NotAlikeError:
        return None


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(4))
def test_one_rank_of_each_class_takes_the_time_of_all(block: int) -> None:
    numbers = volume.part(range(PER_BLOCK))
    num_folded = 0
    for number in numbers:
        case = Case(f"{block}/{number}")
        found = simulate_classes(case)
        if found is None:
            continue
        num_folded += 1
        whole = simulate(case.plan, build(case.spec), case.costs)
        assert found.num_actions <= whole.num_actions
        assert found.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9), number
        assert found.cost == pytest.approx(whole.cost, rel=1e-9), number
        assert found.bytes_by_link == pytest.approx(whole.bytes_by_link), number
        for own, other in zip(found.ranks, whole.ranks, strict=True):
            # Of several things that end at once either may count as what a rank waited for.
            for name in ("forward_s", "backward_s", "update_s"):
                assert getattr(own, name) == pytest.approx(getattr(other, name)), number
    assert num_folded > 0.6 * len(numbers)
