"""Dynamic loss scaling for fp16, in the manner of `torch.amp.GradScaler`.

Losses are multiplied so that small gradients do not vanish in fp16. A step in which a gradient
overflows changes nothing, on any rank, and halves the scale; many good steps in a row double it.
"""

from __future__ import annotations

INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
"""Good steps in a row after which the scale grows (these are `GradScaler`'s defaults)."""


class LossScale:
    """The scale, the same on every rank, since every rank sees the same global norm."""

    def __init__(self, value: float = INITIAL) -> None:
        self.value = value
        """Factor of the next step's losses."""
        self.value_of_step = value
        """Factor of this step's losses."""
        self._num_good = 0

    def begin(self) -> None:
        """Starts a step."""
        self.value_of_step = self.value

    def update(self, *, overflowed: bool) -> None:
        """Once it is known whether all gradients of a step are finite."""
        if overflowed:
            self.value *= BACKOFF
            self._num_good = 0
            return
        self._num_good += 1
        if self._num_good == GROWTH_INTERVAL:
            self.value *= GROWTH
            self._num_good = 0
