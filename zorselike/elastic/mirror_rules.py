"""How often state is mirrored. Who mirrors whose is `simulator.mirrors`' to say."""

from __future__ import annotations

import math

from zorselike.errors import ConfigError


def check_mirroring(share: float, every: int | None) -> None:
    """Raises `ConfigError` for a share of the time, or a number of steps, that cannot be."""
    if not 0 < share <= 1:
        raise ConfigError(f"mirror_share = {share}; give a share of the time, above 0 and up to 1")
    if every is not None and every < 1:
        raise ConfigError(f"mirror_every = {every}; give a number of steps, 1 or more")


def choose_interval(mirror_s: float, step_s: float, share: float) -> int:
    """The smallest k for which a mirror every k steps takes no more than a share of the time."""
    return max(1, math.ceil(mirror_s / (share * step_s) - 1e-9)) if step_s > 0 else 1
