"""A member's side of the job in a real process: the machine, its links, and the thread that trains.

One thread reads links, feeds `membership` and does what that asks; what the pipeline does (`contract.Worker`)
runs on threads of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from zorselike.elastic.contract import Generation, GenerationOver, Json, LeftError, Member, Worker
from zorselike.elastic.meeting.links import Links
from zorselike.elastic.meeting.threads import Threads
from zorselike.elastic.meeting.waiting import describe_wait, is_spare
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.leading import describe_lost
from zorselike.elastic.membership.machine import Membership
from zorselike.elastic.membership.round import Settings
from zorselike.errors import ClusterError

logger = logging.getLogger("zorselike")

_NUM_EVENTS = 30
_NUM_ADDRESSES = 16
_LONGEST_WAIT_S = 0.5
_LINGER_S = 2.0
_SAY_AFTER_S = 10.0
"""Whoever has waited so long is told for what."""
_STORE_LIMIT = timedelta(minutes=10)


class Meeting:
    """One process's membership. All methods may be called from any thread, those of `contract.Control` by the
    thread that trains."""

    def __init__(
        self,
        worker: Worker,
        me: Member,
        listener: socket.socket,
        token: str,
        *,
        num_founding: int | None = None,
        contact: Sequence[tuple[str, int]] = (),
        settings: Settings | None = None,
        holds_lease: Callable[[], bool] | None = None,
        notice_file: Path | None = None,
        nanny_fd: int | None = None,
    ) -> None:
        """Founds a job of `num_founding` members, or joins that of the members at `contact`.

        Args:
            me: this process, with the address at which `listener` can be reached.
            token: what all members of the job know.
            holds_lease: whether no generation has begun that this side of the job does not know of; asked of
                who leads, many or few, where others may have gone on. None: only a majority goes on then.
            notice_file: once it exists, this member leaves.
            nanny_fd: where to write what `nanny` reads.
        """
        self.id = me.id
        self.member = me
        self.settings = settings or Settings()
        self._worker = worker
        self._machine = Membership(me, self.settings)
        self._holds_lease = holds_lease
        self._notice_file = notice_file
        self._nanny_fd = nanny_fd
        self._token = token
        self._nanny_told = (-2, 0.0)
        self._events: deque[e.Event] = deque()
        self._posted: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self._encoded: tuple[msg.Message | None, bytes] = (None, b"")
        self._timers: dict[str, tuple[float, int]] = {}
        self._history: deque[tuple[float, str]] = deque(maxlen=_NUM_EVENTS)
        self._stores: dict[int, Any] = {}
        self._changed = threading.Condition()
        # Guarded by it:
        self._pending: Generation | None = None
        self._last_delivered = self._last_over = self._taken = 0
        self._formed = self._filled = 0
        self._gate: int | None = None
        self._holds = False
        self._step = -1
        self._is_idle = True
        self._num_interrupting = 0
        self._over: str | None = None
        self._is_done = False
        self._stops = False
        self._polled_s = time.monotonic()
        self._waits_s: float | None = None
        """Since when the thread that trains waits for a generation, or since it was last said for what."""
        self._said = ""
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._links = Links(
            me,
            token,
            listener,
            silence_s=self.settings.silence_s,
            tell=self._events.append,
            ask=self._answer,
        )
        self._links.watch(self._woken)
        if num_founding is not None:
            self._events.append(e.Found(num_founding))
        if contact:
            limit_s = self.settings.start_limit_s
            self._links.contact(contact, limit_s=limit_s, failed=self._strand)
        self._threads = Threads(self._post, stop=self._stop)
        self._thread = threading.Thread(target=self._run, name="elastic membership", daemon=True)
        self._thread.start()

    # -- the thread that trains ----------------------------------------------------------------

    def next_generation(self) -> Generation:
        """Waits for the next generation.

        Raises:
            LeftError: This member has left, or the job has done its last step.
            ClusterError: The job has ended, or goes on without this member; says why.
        """
        with self._changed:
            self._is_idle = True
            self._waits_s = time.monotonic()
            self._changed.wait_for(
                lambda: (
                    self._over is not None
                    or self._is_done
                    or (self._pending is not None and not self._num_interrupting)
                )
            )
            self._waits_s = None
            if self._over is not None:
                raise (LeftError if self._over in (e.LEFT, e.ALL_LEAVE) else ClusterError)(self._over)
            if self._is_done:
                raise LeftError(e.DONE)
            assert self._pending is not None
            generation, self._pending = self._pending, None
            self._taken = generation.number
            self._gate = None
            self._step = -1
            if self._said and self.id in generation.ranks:
                logger.warning("elastic: this process is rank %d now", generation.ranks.index(self.id))
                self._said = ""
            return generation

    def formed(self) -> None:
        """Returns when all have formed their groups. Raises `GenerationOver` if the generation ended."""
        self._post(e.Formed(self._taken))
        self._wait_for(lambda: self._formed >= self._taken)

    def filled(self) -> None:
        """Returns when all have all state, and the generation runs. Raises `GenerationOver`."""
        self._post(e.Filled(self._taken))
        self._wait_for(lambda: self._filled >= self._taken)
        with self._changed:
            self._is_idle = False

    def step_done(self, step: int) -> bool:
        """Whether the generation ends after this step, as planned. Raises `GenerationOver`."""
        with self._changed:
            self._step = step
            self._changed.wait_for(lambda: self._is_over() or not self._must_wait(step))
            if self._is_over():
                raise GenerationOver
            return self._gate is not None and step >= self._gate

    def _must_wait(self, step: int) -> bool:
        """Whether only the leader can say what follows this step, or this process has stood still, or is cut
        off, so that the others may have gone on without it."""
        is_gated = self._gate is not None and step >= self._gate and self._pending is None
        return is_gated or self._holds or time.monotonic() - self._polled_s > self.settings.silence_s / 2

    def _is_over(self) -> bool:
        return self._over is not None or self._last_over >= self._taken

    def _wait_for(self, happens: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or happens())
            if self._is_over():
                raise GenerationOver

    def lost(self, ids: Iterable[str], reason: str) -> None:
        """Members that the alarm says are gone."""
        ids = tuple(ids)
        self._note(f"the alarm: {', '.join(ids)}: {reason}")
        self._post(e.Lost(ids))

    def fail(self, error: BaseException, *, step: int, may_recur: bool = False) -> None:
        """This member's own exception ended the generation."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        self._post(e.Failed(text, step, may_recur))

    def request_change(self) -> None:
        """Asks for another decision about the same members."""
        self._post(e.Change())

    @property
    def is_spare(self) -> bool:
        """Whether the job runs, and this member is no rank of it."""
        return is_spare(self._machine)

    def leave(self) -> None:
        """Asks to leave at a step boundary."""
        self._post(e.Leave(self.id))

    def close(self, *, is_done: bool = False) -> None:
        """This member is done, and with it the job where it `is_done`."""
        self._post(e.Finish(is_done))
        self._thread.join(_LINGER_S + 1)
        self._stores.clear()

    # -- for the process -----------------------------------------------------------------------

    def _post(self, event: e.Event) -> None:
        self._posted.put(event)
        with contextlib.suppress(OSError):
            self._wakes.send(b"\0")

    def _stop(self) -> None:
        """Without a word: to the others this process has ended."""
        self._stops = True
        self._thread.join(_LINGER_S + 1)

    def _note(self, text: str) -> None:
        self._history.append((time.time(), text))

    # -- the thread of the links ---------------------------------------------------------------

    def _run(self) -> None:
        notice_s = 0.0
        while not self._stops:
            now = time.monotonic()
            due_s = min((at for at, _ in self._timers.values()), default=now + _LONGEST_WAIT_S)
            self._drain()
            waits_s = 0.0 if self._events else max(0.0, min(due_s - now, self._tick_s))
            self._links.poll(waits_s)
            with contextlib.suppress(OSError):
                self._woken.recv(1 << 12)
            after = time.monotonic()
            if after - self._polled_s > self._tick_s + self.settings.silence_s / 2:
                self._links.slept()
                self._events.appendleft(e.Slept())  # Before what was read since: others may have gone on.
            while not self._posted.empty():
                self._events.append(self._posted.get())
            self._ring(after)
            self._tell_nanny()
            self._say_wait(after)
            if self._notice_file is not None and after > notice_s:
                notice_s = after + _LONGEST_WAIT_S
                if self._notice_file.exists():
                    self._notice_file = None
                    self._events.append(e.Leave(self.id))
            self._drain()
            with self._changed:
                if after - self._polled_s > self.settings.silence_s / 2:
                    self._changed.notify_all()
                self._polled_s = after
        until = time.monotonic() + _LINGER_S
        while self._links.is_congested() and time.monotonic() < until:
            self._links.poll(0.05)
        self._links.close_all()
        self._wakes.close()
        self._woken.close()

    @property
    def _tick_s(self) -> float:
        return min(_LONGEST_WAIT_S, self.settings.silence_s / 20)

    def _drain(self) -> None:
        while self._events:
            effects = self._machine.handle(self._events.popleft())
            self._tell_nanny()  # What this member has agreed to, before anybody else learns of it.
            for effect in effects:
                self._do(effect)

    def _tell_nanny(self) -> None:
        """That this process lives, and when it changes, to which generation it belongs."""
        if self._nanny_fd is None:
            return
        machine, now = self._machine, time.monotonic()
        last = max((roster.number for roster in (machine.committed, *machine.agreed) if roster), default=-1)
        is_new = last != self._nanny_told[0]
        if not is_new and now < self._nanny_told[1] + self.settings.silence_s / 20:
            return
        self._nanny_told = (last, now)
        word: Json = {}
        if is_new:
            roster = machine.agreed[-1] if machine.agreed else machine.committed
            addresses = [[m.host, m.port] for m in roster.members if m.id != self.id] if roster else []
            word = {"id": self.id, "last": last, "members": addresses[:_NUM_ADDRESSES], "token": self._token}
        self._write_to_nanny(word)

    def _write_to_nanny(self, word: Json) -> None:
        if self._nanny_fd is not None:
            try:
                os.write(self._nanny_fd, json.dumps(word).encode() + b"\n")
            except BrokenPipeError:  # Nobody else would ever have this process leave.
                self._nanny_fd = None
                logger.warning("elastic: this process's nanny has ended without a word; it leaves")
                os.kill(os.getpid(), signal.SIGTERM)
            except OSError:  # Closed by the program, perhaps.
                self._nanny_fd = None

    def _say_wait(self, now: float) -> None:
        """Says for what the thread that trains waits, where it waits long, whenever that is another thing."""
        with self._changed:
            if self._waits_s is None or now < self._waits_s + _SAY_AFTER_S:
                return
            self._waits_s, before = now, self._said
            self._said = describe_wait(self._machine, self._links.unanswered) or before
        if self._said != before:
            logger.warning("elastic: this process %s", self._said)

    def _ring(self, now: float) -> None:
        for timer, (at, number) in list(self._timers.items()):
            if now >= at:
                del self._timers[timer]
                self._events.append(e.Rang(timer, number))

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Send(to, message):
                if self._encoded[0] is not message:  # The same goes to many.
                    self._encoded = (message, msg.encode(message))
                self._links.send(to, self._encoded[1])
            case e.Open(member):
                self._links.open(member)
            case e.Close(id):
                self._links.close(id)
            case e.SetTimer(timer, number, delay_s):
                self._timers[timer] = (time.monotonic() + delay_s, number)
            case e.AskOffer(number):
                self._threads.answer(
                    lambda: e.Offered(number, self._offer()), lambda x: e.Offered(number, {"error": x})
                )
            case e.AskDecision(number, attempt, _):
                self._threads.answer(lambda: self._decide(effect), lambda x: e.Undecided(number, attempt, x))
            case e.AskPrepare(number, attempt, _, _, _):
                self._threads.answer(lambda: self._prepare(effect), lambda x: e.Refused(number, attempt, x))
            case e.AskLease(number):
                self._threads.answer(lambda: self._ask_lease(number), lambda _: e.Lease(number, False))
            case e.Gate(number, attempt, step):
                with self._changed:
                    is_past = not self._is_idle and self._step >= step
                    self._gate = None if is_past else step
                    self._changed.notify_all()
                    past = self._step if is_past else -1
                self._events.append(e.Gated(number, attempt, past))
            case _:
                self._tell_trainer(effect)

    def _tell_trainer(self, effect: e.Effect) -> None:
        with self._changed:
            match effect:
                case e.Ungate():
                    self._gate = None
                case e.Hold(holds):
                    self._holds = holds
                case e.Interrupt(lost):
                    self._last_over = self._last_delivered
                    self._pending, self._gate = None, None
                    self._num_interrupting += 1
                    self._note(f"generation {self._last_over} is over" + describe_lost(lost))
                    self._threads.start(partial(self._interrupt, self._last_over, lost))
                case e.Deliver(generation):
                    self._pending = generation
                    self._last_delivered = generation.number
                case e.ReleaseFormed(number):
                    self._formed = number
                case e.ReleaseFilled(number):
                    self._filled = number
                    self._note(f"generation {number} runs")
                    for old in [old for old in self._stores if old < number]:
                        del self._stores[old]
                case e.Done():
                    self._is_done = True
                case e.Over(reason, may_return):
                    self._write_to_nanny({"over": reason, "may_return": may_return})
                    self._over = reason
                    self._stops = True
            self._changed.notify_all()

    def _interrupt(self, number: int, lost: tuple[Member, ...]) -> None:
        try:
            self._worker.interrupt(number, lost)
        finally:
            with self._changed:
                self._num_interrupting -= 1
                self._changed.notify_all()

    def _offer(self) -> Json:
        with self._changed:  # A generation that is over has been told so first.
            self._changed.wait_for(lambda: not self._num_interrupting)
        return self._worker.offer()

    def _decide(self, ask: e.AskDecision) -> e.Event:
        decided = self._worker.decide(ask.request)
        if decided is None:
            for member in ask.request.arrived:
                self._note(f"{member.node} local rank {member.local_rank} waits as a spare")
            return e.Kept(ask.number, ask.attempt)
        return e.Decided(ask.number, ask.attempt, tuple(decided[0]), decided[1])

    def _prepare(self, ask: e.AskPrepare) -> e.Event:
        host, port = "", 0
        if ask.keeps_store:
            host, port = self._machine.me.host, self._open_store(ask.number)
        self._worker.prepare(ask.ranks, ask.decision)
        with self._changed:
            step = self._step
        return e.Prepared(ask.number, ask.attempt, step, host, port)

    def _open_store(self, number: int) -> int:
        import torch.distributed as dist

        if number not in self._stores:
            self._stores[number] = dist.TCPStore(  # type: ignore[attr-defined]
                self._machine.me.host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_LIMIT
            )
        return int(self._stores[number].port)

    def _ask_lease(self, number: int) -> e.Event:
        return e.Lease(number, None if self._holds_lease is None else self._holds_lease())

    def _strand(self, reason: str) -> None:
        self._write_to_nanny({"stranded": True})
        self._events.append(e.Stranded(reason))

    # -- programs that ask ---------------------------------------------------------------------

    def _answer(self, message: Json) -> Json:
        match message.get("ask"):
            case "status":
                return {"status": self.describe()}
            case "leave":
                return self._answer_leave(message)
            case "word":
                self._events.append(e.Dead(msg.Gone(str(message.get("id")), int(message.get("last", -1)))))
                return {"heard": True}
        return {"error": "no such request"}

    def _answer_leave(self, message: Json) -> Json:
        roster = self._machine.committed
        found = [
            member
            for member in (roster.members if roster else ())
            if member.node == message.get("node") and message.get("local_rank") in (None, member.local_rank)
        ]
        for member in found:
            self._events.append(e.Leave(member.id))
        return {"leaving": [asdict(member) for member in found]}

    def describe(self) -> Json:
        """What `zorselike status` shows, of what this member knows."""
        machine = self._machine
        generation = machine.generation
        roster = machine.committed
        leader = machine.find(machine.leader or "") or machine.me
        return {
            "id": self.id,
            "leader": {"id": leader.id, "host": leader.host, "port": leader.port},
            "state": "running" if machine.is_running else "meeting" if machine.round else "waiting",
            "stage": machine.leading.stage or (machine.round.phase if machine.round else ""),
            "generation": None if roster is None else roster.number,
            "members": [asdict(member) for member in roster.members] if roster else [],
            "ranks": list(generation.ranks) if generation else [],
            "arrivals": [asdict(member) for member in machine.arrivals.values()],
            "summary": str(generation.decision.get("summary", "")) if generation else "",
            "step": self._step,
            "events": [{"time": at, "text": text} for at, text in self._history],
        }


def make_member(
    host: str, port: int, node: str, local_rank: int, device_type: str, memory_bytes: int
) -> Member:
    """This process, as a member that has no number yet."""
    return Member(uuid.uuid4().hex[:12], -1, host, port, node, local_rank, device_type, memory_bytes)
