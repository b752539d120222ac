"""Links between members: TCP connections whose ends have proven to each other that they know the job's token.

A member listens at one port. Whoever connects is sent a challenge and answers with an HMAC of it, then the
listener proves itself likewise: the token never travels. Before that an end may say 4 KiB in 5 seconds, and
only so many strangers are kept at once. Afterwards lines of JSON pass (`runtime.alarm.heartbeat.Link`).

A link that ends is looked into: if nobody, or somebody else, answers at the member's port, its process has
certainly ended; if nothing answers in time, the member is silent; if it answers, only messages may be lost.

A member that says nothing may be in a call that keeps Python's lock, such as an allocation that waits for its
GPU. So it is silent after the limit if its process is stopped, or its node or the network lost, as far as the
kernels know; if they know of nothing, after `HELD_S`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from zorselike.elastic.contract import Json, Member
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.errors import FileError
from zorselike.runtime.alarm.heartbeat import Link
from zorselike.runtime.alarm.kernel import HELD_S, find_process, is_stopped, name_process
from zorselike.text.dataclass_tables import read_dataclass

MAX_STRANGERS = 64
"""Connections that have not proven themselves yet; the oldest goes when one more comes."""
_HELLO_S = 5.0
_MAX_HELLO_BYTES = 4096
_MAX_BYTES = 64 << 20
_RETRY_S = 0.2
_NONCE_BYTES = 16
_REFUSES = "who listens there refuses it: is its ZORSELIKE_JOB_TOKEN the job's?"


def prove(token: str, role: str, *nonces: str) -> str:
    """What only those who know the token can say about these nonces, by HMAC-SHA256."""
    return hmac.new(token.encode(), "\n".join((role, *nonces)).encode(), "sha256").hexdigest()


def is_proof(proof: object, token: str, role: str, *nonces: str) -> bool:
    return hmac.compare_digest(str(proof).encode(), prove(token, role, *nonces).encode())


@dataclass(eq=False)
class _Connection:
    """One socket and what its other end has proven so far."""

    socket: socket.socket
    link: Link
    since_s: float
    target: Member | None = None
    """Whom it dials; None if it was accepted, or dials the address by which this process joins."""
    is_dialed: bool = False
    is_connected: bool = True
    nonce: str = field(default_factory=lambda: secrets.token_hex(_NONCE_BYTES))
    member: Member | None = None
    """Who is at the other end, proven."""
    peer_nonce: str = ""
    process: int | None = None
    """Of that member, if it is one of this node."""
    heard_s: float = 0.0
    reached_s: float = 0.0
    """When the other end's kernel last had all that it was sent."""
    sent_s: float = 0.0
    is_quiet: bool = False
    ping: int = 0


@dataclass
class _Dial:
    """A link being opened, or a member being looked for whose link has ended."""

    member: Member
    until_s: float
    retry_s: float
    is_probe: bool
    messages: list[bytes] = field(default_factory=list)
    connection: _Connection | None = None


@dataclass
class _Contact:
    """The addresses by which this process joins, tried in turn; a member may not be there yet."""

    addresses: list[tuple[str, int]]
    until_s: float
    retry_s: float
    connection: _Connection | None = None


class Links:
    """All of a member's links. Used by one thread alone."""

    def __init__(
        self,
        me: Member,
        token: str,
        listener: socket.socket,
        *,
        silence_s: float,
        tell: Callable[[e.Event], None],
        ask: Callable[[Json], Json],
    ) -> None:
        """`tell` takes what happens, `ask` answers requests of programs such as `zorselike status`."""
        self.me = me
        self._token = token
        self._listener = listener
        self._silence_s = silence_s
        self._tell = tell
        self._ask = ask
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Connection] = []
        self._links: dict[str, list[_Connection]] = {}
        self._dials: dict[str, _Dial] = {}
        self._contact: _Contact | None = None
        self._contact_failed: Callable[[str], None] | None = None
        self._pings = 0
        self.unanswered = ""
        """The address of its job that was tried last in vain, and why."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        _OPEN.add(self)

    # -- what the machine asks for -------------------------------------------------------------

    def contact(
        self, addresses: Sequence[tuple[str, int]], *, limit_s: float, failed: Callable[[str], None]
    ) -> None:
        """Opens a first link, to whoever is at one of these addresses; tries until the limit."""
        now = time.monotonic()
        self._contact = _Contact(list(addresses), now + limit_s, now)
        self._contact_failed = failed

    def open(self, member: Member) -> None:
        if member.id in self._links:
            self._tell(e.Opened(self._links[member.id][0].member or member))
        elif (dial := self._dials.get(member.id)) is None or dial.is_probe:
            now = time.monotonic()
            self._dials[member.id] = _Dial(member, now + self._silence_s, now, is_probe=False)

    def send(self, id: str, line: bytes) -> None:
        if id in self._links:
            self._links[id][0].link.send_line(line)
            self._links[id][0].sent_s = time.monotonic()
        elif id in self._dials:
            self._dials[id].messages.append(line)

    def close(self, id: str) -> None:
        """Ends a link, so that the other side knows it is not needed any more."""
        for connection in self._links.pop(id, []):
            connection.link.send({"link": "close"})
            connection.link.end_sending()
            self._drop(connection)

    def close_all(self) -> None:
        for connection in [*self._connections()]:
            connection.link.flush()
            self._drop(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()
        _OPEN.discard(self)

    def is_congested(self) -> bool:
        """Whether something is still unsent."""
        return any(c.link.is_congested for connections in self._links.values() for c in connections)

    def watch(self, file: socket.socket) -> None:
        """Polling ends when this one can be read."""
        self._selector.register(file, selectors.EVENT_READ)

    def forget_in_child(self) -> None:
        """In a forked process: closes what belongs to its parent, which would seem to live on in it."""
        for connection in self._connections():
            connection.link.close()
        self._listener.close()

    # -- polling -------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> None:
        """Waits for something to happen, no longer than so, and tells it."""
        self._want_writes()
        for key, mask in self._selector.select(max(0.0, timeout_s)):
            connection = key.data
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(connection, _Connection) and connection.link.fileno() >= 0:
                if not connection.is_connected:
                    self._finish_connecting(connection)
                    continue
                if mask & selectors.EVENT_WRITE:
                    connection.link.flush()
                if mask & selectors.EVENT_READ:
                    self._read(connection)
        self._look_after(time.monotonic())

    def _want_writes(self) -> None:
        for connection in self._connections():
            wanted = selectors.EVENT_READ
            if connection.link.is_congested or not connection.is_connected:
                wanted |= selectors.EVENT_WRITE
            with contextlib.suppress(KeyError, ValueError):
                if self._selector.get_key(connection.link).events != wanted:
                    self._selector.modify(connection.link, wanted, connection)

    def _connections(self) -> Iterator[_Connection]:
        yield from list(self._strangers)
        for connections in list(self._links.values()):
            yield from list(connections)

    def slept(self) -> None:
        """This process stood still: whoever seems quiet may not be."""
        now = time.monotonic()
        for connections in self._links.values():
            for connection in connections:
                connection.heard_s = connection.reached_s = now
                self._doubt(connection)

    def _doubt(self, connection: _Connection) -> None:
        """Only an answer to a question asked from now on shows that the other end is there."""
        self._pings += 1
        connection.is_quiet, connection.ping = True, self._pings
        connection.link.send({"link": "ping", "number": self._pings})

    def _look_after(self, now: float) -> None:
        for connection in list(self._strangers):
            if now > connection.since_s + _HELLO_S:
                self._drop(connection)
        for id, connections in list(self._links.items()):
            for connection in list(connections):
                quiet_s = now - connection.heard_s
                if connection.link.is_acknowledged:
                    connection.reached_s = now
                if now - connection.sent_s > self._silence_s / 5:
                    connection.link.send({"link": "beat"})
                    connection.sent_s = now
                if quiet_s > self._silence_s and self._is_lost(connection, now):
                    self._drop(connection)
                    if id not in self._links:
                        self._tell(e.Silent(id))
                elif quiet_s > self._silence_s / 2 and not connection.is_quiet:
                    self._doubt(connection)
                    self._tell(e.Quiet(id))
        self._look_after_dials(now)

    def _is_lost(self, connection: _Connection, now: float) -> bool:
        """Whether a quiet member is, and not merely in a call that is long."""
        if connection.process is not None:
            is_lost = is_stopped(connection.process)
        else:
            is_lost = now - connection.reached_s > self._silence_s
        return is_lost or now - connection.heard_s > HELD_S

    def _look_after_dials(self, now: float) -> None:
        for id, dial in list(self._dials.items()):
            if now > dial.until_s:
                self._give_up(id, e.Silent(id))
            elif dial.connection is None and now >= dial.retry_s:
                self._dial(dial)
        contact = self._contact
        if contact is not None and contact.connection is None:
            if now > contact.until_s:
                self._contact = None
                if self._contact_failed is not None:
                    at = ", ".join(f"{host}:{port}" for host, port in contact.addresses[:4])
                    self._contact_failed(f"nobody with this job's token answers at {at} ({self.unanswered})")
            elif now >= contact.retry_s:
                self._dial(contact)

    # -- dialing -------------------------------------------------------------------------------

    def _dial(self, dial: _Dial | _Contact) -> None:
        """Begins to connect."""
        member = dial.member if isinstance(dial, _Dial) else None
        if isinstance(dial, _Dial):
            host, port = dial.member.host, dial.member.port
        else:
            host, port = dial.addresses[0]
            dial.addresses.append(dial.addresses.pop(0))
        dial.retry_s = time.monotonic() + _RETRY_S
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            connected = socket.socket(family, kind, protocol)
        except OSError as error:
            self.unanswered = f"{host}:{port}: {error.strerror}"
            return
        link = Link(connected, max_bytes=_MAX_HELLO_BYTES)
        code = connected.connect_ex(address)
        now = time.monotonic()
        connection = _Connection(connected, link, now, member, is_dialed=True, is_connected=False)
        dial.connection = connection
        self._strangers.append(connection)
        self._selector.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            self._miss(connection, code)

    def _finish_connecting(self, connection: _Connection) -> None:
        code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        connection.is_connected = not code
        if code:
            self._miss(connection, code)

    def _miss(self, connection: _Connection, code: int) -> None:
        """Nobody takes the call; where the machine says that nobody listens, the process has ended."""
        self._drop(connection, os.strerror(code))
        if connection.target is not None and code == errno.ECONNREFUSED:
            self._give_up(connection.target.id, e.Dead(msg.Gone(connection.target.id)))

    def _give_up(self, id: str, event: e.Event) -> None:
        dial = self._dials.pop(id, None)
        if dial is None:
            return
        if dial.connection is not None:
            self._drop(dial.connection)
        self._tell(event)

    def _dial_of(self, connection: _Connection) -> _Dial | _Contact | None:
        if self._contact is not None and self._contact.connection is connection:
            return self._contact
        return next((dial for dial in self._dials.values() if dial.connection is connection), None)

    # -- strangers -----------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(MAX_STRANGERS):
            try:
                connected, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # No more files, or gone again already.
                if self._strangers:
                    self._drop(self._strangers[0])
                return
            accepted = [stranger for stranger in self._strangers if not stranger.is_dialed]
            if len(accepted) >= MAX_STRANGERS:
                self._drop(accepted[0])
            link = Link(connected, max_bytes=_MAX_HELLO_BYTES)
            connection = _Connection(connected, link, time.monotonic())
            self._strangers.append(connection)
            self._selector.register(connection.link, selectors.EVENT_READ, connection)
            connection.link.send({"challenge": connection.nonce})

    def _greet(self, connection: _Connection, message: Json) -> None:
        """The next step of the proof."""
        if connection.is_dialed:
            self._greet_as_caller(connection, message)
        else:
            self._greet_as_listener(connection, message)

    def _greet_as_caller(self, connection: _Connection, message: Json) -> None:
        if "challenge" in message:
            theirs = str(message["challenge"])
            connection.peer_nonce = theirs
            connection.link.send(
                {
                    "nonce": connection.nonce,
                    "proof": prove(self._token, "caller", theirs, connection.nonce),
                    "member": asdict(self.me),
                    "process": name_process(),
                }
            )
            return
        theirs = connection.peer_nonce
        if not is_proof(message.get("proof"), self._token, "listener", connection.nonce, theirs):
            raise FileError("wrong token")
        self._become_link(connection, message)

    def _greet_as_listener(self, connection: _Connection, message: Json) -> None:
        theirs = str(message.get("nonce"))
        if not is_proof(message.get("proof"), self._token, "caller", connection.nonce, theirs):
            raise FileError("wrong token")
        answer: Json = {"proof": prove(self._token, "listener", theirs, connection.nonce)}
        if "ask" in message:
            connection.link.max_bytes = _MAX_BYTES
            connection.link.send(answer | self._ask(message))
            connection.link.end_sending()
            self._drop(connection)
            return
        connection.link.send(answer | {"member": asdict(self.me), "process": name_process()})
        self._become_link(connection, message)

    def _become_link(self, connection: _Connection, message: Json) -> None:
        """`message`: what the other end has said last."""
        member = read_dataclass(Member, message.get("member"))
        dial = self._dial_of(connection)
        self._strangers.remove(connection)
        if connection.target is not None and connection.target.id != member.id:
            self._strangers.append(connection)
            raise FileError("another process is there now")
        if dial is self._contact and dial is not None:
            self._contact = None
        probe = self._dials.pop(member.id, None)
        connection.member, connection.process = member, find_process(str(message.get("process", "")))
        connection.link.max_bytes = _MAX_BYTES
        connection.heard_s = connection.reached_s = connection.sent_s = time.monotonic()
        is_new = member.id not in self._links
        self._links.setdefault(member.id, []).append(connection)
        for line in probe.messages if probe is not None else []:
            connection.link.send_line(line)
        # If both ends dial at once both connections stay: one might close what the other keeps.
        if probe is not None and probe.is_probe:
            self._tell(e.Relinked(member.id))
        elif is_new:
            self._tell(e.Opened(member))

    # -- what comes ----------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        messages, is_closed = connection.link.receive()
        connection.heard_s = time.monotonic()
        try:
            for message in messages:
                if connection.member is None:
                    self._greet(connection, message)
                elif not self._hear(connection, connection.member.id, message):
                    return
        except (FileError, ValueError, TypeError, RecursionError):
            is_closed = True
            self._mistrust(connection)
        if is_closed and connection.link.fileno() >= 0:
            self._lose(connection)

    def _mistrust(self, connection: _Connection) -> None:
        """Who answers at a member's port is not that member."""
        if connection.member is None and connection.target is not None:
            self._drop(connection)
            self._give_up(connection.target.id, e.Dead(msg.Gone(connection.target.id)))

    def _hear(self, connection: _Connection, id: str, message: Json) -> bool:
        """Whether the link still stands afterwards."""
        match message.get("link"):
            case None:
                self._tell(e.Received(id, msg.read(message)))
            case "ping":
                connection.link.send({"link": "pong", "number": message.get("number")})
            case "pong":
                if connection.is_quiet and message.get("number") == connection.ping:
                    connection.is_quiet = False
                    self._tell(e.Heard(id))
            case "close":
                for each in self._links.pop(id, []):
                    self._drop(each)
                self._tell(e.Closed(id))
                return False
        return connection.link.fileno() >= 0

    def _lose(self, connection: _Connection) -> None:
        """The other end, or the network, has ended a connection."""
        member = connection.member
        was_sending = member is not None and self._links.get(member.id, [None])[0] is connection
        self._drop(connection)
        if member is not None and member.id in self._links and was_sending:
            self._tell(e.Relinked(member.id))
        elif member is not None and member.id not in self._links and member.id not in self._dials:
            now = time.monotonic()
            self._dials[member.id] = dial = _Dial(member, now + self._silence_s / 2, now, is_probe=True)
            self._dial(dial)

    def _drop(self, connection: _Connection, why: str = "no answer") -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.link)
        connection.link.close()
        if connection in self._strangers:
            self._strangers.remove(connection)
        if connection.member is not None:
            connections = self._links.get(connection.member.id, [])
            if connection in connections:
                connections.remove(connection)
                if not connections:
                    del self._links[connection.member.id]
        if (dial := self._dial_of(connection)) is not None:
            dial.connection = None
            if isinstance(dial, _Contact):
                why = _REFUSES if connection.peer_nonce else why
                self.unanswered = "{}:{}: {}".format(*dial.addresses[-1], why)


_OPEN: weakref.WeakSet[Links] = weakref.WeakSet()


def _forget_all() -> None:
    for links in list(_OPEN):
        links.forget_in_child()


os.register_at_fork(after_in_child=_forget_all)
