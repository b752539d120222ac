"""Bytes that a rank's memory holds by purpose, now and at the peak."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from zorselike.cost.purposes import Purpose

Place = Literal["device", "host"]


class Ledger:
    """Bytes held on the device and on the host; the offload code enters what it allocates and frees."""

    def __init__(self) -> None:
        self._held: defaultdict[tuple[Purpose, Place], int] = defaultdict(int)
        self._peaks: defaultdict[tuple[Purpose, Place], int] = defaultdict(int)
        self._device_peak = 0

    def hold(self, purpose: Purpose, place: Place, num_bytes: int) -> None:
        """Enters an allocation."""
        key = (purpose, place)
        self._held[key] += num_bytes
        self._peaks[key] = max(self._peaks[key], self._held[key])
        self._device_peak = max(self._device_peak, self.device_bytes)

    def drop(self, purpose: Purpose, place: Place, num_bytes: int) -> None:
        """Enters a free."""
        self._held[purpose, place] -= num_bytes
        assert self._held[purpose, place] >= 0, f"{purpose} on the {place} freed twice"

    def held(self, purpose: Purpose, place: Place) -> int:
        return self._held[purpose, place]

    def peak(self, purpose: Purpose, place: Place) -> int:
        return self._peaks[purpose, place]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now, over all purposes."""
        return sum(count for (_, place), count in self._held.items() if place == "device")

    @property
    def device_peak(self) -> int:
        """The most that was on the device at one time."""
        return self._device_peak
