"""Costs of a plan made by hand: round numbers and a network of one link a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from zorselike.cost.network import Flow
from zorselike.cost.sizes import MinistageBytes
from zorselike.cost.step_costs import StepCosts, UnitBytes
from zorselike.plan.cluster.cluster import Place
from zorselike.plan.plan import Plan


@dataclass
class PlainNetwork:
    """Each node has one way out and one way in of the same rate, inside it all is free; each rank has a
    way from and to its host."""

    nodes: Sequence[int]
    """Of each rank."""
    rate: float = 1.0
    latency_s: float = 0.0
    host_rate: float = 1.0
    max_rate: float = float("inf")
    names: tuple[str, ...] = field(init=False)
    capacities: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        count = max(self.nodes) + 1
        self.names = tuple(f"node {n}, {way}" for n in range(count) for way in ("out", "in"))
        self.names += tuple(f"rank {r}, {way}" for r in range(len(self.nodes)) for way in ("load", "store"))
        self.capacities = (self.rate,) * (2 * count) + (self.host_rate,) * (2 * len(self.nodes))

    def transfer(self, source: int, target: int, num_bytes: float) -> Flow:
        a, b = self.nodes[source], self.nodes[target]
        if a == b:
            return Flow(0.0, (), self.rate)
        return Flow(num_bytes, (2 * a, 2 * b + 1), self.max_rate, self.latency_s, (a, b))

    def collective(self, op: str, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        """Each edge of the ring between two nodes carries (n - 1)/n of the bytes, twice for an all-reduce."""
        ring = sorted(ranks, key=lambda rank: self.nodes[rank])
        share = (len(ring) - 1) / len(ring) * (2 if op == "all_reduce" else 1) * num_bytes
        pairs = [(a, b) for a, b in pairwise([*ring, ring[0]]) if self.nodes[a] != self.nodes[b]]
        return tuple(self.transfer(a, b, share) for a, b in pairs)

    def copy(self, rank: int, num_bytes: float, *, to_device: bool) -> Flow:
        first = 2 * (max(self.nodes) + 1) + 2 * rank
        return Flow(num_bytes, (first if to_device else first + 1,), float("inf"))


def make_costs(
    plan: Plan,
    *,
    forward: float | Callable[[int, int, int], float] = 1.0,
    backward: float | Callable[[int, int, int], float] | None = None,
    update: float | Callable[[int, int], float] = 0.0,
    network: PlainNetwork | None = None,
    row_bytes: int = 0,
    unit_bytes: int = 0,
    num_units: int = 1,
    sizes: Mapping[str, int] | None = None,
    cpu: bool = False,
    is_cut: bool = False,
    **others: Any,
) -> StepCosts:
    """`forward` and `backward` in seconds a row, or by rank, ministage and rows; `backward` is by default
    twice the forward; `unit_bytes` are gathered and reduced by each of a ministage's units, which tensor
    parallelism cuts if `is_cut`."""
    if backward is None:
        backward = 2 * forward if isinstance(forward, float | int) else lambda *key: 2 * forward(*key)

    def times(seconds: float | Callable[[int, int, int], float]) -> dict[tuple[int, int, int], float]:
        return {
            (rank, i, m.num_rows): seconds * m.num_rows
            if isinstance(seconds, float | int)
            else seconds(rank, i, m.num_rows)
            for rank in plan.group_of_rank
            for i in plan.ministages_of_rank(rank)
            for m in plan.microbatches_of_rank(rank)
        }

    names = ("gathered", "shard", "gradient", "gradient_shard", "state", "activation", "boundary")
    given = {"activation_bytes_per_row": row_bytes, "boundary_bytes_per_row": row_bytes}
    given |= {
        f"{name}_bytes": unit_bytes * num_units // (1 if name in ("gathered", "gradient") else 2)
        for name in names[:5]
    }
    own = MinistageBytes(**(given | dict(sizes or {})))
    ranks = sorted(plan.group_of_rank)
    return StepCosts(
        places=tuple(Place(rank, 0) for rank in ranks),
        network=network or PlainNetwork(ranks),  # type: ignore[arg-type]
        forward_s=times(forward),
        backward_s=times(backward),
        update_s={
            (rank, i): update(rank, i) if callable(update) else update
            for rank in ranks
            for i in plan.ministages_of_rank(rank)
        },
        row_bytes=(0,) + (row_bytes,) * (plan.num_ministages - 1),
        units=((UnitBytes(unit_bytes, unit_bytes, is_cut),) * num_units,) * plan.num_ministages,
        sizes=tuple(dict.fromkeys(plan.ministages_of_rank(rank), own) for rank in ranks),
        is_cpu=(cpu,) * len(ranks),
        **others,
    )
