"""What membership asks of a process that trains, on its own threads: offers, decisions, drawings, an end."""

from __future__ import annotations

import atexit
import gc
import logging
import threading
import time
from collections import Counter
from contextlib import suppress

from zorselike.elastic.contract import Control, Generation, Json, Member, Request, StateLostError
from zorselike.elastic.deciding.decisions import Source, is_out_of_memory
from zorselike.elastic.deciding.leader import Leader
from zorselike.elastic.drawing import MAX_DRAWN, Drawings
from zorselike.elastic.held import Held
from zorselike.elastic.replicas import Replicas
from zorselike.elastic.running import Running
from zorselike.errors import ClusterError, ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.runtime.checkpoints import Stateful
from zorselike.runtime.comm.connections import Connections
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.result import Sums
from zorselike.runtime.state.save import Save
from zorselike.runtime.state.save_history import SaveHistory

logger = logging.getLogger("zorselike")

_DROPPED_WITHIN_S = 10.0
"""So long a process that ends waits for what remains of earlier generations to be dropped."""
_TRIES = 2
"""So often who comes may fail before it has done a step of the job."""


class ElasticWorker:
    """One member's; also what it keeps from one generation to the next."""

    def __init__(self, leader: Leader, drawings: Drawings) -> None:
        self.leader, self._drawings = leader, drawings
        self._control: Control | None = None
        self._has_control = threading.Event()
        self.running: Running | None = None
        """The generation that was entered last."""
        self.num_steps = 0
        self.rows_seen = 0
        self.sums: tuple[int, Sums] | None = None
        """A step, and what all its ranks came to."""
        self.checkpoint: str | None = None
        """Where a state is that nobody need have in memory."""
        self.save_history = SaveHistory()
        self._saving: Save | None = None
        """On its way there, or elsewhere."""
        self._has_begun = False
        """Whether it has done a step, or has been a rank before anybody had."""
        self._blamed: Counter[str] = Counter()
        """By id: how many failures may have been due to who has come; enough, where it has trained."""
        self._failed_as: str | None = None
        """How it has failed before that."""
        self._lock = threading.Lock()
        self._over = -1
        """The last generation that has ended."""
        self._ahead: threading.Thread | None = None
        self._ahead_of = -1
        """The generation for whose losses it draws."""
        self._stepped_s: float | None = None
        """When this process has done its last step."""
        self._graves: list[tuple[HeteroPipeline | None, Connections]] = []
        """What remains of generations that were left without the others."""
        self._past: list[Replicas] = []
        """Of generations that have ended, and from which the next one may be filled."""

    @property
    def control(self) -> Control:
        """This process's membership, which may ask before it is known here."""
        self._has_control.wait()
        assert self._control is not None
        return self._control

    @control.setter
    def control(self, control: Control) -> None:
        self._control = control
        self._has_control.set()

    # -- of membership ---------------------------------------------------------------------

    def offer(self) -> Json:
        """See `Worker`."""
        return {
            "holds": [list(held.origin) for held in self._held()],
            "step": self.num_steps,
            "has_state": self.num_steps > 0,
            "has_begun": self._has_begun,
            "sums": None if self.sums is None else [self.sums[0], list(self.sums[1])],
            "checkpoint": self._find_checkpoint(),
        }

    def decide(self, request: Request) -> tuple[tuple[str, ...], Json] | None:
        """See `Worker`."""
        decided = self.leader.decide(request)
        if decided is None:
            return None
        ranks, decision = decided
        own = {"settings": self._drawings.list_settings(), "computes_in": self._drawings.computes_in}
        return ranks, {**decision, **own}

    def prepare(self, ranks: tuple[str, ...], decision: Json) -> None:
        """See `Worker`."""
        plan = Plan.parse(decision["plan"])
        if self.control.id in ranks and not self.take_settings(decision):
            self._drawings.draw(plan, ranks.index(self.control.id))

    def take_settings(self, decision: Json) -> str:
        """Computes in the dtype of those who were there before; gives in what this process is not like the
        one that leads, if anything."""
        own, there = self._drawings.list_settings(), decision["settings"]
        self._drawings.compute_in(decision["computes_in"])
        return next(
            (
                f"{name} is {own.get(name)} in this process, and {there.get(name)} in the job that it has "
                "joined"
                for name in there | own
                if own.get(name) != there.get(name)
            ),
            "",
        )

    def interrupt(self, number: int, lost: tuple[Member, ...]) -> None:
        """See `Worker`."""
        with self._lock:
            self._over = max(self._over, number)
            running = self.running
        if running is not None and running.number <= number:
            running.interrupt()

    def hear_of_losses(self, running: Running) -> None:
        """In the alarm's thread: a rank is lost, by the connections between ranks. That a process has ended
        membership sees on its own links, and who has raised says so itself."""
        for loss in running.losses:
            if loss.kind == "silent":
                self.control.lost([running.generation.ranks[loss.rank]], loss.reason)
        running.interrupt()

    # -- of the thread that trains ---------------------------------------------------------

    def enter(self, running: Running) -> None:
        """This process takes part in a generation, which may have ended since it was handed over."""
        with self._lock:
            self.running = running
            is_over = running.number <= self._over
        if is_over:
            running.interrupt()

    def begin(self, running: Running) -> None:
        """A generation runs: who leads has plans looked for, and a spare gets ready for what may follow."""
        generation, id = running.generation, self.control.id
        self._has_begun |= running.rank is not None and not self._has_trained(generation)
        self._blamed.update(dict.fromkeys(generation.ranks, _TRIES))
        if generation.after_step is not None and self._stepped_s is not None:
            self.leader.switch_s = time.monotonic() - self._stepped_s
        if running.rank is None and any(member.id == id for member in generation.members):
            logger.info("this process waits as a spare: the plan has %d ranks", len(generation.ranks))
            self.draw_ahead(running)
        if generation.members[0].id == id:
            self.leader.look_ahead(self.control.request_change)

    def fail(self, error: BaseException) -> None:
        """This process itself has failed. Memory that did not suffice may not suffice again: the plan is
        another one each time, until none needs less. Nor does it count where it may be due to who has come,
        who then fails as well.

        Raises:
            ClusterError: It has come to others who train, and fails again before it has done a step; or their
                state is lost.
        """
        if isinstance(error, StateLostError):  # To others, too.
            raise error
        reason = f"{type(error).__name__}: {error}"
        may_recur = is_out_of_memory(reason)
        assert self.running is not None
        generation = self.running.generation
        if self._has_begun:
            arrived = [id for id in generation.ranks if self._blamed[id] < _TRIES]
            self._blamed.update(arrived)
            may_recur |= bool(arrived)
        elif self._has_trained(generation) and not may_recur:
            if self._failed_as == reason:
                raise ClusterError(
                    f"this process has failed twice before it had done a step of its job, which goes on "
                    f"without it: {reason}"
                ) from error
            self._failed_as = reason
        self.control.fail(error, step=self.num_steps, may_recur=may_recur)

    def refuse_lost_state(self, generation: Generation, num_steps: int) -> None:
        """Raises `StateLostError` where all who are left came when others trained, and begin at step 0."""
        if generation.decision["is_orphaned"] and not num_steps:
            raise StateLostError(
                "all who had the job's state were lost before this process had any of it, and no checkpoint "
                "of it is there: too many were lost at once; save one every now and then, and start the job "
                "again"
            )

    def note_counts(self, pipe: Stateful) -> None:
        """A step has ended, or a state was taken over."""
        self.num_steps, self.rows_seen = pipe.num_steps, pipe.rows_seen

    def note_save(self, save: Save) -> None:
        """One is on its way: once it is there the job can go back to it, and until then to the one before."""
        self._find_checkpoint()
        self._saving = save

    def _find_checkpoint(self) -> str | None:
        if (save := self._saving) is not None and save.path is not None:
            self.checkpoint, self._saving = str(save.folder), None
        return self.checkpoint

    def let_go(self) -> None:
        """Drops what remains of generations that all have left. Pipelines in a thread: the end of a Gloo
        group waits for what it still runs, and that may not end though its connections have (seen once in
        about a hundred recoveries)."""
        graves, self._graves = self._graves, []
        for connections in [own for _, own in graves]:
            connections.let_go()

        def drop() -> None:
            graves.clear()
            gc.collect()  # FSDP's modules and their groups are in circles.

        if graves:
            thread = threading.Thread(target=drop, name="elastic remains", daemon=True)
            thread.start()
            # A thread that is ended inside a group's destructor, as Python's end would, aborts the process.
            atexit.register(thread.join, _DROPPED_WITHIN_S)

    def note_step(self, running: Running) -> None:
        """A step is done. After a generation's first, draws what may follow."""
        self._stepped_s = time.monotonic()
        self._has_begun = True
        self.let_go()
        if running.pipe is not None:
            self._drawings.step = running.pipe.assembly.step_inputs
            self.draw_ahead(running)

    def draw_ahead(self, running: Running) -> None:
        """Once a generation, draws in a thread the plans that follow if somebody is lost, so that nobody
        waits for that then: those who take part, nor spares."""
        is_busy = self._ahead is not None and self._ahead.is_alive()
        if is_busy or self._ahead_of == running.number:
            return
        self._ahead_of = running.number
        plans = list(dict.fromkeys(self.leader.foresee()))[: MAX_DRAWN - 1]

        def draw() -> None:
            for plan in plans:
                if running.is_over.is_set():
                    return
                with suppress(PlanError, ConfigError):  # If it comes to that, another is found.
                    self._drawings.draw_ahead(plan)

        self._ahead = threading.Thread(target=draw, name="elastic drawings", daemon=True)
        self._ahead.start()

    def source_of(self, generation: Generation) -> Source | None:
        """From where it is filled; None where nobody has a state to give."""
        decision = generation.decision
        if generation.after_step is not None:  # Whoever was there has stopped after the same step.
            return Source(decision["generation"], self.num_steps)
        return None if decision["source"] is None else Source(*decision["source"])

    def _has_trained(self, generation: Generation) -> bool:
        """Whether somebody had a state before it."""
        return self.source_of(generation) is not None or generation.decision["checkpoint"] is not None

    def copies_of(self, source: Source) -> list[Held]:
        """What this process has of it."""
        return [held for held in self._held() if held.origin[:2] == source]

    def stash(self, running: Running) -> None:
        """A generation has been left; what it held may be asked for."""
        if running.remains is not None:
            self._graves.append(running.remains)
            running.remains = None
        if running.replicas is not None:
            with self._lock:
                self._past.append(running.replicas)
            running.replicas = None

    def forget_copies(self) -> None:
        """Nobody goes back to generations before this one."""
        with self._lock:
            past, self._past = self._past, []
        for replicas in past:
            replicas.forget()

    def _held(self) -> list[Held]:
        with self._lock:
            everything = list(self._past)
        running = self.running
        if running is not None and running.replicas is not None:
            everything.append(running.replicas)
        return [held for replicas in everything for held in replicas.held]
