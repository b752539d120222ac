"""The names of device types, by which clusters, plans and profiles speak of them.

What each can do is in `zorselike/cost/catalogue.py`, one entry for each name here.
"""

from __future__ import annotations

import re

from zorselike.errors import ClusterError
from zorselike.text.wording import suggest

DEVICE_TYPES = (
    *("T4", "P100", "P100-PCIe", "V100-16", "V100-32", "V100-PCIe-16", "V100-PCIe-32"),
    *("RTX2080Ti", "TitanRTX", "RTX3070", "RTX3080", "RTX3090", "RTX3090Ti", "RTX4080", "RTX4090", "RTX5090"),
    *("A10", "A10G", "A30", "A40", "A6000", "L4", "L40", "L40S", "RTX6000Ada"),
    *("A100-40", "A100-80", "A800-80", "H100-PCIe", "H100-NVL", "H100-SXM", "H200", "H200-NVL", "GH200"),
    *("B200", "MI250", "MI300X", "CPU"),
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
    same_letters = [known for known in DEVICE_TYPES if _letters(known) == _letters(name)]
    starts_alike = [known for known in DEVICE_TYPES if _letters(known).startswith(_letters(name))]
    if nearest := same_letters or starts_alike:
        hint = f"; did you mean {' or '.join(nearest)}?"
    else:
        hint = suggest(name, DEVICE_TYPES) or f"; the types are {', '.join(DEVICE_TYPES)}"
    raise ClusterError(f"there is no device type {name!r}{hint}")


def _letters(name: str) -> str:
    """Without case, spaces and dashes, which people write in different ways."""
    return "".join(char for char in name.casefold() if char.isalnum())
