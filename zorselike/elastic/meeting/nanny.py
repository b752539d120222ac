"""A process beside each worker, which survives it: sees its death, says so, and starts another in its place.

It never computes and needs no torch. The worker writes lines of JSON to a pipe: at least every twentieth of
the silence limit that it lives, and which generation it belongs to, whom to tell of its death, why it is out.
A worker that stops writing (SIGSTOP, a process stuck for good) is killed before the others would only call it
silent: of the killed it is certain that they are gone. One that runs may be in a call that keeps Python's
lock, and has more time.

Under a launcher that ends a node's processes when one ends, as torchrun does, start nannies by it:
`torchrun ... -m zorselike.elastic.meeting.nanny COMMAND...`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zorselike.elastic.contract import Json
from zorselike.elastic.meeting.asking import NobodyListens, NobodyThere, ask
from zorselike.elastic.meeting.environment import (
    AGAIN_AT,
    ANSWERED,
    FOUND,
    JOIN,
    MEMBERS,
    NANNY_FD,
    RUN,
    TOKEN,
    read_address,
    read_settings,
)
from zorselike.errors import ClusterError, ConfigError
from zorselike.runtime.alarm.kernel import HELD_S, is_stopped

_SILENT_SHARE = 0.8
"""Of the silence limit, after which a worker that is stopped is killed, and of `HELD_S` for others."""
_SOON_S = 60.0
"""A worker that dies sooner after its start was no use."""
_MAX_STARTS = 3
"""So many of these one after the other, and no other is started."""
_FIRST_WAIT_S = 1.0
_FOLLOWS_S = 5.0
"""From one look at who is in the job to the next, while a worker starts or the network is cut."""
_CUT_S = 120.0
"""So long it looks for a job whose machines cannot be reached: a network that is cut may be mended."""
_MAX_LINE_BYTES = 1 << 16
MISTAKE = 2
"""Exit code of a program whose user has to correct something: its command line, its recipe."""
LATE = 75
"""Exit code where a worker that came to a job which was there, perhaps in the place of a lost one, has found
nobody, or was to leave before it had a part: how the job has ended, others say."""
UNFOUNDED = 76
"""Exit code where the founder has ended with such a mistake before its job began."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class _Known:
    """What a worker has said."""

    id: str = ""
    last: int = -1
    members: list[tuple[str, int]] = field(default_factory=list)
    over: str | None = None
    is_stranded: bool = False
    """Whether it has found nobody of its job."""
    may_return: bool = False


class Nanny:
    """Keeps one worker running. `run` returns when no other one is to be started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._silence_s = read_settings(environment).silence_s
        self._worker: subprocess.Popen[bytes] | None = None
        self._leaves = False
        self._members: list[tuple[str, int]] = []
        self._is_cut = False
        """Whether a machine could not be reached when a member was looked for last."""

    def leave(self) -> None:
        """The worker is to leave the job, and no other comes in its place."""
        self._leaves = True
        if self._worker is not None:
            with contextlib.suppress(ProcessLookupError):
                self._worker.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """The exit code of the last worker, as a shell would give it."""
        num_soon = 0
        while True:
            started_s = time.monotonic()
            code, known = self._run_once()
            is_late = known.is_stranded and ANSWERED in self._environment
            if is_late and self._tell(known) in (None, *self._list_joined()):
                self._say("the job has ended meanwhile, or cannot be reached any more")
                return LATE
            if code and self._leaves and known.last < 0:
                self._say(f"worker {describe_end(code)} before it had a part in its job")
                return LATE if ANSWERED in self._environment else code
            is_out = known.over is not None and not known.may_return
            if code == 0 or self._leaves or (is_out and not is_late):
                return code
            if code == MISTAKE and known.over is None and not is_late:
                # Another one would make it too.
                return UNFOUNDED if FOUND in self._environment and known.last < 0 else code
            self._members = known.members or self._members
            self._say(f"worker {describe_end(code)}")
            contact = self._tell_when_reached(known)
            if contact is None:
                self._say("no member of its job can be reached; no other worker is started")
                return code
            if not is_late:
                num_soon = num_soon + 1 if time.monotonic() - started_s < _SOON_S else 0
            if num_soon >= _MAX_STARTS:
                self._say(
                    f"{num_soon} workers one after the other ended within {_SOON_S:g} s of their start, the "
                    f"last {describe_end(code)}: given up; look at what they printed"
                )
                return code
            if FOUND in self._environment:
                self._environment[AGAIN_AT] = self._environment[FOUND]
            for name in (FOUND, MEMBERS, *_LAUNCHERS):
                self._environment.pop(name, None)
            others = [address for address in self._members if address != contact]
            self._environment[JOIN] = ",".join(f"{host}:{port}" for host, port in (contact, *others))
            self._environment[ANSWERED] = "1"
            time.sleep(_FIRST_WAIT_S * 2**num_soon - _FIRST_WAIT_S)
            if self._leaves:
                return LATE

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # Who has read it may be gone.
            print(f"nanny of {' '.join(self._command)[:60]}: {text}", file=sys.stderr, flush=True)

    def _leave_if_alone(self) -> None:
        """With `zorselike run` nobody is left who would end this node's workers."""
        if not self._leaves and self._environment.get(RUN, "") not in ("", str(os.getppid())):
            self._say("`zorselike run` has ended without a word; the worker leaves")
            self.leave()

    def _run_once(self) -> tuple[int, _Known]:
        reads, writes = os.pipe()
        known = _Known()
        try:
            self._worker = subprocess.Popen(
                self._command, env=self._environment | {NANNY_FD: str(writes)}, pass_fds=(writes,)
            )
        except OSError as error:
            os.close(reads)
            raise ConfigError(f"cannot start {self._command[0]}: {error}") from error
        finally:
            os.close(writes)
        if self._leaves:
            self.leave()
        try:
            self._listen(reads, known)
        finally:
            os.close(reads)
        code = self._worker.wait()
        return (128 - code if code < 0 else code), known

    def _listen(self, reads: int, known: _Known) -> None:
        """Until the worker has ended; kills it where it falls silent."""
        assert self._worker is not None
        received = b""
        heard_s = last_s = followed_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(reads, selectors.EVENT_READ)
            is_open = True
            while self._worker.poll() is None:
                ready = selector.select(min(0.2, self._silence_s / 20)) if is_open else []
                if not is_open:
                    time.sleep(0.02)
                now = time.monotonic()
                if now - last_s > self._silence_s / 4:  # This process stood still itself.
                    heard_s = now
                last_s = now
                self._leave_if_alone()
                if not known.id and now - followed_s > _FOLLOWS_S:
                    self._follow()
                    followed_s = time.monotonic()
                if ready:
                    chunk = os.read(reads, 1 << 16)
                    is_open = bool(chunk)
                    heard_s = now
                    *lines, received = (received + chunk).split(b"\n")
                    received = received[-_MAX_LINE_BYTES:]
                    for line in lines:
                        self._learn(known, line)
                is_speaking = bool(known.id) and known.over is None and is_open
                silent_s = (now - heard_s) / _SILENT_SHARE
                may_run = silent_s <= HELD_S and not is_stopped(self._worker.pid)
                if is_speaking and silent_s > self._silence_s and not may_run:
                    self._say(f"worker says nothing for {now - heard_s:.1f} s; it is killed")
                    self._worker.kill()
            # What it wrote last.
            os.set_blocking(reads, False)
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(reads, 1 << 16):
                    received += chunk
            for line in received.split(b"\n"):
                self._learn(known, line)

    def _learn(self, known: _Known, line: bytes) -> None:
        try:
            word: Json = json.loads(line)
            known.id = str(word.get("id", known.id))
            known.last = int(word.get("last", known.last))
            if "members" in word:
                known.members = [(str(host), int(port)) for host, port in word["members"]]
            if "token" in word:  # Where a launcher's store told the worker.
                self._environment[TOKEN] = str(word["token"])
            known.is_stranded |= bool(word.get("stranded"))
            if "over" in word:
                known.over, known.may_return = str(word["over"]), bool(word.get("may_return"))
        except (ValueError, TypeError, AttributeError):
            return

    def _follow(self) -> None:
        """Learns who is in the job now: those whom a worker is to join may be lost while it starts."""
        found = self._ask({"ask": "status"}) if ANSWERED in self._environment else None
        if found is not None and (members := found[1].get("status", {}).get("members")):
            self._members = [(str(member["host"]), int(member["port"])) for member in members]

    def _list_joined(self) -> list[tuple[str, int]]:
        """Addresses at which the worker looks for its job."""
        join = self._environment.get(JOIN)
        return [read_address(JOIN, text) for text in join.split(",")] if join else []

    def _tell(self, known: _Known) -> tuple[str, int] | None:
        """Tells the first member that can be reached; its address."""
        found = self._ask({"ask": "word", "id": known.id, "last": known.last})
        return None if found is None else found[0]

    def _tell_when_reached(self, known: _Known) -> tuple[str, int] | None:
        """The same, once the network is there again."""
        contact = self._tell(known)
        if contact is None and self._is_cut:
            self._say(f"its job cannot be reached; waits up to {_CUT_S:g} s for the network")
        until_s = time.monotonic() + _CUT_S
        while contact is None and self._is_cut and not self._leaves and time.monotonic() < until_s:
            time.sleep(_FOLLOWS_S)
            contact = self._tell(known)
        return contact

    def _ask(self, request: Json) -> tuple[tuple[str, int], Json] | None:
        """The first member that can be reached, by its address, and its answer."""
        self._is_cut = False
        for host, port in (*self._members, *self._list_joined()):
            try:
                answer = ask(host, port, self._environment.get(TOKEN, ""), request, limit_s=2.0)
                return (host, port), answer
            except ClusterError as error:
                self._is_cut |= isinstance(error, NobodyThere) and not isinstance(error, NobodyListens)
        return None


def describe_end(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"


def main(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs a nanny in this process; SIGTERM and Ctrl-C make its worker leave."""
    nanny = Nanny(command, environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: nanny.leave())
    return nanny.run()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m zorselike.elastic.meeting.nanny COMMAND...")
    sys.exit(main(sys.argv[2:] if sys.argv[1] == "--" else sys.argv[1:]))
