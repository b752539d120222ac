"""A plan by proportion: every group gets layers, and every rank rows, as fast as it is. No search.

Ranks of one device type, or of one node, are a group. A rank's speed is rows per second of one layer of
the kind of which the model has most. Memory is not looked at: `zorselike simulate` shows what a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import Group, Plan, Recompute
from zorselike.plan.shares import apportion, cut_in_proportion, expand_shares
from zorselike.plan.workload import Workload
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.to_plan import add_fingerprints, assemble_plan
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
    for option in ("global_batch", "ministages", "rows_per_microbatch"):
        if (number := getattr(job, option)) < 1:
            raise ConfigError(f"plan: --{option.replace('_', '-')} is {number}; it must be at least 1")
    speed = _Speed(LayerTable(workload, clock), job)
    members = _group_devices(cluster, job.group_by)
    places = [place for own in members for place in own]
    speeds = [[speed.rows_per_s(cluster.device_type(place)) for place in own] for own in members]
    types = sorted({cluster.device_type(place) for place in places})
    owners = [*range(len(members))] * job.ministages
    ends = _cut(workload, speed.weigh_layers(types), [sum(speeds[g]) for g in owners], len(members))
    groups: list[Group] = []
    start = 0
    for g, own in enumerate(members):
        ranks = tuple(range(start, start + len(own)))
        start += len(own)
        cuts = [cut for owner, cut in zip(owners, pairwise((0, *ends)), strict=True) if owner == g]
        keys = {key for cut in cuts for key in speed.table.keys[slice(*cut)]}
        at_once = [speed.rows_at_once(keys, cluster.device_type(place)) for place in own]
        shares = zip(ranks, apportion(job.global_batch, speeds[g]), at_once, strict=True)
        groups.append(
            Group(
                ranks=ranks,
                microbatches=expand_shares(list(shares), job.global_batch),
                zero=job.zero,
                recompute=job.recompute,
                offload=job.offload,
            )
        )
    plan = assemble_plan(workload, cluster, places, groups, ends, owners)
    return add_fingerprints(plan, workload, cluster).validate()


class _Speed:
    """How fast layers are in microbatches as they will be computed."""

    def __init__(self, table: LayerTable, job: SharesJob) -> None:
        self.table, self._job = table, job
        flops = {key: table.kind(key).forward_flops_per_row for key in table.counts}
        self._typical = max(table.counts, key=lambda key: (flops[key] > 0, table.counts[key], flops[key]))
        """The layer that computes anything of which the model has most; of as many, that which computes
        most."""

    def rows_at_once(self, keys: Iterable[str], device: str) -> int:
        """What is asked for, or fewer where the profile found that fewer fit through one of the layers."""
        found = self.table.most_rows(device, self._job.recompute, keys)
        return min(self._job.rows_per_microbatch, self._job.global_batch, found or self._job.global_batch)

    def rows_per_s(self, device: str) -> float:
        """Through one typical layer."""
        rows = self.rows_at_once([self._typical], device)
        seconds = self.table.seconds(self._typical, device, rows, self._job.recompute).both
        if seconds <= 0:
            name = self.table.kind(self._typical).name
            raise ConfigError(f"plan: {name} takes no time on {device} by the profile; measure it again")
        return rows / seconds

    def weigh_layers(self, devices: Iterable[str]) -> list[float]:
        """What each costs beside the others: its share of a row's time, averaged over device types."""
        weights = [0.0] * len(self.table.keys)
        for device in devices:
            rows = self.rows_at_once([self._typical], device)
            seconds = [
                self.table.seconds(key, device, rows, self._job.recompute).both for key in self.table.keys
            ]
            total = sum(seconds)
            weights = [weight + own / total for weight, own in zip(weights, seconds, strict=True)]
        return weights


def _group_devices(cluster: Cluster, group_by: GroupBy) -> list[list[Place]]:
    """In the cluster's order."""
    found: dict[object, list[Place]] = {}
    for place in cluster.places:
        key = cluster.device_type(place) if group_by == "type" else place.node
        found.setdefault(key, []).append(place)
    return list(found.values())


def _cut(workload: Workload, weights: Sequence[float], speeds: Sequence[float], num_groups: int) -> list[int]:
    """Where each ministage ends, each as large as its group is fast."""
    num_modules, per_group = len(workload.layers), len(speeds) // num_groups
    if len(speeds) > num_modules:
        raise ConfigError(
            f"plan: {count(num_groups, 'group')} of {count(per_group, 'ministage')} need "
            f"{len(speeds)} modules, {workload.model} has {num_modules}; give fewer --ministages"
            + ("" if num_groups <= num_modules else ", or group by type")
        )
    return cut_in_proportion(weights, speeds)
