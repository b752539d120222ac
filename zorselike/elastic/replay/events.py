"""Which devices are there at which time: files of recorded availability."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from zorselike.errors import ConfigError, FileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.text.files import read_text
from zorselike.text.wording import list_few, suggest

TIME = "time_s"
_TIMES = (TIME, "time")
ANY = "gpus"
"""A column that counts devices of whatever type."""


class Stretch(NamedTuple):
    """A time during which the same devices are there."""

    start_s: float
    stop_s: float
    devices: tuple[int, ...]
    """Indices into `Cluster.places`, rising."""


def read_stretches(path: str, cluster: Cluster, until_s: float | None = None) -> list[Stretch]:
    """What a file of events says of a cluster's devices, from the first event to `until_s` (by default the
    last event).

    The file is CSV with a header, or a JSON list of objects: `time_s` (or `time`), and how many devices are
    there from then on, in columns named after a type of device, a node, or `gpus` for any. Of each the first
    so many in the order of the cluster file are there; what no column names is always there. Case does not
    count. JSON of SkyPilot's spot-traces (github.com/skypilot-org/spot-traces) is read as it is: numbers of
    `gpus`, at even intervals.

    Raises:
        ConfigError: says what is wrong with the file, and where.
    """
    records = _read_records(path)
    columns = _find_columns(path, records[0], cluster)
    times = [_number(record, TIME, path, i) for i, record in enumerate(records)]
    if any(b <= a for a, b in pairwise(times)):
        later = next(i for i in range(1, len(times)) if times[i] <= times[i - 1])
        raise ConfigError(
            f"{path}: record {later + 1} is not later than the one before; sort the file by time"
        )
    end_s = times[-1] if until_s is None else until_s
    if end_s <= times[0]:
        raise ConfigError(
            f"{path}: nothing lies between the first event at {times[0]:g} s and the end at {end_s:g} s; "
            "give a later event or --until"
        )
    found: list[Stretch] = []
    for i, record in enumerate(records):
        start, stop = times[i], min(end_s, times[i + 1] if i + 1 < len(times) else end_s)
        devices = tuple(sorted(_list_there(record, columns, cluster, path, i)))
        if stop <= start:
            continue
        if found and found[-1].devices == devices:
            found[-1] = found[-1]._replace(stop_s=stop)
        else:
            found.append(Stretch(start, stop, devices))
    return found


def _read_records(path: str) -> Sequence[Mapping[str, object]]:
    """With the names of columns in small letters."""
    try:
        text = read_text(Path(path).expanduser(), "record")
    except FileError as error:
        raise ConfigError(f"{path}: {error}") from None
    if text.lstrip().startswith(("[", "{")):
        try:
            records = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: is no JSON ({error})") from None
        if isinstance(records, dict):
            records = _read_ticks(path, records)
        if not all(isinstance(record, dict) for record in records):
            raise ConfigError(f"{path}: the list must hold objects such as {{'time_s': 0, 'gpus': 16}}")
    else:
        records = list(csv.DictReader(text.splitlines()))
    if not records:
        raise ConfigError(f"{path}: has no events; write a header such as {TIME},{ANY} and a line for each")
    return [{str(name).strip().lower(): value for name, value in record.items()} for record in records]


def _read_ticks(path: str, table: Mapping[str, Any]) -> list[Mapping[str, object]]:
    """Numbers of devices at even intervals, as records."""
    try:
        gap_s, numbers = float(table["metadata"]["gap_seconds"]), list(table["data"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: an object must have 'gap_seconds' in its 'metadata' and a list of numbers as 'data', "
            "as in SkyPilot's spot-traces; else give a list of objects"
        ) from None
    return [{TIME: i * gap_s, ANY: number} for i, number in enumerate(numbers)]


def _find_columns(path: str, first: Mapping[str, object], cluster: Cluster) -> dict[str, Sequence[int]]:
    """By name: the devices that a column counts, in the cluster's order."""
    if not any(name in first for name in _TIMES):
        raise ConfigError(f"{path}: has no column '{TIME}'; its columns are {list_few(sorted(first))}")
    members: dict[str, list[int]] = {ANY: [*range(cluster.num_devices)]}
    for i, place in enumerate(cluster.places):
        for name in (cluster.device_type(place), cluster.nodes[place.node].name):
            members.setdefault(name.lower(), []).append(i)
    columns: dict[str, Sequence[int]] = {}
    for name in first:
        if name in _TIMES:
            continue
        if name not in members:
            raise ConfigError(
                f"{path}: column '{name}' is neither a type of device nor a node of the cluster, nor "
                f"'{ANY}'{suggest(name, members)}"
            )
        columns[name] = members[name]
    counted = [device for devices in columns.values() for device in devices]
    if len(counted) > len({*counted}):
        raise ConfigError(f"{path}: columns {list_few(sorted(columns))} count the same devices twice")
    if not columns:
        raise ConfigError(f"{path}: no column says which devices are there; name one '{ANY}'")
    return columns


def _list_there(
    record: Mapping[str, object], columns: Mapping[str, Sequence[int]], cluster: Cluster, path: str, i: int
) -> Iterator[int]:
    counted = {device for devices in columns.values() for device in devices}
    yield from (device for device in range(cluster.num_devices) if device not in counted)
    for name, devices in columns.items():
        number = _number(record, name, path, i)
        if number != int(number) or not 0 <= number <= len(devices):
            raise ConfigError(
                f"{path}: record {i + 1}: {name} is {number:g}; the cluster has {len(devices)} of them"
            )
        yield from devices[: int(number)]


def _number(record: Mapping[str, object], name: str, path: str, i: int) -> float:
    value = next((record[key] for key in (_TIMES if name == TIME else (name,)) if key in record), None)
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not isfinite(number) or number < 0:
        raise ConfigError(f"{path}: record {i + 1}: {name} is {value!r}; it must be a number, 0 or more")
    return number
