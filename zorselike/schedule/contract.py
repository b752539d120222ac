"""Numbers that the runtime follows and that the memory model, the simulator and the planner foresee."""

from collections import Counter
from collections.abc import Iterable

from zorselike.plan.parts import may_overlap_reduction
from zorselike.schedule.actions import Edge

RECEIVES_AHEAD = 2
"""Receives are posted this many computations before the one that needs them: enough to keep a
link busy during a computation without holding a whole ministage's inputs early."""

SENDS_KEPT_BY_NCCL = RECEIVES_AHEAD
"""Computations, the newest, whose rows may not have left and are still held. Gloo holds what it sends until
the step ends."""

COPIES_IN_FLIGHT = 2
"""Microbatches whose activations leave for the host at once and still occupy the device; one more makes the
computation wait."""


MOST_DIRECT_EDGES = 24
"""Of a GPU's rank, over NCCL. Each has a communicator with a stream, and torch deals 32 streams over and
over again: what is on one that is dealt twice stands behind a receive that waits for its sender, and that may
wait for just this. What is left is for updates, and for the communicators of groups and replicas."""


def find_crowded(edges: Iterable[Edge]) -> frozenset[Edge]:
    """Of edges that NCCL could serve, in an order that all ranks know: those that are too many for one of
    their ends, and so go over host memory."""
    num_direct: Counter[int] = Counter()
    crowded = set()
    for edge in edges:
        ends = edge[:2]
        if max(num_direct[end] for end in ends) < MOST_DIRECT_EDGES:
            num_direct.update(ends)
        else:
            crowded.add(edge)
    return frozenset(crowded)


def reduces_beside(zero: int, num_ranks: int, *, overlap: bool, on_gpu: bool) -> bool:
    """Whether a ministage's reduction runs beside what follows it. A CPU rank does one thing after the other.

    Args:
        zero: stage of the group.
        num_ranks: of the group.
        overlap: what the plan says (`Group.overlap_grad_reduce`).
        on_gpu: whether its ranks have streams.
    """
    return overlap and on_gpu and may_overlap_reduction(zero, num_ranks)


NUM_STEPS = 2
"""Steps simulated or estimated, after which all are alike: what one step does to the next (ranks that end and
begin early) shows in the second."""

NUM_STEPS_OFFLOADING = 3
"""The same with offload: copies to the host that continue beside the next step may delay the second step more
than later ones."""
