"""What the search for a pipeline asks of a cost model (Sailor section 4.2.2).

A step of a pipeline whose stages all have as many replicas takes

    (m - 1) max(stage) + sum(stage) + max(update) + max(sync) seconds,

m its microbatches and stage a stage's compute with its sends. The search knows neither models nor devices:
only layers by number, device pools by number, and options: ways to equip a stage, each so many devices of
each pool. One of these stands for one data-parallel degree and one microbatch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Interchangeable devices: of one type in one zone."""

    num_devices: int
    """Quota, or what is available now."""
    dollars_per_device_s: float = 0.0
    devices_per_node: int = 1


class PipelineCosts(Protocol):
    """Costs at one degree of data parallelism and one microbatch size; everything finite and at least 0.

    Stages are given by an option and layers `start` to `stop` - 1. Update, sync and memory must not fall
    when layers are added at either end.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one replica in one step."""

    @property
    def uses(self) -> Sequence[Sequence[int]]:
        """Devices of each pool that a stage takes, by option."""

    def layer_s(self, option: int, layer: int) -> float:
        """Forward and backward of one layer for one microbatch, on the slowest replica."""

    def forward_send_s(self, option: int, following: int, stop: int, first_of: int) -> float:
        """What sending forward adds to a stage.

        Args:
            first_of: the number of stages if this is the first of them, else 0.
        """

    def backward_send_s(self, option: int, previous: int, start: int, is_last: bool) -> float:
        """What sending backward adds to a stage."""

    def least_send_s(self, option: int) -> float:
        """No more than what sends add to any stage of the option that is not the only one."""

    def update_s(self, option: int, start: int, stop: int) -> float: ...

    def sync_s(self, option: int, start: int, stop: int) -> float:
        """Reduction of gradients between the replicas."""

    def fits(self, option: int, start: int, stop: int, depth: int) -> bool:
        """Whether memory is enough with `depth` - 1 stages after it; must not turn true as `depth` grows."""

    def boundary_dollars(self, option: int, following: int, stop: int) -> float:
        """Egress of a step between a stage and the next."""

    def sync_dollars(self, option: int, start: int, stop: int) -> float:
        """Egress of a step within a stage."""


class Stage(NamedTuple):
    """Layers `start` to `stop` - 1 on the devices of an option."""

    option: int
    start: int
    stop: int


@dataclass(frozen=True)
class Figures:
    """What a pipeline takes."""

    iteration_s: float
    dollars: float
    """A step: rent and egress."""
    used: tuple[int, ...]
    """Devices by pool."""


@dataclass(frozen=True)
class Rent:
    """What devices cost by the second."""

    pools: tuple[Pool, ...]
    bill_idle: bool
    """Whole nodes are paid for."""

    def dollars_per_s(self, used: Sequence[int]) -> float:
        total = 0.0
        for pool, count in zip(self.pools, used, strict=True):
            if self.bill_idle:
                count = ceil(count / pool.devices_per_node) * pool.devices_per_node
            total += count * pool.dollars_per_device_s
        return total


def evaluate(costs: PipelineCosts, stages: Sequence[Stage], rent: Rent) -> Figures:
    """Time and money of a step, straight from the formula above."""
    times, egress, last = [], 0.0, len(stages) - 1
    for i, (option, start, stop) in enumerate(stages):
        seconds = sum(costs.layer_s(option, layer) for layer in range(start, stop))
        if i < last:
            following = stages[i + 1].option
            seconds += costs.forward_send_s(option, following, stop, len(stages) if i == 0 else 0)
            egress += costs.boundary_dollars(option, following, stop)
        if i > 0:
            seconds += costs.backward_send_s(option, stages[i - 1].option, start, i == last)
        egress += costs.sync_dollars(option, start, stop)
        times.append(seconds)
    iteration_s = (
        (costs.num_microbatches - 1) * max(times)
        + sum(times)
        + max(costs.update_s(s.option, s.start, s.stop) for s in stages)
        + max(costs.sync_s(s.option, s.start, s.stop) for s in stages)
    )
    used = tuple(sum(costs.uses[stage.option][p] for stage in stages) for p in range(len(rent.pools)))
    return Figures(iteration_s, rent.dollars_per_s(used) * iteration_s + egress, used)
