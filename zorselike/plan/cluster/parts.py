"""What a cluster is made of: nodes with their devices, and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from zorselike.plan.cluster.link_curve import interpolate_rate
from zorselike.text.annotations import MAX_BYTES_PER_S, MEMORY, RATE, SIZE, TIME, Key, Label, Must, Quantity

Rate = Annotated[
    float,
    RATE,
    Must(
        lambda rate: 0 < rate <= MAX_BYTES_PER_S,
        "give one above 0 and up to 10TB/s, which no link exceeds; 25Gb/s are bits and 25GB/s bytes",
    ),
]
Latency = Annotated[
    float,
    TIME,
    Must(lambda seconds: 0 <= seconds <= 10, 'give one from 0s to 10s, such as "10us"'),
]
Memory = Annotated[
    int, MEMORY, Must(lambda size: 0 < size <= 2**50, 'write what the machine has, such as "256GiB"')
]
Size = Annotated[float, SIZE, Must(lambda size: 0 < size < float("inf"), "give a size above 0")]
Point = Annotated[tuple[Size, Rate], 'a size with its bandwidth, ["1MB", "1.2GB/s"]']


@dataclass(frozen=True)
class Link:
    """How fast bytes go one way: a bandwidth and a latency, or a fitted curve."""

    bandwidth_bytes_per_s: Rate
    """The most that it carries, however many share it."""
    latency_s: Latency = 0.0
    points: tuple[Point, ...] = ()
    """What one transfer of a size reaches, `(bytes, bytes_per_s)` by rising size; empty: the bandwidth.
    Interpolated over the logarithm of the size, constant outside."""

    def rate(self, num_bytes: float) -> float:
        """Bytes per second that one transfer of this size reaches if it is alone, latency not counted."""
        return interpolate_rate(self.points, num_bytes, max_bytes_per_s=self.bandwidth_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine."""

    name: Annotated[Label, Must(bool, "give it its hostname")]
    devices: Annotated[tuple[str, ...], Must(bool, "give the type of each device, or leave the node out")]
    """The type of each device, by local rank: names of the device catalogue (`A100-40`, `T4`)."""
    memory_bytes: Annotated[tuple[Memory, ...], Key("device_memory")] = ()
    """Memory of each device, where it is not the catalogue's."""
    zone: Label = ""
    region: Label = ""
    price_per_hour: Quantity = 0.0
    """Price of the whole node, in the cluster's currency."""
    host_memory_bytes: Memory | None = None
    """RAM for what is offloaded; None: not known, not limited."""
    host_link: Link | None = None
    """One device's link to the host's memory, each way; None: the catalogue's bus."""
    host_link_both_bytes_per_s: Rate | None = None
    """What both ways carry together when both are busy; None: each way has its own bandwidth."""
    fabric: Link | None = None
    """Link between two devices of this node; None where there is one device."""
    fabric_total_bytes_per_s: Rate | None = None
    """What all devices of the node carry at once; None: every device has `fabric` in and out."""
    nic: Link | None = None
    """The node's way out and, of the same size, its way in; None: the links to others bound it alone."""


class Place(NamedTuple):
    """Where a rank is."""

    node: int
    local_rank: int
