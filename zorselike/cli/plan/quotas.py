"""`--quota`: upper limits on devices of a type, in total or in a zone or region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.text.wording import suggest


@dataclass(frozen=True)
class Quota:
    """Upper limit on devices of one type in a zone or region, or in total."""

    device: str
    where: str
    """A zone or a region; empty for the total."""
    limit: int

    @property
    def name(self) -> str:
        """`us-east/A100-40`."""
        return f"{self.where}/{self.device}" if self.where else self.device


def read_quotas(words: Sequence[str], cluster: Cluster) -> tuple[Quota, ...]:
    """Reads quotas such as `T4=4` and `us-east/A100-40=16`; raises `ConfigError` for unknown names."""
    quotas = tuple(_read_quota(word, cluster) for word in words)
    names = [quota.name for quota in quotas]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"plan: --quota {name} is given twice; give it once")
    return quotas


def choose_devices(cluster: Cluster, quotas: Sequence[Quota]) -> tuple[int, ...]:
    """Devices that all quotas allow together, as indices into `cluster.places`.

    Whole nodes come first, in the cluster's order, then parts of nodes; what no quota names is not limited.
    """
    left = {quota: quota.limit for quota in quotas}
    chosen: set[int] = set()
    blocks = list(_list_blocks(cluster))
    for is_whole in (True, False):
        for devices, node, device in blocks:
            bounds = [quota for quota in quotas if _concerns(quota, cluster, node, device)]
            room = min([len(devices), *(left[quota] for quota in bounds)])
            if chosen.isdisjoint(devices) and (room == len(devices) or not is_whole):
                chosen.update(devices[:room])
                for quota in bounds:
                    left[quota] -= room
    return tuple(sorted(chosen))


def _read_quota(word: str, cluster: Cluster) -> Quota:
    name, equals, number = word.rpartition("=")
    if not equals or not number.isdecimal():
        raise ConfigError(f"plan: --quota '{word}' is not a quota; write it as T4=4, or us-east/A100-40=16")
    where, _, device = name.rpartition("/")
    types = sorted({device for node in cluster.nodes for device in node.devices})
    by_folded = {known.casefold(): known for known in types}
    if device.casefold() not in by_folded:
        raise ConfigError(
            f"plan: --quota {word}: the cluster has no device '{device}'"
            f"{suggest(device, types) or '; it has ' + ', '.join(types)}"
        )
    known_places = sorted({place for node in cluster.nodes for place in (node.zone, node.region) if place})
    if where and where not in known_places:
        raise ConfigError(
            f"plan: --quota {word}: the cluster has no zone or region '{where}'"
            f"{suggest(where, known_places) or '; it has ' + (', '.join(known_places) or 'none')}"
        )
    return Quota(by_folded[device.casefold()], where, int(number))


def _list_blocks(cluster: Cluster) -> Iterator[tuple[list[int], int, str]]:
    """Devices of one type on one node: their indices, the node's index and the type."""

    def key(device: int) -> tuple[int, str]:
        place = cluster.places[device]
        return place.node, cluster.device_type(place)

    # Types may alternate among local ranks.
    for (node, device), devices in groupby(sorted(range(cluster.num_devices), key=key), key):
        yield list(devices), node, device


def _concerns(quota: Quota, cluster: Cluster, node: int, device: str) -> bool:
    places = ("", cluster.nodes[node].zone, cluster.nodes[node].region)
    return quota.device == device and quota.where in places
