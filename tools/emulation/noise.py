"""What else a machine does, and what that leaves in measurements."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..report import num_cores

MAX_OTHERS_SHARE = 0.1
"""Share of the cores above which what is measured is not a run alone."""


def straighten(seconds: Iterable[float]) -> tuple[float, ...]:
    """More bytes or rows take no less time: the least of each size and all larger ones."""
    return tuple(np.minimum.accumulate(list(seconds)[::-1])[::-1].tolist())


@dataclass(frozen=True)
class Moment:
    """Processor seconds up to now."""

    wall_s: float
    machine_s: float | None
    """Processor seconds of all processes; None where the system does not tell."""
    own_s: float
    """Processor seconds of this process and its children that have ended."""

    @classmethod
    def now(cls) -> Moment:
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(time.monotonic(), _machine_s(), sum(usage.ru_utime + usage.ru_stime for usage in own))

    def others_share(self, since: Moment) -> float | None:
        """The share of the cores that others used since then."""
        if self.machine_s is None or since.machine_s is None:
            return None
        others_s = (self.machine_s - since.machine_s) - (self.own_s - since.own_s)
        return max(0.0, others_s) / (num_cores() * (self.wall_s - since.wall_s))


def is_busy(shares: Sequence[float | None]) -> bool:
    """Whether others used too much of the machine in most of the runs."""
    known = sorted(share for share in shares if share is not None)
    return bool(known) and known[len(known) // 2] > MAX_OTHERS_SHARE


def _machine_s() -> float | None:
    """All but idle time, waiting for disks and time of guests, which is counted as the user's already."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:  # Not Linux.
        return None
    user, nice, system, _, _, irq, soft_irq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")
