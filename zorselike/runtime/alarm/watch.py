"""The thread by which ranks fail together: rank 0 watches all and names the first failure."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zorselike.errors import DataError
from zorselike.runtime.alarm.failure import (
    Failure,
    FailureKind,
    State,
    exit_code_of,
    find_absent,
    find_mismatch,
    first_of,
    is_echo,
    last_line,
    reason_of,
)
from zorselike.runtime.alarm.heartbeat import Message, Page, Peer
from zorselike.runtime.alarm.kernel import is_stopped
from zorselike.runtime.alarm.stall import Stall

SILENCE_VARIABLE = "ZORSELIKE_SILENCE_S"
START_UP = "start-up"
"""The first label of every rank."""
PLACE_OF_ERROR = "zorselike_place"
"""Attribute of an error that says where it arose, if that is not what its rank is at."""

_ECHO_WAIT_S = 1.0
"""How long an error that reads like the echo of another rank's end waits for its cause."""
_DECISION_WAIT_S = 3.0
"""How long a failed rank waits for rank 0 to name the first failure before it decides by itself."""
_LAST_LINE_S = 0.5
"""Between a rank's last line and its end, so that no launcher kills a rank that has not printed."""
_LINGER_S = 5.0
"""How long rank 0 stays for ranks that are not at work and do not leave either."""
_GOODBYE_S = 1.0
_TOGETHER_S = 0.03
"""Losses so close to each other are reported together."""

OnLoss = Callable[[tuple[Failure, ...]], object]
"""Told of all ranks that are lost so far, again for each that follows; in the alarm's thread."""


@dataclass(frozen=True)
class Limits:
    """Seconds; None: never. See `Alarm`."""

    interval_s: float
    silence_s: float | None
    start_silence_s: float | None
    held_s: float


class Whereabouts:
    """Progress of this rank. The working thread writes, the watching thread and other ranks read."""

    def __init__(self, page: Page | None) -> None:
        self.label: object = START_UP
        self.rounds = 0
        self.has_acted = False
        self.call = (0, "")
        """A round, and what was called in it."""
        self.page = page

    @property
    def place(self) -> str:
        label = self.label  # Once: the working thread may change it in between.
        return "" if label is None else str(label)

    def place_of(self, error: BaseException | str) -> str:
        """Where an error arose that ends this rank."""
        return getattr(error, PLACE_OF_ERROR, self.place)


@dataclass
class _Watched:
    """A peer as its heartbeats show it."""

    peer: Peer
    heard_s: float
    reached_s: float
    """When its kernel last had all that it was sent."""
    state: State
    left: bool = False
    left_at: State | None = None
    """State at its goodbye, if others may not go on without it."""

    @property
    def place(self) -> str:
        return self.state.place if self.peer.page is None else self.peer.page.read()


class Watch(threading.Thread):
    """Ends the process once any rank has failed, or, with `on_loss`, says which are lost and goes on; ends
    itself once this rank or rank 0 has left."""

    def __init__(
        self,
        rank: int,
        peers: list[Peer],
        whereabouts: Whereabouts,
        limits: Limits,
        on_loss: OnLoss | None = None,
    ) -> None:
        super().__init__(name="zorselike-alarm", daemon=True)
        now = time.monotonic()
        self._on_loss = on_loss
        self._num_reported = 0
        self._is_over = False
        self._rank = rank
        self._is_judge = rank == 0
        self._whereabouts = whereabouts
        self._limits = limits
        self._stall = Stall(rank, _print_error)
        self._watched = {peer.rank: _Watched(peer, now, now, State(START_UP)) for peer in peers}

        self._lock = threading.Lock()
        self._own_failure: Failure | None = None
        self._own_traceback = ""
        self._told = False
        self._failures: list[Failure] = []
        self._first_failure_s = now
        self._decided: Failure | None = None

        self._leaving = False
        self._left_at: State | None = None
        self._last_busy_s = now
        self._goodbye_s: float | None = None

        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for watched in self._watched.values():
            self._selector.register(watched.peer.link, selectors.EVENT_READ, watched)

    def report(self, error: BaseException | str, *, is_printed: bool = False) -> None:
        """Makes an error this rank's failure unless it has failed already; from any thread."""
        with self._lock:
            if self._own_failure is not None:
                return
            says_all = is_printed or isinstance(error, DataError)
            if isinstance(error, BaseException) and not says_all:
                self._own_traceback = "".join(traceback.format_exception(error))
            reason = reason_of(error)
            self._own_failure = Failure(
                self._rank,
                self._whereabouts.place_of(error),
                reason,
                is_echo(reason),
                exit_code=exit_code_of(error),
            )
        self.wake()

    def leave(self, *, binding: bool) -> None:
        """Says goodbye to the others, who have failed if they need this rank (`binding`) again."""
        if binding:
            self._left_at = State(self._whereabouts.place, self._whereabouts.rounds)
        self._leaving = True
        self.wake()

    def end(self) -> None:
        """Ends the thread soon; the others hear that this is no failure."""
        self._is_over = True
        self.wake()

    def wake(self) -> None:
        """Wakes the thread, so that it checks and sends now."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def run(self) -> None:
        try:
            next_beat_s, now = 0.0, time.monotonic()
            while True:
                due_s = max(now, min(next_beat_s, self._report_due_s))
                was_woken = self._receive(max(0.0, due_s - time.monotonic()))
                now = time.monotonic()
                self._leave_out(now - due_s, now)
                if self._is_over:
                    self._say_last()
                    return
                if was_woken or now >= next_beat_s:
                    next_beat_s = now + self._limits.interval_s
                    self._beat(now)
                self._notice_failures(now)
                first = self._judge(now)
                if first is not None and (self._on_loss is None or first.kind == "mistake"):
                    self._end(first)
                    return
                self._report_losses(now)
                if self._has_left(now):
                    return
        finally:
            self._close()

    # Hearing and being heard.

    def _receive(self, timeout_s: float) -> bool:
        """Waits for messages; whether this rank's own thread had something to say."""
        was_woken = False
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._woken.recv(4096)
                was_woken = True
                continue
            watched: _Watched = key.data
            messages, closed = watched.peer.link.receive()
            watched.heard_s = time.monotonic()
            for message in messages:
                self._understand(watched, message)
            if closed:
                self._selector.unregister(watched.peer.link)
                if not (watched.left or self._is_over) and self._goodbye_s is None:
                    reason = "its process ended without a word (killed, out of host memory, or crashed)"
                    self._lose(watched, reason, "dead")
                watched.left = True
        return was_woken

    def _leave_out(self, late_s: float, now: float) -> None:
        """A time in which this thread did not run either (the whole job was stopped) is no silence of others,
        whose words of that time may still wait to be read."""
        if late_s > self._limits.interval_s:
            for watched in self._watched.values():
                watched.heard_s = min(now, watched.heard_s + late_s)
                watched.reached_s = min(now, watched.reached_s + late_s)

    def _understand(self, watched: _Watched, message: Message) -> None:
        content = message["content"]
        match message["kind"]:
            case "beat":
                watched.state = State(**content)
            case "fail":
                self._add(Failure(**content))
            case "first":
                self._decided = Failure(**content)
            case "lost":
                known = {failure.rank for failure in self._failures}
                for failure in (Failure(**each) for each in content):
                    if failure.rank not in known:
                        self._add(failure)
            case "over":
                watched.left = True
            case "bye":
                watched.left = True
                watched.left_at = None if content is None else State(**content)
                watched.peer.link.end_sending()

    def _present(self) -> list[_Watched]:
        return [watched for watched in self._watched.values() if not watched.left]

    def _tell(self, kind: str, content: Failure | State | Sequence[Failure] | None) -> None:
        said: Any = asdict(content) if isinstance(content, Failure | State) else None
        if isinstance(content, Sequence):
            said = [asdict(each) for each in content]
        message = {"kind": kind, "content": said}
        for watched in self._present():
            watched.peer.link.send(message)

    def _beat(self, now: float) -> None:
        state = self._own_state()
        if state.has_acted or self._limits.start_silence_s is not None:
            self._stall.look(state, now)
        # One that does not read for hours (a debugger) must not fill the memory.
        message = {"kind": "beat", "content": asdict(state)}
        for watched in self._present():
            if watched.peer.link.is_acknowledged:
                watched.reached_s = now
            if watched.peer.link.is_congested:
                watched.peer.link.flush()
            else:
                watched.peer.link.send(message)

    def _own_state(self) -> State:
        rounds = self._whereabouts.rounds  # Before the place: see `Alarm.idle`.
        called_in, call = self._whereabouts.call
        return State(self._whereabouts.place, rounds, self._whereabouts.has_acted, call, called_in)

    # Failures.

    def _add(self, failure: Failure) -> None:
        if not self._failures:
            self._first_failure_s = time.monotonic()
        self._failures.append(failure)

    def _lose(self, watched: _Watched, reason: str, kind: FailureKind) -> None:
        watched.left = True
        self._add(Failure(watched.peer.rank, watched.place, reason, kind=kind))

    def _notice_failures(self, now: float) -> None:
        self._notice_own_failure()
        for watched in self._present():
            has_acted = watched.state.has_acted
            limit_s = self._limits.silence_s if has_acted else self._limits.start_silence_s
            silent_s = now - watched.heard_s
            if limit_s is not None and silent_s > limit_s:
                cause = self._find_cause(watched, now, limit_s)
                if cause:
                    self._lose(watched, f"silent for {silent_s:.1f} s ({cause})", "silent")
        if self._is_judge and not self._failures:
            self._notice_absence()

    def _find_cause(self, watched: _Watched, now: float, limit_s: float) -> str:
        """Why a rank is not heard for so long; empty where it may be healthy and has time left."""
        is_here = watched.peer.process is not None
        if watched.peer.process is not None and is_stopped(watched.peer.process):
            return "its process is stopped"
        if not is_here and now - watched.reached_s > limit_s:
            return "its node or network is lost"
        if now - watched.heard_s <= max(limit_s, self._limits.held_s):
            return ""
        stopped = "" if is_here else "its process is stopped, or "
        return f"{stopped}one call has kept Python's lock so long; {SILENCE_VARIABLE} allows more"

    def _notice_own_failure(self) -> None:
        with self._lock:
            own = self._own_failure
        if own is not None and not self._told:
            self._told = True
            self._add(own)
            if not self._is_judge:
                self._tell("fail", own)

    def _notice_absence(self) -> None:
        present = {watched.peer.rank: watched.state for watched in self._present()}
        left = {
            watched.peer.rank: watched.left_at
            for watched in self._watched.values()
            if watched.left_at is not None
        }
        if not self._leaving:
            present[self._rank] = self._own_state()
        elif self._left_at is not None:
            left[self._rank] = self._left_at
        failure = find_absent(present, left) or find_mismatch(present)
        if failure is not None:
            self._add(failure)

    def _judge(self, now: float) -> Failure | None:
        """Which failure was first, once that is known."""
        if self._decided is not None or not self._failures:
            return self._decided
        first = first_of(self._failures)
        patience_s = _ECHO_WAIT_S if first.is_echo else 0.0
        if not self._is_judge and self._present():
            patience_s = _DECISION_WAIT_S
        return first if now - self._first_failure_s >= patience_s else None

    @property
    def _report_due_s(self) -> float:
        """When losses that nobody was told of are to be."""
        has_news = self._on_loss is not None and len(self._failures) > self._num_reported
        return self._first_failure_s + _TOGETHER_S if has_news else math.inf

    def _report_losses(self, now: float) -> None:
        """To who asked, and as the judge to the others."""
        if now < self._report_due_s or self._on_loss is None:
            return
        self._num_reported = len(self._failures)
        losses = {failure.rank: failure for failure in reversed(self._failures)}
        found = tuple(losses[rank] for rank in sorted(losses))
        if self._is_judge:
            self._tell("lost", found)
        self._on_loss(found)

    def _end(self, first: Failure) -> None:
        """Tells the others, prints the last line, and ends the process."""
        if self._is_judge or first.rank == 0:
            for watched in self._watched.values():  # A stopped rank reads it when it goes on.
                watched.peer.link.send({"kind": "first", "content": asdict(first)})
        own = self._own_failure
        if own is not None and self._own_traceback and (own.rank == first.rank or not own.is_echo):
            _print_error(self._own_traceback)
        _print_error(last_line(first, self._rank, self._whereabouts.place) + "\n")
        _silence_errors()
        threading.Thread(target=_flush_output, daemon=True).start()
        until_s = time.monotonic() + _LAST_LINE_S
        while time.monotonic() < until_s:
            for watched in self._watched.values():
                watched.peer.link.flush()
            time.sleep(0.02)
        os._exit(first.exit_code)

    def _say_last(self) -> None:
        """Before this rank goes from the others, which go on."""
        self._notice_own_failure()
        if self._is_judge and len(self._failures) > self._num_reported:
            self._tell("lost", self._failures)
        self._tell("over", None)
        # Closing at once, with heartbeats unread, would make the others miss these words.
        for watched in self._present():
            watched.peer.link.end_sending()
        until_s = time.monotonic() + _GOODBYE_S
        while self._has_links() and time.monotonic() < until_s:
            self._receive(until_s - time.monotonic())

    def _has_links(self) -> bool:
        return any(key.data is not None for key in self._selector.get_map().values())

    # Leaving in order.

    def _has_left(self, now: float) -> bool:
        """Whether nothing remains to watch or to say, after a goodbye of this rank or of rank 0."""
        if not self._is_judge and not self._present():
            return not self._failures
        if not self._leaving:
            return False
        if self._goodbye_s is None:
            if any(watched.state.is_busy for watched in self._present()):
                self._last_busy_s = now
            if self._is_judge and self._present() and now - self._last_busy_s < _LINGER_S:
                return False
            self._goodbye_s = now
            self._tell("bye", self._left_at)
            for watched in self._present():
                watched.peer.link.end_sending()
        # The other side's end of the connection says that the goodbye was read.
        return not self._has_links() or now - self._goodbye_s > _GOODBYE_S

    def _close(self) -> None:
        self._selector.close()
        self._woken.close()
        self._waker.close()
        for watched in self._watched.values():
            watched.peer.link.close()
            if watched.peer.page is not None:
                watched.peer.page.close()


def _error_fd() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return 2


def _print_error(text: str) -> None:
    """Writes past Python's buffers, whose locks the working thread may hold."""
    # A progress bar may have left the cursor in mid-line.
    rest = b"\n" + text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(_error_fd(), rest) :]


def _silence_errors() -> None:
    """Nothing that still runs in this process may print after its last line."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in {2, _error_fd()}:
            os.dup2(nowhere, fd)


def _flush_output() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
