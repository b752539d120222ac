"""The names of device types, by which clusters, plans and profiles speak of them.

What each can do is in `zorselike/cost/catalogue.py`, one entry for each name here.
"""

from __future__ import annotations

import re

from zorselike.errors import ClusterError
from zorselike.text.wording import suggest

DEVICE_TYPES = (
    *("T4", "P100", "P100-PCIe", "V100-16", "V100-32", "V100-PCIe-16", "V100-PCIe-32"),
    *("GTX1080Ti", "RTX2060", "RTX2070", "RTX2070Super", "RTX2080", "RTX2080Super", "RTX2080Ti", "TitanRTX"),
    *("QuadroRTX6000", "QuadroRTX8000"),
    *("RTX3060", "RTX3060Ti", "RTX3070", "RTX3070Ti", "RTX3080", "RTX3080-12", "RTX3080Ti"),
    *("RTX3090", "RTX3090Ti"),
    *("RTX4060", "RTX4060Ti-8", "RTX4060Ti-16", "RTX4070", "RTX4070Super", "RTX4070Ti", "RTX4070TiSuper"),
    *("RTX4080", "RTX4080Super", "RTX4090"),
    *("RTX5060Ti-8", "RTX5060Ti-16", "RTX5070", "RTX5070Ti", "RTX5080", "RTX5090"),
    *("A2", "A10", "A10G", "A30", "A40", "A4000", "A4500", "A5000", "A5500", "A6000"),
    *("L4", "L20", "L40", "L40S", "RTX4500Ada", "RTX5000Ada", "RTX6000Ada"),
    *("PRO6000", "PRO6000-MaxQ", "PRO6000-Server"),
    *("A100-40", "A100-80", "A800-80", "H20", "H100-PCIe", "H100-NVL", "H100-SXM", "H800-PCIe", "H800-SXM"),
    *("H200", "H200-NVL", "GH200", "B200", "B300"),
    *("MI210", "MI250", "MI300X", "MI325X", "MI355X", "CPU"),
)


def at_speed(name: str, share: float) -> str:
    """The type of a device that reaches only a share of its type's speed: `T4@0.70`."""
    return f"{split_speed(name)[0]}@{share:.2f}"


def split_speed(name: str) -> tuple[str, float]:
    """Of `T4@0.70` the type and the share of its speed; of a type itself 1."""
    base, _, share = name.partition("@")
    return base, float(share) if share else 1.0


def require_device_type(name: str) -> None:
    """Raises `ClusterError`, with the nearest names, for a type that does not exist."""
    if re.fullmatch(r"[^@]+(@0\.\d*[1-9]\d*|@1\.0*)?", name) and split_speed(name)[0] in DEVICE_TYPES:
        return
    letters = _letters(name)
    same_letters = [known for known in DEVICE_TYPES if _letters(known) == letters]
    contain_it = [known for known in DEVICE_TYPES if letters and letters in _letters(known)]
    nearest, hint = same_letters or contain_it, ""
    if not nearest:
        hint = suggest(name, DEVICE_TYPES)
        nearest = [] if hint else _named_within(name)
    if nearest:
        hint = f"; did you mean {' or '.join(nearest)}?"
    hint = hint or f"; the types are {', '.join(DEVICE_TYPES)}"
    raise ClusterError(f"there is no device type {name!r}{hint}")


def _named_within(name: str) -> list[str]:
    """What a driver's name may mean, such as `NVIDIA GeForce RTX 4090` or `Tesla V100-SXM2-16GB`."""
    words = re.findall("[a-z0-9]+", name.casefold())
    if {"laptop", "max"} & {*words}:  # Others than those of that number.
        return []
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    stems = {known: _letters(known.split("-")[0]) for known in DEVICE_TYPES}
    longest = max((len(stem) for stem in stems.values() if stem in runs), default=0)
    return [known for known, stem in stems.items() if stem in runs and len(stem) == longest]


def _letters(name: str) -> str:
    """Without case, spaces and dashes, which people write in different ways."""
    return "".join(char for char in name.casefold() if char.isalnum())
