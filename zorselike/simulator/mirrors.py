"""What an elastic job holds of its state in its hosts' memory: each rank's own, and another node's mirrored.

`elastic.replicas` holds two steps of each, since one is not whole while it is on its way, and frozen weights
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.sizes import is_layer
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload

_STEPS = 2
"""Whose state is held at once."""


class State(NamedTuple):
    """What one rank answers for, in bytes."""

    changing: float
    """Weights (fp32 masters where there are any) and moments of what trains."""
    frozen: float

    @property
    def held(self) -> float:
        """What whoever keeps it holds of it."""
        return _STEPS * self.changing + self.frozen

    def share(self, num_ranks: int) -> State:
        """Of one of so many that divide it evenly."""
        return State(self.changing / num_ranks, self.frozen / num_ranks)


def state_of(kind: LayerKind, each: ParameterBytes) -> State:
    """Of one layer; weights that it borrows are its owner's."""
    per_trained = max(each.weight, each.gradient) + each.num_moments * each.gradient
    frozen = kind.num_parameters - kind.trainable
    return State(kind.trainable * per_trained, frozen * each.weight)


def list_states(plan: Plan, workload: Workload) -> list[State]:
    """By rank."""
    each = ParameterBytes.of(workload)
    found = [State(0.0, 0.0)] * plan.num_ranks
    for ministage in plan.ministages:
        group = plan.groups[ministage.group]
        cut, whole = (
            add_up([state_of(workload.kind_of[m], each) for m in ministage.modules if is_layer(m) == is_cut])
            for is_cut in (True, False)
        )
        for replica in group.replicas:  # Of layers each has all pieces once.
            own = cut.share(replica.degree * len(group.replicas)), whole.share(len(group.flat_ranks))
            for rank in replica.ranks:
                found[rank] = add_up((found[rank], *own))
    return found


def add_up(states: Sequence[State]) -> State:
    """All together."""
    return State(sum(state.changing for state in states), sum(state.frozen for state in states))


def host_copies(states: Sequence[State], nodes: Sequence[object]) -> list[int]:
    """By rank: bytes of its host's memory for what it keeps of its own and of other ranks' states.

    Args:
        nodes: by rank, which one it is on.
    """
    held = [state.held for state in states]
    holders = assign_mirrors(nodes, [round(state.changing + state.frozen) for state in states])
    for rank, holder in holders.items():
        held[holder] += states[rank].held
    return [round(size) for size in held]


def assign_mirrors(nodes: Sequence[object], num_bytes: Sequence[int]) -> dict[int, int]:
    """Which rank mirrors which: one of another node where there is one, else another rank; the largest first,
    each to the one that holds least. By rank; a rank alone has no mirror."""
    load = dict.fromkeys(range(len(nodes)), 0)
    found = {}
    for rank in sorted(load, key=lambda rank: (-num_bytes[rank], rank)):
        others = [other for other in load if other != rank]
        far = [other for other in others if nodes[other] != nodes[rank]]
        if others:
            size = len(nodes)
            holder = min(far or others, key=lambda other: (load[other], (other - rank) % size))
            found[rank] = holder
            load[holder] += max(1, num_bytes[rank])
    return found
