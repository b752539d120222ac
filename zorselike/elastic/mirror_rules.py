"""Who mirrors whose state, and how often."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zorselike.errors import ConfigError


def check_mirroring(share: float, every: int | None) -> None:
    """Raises `ConfigError` for a share of the time, or a number of steps, that cannot be."""
    if not 0 < share <= 1:
        raise ConfigError(f"mirror_share = {share}; give a share of the time, above 0 and up to 1")
    if every is not None and every < 1:
        raise ConfigError(f"mirror_every = {every}; give a number of steps, 1 or more")


def assign_mirrors(nodes: Sequence[str], num_bytes: Sequence[int]) -> dict[int, int]:
    """Which rank mirrors which: one of another node where there is one, else another rank; the largest first,
    each to the one that holds least. By rank; a rank alone has no mirror."""
    load = dict.fromkeys(range(len(nodes)), 0)
    found = {}
    for rank in sorted(load, key=lambda rank: (-num_bytes[rank], rank)):
        others = [other for other in load if other != rank]
        far = [other for other in others if nodes[other] != nodes[rank]]
        if others:
            size = len(nodes)
            holder = min(far or others, key=lambda other: (load[other], (other - rank) % size))
            found[rank] = holder
            load[holder] += max(1, num_bytes[rank])
    return found


def choose_interval(mirror_s: float, step_s: float, share: float) -> int:
    """The smallest k for which a mirror every k steps takes no more than a share of the time."""
    return max(1, math.ceil(mirror_s / (share * step_s) - 1e-9)) if step_s > 0 else 1
