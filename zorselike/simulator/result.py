"""A simulated step: how long it took, where the time went, and what was in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from zorselike.cost.purposes import MemoryWalk
from zorselike.schedule.actions import Action
from zorselike.simulator.garbage import without_collection

Track = Literal["compute", "update", "gather", "reduce", "send", "receive", "to device", "to host", "host"]


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one rank, in seconds since the step began (below 0 where the rank is ahead).

    Spans of one track do not overlap, where `send` and `receive` are a track for each peer and direction, and
    `to device` and `to host` one each for shards, activations and optimizer state. A computation that waits
    for several gathers has a span for each part.
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
    """Computing: forwards, backwards, updates that nothing hides, and work of the host."""
    waiting_for_data_s: float
    """Waiting for activations or gradients that another group has not computed yet."""
    exposed_communication_s: float
    """Waiting for bytes on a link, or for the other ranks of a collective."""
    exposed_copies_s: float
    """Waiting for copies between host and device."""
    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated step in a steady run."""

    iteration_s: float
    ranks: Sequence[RankTimes]
    memory: Sequence[MemoryWalk]
    """By rank: bytes of tensors at every action of its list, and of the context."""
    bytes_by_link: Mapping[str, float]
    """By name of the link (a capacity of the network)."""
    cost: float
    """Price of one step: device-hours and egress."""
    egress_cost: float
    allocator_share: float = 0.0
    """What the allocator adds, as a share of tensors' bytes."""
    num_actions: int = 0
    """Actions that were simulated: of all ranks, or of one of each class."""
    spans: tuple[Span, ...] = ()
    """By start, if recorded."""
    action_times: Mapping[int, tuple[tuple[float, float], ...]] | None = None
    """By rank, start and end of each action of its list, if recorded. An action that only launches something
    (a send, a copy beside computation) starts and ends when the rank has computed everything before it."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak on each rank's device, the allocator's share included."""
        with without_collection():  # Walks record every action, among millions of live objects.
            return tuple(self._allocated(walk, walk.device_peak_bytes) for walk in self.memory)

    def folded_spans(self) -> Iterator[Span]:
        """Spans of a steady run in `[0, iteration_s]`: what the step does before its beginning or after its
        end, the steps before and after do inside it."""
        period_s = self.iteration_s
        for span in self.spans:
            for shift_s in (-period_s, 0.0, period_s):
                start_s = max(0.0, span.start_s + shift_s)
                stop_s = min(period_s, span.stop_s + shift_s)
                if stop_s > start_s:
                    is_whole = (start_s, stop_s) == (span.start_s, span.stop_s)
                    yield span if is_whole else replace(span, start_s=start_s, stop_s=stop_s)

    def memory_over_time(self, rank: int) -> tuple[tuple[float, int], ...]:
        """Seconds since the step began, and bytes on the rank's device from then on; needs recorded spans."""
        assert self.action_times is not None, "simulate(record=True) keeps the times of actions"
        walk = self.memory[rank]
        # An update may begin after actions that follow it in the list, but the rank reaches it before them.
        starts = [start for start, _ in self.action_times[rank]]
        reached = list(accumulate(reversed(starts), min))[::-1]
        pairs = zip(reached, walk.device_bytes, strict=True)
        return tuple((start, self._allocated(walk, num_bytes)) for start, num_bytes in pairs)

    def _allocated(self, walk: MemoryWalk, num_bytes: int) -> int:
        return num_bytes + round(self.allocator_share * (num_bytes - walk.context_bytes))
