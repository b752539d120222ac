"""What a training program needs of `ElasticPipeline` beside what a script does: collectives of its own around
the steps, a beginning of its own choice, and word of what has happened between two generations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from zorselike.elastic.contract import Generation, Member, Reason
from zorselike.elastic.pipeline import ElasticPipeline
from zorselike.elastic.running import Running
from zorselike.runtime.alarm.failure import describe_place
from zorselike.runtime.pipeline import HeteroPipeline

Begin = Callable[[HeteroPipeline, str | None], object]
"""The second one: where the job has saved a checkpoint of its own, which it must go back to."""


@dataclass(frozen=True)
class Change:
    """From the last generation that ran to the one that runs, as one process saw it."""

    reason: Reason
    lost: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    arrived: tuple[Member, ...] = ()
    why: dict[str, str] = field(default_factory=dict)
    """By id, what is known of who was lost, or has failed."""
    pause_s: float = 0.0
    """From the end of the one to the beginning of the other."""
    step_before: int = 0
    """Steps that were done when it ended."""
    has_new_leader: bool = False
    is_from_checkpoint: bool = False
    """Whether nobody had a state to give."""


class ProgramPipeline(ElasticPipeline):
    """An `ElasticPipeline` for a loop that has collectives of its own.

    These take place between `wait` and the next step, inside `recovering`. Where ranks are lost in one, or in
    a call of this object, the generation `runs` no more afterwards, and all go on from `wait`.
    """

    begin_with: Begin | None = None
    """Fills a pipeline where nobody has a state to give, at the start and after too great a loss: with the
    newest checkpoint, if there is one; collective. To be set before `wait`. (The argument `begin` only says
    whether parameters need not be initialised.)"""
    change: Change | None = None
    """That led to the generation that runs; None where this process came with it."""
    _ran: Generation | None = None
    _ended_s: float | None = None
    _ended: Running | None = None
    _step_before = 0

    @property
    def leader(self) -> Member:
        """Who leads the generation that runs; at its address the job is joined and asked."""
        assert self._running is not None
        return self._running.generation.members[0]

    @property
    def job(self) -> str:
        """What tells this job from all others, on all its processes alike."""
        return self.worker.leader.job

    @property
    def has_part(self) -> bool:
        """Whether this process is or was in a generation that runs, or is about to."""
        running = self._running
        return self._ran is not None or (running is not None and not running.is_over.is_set())

    @property
    def is_spare(self) -> bool:
        """Whether the job runs without this process."""
        return self._control.is_spare

    def runs(self, number: int) -> bool:
        """Whether this generation still does, and this process is in it."""
        return not self.why_left and self.generation == number

    def note_checkpoint(self, folder: str) -> None:
        """From now on `begin_with` finds a checkpoint of this job there; where there is none, a loss that
        mirrors do not mend ends the job."""
        self.worker.checkpoint = folder

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around collectives of the caller's own: what they raise because ranks were lost ends here, when the
        next generation runs."""
        running = self._running
        assert running is not None
        try:
            yield
        except Exception as error:
            is_over = running is not self._running or running.is_over.is_set()
            if not is_over and running.is_own(error):
                raise
            if running is self._running:
                self._recover(error)

    def settle(self) -> None:
        """Waits for mirrors on their way; raises where ranks were lost, so inside `recovering`."""
        if self._running is not None and self._running.replicas is not None:
            self._running.replicas.wait()

    # -- internal --------------------------------------------------------------------------

    def _recover(self, error: BaseException) -> None:
        self._note_end()
        super()._recover(error)

    def _enter_next(self) -> None:
        self._note_end()
        super()._enter_next()
        running = self._running
        if not self.why_left and running is not None:
            self.change = self._describe_change(running.generation)
            self._ran, self._ended_s, self._ended = running.generation, None, None

    def _note_end(self) -> None:
        """The generation that ran is over."""
        if self._ran is not None and self._ended_s is None:
            self._ended_s, self._step_before = time.monotonic(), self.num_steps
            self._ended = self._running

    def _describe_change(self, generation: Generation) -> Change | None:
        before = self._ran
        if before is None or self._ended_s is None:
            return None
        now = {member.id for member in (*generation.members, *generation.leaving)}
        then = {member.id for member in before.members}
        losses = () if self._ended is None else self._ended.losses
        why = {before.ranks[loss.rank]: f"{loss.reason} ({describe_place(loss.place)})" for loss in losses}
        return Change(
            generation.reason,
            lost=tuple(member for member in before.members if member.id not in now),
            left=generation.leaving,
            arrived=tuple(member for member in generation.members if member.id not in then),
            why=why,
            pause_s=time.monotonic() - self._ended_s,
            step_before=self._step_before,
            has_new_leader=before.members[0].id != generation.members[0].id,
            is_from_checkpoint=generation.after_step is None and generation.decision["source"] is None,
        )

    def _begin_anew(self, pipe: HeteroPipeline, checkpoint: str | None) -> None:
        if self.begin_with is not None:
            self.begin_with(pipe, checkpoint)
            self._schedulers.begin_anew()
        else:
            super()._begin_anew(pipe, checkpoint)
