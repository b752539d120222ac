"""The plan of a candidate: ranks, numbered group by group, with their rows and layers."""

from __future__ import annotations

from collections.abc import Iterable

from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import Device, Group, Ministage, Plan
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.deal_rows import deal_candidate
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.problem import PlanProblem


def name_devices(cluster: Cluster, places: Iterable[Place]) -> tuple[Device, ...]:
    """Ranks 0, 1, ... at these places."""
    return tuple(
        Device(rank, cluster.nodes[place.node].name, place.local_rank, cluster.device_type(place))
        for rank, place in enumerate(places)
    )


def make_plan(candidate: CandidatePlan, problem: PlanProblem, table: LayerTable) -> Plan:
    """The plan of a candidate, ranks numbered group by group."""
    cluster = problem.cluster
    dealt = deal_candidate(
        candidate,
        table,
        lambda device: cluster.places[device].node,
        lambda device: cluster.device_type(cluster.places[device]),
    )
    groups: list[Group] = []
    places: list[Place] = []
    for group, rows in zip(candidate.groups, dealt, strict=True):
        first = len(places)
        places += [cluster.places[device] for device in group.devices]
        groups.append(
            Group(
                ranks=tuple(range(first, len(places))),
                microbatches=rows,
                zero=group.mode.zero,
                grad_reduce=group.mode.grad_reduce,
                offload=group.mode.offload,
                recompute=group.mode.recompute,
                max_in_flight=group.max_in_flight,
            )
        )
    ministages = tuple(
        Ministage(owner, tuple(table.modules[layer] for layer in candidate.layers_of(i)))
        for i, owner in enumerate(candidate.owners)
    )
    return Plan(
        global_batch=problem.global_batch,
        groups=tuple(groups),
        ministages=ministages,
        devices=name_devices(cluster, places),
        sequence_length=problem.workload.sequence_length,
        model=problem.workload.model,
        cluster_fingerprint=cluster.fingerprint,
        workload_fingerprint=problem.workload.fingerprint,
    )
