"""Learning-rate schedulers that outlast their pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zorselike.elastic.wire import gather_json
from zorselike.runtime.checkpoints import Stateful
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.state.schedulers import LRSchedulers

Factory = Callable[[Optimizer], LRScheduler]
Call = list[Any]
"""What a scheduler's `step` was given."""


class ElasticSchedulers:
    """One scheduler per local optimizer of whichever pipeline runs, stepped together after each step.

    A copy of the state is taken as a step ends, before the training loop steps these. So calls are noted by
    the step after which they were made: who goes back to such a copy makes them again, and who has not come
    to them, or is new, makes those of the others; its own loop's calls then count as made.
    """

    def __init__(self, count_steps: Callable[[], int]) -> None:
        """`count_steps`: optimizer steps taken by now."""
        self._factory: Factory | None = None
        self._count_steps = count_steps
        self._inner: LRSchedulers | None = None
        self._calls: dict[int, list[Call]] = {}
        self._num_made: dict[int, int] = {}
        """How many of those after a step are in the schedulers' state."""
        self._ahead: dict[int, int] = {}
        """Calls that were made before this process's loop came to them, by step."""

    def step(self, *values: float) -> None:
        """Steps every scheduler once; `values`: numbers that some want, such as the loss of a validation."""
        at = self._count_steps()
        if self._ahead.get(at):
            self._ahead[at] -= 1
        else:
            self._make(at, list(values))

    def _make(self, at: int, values: Call) -> None:
        self._calls.setdefault(at, []).append(values)
        self._num_made[at] = self._num_made.get(at, 0) + 1
        if self._inner is not None:
            self._inner.step(*values)

    def get_last_lr(self) -> list[float]:
        """The learning rates of the first local optimizer's groups; [] on a rank without one."""
        return [] if self._inner is None else self._inner.get_last_lr()

    def use(self, factory: Factory, pipe: Stateful | None) -> None:
        """From now on there are such schedulers."""
        self._factory = factory
        self.attach(pipe)

    def attach(self, pipe: Stateful | None) -> None:
        """Goes on with another pipeline, before that has its state; None: this process has none."""
        has_any = pipe is not None and self._factory is not None
        self._inner = pipe.lr_schedulers(self._factory) if has_any else None  # type: ignore
        self._num_made = {}

    def return_to(self, step: int, num_calls: int) -> None:
        """The pipeline has the state of a step, and of so many calls after it: makes those that followed."""
        self._calls = {at: calls for at, calls in self._calls.items() if at <= step}
        self._ahead = {at: count for at, count in self._ahead.items() if at <= step}
        calls = self.calls_after(step)
        self._num_made = {step: max(num_calls, len(calls))}
        for values in calls[num_calls:]:
            if self._inner is not None:
                self._inner.step(*values)

    def begin_anew(self) -> None:
        """The pipeline has another state, from a checkpoint or from the beginning."""
        self._calls, self._ahead, self._num_made = {}, {}, {}

    def calls_after(self, step: int) -> list[Call]:
        """Made here after this step, and before another."""
        return self._calls.get(step, [])

    @property
    def num_made(self) -> int:
        """How many calls that followed the last step the schedulers' state has in it."""
        return self._num_made.get(self._count_steps(), 0)

    def catch_up(self, control: ProcessGroup) -> None:
        """Before a generation's first step, collective: makes calls after the last step that some have made
        and others not."""
        at = self._count_steps()
        said = gather_json({"calls": self.calls_after(at)}, control)
        calls = max((other["calls"] for other in said), key=len)
        for values in calls[self._num_made.get(at, 0) :]:
            self._make(at, values)
            self._ahead[at] = self._ahead.get(at, 0) + 1

    def forget_before(self, step: int) -> None:
        """Nobody goes back to earlier steps any more."""
        tables: tuple[dict[int, Any], ...] = (self._calls, self._ahead, self._num_made)
        for table in tables:
            for at in [at for at in table if at < step]:
                del table[at]
