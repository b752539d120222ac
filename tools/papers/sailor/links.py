"""Bandwidths and prices of Sailor's providers (github.com/eth-easl/sailor, `providers/`).

Between machines: `{zone: {GPU: {count: {zone: {GPU: {count: [[a, b, c], maximum]}}}}}}`; `count` GPUs of one
machine send at once to as many of another, and together they reach `GB/s = a log2(MB)^2 + b log2(MB) + c`
for messages of that size each. It was fitted to messages of 2^16 to 2^30 bytes and is constant outside
them here, and below the smallest of them at which the fit is positive. Pairs of A100 and V100, and what
says A100-80, are their authors' model and not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

from zorselike.errors import ClusterError
from zorselike.plan.cluster.cluster import Link
from zorselike.plan.cluster.link_curve import tabulate_fit

from ..data import read_object

MACHINES_FILE = "multizone_bandwidths_het.json"

SMALLEST_BYTES, LARGEST_BYTES = float(2**16), float(2**30)
"""Sizes that their script measured."""


@dataclass(frozen=True)
class Place:
    """GPUs of one type in one machine that compute a part of the model together, and send at once."""

    gpu: str
    """Sailor's name of the type."""
    zone: str
    tensor_parallel: int


class MachineLinks:
    """Links between machines, as `multizone_bandwidths_het.json` has them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fits = read_object(path)

    def together(self, source: Place, target: Place) -> Link:
        """What the GPUs of two machines reach together, both with as many; see `share`."""
        fit = self._find(source, target) or self._find(target, source)
        if fit is None:
            raise ClusterError(
                f"{self._path}: nothing between {source.tensor_parallel} {source.gpu} in {source.zone} and "
                f"{target.tensor_parallel} {target.gpu} in {target.zone}; add the pair"
            )
        return make_link(fit)

    def share(self, source: Place, target: Place) -> Link:
        """One GPU's share of what as many GPUs as the end with fewer has reach together.

        Where nothing was measured between so many GPUs, the nearest number that was is taken.

        Raises:
            ClusterError: Nothing was measured between such machines.
        """
        num_gpus = min(source.tensor_parallel, target.tensor_parallel)
        a, b = (replace(place, tensor_parallel=num_gpus) for place in (source, target))
        return divide(self.together(a, b), num_gpus)

    def _find(self, source: Place, target: Place) -> Any:
        by_count = self._fits.get(source.zone, {}).get(source.gpu, {})
        counts = {
            int(count): fit
            for count, by_zone in by_count.items()
            if (fit := by_zone.get(target.zone, {}).get(target.gpu, {}).get(count)) is not None
        }
        if not counts:
            return None
        return counts[min(counts, key=lambda count: abs(count - source.tensor_parallel))]


def make_link(fit: Any) -> Link:
    """A link of `[[a, b, c], maximum in bytes per second]`."""
    (a, b, c), maximum = fit
    smallest = SMALLEST_BYTES
    while smallest < LARGEST_BYTES / 2 and a * (x := log2(smallest / 1e6)) * x + b * x + c <= 0:
        smallest *= 2
    points = tabulate_fit(
        (a, b, c), max_bytes_per_s=float(maximum), smallest_bytes=smallest, largest_bytes=LARGEST_BYTES
    )
    return Link(max(rate for _, rate in points), points=points)


def divide(link: Link, ways: int) -> Link:
    """One of equal shares of a link, by the size of what one of them sends."""
    points = tuple((size, rate / ways) for size, rate in link.points)
    return Link(link.bandwidth_bytes_per_s / ways, link.latency_s, points)


def read_egress_prices(path: Path) -> dict[tuple[str, str], float]:
    """`communication_cost.json`: dollars per GB from zone to zone, free ones left out."""
    found = read_object(path)
    prices = found.get("communication_cost", found)
    return {
        (source, target): float(price)
        for source, targets in prices.items()
        for target, price in targets.items()
        if price
    }
