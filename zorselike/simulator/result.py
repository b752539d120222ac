"""What a simulated step took, where the time went, and what it held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from zorselike.cost.memory import MemoryWalk
from zorselike.schedule.actions import Action
from zorselike.simulator.garbage import without_collection

Track = Literal["compute", "update", "gather", "reduce", "send", "receive", "to device", "to host", "host"]


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that one rank did, in seconds since the step began: below 0 where a rank is ahead.

    Of one track none overlap, but `send` and `receive` are a track for each peer and direction, and
    `to device` and `to host` one each for shards, activations and optimizer state. A computation that waits
    for one gather after another has a span for each part.
    """

    rank: int
    track: Track
    start_s: float
    stop_s: float
    action: Action


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Where one rank's step went, in seconds; the first four add up to the iteration time."""

    busy_s: float
    """It computes: forwards, backwards, updates that nothing hides, and its host's own work."""
    waiting_for_data_s: float
    """It waits for activations or gradients of another group that are not computed yet."""
    exposed_communication_s: float
    """It waits for bytes on a wire, or for the others of a collective."""
    exposed_copies_s: float
    """It waits for copies between host and device."""
    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated step in a steady run."""

    iteration_s: float
    ranks: tuple[RankTimes, ...]
    memory: Sequence[MemoryWalk]
    """Of each rank: bytes that tensors ask for at every action of its list, and the context."""
    bytes_by_link: Mapping[str, float]
    """By name of the capacity."""
    cost: float
    """Money of one step: device-hours and egress."""
    egress_cost: float
    allocator_share: float = 0.0
    """Of tensors' bytes, what the allocator adds."""
    spans: tuple[Span, ...] = ()
    """By time, if they were asked for."""
    action_times: Mapping[int, tuple[tuple[float, float], ...]] | None = None
    """By rank, start and end of each action of its list, if spans were asked for. What only starts
    something (a send, a copy beside computation) starts and ends when the rank has computed all before it."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most on each rank's device, the allocator's share included."""
        with without_collection():  # Each walk records every action, and millions may lie there already.
            return tuple(self._allocated(walk, walk.device_peak_bytes) for walk in self.memory)

    def memory_over_time(self, rank: int) -> tuple[tuple[float, int], ...]:
        """Seconds since the step began, and bytes on the rank's device from then on; needs `record`."""
        assert self.action_times is not None, "simulate(record=True) keeps the times of actions"
        walk = self.memory[rank]
        # An update may begin after actions that follow it in the list, but the rank comes to it before.
        starts = [start for start, _ in self.action_times[rank]]
        reached = list(accumulate(reversed(starts), min))[::-1]
        pairs = zip(reached, walk.device_bytes, strict=True)
        return tuple((start, self._allocated(walk, num_bytes)) for start, num_bytes in pairs)

    def _allocated(self, walk: MemoryWalk, num_bytes: int) -> int:
        return num_bytes + round(self.allocator_share * (num_bytes - walk.context_bytes))
