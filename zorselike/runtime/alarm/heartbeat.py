"""Heartbeats: a TCP connection of every rank to rank 0, and pages of shared memory.

The connections tell that a process lives, and end with it. A page holds the action that a rank
is in, written by that rank at every action and readable by the other ranks of its node even
after its death; ranks on other nodes know the action from the last heartbeat only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorselike.errors import ClusterError
from zorselike.runtime.alarm.kernel import find_process, has_arrived, name_process
from zorselike.runtime.processes.identity import find_identity

if TYPE_CHECKING:  # Links alone need no torch.
    from zorselike.runtime._compat import Store

Message = dict[str, Any]

_CONNECT_S = 3.0
_LOOK_S = 0.5
"""How often rank 0, while it waits for others, looks whether its store is still there."""
_HELLO_S = 5.0
_MAX_HELLO_BYTES = 4096
_MAX_BYTES = 64 << 20
_LOOPBACK = "127.0.0.1"
LOOPBACK_HOSTS = frozenset(("localhost", _LOOPBACK, "::1"))
"""Names of a machine that mean something to itself alone."""


class Page:
    """A line of text in memory that processes of one node share; at most 120 bytes."""

    _SIZE = 120
    _write_into = struct.Struct(f"{_SIZE}s").pack_into

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory

    @classmethod
    def create(cls) -> Page:
        """A new page, writable by this process; `unlink` it once the others have opened it."""
        shared_memory = Path("/dev/shm")
        try:
            return cls._create_in(shared_memory if shared_memory.is_dir() else None)
        except OSError:
            return cls._create_in(None)

    @classmethod
    def _create_in(cls, folder: Path | None) -> Page:
        fd, name = tempfile.mkstemp(prefix="zorselike-", dir=folder)
        try:
            os.write(fd, bytes(cls._SIZE))  # Where memory is short, fail here and not at a later write.
            return cls(Path(name), mmap.mmap(fd, cls._SIZE))
        except OSError:
            Path(name).unlink()
            raise
        finally:
            os.close(fd)

    @classmethod
    def open(cls, node: str, path: str) -> Page | None:
        """Another rank's page; None if that rank is on another node (or in another container)."""
        if node != node_identity():
            return None
        try:
            with Path(path).open("rb") as file:
                return cls(Path(path), mmap.mmap(file.fileno(), cls._SIZE, access=mmap.ACCESS_READ))
        except (OSError, ValueError):
            return None

    def write(self, text: str) -> None:
        self._write_into(self._memory, 0, text.encode())

    def read(self) -> str:
        return self._memory[:].split(b"\0", 1)[0].decode(errors="ignore")

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._memory.close()


class Link:
    """One connection: JSON objects, a line each, sent and received without ever blocking.

    Whoever sends what is no JSON object, or a line longer than `max_bytes`, counts as having closed it; so
    does whoever lets more than that wait for it.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int = _MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        self._connection = connection
        self._received = b""
        self._unsent = b""
        self._is_broken = False

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_congested(self) -> bool:
        """Whether something is still unsent, because the other side does not read."""
        return bool(self._unsent)

    @property
    def is_acknowledged(self) -> bool:
        """Whether all that was sent has reached the other side, though perhaps nobody read it there."""
        return not self._unsent and has_arrived(self._connection)

    def send(self, message: Message) -> None:
        """Sends what the connection takes and keeps the rest; a broken one shows in `receive`."""
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        """Sends a message that is JSON already."""
        if len(self._unsent) + len(line) <= self.max_bytes:
            self._unsent += line + b"\n"
            self.flush()
        else:
            self._is_broken = True

    def flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""

    def receive(self) -> tuple[list[Message], bool]:
        """The messages that have arrived, and whether the other side has closed the connection."""
        closed = self._is_broken
        try:
            while not closed and len(self._received) <= self.max_bytes:
                received = self._connection.recv(1 << 16)
                self._received += received
                closed = not received
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        *lines, self._received = self._received.split(b"\n")
        messages: list[Message] = []
        for line in lines:
            message = _parse(line) if len(line) <= self.max_bytes else None
            if message is None:
                closed = True
                break
            messages.append(message)
        self._is_broken = closed or len(self._received) > self.max_bytes
        return messages, self._is_broken

    def end_sending(self) -> None:
        """Tells the other side that nothing more comes; what it still sends can be received."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()


def _parse(line: bytes) -> Message | None:
    """A JSON object; None if it is anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


@dataclass(frozen=True)
class Peer:
    """A connected rank: its link, and its page and the number of its process if they are on this node."""

    rank: int
    link: Link
    page: Page | None
    process: int | None


def join(rank: int, world_size: int, store: Store, page: Page, *, timeout_s: float) -> list[Peer]:
    """Connects every rank to rank 0; collective. Gives rank 0 all others, the others rank 0.

    Addresses go through the store, under a key of their own for each time that ranks join.

    Raises:
        ClusterError: Rank 0 cannot be reached, or a rank did not come within `timeout_s` seconds.
    """
    generation = store.add(f"zorselike/alarm/joined/{rank}", 1)
    key = f"zorselike/alarm/{generation}"
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return _accept_all(world_size, store, key, page, deadline, timeout_s)
    return [_connect_to_first(rank, store, key, page, deadline)]


def _introduce(page: Page) -> Message:
    """What others need to know of this process; `_look_up` reads it."""
    return {"node": node_identity(), "page": str(page.path), "process": name_process()}


def _look_up(introduction: Message) -> tuple[Page | None, int | None]:
    """Another rank's page, and the number of its process, where this process can see them."""
    page = Page.open(introduction["node"], introduction["page"])
    return page, find_process(introduction["process"])


def _accept_all(
    world_size: int, store: Store, key: str, page: Page, deadline: float, timeout_s: float
) -> list[Peer]:
    token = secrets.token_hex(16)
    peers: dict[int, Peer] = {}
    with _listen(world_size) as listener:
        invitation = {
            "addresses": local_addresses(),
            "port": listener.getsockname()[1],
            "token": token,
            **_introduce(page),
        }
        store.set(key, json.dumps(invitation))
        try:
            while len(peers) < world_size - 1:
                connection = _await_connection(listener, store, key, deadline)
                hello = _accept(connection, token)
                if hello is not None:
                    number = int(hello["rank"])
                    if number in peers:  # It did not see the answer, and came by another address.
                        peers[number].link.close()
                    peers[number] = Peer(number, Link(connection), *_look_up(hello))
        except BaseException as error:
            for peer in peers.values():
                peer.link.close()
            if not isinstance(error, TimeoutError):
                raise
            missing = sorted(set(range(1, world_size)) - set(peers))
            raise ClusterError(
                f"ranks {missing} did not connect to rank 0 within {timeout_s:g} s; look at what they "
                "printed, and let TCP connections pass between the nodes"
            ) from None
    for peer in peers.values():
        peer.link.send({"kind": "go"})
    return [peers[number] for number in sorted(peers)]


def _await_connection(listener: socket.socket, store: Store, key: str, deadline: float) -> socket.socket:
    """The next one. Raises `TimeoutError` after the deadline, and `RuntimeError` where the store has ended:
    an elastic job ends this process's connection to it when a rank is lost, which then never comes."""
    while True:
        listener.settimeout(max(min(deadline - time.monotonic(), _LOOK_S), 0.001))
        try:
            return listener.accept()[0]
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
            store.check([key])


def _accept(connection: socket.socket, token: str) -> Message | None:
    """The first message of a rank of this job; from anyone else None, and the connection is closed."""
    connection.settimeout(_HELLO_S)
    try:
        hello = _read_line(connection)
        if hmac.compare_digest(str(hello["token"]), token):
            connection.sendall(b'{"kind": "welcome"}\n')
            return hello
    except (OSError, ValueError, KeyError, TypeError):
        pass
    connection.close()
    return None


def _connect_to_first(rank: int, store: Store, key: str, page: Page, deadline: float) -> Peer:
    invitation = json.loads(store.get(key))
    hello = {"rank": rank, "token": invitation["token"], **_introduce(page)}
    addresses = list(invitation["addresses"])
    if invitation["node"] == hello["node"]:
        addresses.sort(key=lambda address: address != _LOOPBACK)
    seen = _look_up(invitation)  # Its page has no name any more once all ranks have come.
    connection = _connect(rank, addresses, invitation["port"], hello)
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        _read_line(connection)
    except (OSError, ValueError):
        connection.close()
        raise ClusterError(
            f"rank {rank} was connected to rank 0, which ended before all ranks had come; "
            "look at what rank 0 printed"
        ) from None
    return Peer(0, Link(connection), *seen)


def _connect(rank: int, addresses: Iterable[str], port: int, hello: Message) -> socket.socket:
    """A connection on which rank 0 has answered."""
    failures = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError as error:
            failures.append(f"{address} ({error})")
            continue
        try:
            connection.settimeout(_HELLO_S)
            connection.sendall(json.dumps(hello).encode() + b"\n")
            _read_line(connection)
            return connection
        except (OSError, ValueError) as error:
            connection.close()
            failures.append(f"{address} ({error})")
    raise ClusterError(
        f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at port {port} of any of "
        f"{', '.join(failures)}; let TCP connections pass between the nodes, or name the network "
        "interface that joins them in GLOO_SOCKET_IFNAME"
    )


def _read_line(connection: socket.socket) -> Message:
    """One message from a blocking connection; what follows is left for its `Link`."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("closed by the other side")
        line += byte
        if len(line) > _MAX_HELLO_BYTES:
            raise ConnectionError("not a rank of this job")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a rank of this job")
    return message


def _listen(world_size: int) -> socket.socket:
    """A listener for `world_size` ranks, reachable from other nodes only where there are some."""
    if find_identity().local_size == world_size:
        return socket.create_server((_LOOPBACK, 0), backlog=world_size)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=world_size
            )
        except OSError:
            pass  # The kernel knows IPv6, this container has none.
    return socket.create_server(("", 0), backlog=world_size)


def node_identity() -> str:
    """The machine's identity: its hostname, and the kernel's boot identifier if there is one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def local_addresses() -> list[str]:
    """Addresses at which other nodes may reach this one, the likeliest first, loopback last."""
    master = os.environ.get("MASTER_ADDR", "")
    named = [os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
    interfaces = [name for _, name in socket.if_nameindex()]
    found = [address for name in [*named, *interfaces] for address in _interface_address(name)]
    if master and _is_local(master):
        found.insert(0, master)
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(entry[4][0]) for entry in resolved]
    except OSError:
        pass
    far = [
        address for address in found if not address.startswith("127.") and address not in ("::1", "localhost")
    ]
    return [*dict.fromkeys([*far, socket.gethostname()]), _LOOPBACK]


def refuse_loopback() -> None:
    """Before this process connects to those of other nodes. `ClusterError` where Gloo would have these reach
    it at a loopback address: it takes that of the host's name, which is 127.0.1.1 on many a Debian."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    host, address = socket.gethostname(), _LOOPBACK  # Gloo's, where the name means nothing.
    with contextlib.suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        if not all(one.startswith("127.") or one == "::1" for one in found):
            return
        address = found[0]
    raise ClusterError(
        f"this node's own name, {host}, means {address}, where no other node reaches it: name the network "
        "interface by which nodes reach each other in GLOO_SOCKET_IFNAME (zorselike doctor lists them), or "
        "mend /etc/hosts"
    )


def _interface_address(name: str) -> list[str]:
    """The IPv4 address of a network interface, on Linux."""
    if sys.platform != "linux" or not name:
        return []
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name[:15].encode()))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _is_local(host: str) -> bool:
    """Whether a host name or address is this machine: only then can a socket be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _keep_alive(connection: socket.socket) -> None:
    """A lost node closes the connection within half a minute even where silence is allowed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
