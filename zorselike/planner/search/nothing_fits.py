"""When no plan fits: the smallest change that would, in words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.evaluator import EstimatedCandidate
from zorselike.simulator.simulated_plan import SimulatedPlan
from zorselike.text.wording import count, list_few, show_bytes

_MOST = 64.0
"""Times the memory there is, beyond which more is not looked for."""
_NEAR = 0.05
"""How near the factor is found."""


def describe_nothing(
    problem: PlanProblem,
    memory: RankMemory,
    find: Callable[[], EstimatedCandidate | None],
    simulate: Callable[[EstimatedCandidate], SimulatedPlan | None],
    is_late: Callable[[], bool],
    *,
    is_certain: bool,
) -> str:
    """One line: what was tried, and how much memory would be enough.

    Args:
        memory: whose `scale` is changed, and set back.
        find: looks for anything that fits.
        simulate: walks what was found as a whole, which may need more than its parts do; None: it cannot be.
        is_late: whether what was found has to do.
        is_certain: whether all was looked at, not as much as there was time for.
    """
    whose = f"{problem.workload.model} with {count(problem.global_batch, 'row')} a step"
    found_so_far = "nothing fits"
    if not is_certain:
        found_so_far = "nothing that fits was found in time; a longer budget may find it"
    what = f"plan: {found_so_far}: {whose} on {count(len(problem.usable), 'device')}"
    try:
        low, high = 1.0, 1.25
        found = None
        while found is None and high <= _MOST:
            memory.scale = high
            found = find()
            if found is None and is_late():
                tried = "" if low == 1 else f", nor with {low:.3g} times the memory"
                return f"{what}{tried}; what would was not found in time: {_ease(problem)}"
            if found is None:
                low, high = high, high * 1.5
        if found is None:
            return f"{what}; not even with {_MOST:.0f} times the memory: {_ease(problem)}"
        found = _narrow(found, (low, high), partial(setattr, memory, "scale"), find, is_late)
        memory.scale = 1.0
        if memory.overfull_hosts(found.candidate) and not is_late():
            memory.host_scale = _MOST  # Is it these alone?
            hosts_alone = find()
            if hosts_alone is not None:
                enlarge = partial(setattr, memory, "host_scale")
                found = _narrow(hosts_alone, (1.0, _MOST), enlarge, find, is_late)
            memory.host_scale = 1.0
        lack = _describe_lack(problem, memory, found, simulate(found))
        return f"{what}. The smallest change that would: {lack}; or {_ease(problem)}"
    finally:
        memory.scale = memory.host_scale = 1.0


def _narrow(
    found: EstimatedCandidate,
    between: tuple[float, float],
    enlarge: Callable[[float], None],
    find: Callable[[], EstimatedCandidate | None],
    is_late: Callable[[], bool],
) -> EstimatedCandidate:
    """What fits with nearly the least factor; `found` fits with the greater one, nothing with the other."""
    low, high = between
    while high / low > 1 + _NEAR and not is_late():
        middle = (low * high) ** 0.5
        enlarge(middle)
        nearer = find()
        if nearer is None:
            low = middle
        else:
            found, high = nearer, middle
    return found


def _describe_lack(
    problem: PlanProblem, memory: RankMemory, found: EstimatedCandidate, whole: SimulatedPlan | None
) -> str:
    """Which devices and hosts lack how much for a candidate that fits with more memory."""
    candidate = found.candidate
    needed = {
        device: memory.need(candidate, g, position).device_bytes
        for g, group in enumerate(candidate.groups)
        for position, device in enumerate(group.firsts)
    }
    needed_of_hosts = {node: asked for node, (asked, _) in memory.overfull_hosts(candidate).items()}
    if whole is not None:
        devices = map(problem.cluster.places.index, whole.costs.places)
        needed = _take_most(needed, dict(zip(devices, whole.peak_bytes, strict=True)))
        needed_of_hosts = _take_most(needed_of_hosts, whole.host_bytes)
    lacks: dict[tuple[str, int], int] = {}
    for device, asked in needed.items():
        limit = memory.limit_bytes(device)
        if limit is not None and asked > limit:
            alike = problem.device_types[device], limit
            lacks[alike] = max(asked - limit, lacks.get(alike, 0))
    hosts: dict[int, dict[str, int]] = {}
    for node, asked in sorted(needed_of_hosts.items()):
        host = problem.cluster.nodes[node]
        if host.host_memory_bytes is not None and asked > host.host_memory_bytes:
            hosts.setdefault(host.host_memory_bytes, {})[host.name] = asked - host.host_memory_bytes
    parts = [
        f"{_show_no_less(lack)} more than the {show_bytes(limit)} of each {name}"
        for (name, limit), lack in sorted(lacks.items(), key=lambda item: -item[1])
    ]
    parts += [
        f"{_show_no_less(max(lacking.values()))} more than the {show_bytes(limit)} of host memory of "
        f"{'each of ' if len(lacking) > 1 else ''}{list_few(lacking, 'node')}"
        for limit, lacking in hosts.items()
    ]
    return " and ".join(parts) or "a little more memory"


def _take_most(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    """By key, the greater of two."""
    return {key: max(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}


def _show_no_less(num_bytes: int) -> str:
    """As `show_bytes`, rounded up: so much has to be enough."""
    tenth = (2**30 if num_bytes >= 2**30 else 2**20) / 10
    return show_bytes(ceil(num_bytes / tenth) * tenth)


def _ease(problem: PlanProblem) -> str:
    """What else a user can do."""
    eased = ["shorter rows", "fewer rows a step"]
    if problem.fixed.zero is not None or problem.fixed.recompute == "none" or problem.fixed.offload == ():
        eased.insert(0, "leaving ZeRO, recomputation and offload to the planner")
    return " or ".join(eased)
