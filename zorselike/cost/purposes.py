"""What a rank's memory is for: the words of the memory model, of the runtime's ledger and of reports."""

from __future__ import annotations

from enum import StrEnum

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
