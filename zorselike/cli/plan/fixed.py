"""`--fix`: settings that the planner must keep."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar, get_args

from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import OFFLOAD_KINDS, GradReduce, Recompute
from zorselike.planner.groups.replicas import DEGREES
from zorselike.planner.problem import Fixed
from zorselike.text.wording import suggest

T = TypeVar("T")

KEYS = (
    "groups",
    "zero",
    "recompute",
    "offload",
    "ministages",
    "rows_per_microbatch",
    "grad_reduce",
    "overlap_grad_reduce",
    "in_flight",
    "tensor_parallel",
)

_COMMON: Mapping[str, Callable[[Cluster, Place], Hashable]] = {
    "type": lambda cluster, place: cluster.device_type(place),
    "node": lambda cluster, place: place.node,
    "zone": lambda cluster, place: cluster.nodes[place.node].zone,
}
"""Attribute that the devices of a group share, by its keyword."""


def read_fixed(
    words: Sequence[str], cluster: Cluster, devices: Sequence[int], *, spans_regions: bool
) -> Fixed:
    """Reads the settings of `KEY=VALUE` words.

    Args:
        words: such as `zero=2`, `offload=none`, `groups=node`, `groups=a:0-3,b/c`.
        cluster: the cluster, whose nodes may be named.
        devices: usable devices, as indices into `cluster.places`.
        spans_regions: whether a group may have devices of several regions.

    Raises:
        ConfigError: a key or value does not exist, or a key is given twice.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = map(str.strip, word.partition("="))
        if not equals or key not in KEYS:
            meant = "" if key in KEYS else suggest(key, KEYS)
            raise ConfigError(
                f"plan: --fix '{word}' is not a setting{meant or '; write it as zero=2'}; "
                f"keys are {', '.join(KEYS)}"
            )
        if key in given:
            raise ConfigError(f"plan: --fix {key} is given twice; give it once")
        given[key] = value
    groups = given.get("groups")
    offload = given.get("offload")
    overlap = _read_word("overlap_grad_reduce", given, ("true", "false"))
    degree = _read_word("tensor_parallel", given, (*map(str, DEGREES), "auto"))
    in_flight = _read_word("in_flight", given, ("bounded", "unbounded"))
    return Fixed(
        groups=None if groups is None else _read_groups(groups, cluster, devices, spans_regions),
        ministages=_read_number("ministages", given),
        rows_per_microbatch=_read_number("rows_per_microbatch", given),
        zero=_read_number("zero", given, most=3),
        grad_reduce=_read_word("grad_reduce", given, get_args(GradReduce)),
        overlap_grad_reduce=None if overlap is None else overlap == "true",
        recompute=_read_word("recompute", given, get_args(Recompute)),
        offload=None if offload is None else _read_offload(offload),
        bounds_in_flight=None if in_flight is None else in_flight == "bounded",
        tensor_parallel=None if degree in (None, "auto") else int(degree),
    )


def _read_number(key: str, given: Mapping[str, str], most: int | None = None) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if not value.isdecimal() or (most is not None and int(value) > most):
        expected = "a whole number" if most is None else f"0 to {most}"
        raise ConfigError(f"plan: --fix {key}={value}: give {expected}")
    return int(value)


def _read_word(key: str, given: Mapping[str, str], words: tuple[T, ...]) -> T | None:
    value = given.get(key)
    if value is not None and value not in words:
        raise ConfigError(f"plan: --fix {key}={value}: give {' or '.join(map(str, words))}")
    return next((word for word in words if word == value), None)


def _read_offload(text: str) -> tuple[str, ...]:
    kinds = () if text == "none" else tuple(text.split(","))
    for kind in kinds:
        if kind not in OFFLOAD_KINDS:
            raise ConfigError(
                f"plan: --fix offload={text}: give none, or any of {', '.join(OFFLOAD_KINDS)} with commas"
            )
    if len({*kinds}) < len(kinds):
        raise ConfigError(f"plan: --fix offload={text}: name each once")
    return kinds


# -- groups ------------------------------------------------------------------------------------


def _read_groups(
    text: str, cluster: Cluster, devices: Sequence[int], spans_regions: bool
) -> tuple[tuple[int, ...], ...]:
    """Groups by a shared attribute, in the order of Zorse 4.3.3, or as they are listed."""
    if text in _COMMON:
        return _group_by(_COMMON[text], cluster, devices, spans_regions)
    if not text:
        raise ConfigError("plan: --fix groups= is empty; give type, node, zone, or nodes: a:0-3,b/c")
    return tuple(_read_group(group, cluster, devices) for group in text.split("/"))


def _group_by(
    common: Callable[[Cluster, Place], Hashable],
    cluster: Cluster,
    devices: Sequence[int],
    spans_regions: bool,
) -> tuple[tuple[int, ...], ...]:
    from zorselike.planner.groups.bandwidths import read_bandwidths, sort_groups
    from zorselike.planner.groups.order import order_by_bandwidth

    found: dict[Hashable, list[int]] = {}
    for device in devices:
        place = cluster.places[device]
        region = "" if spans_regions else cluster.nodes[place.node].region
        found.setdefault((region, common(cluster, place)), []).append(device)
    if not found:
        return ()
    groups = sort_groups(found.values())
    bandwidths = read_bandwidths(cluster, devices, span_regions=spans_regions)
    return tuple(groups[i] for i in order_by_bandwidth(bandwidths, groups))


def _read_group(text: str, cluster: Cluster, devices: Sequence[int]) -> tuple[int, ...]:
    """Devices of `a:0-3,b`: local ranks 0 to 3 of node a and all usable devices of node b; `a-*` stands for
    all nodes whose names match."""
    found: list[int] = []
    for entry in text.split(","):
        pattern, colon, ranks = entry.partition(":")
        names = [node.name for node in cluster.nodes]
        nodes = {n for n, name in enumerate(names) if fnmatchcase(name, pattern)}
        if not nodes:
            raise ConfigError(
                f"plan: --fix groups: the cluster has no node '{pattern}'"
                f"{suggest(pattern, names) or '; write type, node, zone, or nodes: a:0-3,b/c'}"
            )
        allowed = _read_ranks(ranks, entry) if colon else None
        members = [
            device
            for device in devices
            if cluster.places[device].node in nodes
            and (allowed is None or cluster.places[device].local_rank in allowed)
        ]
        if len(members) < len(nodes) * (1 if allowed is None else len(allowed)):
            raise ConfigError(
                f"plan: --fix groups: {entry} includes devices that do not exist or that quotas exclude; "
                "name others"
            )
        found += members
    return tuple(found)


def _read_ranks(text: str, entry: str) -> range:
    """Local ranks of `0-3` or `2`."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or not (last.isdecimal() if dash else True) or int(last or first) < int(first):
        raise ConfigError(
            f"plan: --fix groups: '{entry}' is not valid; write local ranks as {entry.split(':')[0]}:0-3"
        )
    return range(int(first), int(last or first) + 1)
