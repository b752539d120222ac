"""A plan by proportion: every group gets layers, and every rank rows, as fast as it is. No search.

Ranks of one device type, or of one node, are a group. A rank's speed is rows per second of one layer of
the kind of which the model has most. Memory is not looked at: `zorselike simulate` shows what a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.sizes import is_layer
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Group, Ministage, Plan, Recompute
from zorselike.plan.shares import apportion, cut_in_proportion, expand_shares
from zorselike.plan.workload import Workload
from zorselike.planner.candidate.to_plan import name_devices
from zorselike.text.wording import count

GroupBy = Literal["type", "node"]


@dataclass(frozen=True, kw_only=True)
class SharesJob:
    """What a plan by proportion is asked for."""

    global_batch: int
    """Rows of a step."""
    group_by: GroupBy = "type"
    ministages: int = 1
    """Ministages of each group."""
    rows_per_microbatch: int = 1
    """At most; fewer on a device on which the profile found that fewer fit."""
    zero: int = 2
    recompute: Recompute = "none"
    offload: tuple[str, ...] = ()


def plan_shares(workload: Workload, cluster: Cluster, clock: LayerTimeModel, job: SharesJob) -> Plan:
    """A valid plan for all devices of the cluster.

    Raises:
        ConfigError: There are fewer modules than ministages, or fewer rows than asked for.
        ProfileError: Nothing is known of the speed of some device.
    """
    _check(job)
    speeds = [_row_speed(workload, cluster.device_type(place), clock, job) for place in cluster.places]
    members = _group_ranks(cluster, job.group_by)
    order = tuple(rank for ranks in members for rank in ranks)
    places = [cluster.places[rank] for rank in order]
    group_speeds = [sum(speeds[rank] for rank in ranks) for ranks in members]
    ministages = _cut(workload, group_speeds, job.ministages, _weights(workload, cluster, clock, job))
    groups: list[Group] = []
    start = 0
    for g, ranks in enumerate(members):
        numbered = tuple(range(start, start + len(ranks)))
        start += len(ranks)
        rows = apportion(job.global_batch, [speeds[rank] for rank in ranks])
        modules = [name for ministage in ministages if ministage.group == g for name in ministage.modules]
        layers = {_layer(workload, name, job) for name in modules}
        shares = [
            (rank, num_rows, _rows_at_once(layers, cluster.device_type(places[rank]), clock, job))
            for rank, num_rows in zip(numbered, rows, strict=True)
        ]
        groups.append(
            Group(
                ranks=numbered,
                microbatches=expand_shares(shares, job.global_batch),
                zero=job.zero,
                recompute=job.recompute,
                offload=job.offload,
            )
        )
    return Plan(
        global_batch=job.global_batch,
        groups=tuple(groups),
        ministages=ministages,
        devices=name_devices(cluster, places),
        sequence_length=workload.sequence_length,
        model=workload.model,
        cluster_fingerprint=cluster.fingerprint,
        workload_fingerprint=workload.fingerprint,
    ).validate()


def _check(job: SharesJob) -> None:
    for flag, number in (
        ("--global-batch", job.global_batch),
        ("--ministages", job.ministages),
        ("--rows-per-microbatch", job.rows_per_microbatch),
    ):
        if number < 1:
            raise ConfigError(f"plan: {flag} is {number}; it must be at least 1")


class _Layer(NamedTuple):
    kind: str
    recompute: Recompute


def _layer(workload: Workload, module: str, job: SharesJob) -> _Layer:
    return _Layer(workload.kind_of[module].name, job.recompute if is_layer(module) else "none")


def _typical(workload: Workload, job: SharesJob) -> _Layer:
    """That of which the model has most."""
    layers = [_layer(workload, module, job) for module, _ in workload.layers]
    return max(dict.fromkeys(layers), key=layers.count)


def _seconds(layer: _Layer, device: str, rows: int, clock: LayerTimeModel) -> float:
    """Forward and backward."""
    forward_s = clock.forward_s(layer.kind, device, rows, layer.recompute)
    return forward_s + clock.backward_s(layer.kind, device, rows, layer.recompute)


def _row_speed(workload: Workload, device: str, clock: LayerTimeModel, job: SharesJob) -> float:
    """Rows per second through one typical layer, in microbatches as they will be computed."""
    layer = _typical(workload, job)
    rows = _rows_at_once([layer], device, clock, job)
    seconds = _seconds(layer, device, rows, clock)
    if seconds <= 0:
        raise ConfigError(f"plan: {layer.kind} takes no time on {device} by the profile; measure it again")
    return rows / seconds


def _rows_at_once(layers: Iterable[_Layer], device: str, clock: LayerTimeModel, job: SharesJob) -> int:
    """What is asked for, or fewer where the profile found that fewer fit through one of the layers."""
    found = [clock.max_rows(layer.kind, device, layer.recompute) for layer in layers]
    return min(job.rows_per_microbatch, job.global_batch, *(most for most in found if most))


def _group_ranks(cluster: Cluster, group_by: GroupBy) -> list[list[int]]:
    """Positions in `cluster.places` of each group's devices, in the cluster's order."""
    found: dict[object, list[int]] = {}
    for rank, place in enumerate(cluster.places):
        key = cluster.device_type(place) if group_by == "type" else place.node
        found.setdefault(key, []).append(rank)
    return list(found.values())


def _weights(workload: Workload, cluster: Cluster, clock: LayerTimeModel, job: SharesJob) -> list[float]:
    """What each module costs beside the others: its share of a row's time, averaged over device types."""
    layers = [_layer(workload, module, job) for module, _ in workload.layers]
    weights = [0.0] * len(layers)
    for device in sorted({cluster.device_type(place) for place in cluster.places}):
        rows = _rows_at_once([_typical(workload, job)], device, clock, job)
        seconds = {layer: _seconds(layer, device, rows, clock) for layer in dict.fromkeys(layers)}
        total = sum(seconds[layer] for layer in layers)
        weights = [weight + seconds[layer] / total for weight, layer in zip(weights, layers, strict=True)]
    return weights


def _cut(
    workload: Workload, group_speeds: Sequence[float], ministages: int, weights: Sequence[float]
) -> tuple[Ministage, ...]:
    """Ministages that visit the groups in turn, each as large as its group is fast."""
    num_pieces = len(group_speeds) * ministages
    modules = [module for module, _ in workload.layers]
    if num_pieces > len(modules):
        raise ConfigError(
            f"plan: {count(len(group_speeds), 'group')} of {count(ministages, 'ministage')} need "
            f"{num_pieces} modules, {workload.model} has {len(modules)}; give fewer --ministages"
            + ("" if len(group_speeds) <= len(modules) else ", or group by type")
        )
    ends = cut_in_proportion(weights, list(group_speeds) * ministages)
    starts = [0, *ends[:-1]]
    return tuple(
        Ministage(i % len(group_speeds), tuple(modules[start:end]))
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
