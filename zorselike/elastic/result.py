"""What a step of an elastic job came to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from zorselike.runtime.result import StepResult, Sums

_UNKNOWN: Sums = (math.nan, math.nan, math.nan)


@dataclass(frozen=True, repr=False)
class ElasticResult(StepResult):
    """A `StepResult`, and whether the step took place."""

    generation: int = 0
    """That runs now; where it is another than before, so may the rows of this rank be."""
    is_done: bool = True
    """Whether `num_steps` and `rows_seen` count this step. If not, ranks were lost meanwhile, and the next
    step is that of `rows_seen`: this one again, or one before, if the state had not been mirrored since."""

    @classmethod
    def of(cls, result: StepResult, generation: int) -> ElasticResult:
        """A step that took place. What was not summed before ranks were lost reads nan."""
        return cls(guard(result), result.is_scaled, generation)

    @classmethod
    def lost(cls, generation: int) -> ElasticResult:
        """A step that is to be done again; its numbers are nan."""
        return cls(lambda: _UNKNOWN, False, generation, is_done=False)

    def __repr__(self) -> str:
        done = "" if self.is_done else ", is_done=False"
        return f"ElasticResult(loss={self.loss}, generation={self.generation}{done})"


def guard(result: StepResult) -> Callable[[], Sums]:
    """A result's sums, or nan where ranks were lost before these were there."""

    def read() -> Sums:
        try:
            return result.read_sums()
        except RuntimeError:  # Of Gloo: the group has gone.
            return _UNKNOWN

    return read


def known(sums: Sums) -> Callable[[], Sums]:
    """Sums that somebody has told."""
    return lambda: sums
