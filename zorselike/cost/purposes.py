"""What a rank's memory is for: the words of the memory model, of the runtime's ledger and of reports."""

from __future__ import annotations

from enum import StrEnum


class Purpose(StrEnum):
    """One kind of memory."""

    GATHERED_PARAMETERS = "gathered parameters"
    PARAMETER_SHARDS = "parameter shards"
    GRADIENTS = "gradients"
    """Whole, until they are reduced."""
    GRADIENT_SHARDS = "gradient shards"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    WORKING_SET = "working set"
    """What comes and goes inside an action."""
