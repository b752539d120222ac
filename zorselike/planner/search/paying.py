"""Devices that do not pay: a step that is hardly shorter with them, for more money."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.top_k import SimulatedCandidate
from zorselike.text.wording import count

PAYS = 0.01
"""By this share faster must be what costs more."""
MOST_TOLD = 4
"""Kinds of devices of which is told what they would add."""


def choose_paying(simulated: Sequence[SimulatedCandidate]) -> SimulatedCandidate:
    """The cheapest of the plans that are nearly as fast as the fastest, of each set of devices the best.

    A longer search never makes this slower and dearer at once: what was chosen before is still there, and is
    either as cheap as what is chosen now or more than `PAYS` slower than the fastest now.

    Args:
        simulated: allowed, the fastest first.
    """
    fastest = simulated[0]
    best: dict[frozenset[int], SimulatedCandidate] = {}
    for found in simulated:
        if found.score.wanted <= fastest.score.wanted * (1 + PAYS):
            best.setdefault(list_devices(found), found)
    return min(best.values(), key=lambda found: (found.cost, found.score, found.number))


def list_devices(found: SimulatedCandidate) -> frozenset[int]:
    return frozenset(device for group in found.estimated.candidate.groups for device in group.devices)


def describe_unused(
    problem: PlanProblem, chosen: SimulatedCandidate, simulated: Sequence[SimulatedCandidate]
) -> list[str]:
    """A sentence for each kind of devices (type and zone) of which the chosen plan leaves some out: what the
    best plan found takes that has more of them beside what the chosen one has.

    Args:
        simulated: allowed, the best first.
    """
    cluster = problem.cluster
    places = [cluster.places[device] for device in range(cluster.num_devices)]
    kinds = [(cluster.nodes[place.node].zone, cluster.device_type(place)) for place in places]
    usable = Counter(kinds[device] for device in problem.usable)
    used = Counter(kinds[device] for device in list_devices(chosen))
    zones = {zone for zone, _ in usable}
    sentences = []
    for kind, number in usable.items():
        left = number - used[kind]
        if not left:
            continue
        zone, device = kind
        wanted = used + Counter([kind])
        more = (found for found in simulated if wanted <= Counter(kinds[own] for own in list_devices(found)))
        where = f" of {zone}" if zone and len(zones) > 1 else ""
        what = f"{left} {device}{where} left out"
        sentences.append(f"{what}: {_compare(problem, chosen, next(more, None))}")
    if len(sentences) > MOST_TOLD:
        rest = len(sentences) - MOST_TOLD
        sentences[MOST_TOLD:] = [f"and some of {count(rest, 'other kind')} of devices left out"]
    return sentences


def _compare(problem: PlanProblem, chosen: SimulatedCandidate, other: SimulatedCandidate | None) -> str:
    if other is None:
        if problem.max_devices is not None and len(list_devices(chosen)) >= problem.max_devices:
            return f"no more than {count(problem.max_devices, 'device')} may be used"
        if problem.fixed.groups is not None:
            return "the fixed groups have none of them"
        return "no plan found with more of them that keeps all limits looked better by its estimate"
    change = other.iteration_s / chosen.iteration_s - 1
    gain = chosen.iteration_s / other.iteration_s - 1
    told = f"{gain:.2%} faster" if gain > 0 else f"{change:.1%} slower"
    seconds = f"the best plan found with more of them takes {other.iteration_s:.4g} s a step, {told}"
    if not chosen.cost:
        return seconds
    currency = problem.cluster.currency
    pays = "; --all-devices keeps them" if change < 0 and problem.objective == "throughput" else ""
    return f"{seconds}, for {other.cost:.4g} {currency} in place of {chosen.cost:.4g}{pays}"
