"""A job's clock: what it has trained, what it lost, for how long it stood."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf
from typing import NamedTuple


class Piece(NamedTuple):
    """A time during which a job goes at one speed."""

    start_s: float
    stop_s: float
    rows_per_s: float
    num_devices: int
    """That compute; 0: it stands."""


@dataclass
class Job:
    """Goes on in virtual time: first what it must wait for, then steps, with checkpoints in between."""

    at_s: float
    checkpoint_every_s: float
    checkpoint_s: float
    step_s: float = inf
    """Of the plan that runs; infinite: none does."""
    rows: int = 0
    """Of a step."""
    num_devices: int = 0
    interval: int = 1
    """Steps from one mirror to the next; those up to the last one outlive a loss."""
    steps: float = 0.0
    """Since the plan that runs began; the last one partly."""
    trained: float = 0.0
    """Rows, of the plans before."""
    saved: float = 0.0
    """Rows in the last checkpoint."""
    lost_rows: float = 0.0
    waits_s: float = 0.0
    """Before it goes on."""
    paused_s: float = 0.0
    stood_s: float = 0.0
    """Without a plan that it could run."""
    num_changes: int = 0
    pieces: list[Piece] = field(default_factory=list)
    _since_checkpoint_s: float = 0.0

    @property
    def done(self) -> float:
        """Rows of whole steps."""
        return self.trained + floor(self.steps + 1e-9) * self.rows

    def begin(self, step_s: float, rows: int, num_devices: int, *, waits_s: float, interval: int = 1) -> None:
        """Goes over to another plan; what is trained by now stays (a step that has begun is ended first)."""
        self.trained, self.steps = self.trained + self.steps * self.rows, 0.0
        self.step_s, self.rows, self.num_devices, self.interval = step_s, rows, num_devices, interval
        self.waits_s = waits_s
        self.num_changes += 1

    def stand(self) -> None:
        """No plan can run."""
        self.trained, self.steps = self.trained + self.steps * self.rows, 0.0
        self.step_s, self.num_devices, self.waits_s = inf, 0, 0.0

    def return_to_mirror(self) -> None:
        """A loss, and every lost state has a mirror."""
        kept = floor(self.steps + 1e-9) // self.interval * self.interval
        self.lost_rows += (self.steps - kept) * self.rows
        self.steps = kept

    def return_to_checkpoint(self) -> None:
        """A loss, and only the last checkpoint is left."""
        now = self.trained + self.steps * self.rows
        self.lost_rows += now - self.saved
        self.trained, self.steps = self.saved, 0.0
        self._since_checkpoint_s = 0.0

    def save(self) -> None:
        """A checkpoint."""
        self.saved, self._since_checkpoint_s = self.done, 0.0

    def run(self, until_s: float) -> None:
        """Goes on until then."""
        while self.at_s < until_s - 1e-9:
            left_s = until_s - self.at_s
            if self.step_s == inf:
                self.stood_s += left_s
                self._note(left_s, 0.0, 0)
            elif self.waits_s > 0:
                waited_s = min(self.waits_s, left_s)
                self.waits_s -= waited_s
                self.paused_s += waited_s
                self._note(waited_s, 0.0, 0)
            else:
                trains_s = min(left_s, self.checkpoint_every_s - self._since_checkpoint_s)
                self.steps += trains_s / self.step_s
                self._since_checkpoint_s += trains_s
                self._note(trains_s, self.rows / self.step_s, self.num_devices)
                if self._since_checkpoint_s >= self.checkpoint_every_s - 1e-9:
                    self.save()
                    self.waits_s = self.checkpoint_s

    def _note(self, seconds: float, rows_per_s: float, num_devices: int) -> None:
        stop_s = self.at_s + seconds
        if self.pieces and self.pieces[-1][2:] == (rows_per_s, num_devices):
            self.pieces[-1] = self.pieces[-1]._replace(stop_s=stop_s)
        else:
            self.pieces.append(Piece(self.at_s, stop_s, rows_per_s, num_devices))
        self.at_s = stop_s
