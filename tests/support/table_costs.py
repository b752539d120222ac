"""Pipelines whose costs are tables of small numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zorselike.planner.pipelines.costs import Pool


@dataclass(frozen=True)
class TableCosts:
    """Costs from tables of small numbers; some sizes of a stage, some of its place."""

    uses: tuple[tuple[int, ...], ...]
    num_microbatches: int
    seconds: tuple[tuple[float, ...], ...]
    """By option and layer."""
    sends: tuple[tuple[float, ...], ...]
    """By option and option."""
    weights: tuple[float, ...]
    """By layer: of updates, gradients and memory."""
    sync: tuple[float, ...]
    """By option, for each weight."""
    memory: tuple[float, ...]
    """By option."""
    egress: float

    @property
    def num_layers(self) -> int:
        return len(self.weights)

    def layer_s(self, option: int, layer: int) -> float:
        return self.seconds[option][layer]

    def forward_send_s(self, option: int, following: int, stop: int, first_of: int) -> float:
        return self.sends[option][following] * (2 if first_of > 3 else 1) * (1 + stop % 2)

    def backward_send_s(self, option: int, previous: int, start: int, is_last: bool) -> float:
        return self.sends[option][previous] * (2 if is_last else 1)

    def least_send_s(self, option: int) -> float:
        return min(self.sends[option])

    def update_s(self, option: int, start: int, stop: int) -> float:
        return sum(self.weights[start:stop]) / 16

    def sync_s(self, option: int, start: int, stop: int) -> float:
        return self.sync[option] * sum(self.weights[start:stop])

    def fits(self, option: int, start: int, stop: int, depth: int) -> bool:
        return sum(self.weights[start:stop]) * (1 + depth / 2) <= self.memory[option]

    def boundary_dollars(self, option: int, following: int, stop: int) -> float:
        return self.egress * self.num_microbatches * (stop % 3) * (self.uses[option] != self.uses[following])

    def sync_dollars(self, option: int, start: int, stop: int) -> float:
        return self.egress * (stop - start) if option % 2 else 0.0


def chain(**changes: object) -> TableCosts:
    """Four layers of a second each on a device of the first pool; two seconds on one of the second."""
    costs = TableCosts(
        uses=((1, 0), (0, 1)),
        num_microbatches=12,
        seconds=((1.0,) * 4, (2.0,) * 4),
        sends=((0.0, 0.0), (0.0, 0.0)),
        weights=(1.0,) * 4,
        sync=(0.0, 0.0),
        memory=(100.0, 100.0),
        egress=0.0,
    )
    return replace(costs, **changes)  # type: ignore[arg-type]


POOLS = [
    Pool(num_devices=1, dollars_per_device_s=1.0, devices_per_node=4),
    Pool(num_devices=1, dollars_per_device_s=0.25, devices_per_node=1),
]
