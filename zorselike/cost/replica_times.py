"""What a layer takes on the ranks of a tensor-parallel replica: its computation at their degree, and the
collectives among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.network import CollectiveOp, Network
from zorselike.cost.sizes import GATHERS_PER_LAYER, is_layer
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import LayerKind, Workload

Part = Literal["whole", "cut", "positions"]
"""What a rank of a replica computes of a module: all of it for all positions, its pieces of it, or all of it
for its own positions."""


def find_parts(workload: Workload) -> dict[str, Part]:
    """By module: what comes before the first layer (the embedding) computes all positions on every rank, what
    comes after (the head, the loss) each rank's own."""
    parts: dict[str, Part] = {}
    before: Part = "whole"
    for name, _ in workload.layers:
        if is_layer(name):
            before, parts[name] = "positions", "cut"
        else:
            parts[name] = before
    return parts


def time_in_replica(
    clock: LayerTimeModel,
    kind: LayerKind,
    part: Part,
    device: str,
    rows: int,
    recompute: Recompute,
    *,
    degree: int,
    exchange_s: Callable[[float], float],
) -> tuple[float, float]:
    """Seconds of the forward and the backward of one module for a microbatch, on every rank of a replica.

    Args:
        degree: ranks of the replica, whose devices are of one type.
        exchange_s: seconds of an all-gather and a reduce-scatter of so many bytes inside it. A layer has two
            of each in its forward and two in its backward, two more where that computes the forward again.
    """
    if part != "cut":
        share = 1 if part == "whole" else degree
        return (
            clock.forward_s(kind.name, device, rows, "none") / share,
            clock.backward_s(kind.name, device, rows, "none") / share,
        )
    forward_s = clock.forward_s(kind.name, device, rows, recompute, degree)
    backward_s = clock.backward_s(kind.name, device, rows, recompute, degree)
    pass_s = GATHERS_PER_LAYER * exchange_s(rows * kind.input_elements_per_row * clock.itemsize)
    if kind.backward_flops:
        backward_s += pass_s * (2 if recompute == "layer" else 1)
    return forward_s + pass_s, backward_s


def time_exchange(network: Network, replicas: Sequence[Sequence[int]], num_bytes: float) -> float:
    """Seconds of an all-gather and a reduce-scatter of so many bytes in each of some replicas, which are of
    one node and do so at the same time: they may share its fabric."""
    return sum(
        network.time_alone([flow for ranks in replicas for flow in network.collective(op, ranks, num_bytes)])
        for op in ("all_gather", "reduce_scatter")
    )


def time_collective(
    network: Network, op: CollectiveOp, replicas: Sequence[Sequence[int]], num_bytes: float, *, is_cut: bool
) -> float:
    """Seconds of a gather or reduction of so many bytes in a group of these replicas, alone on its wires: of
    what is cut the holders of each piece, all pieces at once; of what is not all ranks."""
    degree = max(map(len, replicas))
    if degree == 1 or not is_cut:
        rings = [[rank for ranks in replicas for rank in ranks]]
    else:
        rings = [[own[piece * len(own) // degree] for own in replicas] for piece in range(degree)]
    if len(rings[0]) == 1 or not num_bytes:
        return 0.0
    flows = (flow for ring in rings for flow in network.collective(op, ring, num_bytes / len(rings)))
    return network.time_alone(flows)
