"""The plan of a candidate: ranks, numbered group by group, with their rows and layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import Device, Group, Ministage, Plan
from zorselike.plan.workload import Workload
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan
from zorselike.planner.candidate.computers import list_computers
from zorselike.planner.candidate.deal_rows import deal_candidate
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.problem import PlanProblem


def name_devices(cluster: Cluster, places: Iterable[Place]) -> tuple[Device, ...]:
    """Ranks 0, 1, ... at these places."""
    return tuple(
        Device(rank, cluster.nodes[place.node].name, place.local_rank, cluster.device_type(place))
        for rank, place in enumerate(places)
    )


def assemble_plan(
    workload: Workload,
    cluster: Cluster,
    places: Sequence[Place],
    groups: Sequence[Group],
    ends: Sequence[int],
    owners: Iterable[int] | None = None,
) -> Plan:
    """A plan for ranks at these places.

    Args:
        groups: all with the same rows.
        ends: ministage `i` has the layers `[ends[i - 1], ends[i])`.
        owners: the group of each ministage; each group one where it is not given.
    """
    modules = [module for module, _ in workload.layers]
    cuts = pairwise((0, *ends))
    owners = range(len(groups)) if owners is None else owners
    return Plan(
        global_batch=sum(microbatch.num_rows for microbatch in groups[0].microbatches),
        groups=tuple(groups),
        ministages=tuple(
            Ministage(g, tuple(modules[slice(*cut)])) for g, cut in zip(owners, cuts, strict=True)
        ),
        devices=name_devices(cluster, places),
        sequence_length=workload.sequence_length,
        model=workload.model,
    )


def add_fingerprints(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """For a plan that is to be written: what it was made for."""
    return replace(plan, cluster_fingerprint=cluster.fingerprint, workload_fingerprint=workload.fingerprint)


def _number(group: CandidateGroup, first: int) -> tuple[int | tuple[int, ...], ...]:
    """Ranks of its replicas, from `first` on."""
    if not group.degrees:
        return tuple(range(first, first + len(group.devices)))
    cuts = pairwise(accumulate(group.degrees, initial=first))
    return tuple(start if stop == start + 1 else tuple(range(start, stop)) for start, stop in cuts)


def make_plan(candidate: CandidatePlan, problem: PlanProblem, table: LayerTable) -> Plan:
    """The plan of a candidate, ranks numbered group by group."""
    cluster = problem.cluster
    computers = [list_computers(group, problem) for group in candidate.groups]
    dealt = deal_candidate(candidate, table, problem.nodes, computers)
    groups: list[Group] = []
    places: list[Place] = []
    for group, rows in zip(candidate.groups, dealt, strict=True):
        ranks = _number(group, len(places))
        places += [cluster.places[device] for device in group.devices]
        groups.append(
            Group(
                ranks=ranks,
                microbatches=rows,
                zero=group.mode.zero,
                grad_reduce=group.mode.grad_reduce,
                overlap_grad_reduce=group.mode.overlap_grad_reduce,
                offload=group.mode.offload,
                recompute=group.mode.recompute,
                max_in_flight=group.max_in_flight,
            )
        )
    plan = assemble_plan(problem.workload, cluster, places, groups, candidate.ends, candidate.owners)
    return add_fingerprints(plan, problem.workload, cluster)
