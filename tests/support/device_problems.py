"""Problems whose answers are easy to see: devices of round speeds on nodes of round prices."""

from __future__ import annotations

from typing import Any

from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.problem import PlanProblem

SPEEDS = {"A100-40": 4.0, "V100-16": 2.0, "T4": 1.0}
"""Rows per second through the whole model."""
NUM_LAYERS = 8

WORKLOAD = Workload(
    model="round",
    sequence_length=128,
    dtype="float16",
    layers=tuple((f"layers.{i}", "layer") for i in range(NUM_LAYERS)),
    kinds={
        "layer": LayerKind(
            name="layer",
            num_parameters=1_000_000,
            forward_flops_per_row=1e9,
            input_elements_per_row=1000,
            output_elements_per_row=1000,
            activation_bytes_per_row=1_000_000,
        )
    },
)


def make_profile(workload: Workload = WORKLOAD, **speeds: float) -> Profile:
    """Every layer of the model takes as long, in proportion to rows, backward twice the forward."""
    each = {device: 1 / speed / len(workload.layers) for device, speed in {**SPEEDS, **speeds}.items()}
    return Profile(
        model=workload.model,
        layers=tuple(
            LayerTimes(
                kind=kind,
                device=device,
                dtype=workload.dtype,
                sequence_length=workload.sequence_length,
                rows=(1, 2, 4),
                forward_s=tuple(rows * seconds / 3 for rows in (1, 2, 4)),
                backward_s=tuple(rows * seconds * 2 / 3 for rows in (1, 2, 4)),
                source=Source("measured"),
            )
            for device, seconds in each.items()
            for kind in workload.kinds
        ),
    )


def make_nodes(name: str, types: str, copies: int = 1, price: float = 0.0, **given: Any) -> tuple[Node, ...]:
    """`types` of one node: `A100-40 T4`."""
    settings = {"fabric": Link(100e9), "nic": Link(10e9), **given}
    return tuple(
        Node(name=f"{name}{i}", devices=tuple(types.split()), price_per_hour=price, **settings)
        for i in range(copies)
    )


def make_problem(*nodes: tuple[Node, ...], links: dict[str, Any] | None = None, **given: Any) -> PlanProblem:
    cluster = Cluster(
        nodes=tuple(node for some in nodes for node in some),
        **({"default_link": Link(10e9)} if links is None else links),
    )
    settings = {"workload": WORKLOAD, "profile": make_profile(), "global_batch": 64, **given}
    return PlanProblem(cluster=cluster, **settings)
