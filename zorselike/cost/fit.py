"""The largest decoder that one device trains, for each way of offloading.

A candidate is laid out over ministages, its schedule built, and `walk_memory` says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from zorselike.cost.memory import walk_memory
from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.purposes import MemoryWalk, Purpose
from zorselike.cost.sizes import find_tie_bytes, measure_ministages
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.plan.workload import Workload
from zorselike.schedule import ScheduleSpec, build
from zorselike.text.wording import count

NAMED_SHARE = 2 / 3
"""What limits a model is named by the largest purposes that together hold this share."""

MIN_DEPTH, MAX_DEPTH = 0.5, 2.0
"""Layers of a model in a family's proportions, as a share of those of the flavor of its width."""


@dataclass(frozen=True)
class Setting:
    """A way to save memory."""

    name: str
    offload: tuple[str, ...]
    recompute: Recompute


SETTINGS = (
    Setting("none", (), "none"),
    Setting("none, recompute layers", (), "layer"),
    Setting("+ activations", (Purpose.ACTIVATIONS,), "layer"),
    Setting("+ params", ("params", Purpose.ACTIVATIONS), "layer"),
    Setting("+ optimizer: everything", ("params", "optimizer", Purpose.ACTIVATIONS), "layer"),
)
"""Each saves more than the one before."""


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """A decoder of a family: an embedding, layers that are alike, a norm and a head."""

    name: str
    dim: int
    workload: Workload

    @property
    def num_layers(self) -> int:
        return len(self.workload.layers) - 3

    def with_layers(self, num_layers: int) -> Workload:
        """A decoder of its width with that many layers."""
        embedding, (_, layer), *_, norm, head = self.workload.layers
        layers = ((f"layers.{i}", layer) for i in range(num_layers))
        return replace(self.workload, layers=(embedding, *layers, norm, head))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step computes of a model, and in how many pieces."""

    num_rows: int
    rows_per_microbatch: int
    num_ministages: int
    """At most; a model with fewer layers has fewer."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of the device and of the host that a model may take, in bytes."""

    device_bytes: int
    context_bytes: int
    """Of the device's, what is taken whatever the model."""
    host_bytes: int

    def holds(self, walk: MemoryWalk) -> bool:
        return walk.device_peak_bytes <= self.device_bytes and walk.host_peak_bytes <= self.host_bytes


@dataclass(frozen=True)
class Fit:
    """The largest model for one setting."""

    setting: Setting
    flavor: Flavor | None
    """The largest one that fits as it is."""
    base: Flavor
    """The one whose width the largest model has."""
    num_layers: int
    """0 if not even one layer fits."""
    walk: MemoryWalk | None
    limit: str
    """What one more layer would not fit into, and what takes most of that."""


def find_largest(flavors: Sequence[Flavor], batch: Batch, setting: Setting, room: Room) -> Fit:
    """The largest of `flavors` that fits, and the largest model of any of their widths.

    The latter has between `MIN_DEPTH` and `MAX_DEPTH` times its flavor's layers if such a model fits:
    width and depth of a family grow together.
    """

    def walk(flavor: Flavor, num_layers: int) -> MemoryWalk:
        """With as many ministages as take least, of those that fit if any do."""
        walks = walk_in_each_way(flavor.with_layers(num_layers), batch, setting, room.context_bytes)
        return min(walks, key=lambda walk: (not room.holds(walk), walk.device_peak_bytes))

    def find_depth(flavor: Flavor) -> int:
        return _find_last(lambda num_layers: room.holds(walk(flavor, num_layers)))

    by_size = sorted(flavors, key=lambda flavor: flavor.workload.num_parameters)
    depths = [(flavor, find_depth(flavor)) for flavor in by_size]
    fitting = [flavor for flavor, num_layers in depths if num_layers >= flavor.num_layers]
    base, num_layers = max(depths, key=lambda found: _prefer(*found))
    return Fit(
        setting=setting,
        flavor=fitting[-1] if fitting else None,
        base=base,
        num_layers=num_layers,
        walk=walk(base, num_layers) if num_layers else None,
        limit=name_limit(walk(base, num_layers + 1), room),
    )


def _prefer(flavor: Flavor, num_layers: int) -> tuple[int, float]:
    """The largest in proportion; else the largest of those too deep; else the least shallow."""
    share = num_layers / flavor.num_layers
    if share < MIN_DEPTH:
        return 0, share
    return (2 if share <= MAX_DEPTH else 1), flavor.with_layers(num_layers).num_parameters


def _find_last(fits: Callable[[int], bool]) -> int:
    """The last number that fits, or 0; a larger one needs more."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def walk_in_each_way(
    workload: Workload, batch: Batch, setting: Setting, context_bytes: int
) -> list[MemoryWalk]:
    """With 1, 2, 4, ... ministages, and as many as there may be: fewer hold less of a model that stays on
    the device, more hold less of one that is offloaded."""
    most = min(batch.num_ministages, len(workload.layers) - 3)
    numbers = {min(2**exponent, most) for exponent in range(most.bit_length() + 1)}
    return [
        walk_model(workload, replace(batch, num_ministages=number), setting, context_bytes=context_bytes)
        for number in sorted(numbers)
    ]


def walk_model(workload: Workload, batch: Batch, setting: Setting, *, context_bytes: int = 0) -> MemoryWalk:
    """A step of a model on one rank alone (ZeRO 2)."""
    plan = _lay_out(workload, batch, setting)
    ties = tuple(find_tie_bytes(plan, workload, workload.itemsize))
    actions = build(ScheduleSpec(plan, ties=ties, masters=ParameterBytes.of(workload).masters))[0]
    sizes = measure_ministages(plan, workload)[0]
    return walk_memory(plan, 0, actions, sizes, context_bytes=context_bytes)


def _lay_out(workload: Workload, batch: Batch, setting: Setting) -> Plan:
    starts = range(0, batch.num_rows, batch.rows_per_microbatch)
    stops = (*starts[1:], batch.num_rows)
    group = Group(
        ranks=(0,),
        microbatches=tuple(Microbatch(0, *rows) for rows in zip(starts, stops, strict=True)),
        offload=setting.offload,
        recompute=setting.recompute,
    )
    parts = _divide(workload, min(batch.num_ministages, len(workload.layers) - 3))
    return Plan(batch.num_rows, (group,), tuple(Ministage(0, part) for part in parts))


def _divide(workload: Workload, num_parts: int) -> list[tuple[str, ...]]:
    """Cuts the modules where it comes nearest to equal numbers of parameters, into that many parts or,
    where one module is larger than a part, fewer."""
    kinds = workload.kind_of.values()
    reached = [0, *accumulate(kind.num_parameters + kind.num_borrowed for kind in kinds)]
    cuts = {
        min(range(len(reached)), key=lambda position: abs(reached[position] * num_parts - part * reached[-1]))
        for part in range(num_parts + 1)
    }
    modules = tuple(workload.kind_of)
    return [modules[start:stop] for start, stop in pairwise(sorted(cuts))]


def name_limit(walk: MemoryWalk, room: Room) -> str:
    """What does not fit where: `device: optimizer state of 2 ministages, gradients of 1 ministage`."""
    limits = []
    if walk.device_peak_bytes > room.device_bytes:
        limits.append("device: " + ", ".join(_name_largest(walk.at_peak, walk.holders)))
    if walk.host_peak_bytes > room.host_bytes:
        limits.append("host RAM: " + ", ".join(_name_largest(walk.host, {})))
    return "; ".join(limits)


def _name_largest(held: Mapping[Purpose, int], holders: Mapping[Purpose, tuple[int, ...]]) -> list[str]:
    names: list[str] = []
    named, total = 0, sum(held.values())
    for purpose in sorted(Purpose, key=lambda purpose: -held[purpose]):
        if named >= NAMED_SHARE * total:
            break
        named += held[purpose]
        own = holders.get(purpose, ())
        names.append(f"{purpose} of {count(len(own), 'ministage')}" if own else purpose)
    return names
