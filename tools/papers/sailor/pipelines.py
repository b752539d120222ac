"""Sailor's arithmetic as costs for the search for a pipeline, and what is found as a plan of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from zorselike.planner.pipelines.allocation import Allocation, Problem
from zorselike.planner.pipelines.costs import Pool

from .arithmetic import (
    DOLLARS_PER_HOUR,
    GPUS_PER_VM,
    Pairs,
    Ring,
    SailorArithmetic,
    SailorPlan,
    SailorStage,
    count_pairs,
    make_ring,
)
from .links import Place

TENSOR_PARALLEL = (1, 2, 4)


@dataclass(frozen=True)
class Quotas:
    """GPUs by type and zone."""

    of: Mapping[tuple[str, str], int]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(sorted({gpu for gpu, _ in self.of}))

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(
            Pool(
                num_devices=count,
                dollars_per_device_s=DOLLARS_PER_HOUR[gpu] / 3600,
                devices_per_node=GPUS_PER_VM,
            )
            for (gpu, _), count in self.of.items()
        )


@dataclass(frozen=True)
class StageOption:
    """The replicas of a stage in order."""

    replicas: tuple[Place, ...]
    uses: tuple[int, ...]

    @cached_property
    def ring(self) -> Ring:
        return make_ring(self.replicas)


class SailorCosts:
    """`PipelineCosts` at one degree and one microbatch size."""

    def __init__(
        self, arithmetic: SailorArithmetic, options: Sequence[StageOption], rows: int, global_batch: int
    ) -> None:
        self.options = tuple(options)
        self.rows = rows
        self.num_layers = arithmetic.num_layers
        self.num_microbatches = ceil(global_batch / (rows * len(options[0].replicas)))
        self._arithmetic = arithmetic
        self._places = [tuple(dict.fromkeys(option.replicas)) for option in options]
        self._rings = [option.ring for option in options]
        self._pairs = lru_cache(maxsize=None)(self._count_pairs)
        self.least_send_s = lru_cache(maxsize=None)(self._find_least_send_s)
        self._reduce_s = lru_cache(maxsize=None)(self._find_reduce_s)
        self._worst_send_s = lru_cache(maxsize=None)(self._find_worst_send_s)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        return tuple(option.uses for option in self.options)

    def layer_s(self, option: int, layer: int) -> float:
        return max(self._arithmetic.layer_s(place, self.rows, layer) for place in self._places[option])

    def forward_send_s(self, option: int, following: int, stop: int, first_of: int) -> float:
        seconds = self._worst_send_s(option, following, self._arithmetic.output_bytes(stop - 1, self.rows))
        return seconds * 2 if first_of > 3 else seconds

    def backward_send_s(self, option: int, previous: int, start: int, is_last: bool) -> float:
        seconds = self._worst_send_s(option, previous, self._arithmetic.output_bytes(start, self.rows))
        return seconds * 2 if is_last else seconds

    def _find_least_send_s(self, option: int) -> float:
        sizes = {self._arithmetic.output_bytes(layer, self.rows) for layer in range(self.num_layers)}
        return min(self._worst_send_s(option, k, size) for k in range(len(self.options)) for size in sizes)

    def _find_worst_send_s(self, option: int, other: int, num_bytes: float) -> float:
        return self._arithmetic.worst_send_s(self._pairs(option, other), num_bytes)

    def _count_pairs(self, option: int, other: int) -> Pairs:
        return count_pairs(self.options[option].replicas, self.options[other].replicas)

    def update_s(self, option: int, start: int, stop: int) -> float:
        return max(self._arithmetic.update_s(place, self.rows, start) for place in self._places[option])

    def sync_s(self, option: int, start: int, stop: int) -> float:
        return self._reduce_s(option, self._arithmetic.gradient_bytes(self._rings[option], start, stop))

    def _find_reduce_s(self, option: int, num_bytes: float) -> float:
        return self._arithmetic.reduce_s(self._rings[option], num_bytes)

    def fits(self, option: int, start: int, stop: int, depth: int) -> bool:
        return all(
            self._arithmetic.fits(place, self.rows, start, stop, depth) for place in self._places[option]
        )

    def boundary_dollars(self, option: int, following: int, stop: int) -> float:
        size = self._arithmetic.output_bytes(stop - 1, self.rows)
        pairs = self._pairs(option, following)
        return self.num_microbatches * self._arithmetic.boundary_dollars(pairs, size)

    def sync_dollars(self, option: int, start: int, stop: int) -> float:
        return self._arithmetic.reduce_dollars(self._rings[option], start, stop)


def make_problems(arithmetic: SailorArithmetic, quotas: Quotas, global_batch: int) -> Iterator[Problem]:
    """Every degree for which there are GPUs, with every microbatch size that was measured; all replicas of a
    stage are of one kind."""
    for degree in range(1, min(sum(quotas.of.values()), global_batch) + 1):
        for rows in arithmetic.rows():
            if (degree - 1) * rows >= global_batch:
                continue
            kinds = (
                Place(gpu, zone, t)
                for gpu, zone in quotas.of
                for t in TENSOR_PARALLEL
                if arithmetic.has(gpu, rows, t)
            )
            options = [own for place in kinds for own in _option(quotas, (place,) * degree)]
            if options:
                yield Problem(degree, rows, SailorCosts(arithmetic, options, rows, global_batch))


def _option(quotas: Quotas, replicas: tuple[Place, ...]) -> Iterator[StageOption]:
    """None if the quotas are too small."""
    uses = tuple(
        sum(place.tensor_parallel for place in replicas if (place.gpu, place.zone) == pool)
        for pool in quotas.of
    )
    if all(count <= quota for count, quota in zip(uses, quotas.of.values(), strict=True)):
        yield StageOption(replicas, uses)


def to_sailor_plan(found: Allocation, global_batch: int) -> SailorPlan:
    """The plan in their form."""
    costs = found.problem.costs
    assert isinstance(costs, SailorCosts)
    return SailorPlan(
        rows=found.problem.rows,
        global_batch=global_batch,
        stages=tuple(
            SailorStage(stage.start, stage.stop, costs.options[stage.option].replicas)
            for stage in found.stages
        ),
    )
