"""The plan of a candidate: ranks, numbered group by group, with their rows and layers."""

from __future__ import annotations

from zorselike.plan.plan import Device, Group, Ministage, Plan
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.deal_rows import deal_candidate
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.problem import PlanProblem


def make_plan(candidate: CandidatePlan, problem: PlanProblem, table: LayerTable) -> Plan:
    """The plan of a candidate, ranks numbered group by group."""
    cluster = problem.cluster
    devices: list[Device] = []
    groups: list[Group] = []
    dealt = deal_candidate(
        candidate,
        table,
        lambda device: cluster.places[device].node,
        lambda device: cluster.device_type(cluster.places[device]),
    )
    for own, rows in zip(candidate.groups, dealt, strict=True):
        first = len(devices)
        for rank, device in enumerate(own.devices, first):
            place = cluster.places[device]
            name = cluster.nodes[place.node].name
            devices.append(Device(rank, name, place.local_rank, cluster.device_type(place)))
        groups.append(
            Group(
                ranks=tuple(range(first, len(devices))),
                microbatches=rows,
                zero=own.mode.zero,
                grad_reduce=own.mode.grad_reduce,
                offload=own.mode.offload,
                recompute=own.mode.recompute,
                max_in_flight=own.max_in_flight,
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
        devices=tuple(devices),
        sequence_length=problem.workload.sequence_length,
        model=problem.workload.model,
        cluster_fingerprint=cluster.fingerprint,
        workload_fingerprint=problem.workload.fingerprint,
    )
