"""The questions that Sailor's planner was asked, to our own planner and simulator.

What the machines are is said once for both plans: four GPUs on a fast fabric, between machines what their
authors measured of four GPUs that send at once, their layer times by tensor-parallel degree, and the
catalogue for what they did not measure. The plan that is best by their arithmetic runs as they would run it:
a stage a group, whole parameters on every replica, 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement

from zorselike.cost.profile import Overheads, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.parts import Device
from zorselike.plan.plan import Group, Ministage, Plan
from zorselike.planner.answer import Planned as OwnAnswer
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.search import search_plans
from zorselike.schedule.orders.in_flight import least_in_flight
from zorselike.simulator.simulated_plan import SimulatedPlan

from .arithmetic import DOLLARS_PER_HOUR, GPUS_PER_VM, SailorPlan
from .cases import GLOBAL_BATCH, MODEL, ZONES, Case
from .library import Library
from .links import Place, read_egress_prices
from .profiles import DEVICES, SEQUENCE_LENGTH, module_of
from .runs import deal_in_turn

FABRICS = {"A100-40": Link(300e9, 5e-6), "V100-16": Link(150e9, 5e-6)}
"""Of a machine; times of replicas hold their collectives, which are counted beside them here."""
CONTEXT_BYTES = 2**30


@dataclass(frozen=True)
class Both:
    """A question, its best plan by their arithmetic and ours, both simulated."""

    case: Case
    theirs: SimulatedPlan = field(repr=False)
    ours: OwnAnswer = field(repr=False)

    @property
    def ratio(self) -> float:
        """What is wanted little of, ours in theirs."""
        ours, theirs = self.ours.case.simulation, self.theirs.simulation
        if self.case.min_throughput:
            return ours.cost / theirs.cost
        return ours.iteration_s / theirs.iteration_s


def ask_both(case: Case, plan: SailorPlan, problem: PlanProblem, budget_s: float) -> Both:
    """Simulates `plan`, and searches for ours."""
    own = to_own_plan(plan, problem)
    costs = problem.setting.find_costs(own)
    classes = problem.setting.find_classes(own, costs)
    theirs = problem.setting.simulate(own, costs, classes=classes)
    return Both(case, theirs, search_plans(problem, budget_s=budget_s, top=1, all_devices=True).best)


def make_problem(
    case: Case,
    library: Library,
    *,
    model: str = MODEL,
    zones: Sequence[str] = ZONES,
    global_batch: int = GLOBAL_BATCH,
) -> PlanProblem:
    """All of a question's machines; raises `ClusterError` for two that nothing was measured between."""
    kinds = [
        (gpu, zone, number)
        for zone in zones[: case.num_zones]
        for gpu, number in (("A100-40", case.a100), ("V100-16", case.v100))
        if number
    ]
    links = {}
    for (gpu, zone, _), (other_gpu, other_zone, _) in combinations_with_replacement(kinds, 2):
        a, b = Place(gpu, zone, GPUS_PER_VM), Place(other_gpu, other_zone, GPUS_PER_VM)
        first, second = sorted((_name_zone(gpu, zone), _name_zone(other_gpu, other_zone)))
        links[first, second] = library.links.together(a, b)
    nodes = tuple(
        Node(
            name=f"{zone}-{gpu.lower()}-{i}",
            devices=(DEVICES[gpu],) * GPUS_PER_VM,
            zone=_name_zone(gpu, zone),
            fabric=FABRICS[gpu],
            nic=Link(max(own.bandwidth_bytes_per_s for own in links.values())),
            price_per_hour=DOLLARS_PER_HOUR[gpu] * GPUS_PER_VM,
            host_memory_bytes=2**38,
        )
        for gpu, zone, number in kinds
        for i in range(number // GPUS_PER_VM)
    )
    prices = read_egress_prices(library.find("providers/communication_cost.json"))
    egress = {
        (_name_zone(a, source), _name_zone(b, target)): price
        for (source, target), price in prices.items()
        for a, own_zone, _ in kinds
        for b, other_zone, _ in kinds
        if (own_zone, other_zone) == (source, target)
    }
    profile = library.profile(model, sorted({gpu for gpu, _, _ in kinds}))
    overheads = Overheads(context_bytes=CONTEXT_BYTES, source=Source("given", note="assumed"))
    return PlanProblem(
        workload=replace(library.workload(model, 1), max_tensor_parallel=GPUS_PER_VM),
        cluster=Cluster(nodes=nodes, zone_links=links, egress_price_per_gb=egress),
        profile=replace(profile, overheads=overheads),
        global_batch=global_batch,
        objective="cost" if case.min_throughput else "throughput",
        max_cost_per_iteration=case.max_cost,
        min_throughput=case.min_throughput,
    )


def _name_zone(gpu: str, zone: str) -> str:
    """Links are known by zones and types of both ends."""
    return f"{zone} {gpu}"


def to_own_plan(plan: SailorPlan, problem: PlanProblem) -> Plan:
    """A group a stage, a microbatch of each replica in turn, replicas on machines in their order."""
    groups: list[Group] = []
    devices: list[Device] = []
    free = {zone: _list_free(problem.cluster, zone) for zone in {node.zone for node in problem.cluster.nodes}}
    for stage in plan.stages:
        ranks: list[int | tuple[int, ...]] = []
        for place in stage.replicas:
            first = len(devices)
            own = [next(free[_name_zone(place.gpu, place.zone)]) for _ in range(place.tensor_parallel)]
            devices += [replace(device, rank=first + i) for i, device in enumerate(own)]
            ranks.append(first if len(own) == 1 else tuple(range(first, first + len(own))))
        firsts = [entry if isinstance(entry, int) else entry[0] for entry in ranks]
        groups.append(Group(tuple(ranks), deal_in_turn(firsts, plan.rows, plan.global_batch), zero=0))
    num_layers = plan.stages[-1].stop
    own_plan = Plan(
        global_batch=plan.global_batch,
        groups=tuple(groups),
        ministages=tuple(
            Ministage(g, tuple(module_of(layer, num_layers) for layer in range(stage.start, stage.stop)))
            for g, stage in enumerate(plan.stages)
        ),
        devices=tuple(devices),
        sequence_length=SEQUENCE_LENGTH,
    )
    if len(groups) > 1:  # Replicas take turns: a few more may have to be under way.
        least = least_in_flight(own_plan)
        bounded = (
            replace(own, max_in_flight=max(len(groups) - depth, least[depth]))
            for depth, own in enumerate(groups)
        )
        own_plan = replace(own_plan, groups=tuple(bounded))
    return own_plan.validate()


def _list_free(cluster: Cluster, zone: str) -> Iterator[Device]:
    for node in cluster.nodes:
        if node.zone == zone:
            yield from (Device(0, node.name, i, device) for i, device in enumerate(node.devices))
