"""The largest decoder that one device trains, for each way of offloading.

A candidate is laid out over ministages, its schedule built, and `walk_memory` says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zorselike.cost.activations import TokenBytes, count_embedding
from zorselike.cost.memory import MemoryWalk, MinistageBytes, walk_memory
from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.purposes import Purpose
from zorselike.cost.sizes import RowBytes, UnitSize, add_up
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
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
class ModelShape:
    """A decoder without weights; parameters are counts."""

    flavor: str
    dim: int
    num_layers: int
    embedding_parameters: int
    layer_parameters: int
    norm_parameters: int
    output_parameters: int
    """Of the output projection, also where it is tied to the embedding."""
    is_tied: bool
    layer: TokenBytes
    norm: TokenBytes
    output: TokenBytes

    def num_parameters(self, num_layers: int) -> int:
        """Of the same shape with that many layers, tied ones counted once."""
        outside = self.embedding_parameters + self.norm_parameters
        own_output = 0 if self.is_tied else self.output_parameters
        return outside + own_output + num_layers * self.layer_parameters

    def num_own_parameters(self) -> int:
        """Of the flavor itself."""
        return self.num_parameters(self.num_layers)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a step computes, and how precisely."""

    num_rows: int
    rows_per_microbatch: int
    seq_len: int
    num_ministages: int
    """At most; a model with fewer layers has fewer."""
    itemsize: int
    """Bytes of what layers compute in; in half precision the optimizer updates fp32 master weights."""
    num_moments: int
    """Averages that the optimizer keeps of each parameter, in fp32."""

    @property
    def masters(self) -> bool:
        return ParameterBytes(self.itemsize).masters


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
    flavor: str | None
    """The largest flavor that fits as it is."""
    shape: ModelShape
    """Of the largest model in the family's proportions, if one fits."""
    num_layers: int
    """0 if not even one layer fits."""
    walk: MemoryWalk | None
    limit: str
    """What one more layer would not fit into, and what takes most of that."""


def find_largest(shapes: Sequence[ModelShape], job: Job, setting: Setting, room: Room) -> Fit:
    """The largest of `shapes` that fits, and the largest model of any of their widths.

    The latter has between `MIN_DEPTH` and `MAX_DEPTH` times its flavor's layers if such a model fits:
    width and depth of a family grow together.
    """

    def walk(shape: ModelShape, num_layers: int) -> MemoryWalk:
        return walk_model(shape, num_layers, job, setting, context_bytes=room.context_bytes)

    def find_depth(shape: ModelShape) -> int:
        return _find_last(lambda num_layers: room.holds(walk(shape, num_layers)))

    depths = [(shape, find_depth(shape)) for shape in sorted(shapes, key=ModelShape.num_own_parameters)]
    flavors = [shape.flavor for shape, num_layers in depths if num_layers >= shape.num_layers]
    shape, num_layers = max(depths, key=lambda found: _prefer(*found))
    return Fit(
        setting=setting,
        flavor=flavors[-1] if flavors else None,
        shape=shape,
        num_layers=num_layers,
        walk=walk(shape, num_layers) if num_layers else None,
        limit=name_limit(walk(shape, num_layers + 1), room),
    )


def _prefer(shape: ModelShape, num_layers: int) -> tuple[int, float]:
    """The largest in proportion; else the largest of those too deep; else the least shallow."""
    share = num_layers / shape.num_layers
    if share < MIN_DEPTH:
        return 0, share
    return (2 if share <= MAX_DEPTH else 1), shape.num_parameters(num_layers)


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


def walk_model(
    shape: ModelShape, num_layers: int, job: Job, setting: Setting, *, context_bytes: int = 0
) -> MemoryWalk:
    """A step of a model with that many layers on one rank alone (ZeRO 2)."""
    modules = _count_parameters(shape, num_layers)
    parts = _divide(modules, min(job.num_ministages, num_layers))
    plan = _lay_out(parts, job, setting)
    is_cut = shape.is_tied and len(parts) > 1
    sizes = {
        i: _measure(
            part, shape, job, setting, borrows=is_cut and i == len(parts) - 1, lends=is_cut and i == 0
        )
        for i, part in enumerate(parts)
    }
    ties = ((0, len(parts) - 1),) if is_cut else ()
    actions = build(ScheduleSpec(plan, ties=ties, masters=job.masters))[0]
    return walk_memory(plan, 0, actions, sizes, context_bytes=context_bytes)


def _count_parameters(shape: ModelShape, num_layers: int) -> list[tuple[str, int]]:
    """Each module with its parameters, in model order."""
    return [
        ("tok_embeddings", shape.embedding_parameters),
        *((f"layers.{i}", shape.layer_parameters) for i in range(num_layers)),
        ("norm", shape.norm_parameters),
        ("output", shape.output_parameters),
    ]


def _divide(modules: Sequence[tuple[str, int]], num_parts: int) -> list[Sequence[tuple[str, int]]]:
    """Cuts the list where it comes nearest to equal numbers of parameters, into that many parts or,
    where one module is larger than a part, fewer."""
    reached = [0, *accumulate(number for _, number in modules)]
    cuts = {
        min(range(len(reached)), key=lambda position: abs(reached[position] * num_parts - part * reached[-1]))
        for part in range(num_parts + 1)
    }
    return [modules[start:stop] for start, stop in pairwise(sorted(cuts))]


def _lay_out(parts: Sequence[Sequence[tuple[str, int]]], job: Job, setting: Setting) -> Plan:
    starts = range(0, job.num_rows, job.rows_per_microbatch)
    group = Group(
        ranks=(0,),
        microbatches=tuple(
            Microbatch(0, start, min(start + job.rows_per_microbatch, job.num_rows)) for start in starts
        ),
        offload=setting.offload,
        recompute=setting.recompute,
    )
    ministages = tuple(Ministage(0, tuple(name for name, _ in part)) for part in parts)
    return Plan(global_batch=job.num_rows, groups=(group,), ministages=ministages)


def _measure(
    part: Sequence[tuple[str, int]],
    shape: ModelShape,
    job: Job,
    setting: Setting,
    *,
    borrows: bool,
    lends: bool,
) -> MinistageBytes:
    """Sizes of one ministage. One that borrows the embedding's weights does not update them, and on
    neither side do they leave the device; where nobody borrows, both uses are in one ministage."""
    tokens = [_count_tokens(name, shape, job, setting) for name, _ in part]
    rows = RowBytes(
        activation_bytes=job.seq_len * sum(module.kept for module in tokens),
        working_bytes=job.seq_len * max(module.working for module in tokens),
        boundary_bytes=job.seq_len * shape.dim * job.itemsize,
    )
    shared = shape.output_parameters
    units = [
        UnitSize(
            num_parameters=number,
            num_trainable=number,
            num_borrowed=shared if borrows and name == "output" else 0,
            num_tied=shared if (borrows and name == "output") or (lends and name == "tok_embeddings") else 0,
        )
        for name, number in part
        if borrows or not shape.is_tied or name != "output"
    ]
    return add_up(units, rows, ParameterBytes(job.itemsize, job.num_moments))


def _count_tokens(name: str, shape: ModelShape, job: Job, setting: Setting) -> TokenBytes:
    match name:
        case "tok_embeddings":
            return count_embedding()
        case "norm":
            return shape.norm
        case "output":
            return shape.output
    if setting.recompute == "layer":
        return shape.layer.recomputed(shape.dim * job.itemsize)
    return shape.layer


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
