"""The same run with other seconds and bytes, so that it fits two cores: slower time, lighter tensors.

Times grow by one factor and bytes shrink by another; bandwidths follow, so that everything takes the
same share of a step as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, LinkTimes, Profile
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload

SLEEP_PER_RANK_S = 0.1 / 16
"""The shortest sleep of a ministage for each rank of a run: what all ranks' actions cost together stays
under 30 % of two cores over that time."""
MIN_SLEEP_S = 0.04

LARGEST_UNIT_PARAMETERS = 50_000
"""Of an emulated layer: enough that a slow link takes its time, little enough that copies do not."""


def find_shortest_s(plan: Plan, workload: Workload, cluster: Cluster, profile: Profile) -> float:
    """The shortest forward of a microbatch through a ministage."""
    places = cluster.place_ranks(plan)
    clock = LayerTimeModel(profile, workload)
    return min(
        sum(
            clock.forward_s(
                workload.kind_of[module].name,
                cluster.device_type(places[microbatch.rank]),
                microbatch.num_rows,
                "none",
            )
            for module in ministage.modules
        )
        for ministage in plan.ministages
        for microbatch in plan.groups[ministage.group].microbatches
    )


def find_time_scale(plan: Plan, workload: Workload, cluster: Cluster, profile: Profile) -> float:
    """By how much sleeps must be longer for all ranks to fit two cores."""
    wanted_s = max(MIN_SLEEP_S, SLEEP_PER_RANK_S * plan.num_ranks)
    return wanted_s / find_shortest_s(plan, workload, cluster, profile)


def find_byte_scale(workload: Workload) -> float:
    """By how much tensors must be smaller; 1 if they are small."""
    largest = max(kind.num_parameters for kind in workload.kinds.values())
    return min(1.0, LARGEST_UNIT_PARAMETERS / largest)


def scale_workload(workload: Workload, bytes_by: float) -> Workload:
    """Lighter layers of as many FLOPs. Raises `ValueError` for tied weights, which are not emulated."""
    if workload.ties:
        raise ValueError(
            f"workload {workload.model} ties weights, which is not emulated; give one without ties"
        )

    def lighten(kind: LayerKind) -> LayerKind:
        return replace(
            kind,
            num_parameters=_scale(kind.num_parameters, bytes_by),
            num_trainable=None if kind.num_trainable is None else _scale(kind.num_trainable, bytes_by),
            input_elements_per_row=max(1, _scale(kind.input_elements_per_row, bytes_by)),
            output_elements_per_row=max(1, _scale(kind.output_elements_per_row, bytes_by)),
            activation_bytes_per_row=_scale(kind.activation_bytes_per_row, bytes_by),
            working_bytes_per_row=_scale(kind.working_bytes_per_row, bytes_by),
        )

    return replace(workload, kinds={name: lighten(kind) for name, kind in workload.kinds.items()})


def _scale(number: int, by: float) -> int:
    return math.ceil(number * by)


def scale_profile(profile: Profile, workload: Workload, *, time_by: float, bytes_by: float) -> Profile:
    """Slower layers, updates and copies of a workload that was scaled likewise."""

    def slow(times: LayerTimes) -> LayerTimes:
        return replace(
            times,
            forward_s=tuple(time_by * seconds for seconds in times.forward_s),
            backward_s=tuple(time_by * seconds for seconds in times.backward_s),
        )

    def slow_link(times: LinkTimes) -> LinkTimes:
        return replace(
            times,
            num_bytes=tuple(_scale(size, bytes_by) for size in times.num_bytes),
            seconds=tuple(time_by * seconds for seconds in times.seconds),
        )

    rate_by = bytes_by / time_by
    return replace(
        profile,
        workload_fingerprint="" if not profile.workload_fingerprint else workload.fingerprint,
        layers=tuple(slow(times) for times in profile.layers),
        updates=tuple(
            replace(
                update,
                seconds_per_parameter=update.seconds_per_parameter / rate_by,
                seconds_per_call=update.seconds_per_call * time_by,
            )
            for update in profile.updates
        ),
        host_links=(),  # Copies of an emulated device are the machine's own.
        collectives=(),
        links=tuple(slow_link(times) for times in profile.links),
    )


def scale_cluster(cluster: Cluster, *, time_by: float, bytes_by: float) -> Cluster:
    """Slower links, so that a scaled transfer takes the scaled time."""
    rate_by = bytes_by / time_by

    def slow(link: Link | None) -> Link | None:
        return None if link is None else _slow(link)

    def _slow(link: Link) -> Link:
        points = tuple((size * bytes_by, rate * rate_by) for size, rate in link.points)
        return Link(link.bandwidth_bytes_per_s * rate_by, link.latency_s * time_by, points)

    def slow_all(links: Mapping[tuple[str, str], Link]) -> dict[tuple[str, str], Link]:
        return {pair: _slow(link) for pair, link in links.items()}

    def slow_node(node: Node) -> Node:
        total = node.fabric_total_bytes_per_s
        return replace(
            node,
            fabric=slow(node.fabric),
            nic=slow(node.nic),
            fabric_total_bytes_per_s=None if total is None else total * rate_by,
        )

    return replace(
        cluster,
        nodes=tuple(slow_node(node) for node in cluster.nodes),
        node_links=slow_all(cluster.node_links),
        zone_links=slow_all(cluster.zone_links),
        region_links=slow_all(cluster.region_links),
        default_link=slow(cluster.default_link),
        shared_links={pair: rate * rate_by for pair, rate in cluster.shared_links.items()},
    )
