"""What a rank's memory is for, the words of the memory model, of the runtime's ledger and of reports; and
what it was found to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from zorselike.schedule.actions import Action

COMMUNICATOR_BYTES = 100 * 2**20
"""Device memory of an NCCL communicator where it was not measured: its channels' buffers."""


class Purpose(StrEnum):
    """One kind of memory."""

    GATHERED_PARAMETERS = "gathered parameters"
    PARAMETER_SHARDS = "parameter shards"
    GRADIENTS = "gradients"
    """Whole, until they are reduced."""
    GRADIENT_SHARDS = "gradient shards"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication"
    """Communicators; on the host rows on their way between devices that only it joins."""
    WORKING_SET = "working set"
    """What comes and goes inside an action."""


@dataclass(frozen=True)
class MemoryWalk:
    """What one rank's memory holds during a step, in bytes."""

    device: Mapping[Purpose, int]
    """The most that the device holds at once, for each purpose by itself."""
    host: Mapping[Purpose, int]
    """Host copies, which are allocated once and kept."""
    device_bytes: tuple[int, ...]
    """The most on the device during each action, the context included."""
    at_peak: Mapping[Purpose, int]
    """What the device holds at its peak."""
    holders: Mapping[Purpose, tuple[int, ...]]
    """Whose parameters, gradients and state are on the device at its peak: ministages."""
    between_steps: Mapping[Purpose, int]
    """What stays on the device between two steps."""
    context_bytes: int
    peak_position: int | None
    """The action at which the device holds most; None if the rank has no actions."""
    peak_action: Action | None

    @property
    def device_peak_bytes(self) -> int:
        """The most that the device holds at once, the context included."""
        return max(self.device_bytes, default=self.context_bytes + sum(self.between_steps.values()))

    @property
    def host_peak_bytes(self) -> int:
        """All host copies together."""
        return sum(self.host.values())
