"""Ranks fail together: what ends one rank ends all, each saying which rank was first, and where.

A thread waiting in Gloo for a peer that lives can neither be interrupted nor run a Python signal
handler. So each rank has a daemon thread with a connection to rank 0: a failure, a lost
connection or silence makes rank 0 name the first failure, which every thread prints before it ends its
process. When rank 0 itself is lost, the others see that on their connections.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import Self

from zorselike.errors import ConfigError
from zorselike.runtime._compat import Store
from zorselike.runtime.alarm.failure import Failure, describe_failure, reason_of
from zorselike.runtime.alarm.heartbeat import Page, join
from zorselike.runtime.alarm.kernel import HELD_S
from zorselike.runtime.alarm.watch import (
    PLACE_OF_ERROR,
    SILENCE_VARIABLE,
    Limits,
    OnLoss,
    Watch,
    Whereabouts,
)
from zorselike.schedule.actions import Action

MOST_REPORTED = 256
"""Ranks that one rank watches where others hear of losses too."""


class Alarm:
    """Ends the processes of all ranks when one fails, is lost or falls silent; collective to make.

    The runtime says what it is about to do with `enter`, and `idle` when a step is over. On a
    failure every rank prints one last line on standard error and ends with exit code 1 (2 for wrong
    data) within seconds:

        zorselike: rank 2 failed first, in 3B1 (ministage 3, microbatch 1, backward): \
OutOfMemoryError: ...; this rank (0) was in 1B0 and stops.

    Of a process that was killed or has fallen silent the action is exact on rank 0's node, and
    up to `interval_s` old on others. Any rank may leave early by `close`; a process that ends
    without it while others are at work has failed.

    Heartbeats need Python's lock now and then, and one call into C may keep it for long (an allocation
    that waits for the GPU). So a silent rank has failed after `silence_s` if its process is stopped or
    its node or network lost, as far as the kernels know; if they know of nothing, after `held_s`. Before a
    rank's first action of a schedule (imports, initialisation, compilation) it is `start_silence_s`
    instead of `silence_s`. The environment variable `ZORSELIKE_SILENCE_S`, set on every rank, overrides
    both, in seconds; `off`, for a debugger, leaves only closed connections.

    All connections are rank 0's. So with more than `MOST_REPORTED` ranks no losses are reported: who asks
    for that (`on_loss`) belongs to an elastic job, whose membership hears of them by links in a tree.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        interval_s: float = 0.5,
        silence_s: float | None = 5.0,
        start_silence_s: float | None = 60.0,
        held_s: float = HELD_S,
        join_timeout_s: float = 300.0,
        on_loss: OnLoss | None = None,
    ) -> None:
        """Waits until every rank has joined.

        Args:
            rank: this process, of `world_size`.
            store: of the process group; carries rank 0's address, under keys used once.
            interval_s: seconds between heartbeats.
            silence_s: a rank unheard for so many seconds has failed; None: never.
            start_silence_s: the same before its first action of a schedule.
            held_s: the same, where that is more, for one whose process runs, or whose node is there.
            join_timeout_s: how long to wait for the others.
            on_loss: told of all lost ranks, why, and whether they are dead or only silent, on every rank
                that hears of it; no process is ended then, but where ranks call different things. When rank
                0 is lost the others know of no further loss.

        Raises:
            ClusterError: Rank 0 cannot be reached, or not every rank came.
            ConfigError: `ZORSELIKE_SILENCE_S` is neither a number of seconds nor `off`.
        """
        self.rank = rank
        self._process = os.getpid()
        self._whereabouts = Whereabouts(None)
        self._goes_on = on_loss is not None
        self._watch: Watch | None = None
        silence_s, start_silence_s = _read_silence(silence_s, start_silence_s)
        if world_size == 1 or (self._goes_on and world_size > MOST_REPORTED):
            return
        page = Page.create()
        self._whereabouts = Whereabouts(page)
        page.write(self._whereabouts.place)
        try:
            peers = join(rank, world_size, store, page, timeout_s=join_timeout_s)
        except BaseException:
            page.close()
            raise
        finally:
            page.unlink()
        limits = Limits(interval_s, silence_s, start_silence_s, held_s)
        self._watch = Watch(rank, peers, self._whereabouts, limits, on_loss)
        self._watch.start()
        atexit.register(self._at_exit)

    def enter(self, label: Action | str) -> None:
        """Says what this rank does from now on; takes a fraction of a microsecond."""
        whereabouts = self._whereabouts
        whereabouts.label = label
        if whereabouts.page is not None:
            whereabouts.page.write(str(label))
        if not whereabouts.has_acted and isinstance(label, Action):
            whereabouts.has_acted = True
            if self._watch is not None:
                self._watch.wake()  # From now on silence counts; the next heartbeat may never come.

    def begin(self, call: str) -> None:
        """Says what this rank has called that all must call together, until `idle`."""
        whereabouts = self._whereabouts
        whereabouts.call = (whereabouts.rounds, call)

    def idle(self) -> None:
        """Says that a step (or whatever all ranks do together) is over; all ranks call it as often."""
        whereabouts = self._whereabouts
        whereabouts.label = None
        whereabouts.rounds += 1  # After the label, or this rank would look busy with the next round.
        if whereabouts.page is not None:
            whereabouts.page.write("")

    def locate(self, error: BaseException, place: str) -> None:
        """Says where an error arose that the caller may catch: it counts if the error ends the rank."""
        setattr(error, PLACE_OF_ERROR, place)

    def fail(self, error: BaseException | str) -> None:
        """Ends all ranks because this one failed: rank 0 names the first failure, and this does not return.

        It does return when there is nobody to tell, with one rank or after `close`, and where losses
        are reported: the place is then a note on `error`, and the caller raises it.
        """
        watch = self._watch
        if watch is not None:
            watch.report(error)
            if not self._goes_on:
                watch.join()  # Ends with the process, unless rank 0 has left already.
        if isinstance(error, BaseException):
            failure = Failure(self.rank, self._whereabouts.place_of(error), reason_of(error))
            error.add_note(describe_failure(failure))

    def close(self) -> None:
        """Leaves. Ranks may leave at different times, and a rank more than once.

        Rank 0, by which the others hear of failures, waits while others are at work, and then
        some seconds for those that are not and have not left.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        atexit.unregister(self._at_exit)
        watch.leave(binding=self._whereabouts.rounds > 0)
        watch.join()
        page, self._whereabouts.page = self._whereabouts.page, None
        if page is not None:
            page.close()

    def abandon(self, *, wait_s: float = 0.0) -> None:
        """Leaves at once, whatever the others do; that it does so is no failure to them.

        Args:
            wait_s: how long to wait for them to hear so, as a process should that ends afterwards.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        atexit.unregister(self._at_exit)
        watch.end()  # It says so to the others, and ends by itself a second later.
        if wait_s:
            watch.join(wait_s)
        page, self._whereabouts.page = self._whereabouts.page, None
        if page is not None:
            page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        leaves_in_order = error is None or (isinstance(error, SystemExit) and not error.code)
        if error is not None and not leaves_in_order:
            self.fail(error)
        self.close()

    def _at_exit(self) -> None:
        """A process that ends without `close` has failed if it raised or left its work undone."""
        watch = self._watch
        if watch is None or os.getpid() != self._process:
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            watch.report(error, is_printed=True)
        elif self._whereabouts.label is not None:
            watch.report("its process exited in the middle of it (sys.exit)")
        else:
            watch.leave(binding=True)
        if self._goes_on:
            watch.end()
        watch.join()


def _read_silence(
    silence_s: float | None, start_silence_s: float | None
) -> tuple[float | None, float | None]:
    text = os.environ.get(SILENCE_VARIABLE, "").strip().lower()
    if not text:
        return silence_s, start_silence_s
    if text == "off":
        return None, None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(
            f"the environment variable {SILENCE_VARIABLE} is {text!r}; "
            "give a number of seconds above 0, or 'off'"
        )
    return seconds, seconds
