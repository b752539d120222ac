"""Which rank of the plan each running process is, whatever order the nodes came up in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zorselike.errors import ClusterError, PlanError
from zorselike.plan.plan import Device, Plan
from zorselike.plan.validate import check_replicas
from zorselike.text.wording import count, list_few


class Process(NamedTuple):
    """A running process: where it is, what it drives, and the rank its launcher gave it."""

    node: str
    local_rank: int
    type: str
    rank: int


def match_devices(plan: Plan, processes: Iterable[tuple[str, int, str, int]]) -> dict[int, int]:
    """The plan's rank for each process's rank.

    A plan with `devices` is matched by node and local rank. A node of the plan is a hostname
    or its short form (up to the first dot). Types are compared without regard to case, where
    both sides name one. A plan without `devices` takes the processes' ranks as they are.

    Args:
        plan: a valid plan.
        processes: `Process`es, or plain `(node, local_rank, type, rank)`, one per rank.

    Raises:
        PlanError: The plan is not for these processes (names every difference), or a tensor-parallel replica
            would run on unlike devices or on several nodes.
        ClusterError: Two processes claim one rank, or one device of one node.
    """
    running = sorted((Process(*process) for process in processes), key=lambda process: process.rank)
    _check_processes(running)
    counts = f"the plan is for {count(plan.num_ranks, 'rank')}, {count(len(running), 'process')} run"
    if not plan.devices:
        if len(running) != plan.num_ranks:
            mend = f"start {count(plan.num_ranks, 'process')} or make a plan for {len(running)}"
            raise PlanError(f"{counts}; {mend}")
        matched = {process.rank: process.rank for process in running}
        check_replicas(plan, {process.rank: (process.node, process.type) for process in running})
        return matched

    hostname_of = _match_nodes(
        sorted({device.node for device in plan.devices}), sorted({process.node for process in running})
    )
    matched, differences = _match_places(plan.devices, running, hostname_of)
    if len(running) != plan.num_ranks:
        differences.insert(0, counts)
    if differences:
        raise PlanError(
            f"the plan does not match what runs: {'; '.join(differences)}. "
            "Start what [[devices]] of the plan names, or plan for what runs; a node's name is its hostname, "
            "or what ZORSELIKE_NODE says there"
        )
    check_replicas(plan, {matched[process.rank]: (process.node, process.type) for process in running})
    return matched


def _match_places(
    devices: Sequence[Device], running: Sequence[Process], hostname_of: Mapping[str, str | None]
) -> tuple[dict[int, int], list[str]]:
    """The plan's rank for each process's rank, and every difference in words."""
    by_place = {(process.node, process.local_rank): process for process in running}
    in_plan = set(hostname_of.values())
    matched: dict[int, int] = {}
    differences = [
        f"node {node} of the plan does not run" for node, hostname in hostname_of.items() if hostname is None
    ]
    differences += [
        f"node {node} runs but is not in the plan"
        for node in sorted({process.node for process in running} - in_plan)
    ]
    for device in sorted(devices, key=lambda device: device.rank):
        hostname = hostname_of[device.node]
        if hostname is None:
            continue
        process = by_place.get((hostname, device.local_rank))
        if process is None:
            differences.append(
                f"plan rank {device.rank} is local rank {device.local_rank} of node {device.node}, "
                "where no such process runs"
            )
            continue
        matched[process.rank] = device.rank
        if device.type and process.type and device.type.casefold() != process.type.casefold():
            differences.append(
                f"plan rank {device.rank} (node {device.node}, local rank {device.local_rank}) is "
                f"{device.type!r} in the plan, {process.type!r} runs"
            )
    differences += [
        f"local rank {process.local_rank} of node {process.node} runs but is not in the plan"
        for process in running
        if process.rank not in matched and process.node in in_plan
    ]
    return matched, differences


def _check_processes(processes: Sequence[Process]) -> None:
    ranks = [process.rank for process in processes]
    if ranks != list(range(len(ranks))):
        raise ClusterError(f"the processes have ranks {ranks}; they must be 0 to {len(ranks) - 1}, each once")
    places = Counter((process.node, process.local_rank) for process in processes)
    for (node, local_rank), times in places.items():
        if times > 1:
            claimants = [process.rank for process in processes if process[:2] == (node, local_rank)]
            raise ClusterError(
                f"processes {list_few(claimants)} all say that they are local rank {local_rank} "
                f"of node {node}; "
                "give each node a hostname of its own"
            )


def _match_nodes(plan_nodes: Sequence[str], hostnames: Sequence[str]) -> dict[str, str | None]:
    """The hostname that each node of the plan means, or None where none of them runs."""
    matched: dict[str, str | None] = {}
    for node in plan_nodes:
        candidates = [name for name in hostnames if name == node] or [
            # Either side may know only the short form; two full names are the same or they are not.
            name
            for name in hostnames
            if name.split(".")[0] == node.split(".")[0] and ("." not in name or "." not in node)
        ]
        if len(candidates) > 1:
            raise PlanError(
                f"node {node} of the plan may be any of {', '.join(candidates)}; "
                "write the full hostname in [[devices]]"
            )
        matched[node] = candidates[0] if candidates else None
    if not any(matched.values()):
        raise PlanError(
            f"none of the plan's nodes runs: the plan names {', '.join(plan_nodes)}; "
            f"the processes run on {', '.join(hostnames) or 'no node'}. "
            "Write the hostnames in [[devices]], name the nodes by ZORSELIKE_NODE, or start on those nodes"
        )
    meanings = Counter(hostname for hostname in matched.values() if hostname is not None)
    for hostname, times in meanings.items():
        if times > 1:
            nodes = [node for node in plan_nodes if matched[node] == hostname]
            raise PlanError(
                f"nodes {' and '.join(nodes)} of the plan are both {hostname}; write one name for it"
            )
    return matched
