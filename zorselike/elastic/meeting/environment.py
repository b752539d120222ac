"""How a process finds its job, by variables of its environment.

`zorselike run` and `zorselike join` set these for the workers that they start:

- `ZORSELIKE_JOB_TOKEN`: what all members of a job know; links without it are refused.
- `ZORSELIKE_FOUND=HOST:PORT` and `ZORSELIKE_MEMBERS=N`: this process founds a job at this address, which
  starts with N members.
- `ZORSELIKE_JOIN=HOST:PORT`: this process joins the job of which a member is at this address, or at one of
  several with commas between.
- `ZORSELIKE_NODE`: the node's name (by default the hostname), with `LOCAL_RANK` the process's place.
- `ZORSELIKE_HOST`: the address at which other nodes reach this process, where it is not the one from which it
  reaches them.
- `ZORSELIKE_SILENCE_S`: how long a member may be silent before the others go on without it (10).
- `ZORSELIKE_NOTICE_FILE`: once this file exists, the member leaves at the next step boundary. So it does
  after SIGTERM, unless the process has a handler of its own.
- `ZORSELIKE_NOTICE_URL`: page of the cloud's metadata server, asked every 5 s; once it says that the machine
  will be taken back, the member leaves likewise (`notice_url`).
- `ZORSELIKE_ANSWERED`: a member of the job has just answered `zorselike run`, or the nanny of a worker that
  takes the place of a lost one: the worker looks for its job for half a minute only.
- `ZORSELIKE_AGAIN_AT=HOST:PORT`: a nanny sets it for a worker that takes the place of the founder: it listens
  where that did, if it can, so that the lines which people have still lead to the job.
- `ZORSELIKE_RUN`: number of the `zorselike run` process that has started a nanny; once that is gone, killed
  say, the nanny has its worker leave.
- `ZORSELIKE_NANNY_FD`: where this process tells its nanny that it lives, and whom to tell of its death.

Under torchrun with a static rendezvous (`--master-addr`, `--master-port`, `--max-restarts 0`), srun or mpirun
none of the first three is set: rank 0 founds the job, at a port that it tells the others, as the token, by
the launcher's store at `MASTER_ADDR:MASTER_PORT`. The dynamic rendezvous (`--rdzv-backend c10d` or `etcd`) on
several nodes is refused: where one of its agents ends, the others end their workers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from zorselike.elastic.contract import Member, Worker
from zorselike.elastic.meeting.meeting import Meeting, make_member
from zorselike.elastic.meeting.notice_url import NoticeUrl
from zorselike.elastic.membership.round import Settings
from zorselike.errors import ClusterError, ConfigError
from zorselike.runtime.alarm.heartbeat import LOOPBACK_HOSTS, local_addresses, refuse_loopback
from zorselike.runtime.processes.arrival import Arrival
from zorselike.runtime.processes.identity import Identity, find_identity

TOKEN = "ZORSELIKE_JOB_TOKEN"
FOUND = "ZORSELIKE_FOUND"
MEMBERS = "ZORSELIKE_MEMBERS"
JOIN = "ZORSELIKE_JOIN"
HOST = "ZORSELIKE_HOST"
SILENCE = "ZORSELIKE_SILENCE_S"
NOTICE_FILE = "ZORSELIKE_NOTICE_FILE"
NOTICE_URL = "ZORSELIKE_NOTICE_URL"
NANNY_FD = "ZORSELIKE_NANNY_FD"
ANSWERED = "ZORSELIKE_ANSWERED"
AGAIN_AT = "ZORSELIKE_AGAIN_AT"
RUN = "ZORSELIKE_RUN"

_STORE_KEY = "zorselike/elastic/founder"
_START_LIMIT = timedelta(minutes=10)
_ANSWERED_LIMIT_S = 30.0
"""So long a worker looks for a job of which a member has answered: it may have ended meanwhile."""
_REFUSED_S = 2.0
"""So long, where nobody listens at any address of its job."""


def make_token() -> str:
    return secrets.token_hex(16)


def meets_by_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process finds its job in a launcher's store, and not by an address that it was given."""
    return FOUND not in environment and JOIN not in environment


def read_address(name: str, text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, the host perhaps in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(f"{name} is '{text}'; write it as HOST:PORT, such as node1:29600")
    return host.strip("[]"), int(port)


def from_environment(
    worker: Worker,
    *,
    device_type: str,
    memory_bytes: int,
    settings: Settings | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Meeting:
    """This process's meeting, founded or joined as the environment says.

    Raises:
        ConfigError: Variables are missing or contradict each other, or not all of a launcher's processes
            have `[elastic] enable`.
        ClusterError: The launcher's store cannot be reached, or not all come there in time; the job has ended
            before this process came.
    """
    identity = find_identity(environment)
    settings = settings or read_settings(environment)
    found, join = environment.get(FOUND), environment.get(JOIN)
    if meets_by_store(environment):
        return _meet_by_store(worker, identity, device_type, memory_bytes, settings, environment)
    token = environment.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"{TOKEN} is not set; all members of a job need the same, which `zorselike run` prints"
        )
    if found is not None and join is not None:
        raise ConfigError(f"{FOUND} and {JOIN} are both set; a process founds a job or joins one")
    contact = [read_address(JOIN, text) for text in (join or "").split(",")] if found is None else []
    if environment.get(ANSWERED):
        _refuse_ended(contact, environment)
        settings = replace(settings, start_limit_s=min(settings.start_limit_s, _ANSWERED_LIMIT_S))
    host, port = read_address(FOUND, found) if found is not None else contact[0]
    num_members = None
    if found is not None:
        if not environment.get(MEMBERS, "").isdecimal() or int(environment[MEMBERS]) < 1:
            raise ConfigError(f"{FOUND} is set, so {MEMBERS} must say with how many members the job starts")
        num_members = int(environment[MEMBERS])
        check_host(FOUND, host)
    own = host if found is not None else _address_towards(host, port)
    listener = listen(host if found is not None else "", port if found is not None else 0)
    if again := environment.get(AGAIN_AT):
        with contextlib.suppress(ClusterError):
            listener, own = listen(*read_address(AGAIN_AT, again)), read_address(AGAIN_AT, again)[0]
    own = environment.get(HOST) or own
    member = make_member(
        own, listener.getsockname()[1], identity.node, identity.local_rank, device_type, memory_bytes
    )
    return _begin(worker, member, listener, token, num_members, contact, settings, environment)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Raises `ConfigError` for a silence that is no number of seconds."""
    text = environment.get(SILENCE)
    if text is None:
        return Settings()
    try:
        silence_s = float(text)
    except ValueError:
        silence_s = 0.0
    if not 0.5 <= silence_s <= 3600:
        raise ConfigError(f"{SILENCE} is '{text}'; it must be seconds, from 0.5 to 3600")
    return Settings(silence_s=silence_s)


def listen(host: str, port: int) -> socket.socket:
    """A listener: at all addresses, or on loopback alone where that is the host."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return _bind(host, port)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(port) from None
    return _bind("", port)


def check_host(name: str, host: str) -> None:
    """Others are told to come there, and would try for minutes.

    Raises `ConfigError`, which says what `name` is, if no address is known for it.
    """
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{name}: no address is known for '{host}' ({error}); name this node as others reach it"
        ) from None


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(port) from None
        raise ClusterError(f"cannot listen at {host}:{port}: {error}") from error


def _taken(port: int) -> ClusterError:
    return ClusterError(f"port {port} is taken on {socket.gethostname()}; name a free one")


def _refuse_ended(contact: Sequence[tuple[str, int]], environment: Mapping[str, str]) -> None:
    """Raises `ClusterError`, and tells the nanny, where machines say that nobody listens there any more."""
    until_s = time.monotonic() + _REFUSED_S
    while time.monotonic() < until_s:
        for address in contact:
            try:
                socket.create_connection(address, timeout=_REFUSED_S).close()
            except ConnectionRefusedError:
                continue
            except OSError:  # It may be there, and the network is not.
                return
            return
        time.sleep(0.2)
    if nanny := environment.get(NANNY_FD):
        with contextlib.suppress(OSError):
            os.write(int(nanny), b'{"stranded": true}\n')
    raise ClusterError("the job has ended before this process had a part in it")


def _address_towards(host: str, port: int) -> str:
    """Of this machine's addresses, the one from which packets to a member go."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # Sends nothing.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return local_addresses()[0]


def _is_elsewhere(host: str, port: int) -> bool:
    """Whether an address is another machine's: to its own this one sends from the same."""
    with contextlib.suppress(OSError):
        own = _address_towards(host, port)
        found = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)}
        return own not in found
    return False


def _meet_by_store(
    worker: Worker,
    identity: Identity,
    device_type: str,
    memory_bytes: int,
    settings: Settings,
    environment: Mapping[str, str],
) -> Meeting:
    """Under a launcher: rank 0 founds the job and says in the launcher's store where, and the token."""
    _refuse_dynamic(environment)
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    token = environment.get(TOKEN) or make_token()
    if identity.size == 1 and not host:
        host = "127.0.0.1"
    elif not host or not port.isdecimal():
        raise ConfigError(
            f"nothing says where this job's {identity.size} processes meet: start them by `zorselike run`, "
            "or by torchrun with --master-addr and --master-port, or set MASTER_ADDR and MASTER_PORT"
        )
    store = _open_store(identity, host, int(port), environment) if identity.size > 1 else None
    if store is not None:
        Arrival(store, identity, _START_LIMIT).arrive(is_elastic=True)
    contact: list[tuple[str, int]] = []
    if identity.rank == 0 or store is None:
        listener = listen(host, 0)
        own = environment.get(HOST) or host
        if store is not None:
            where = {"host": own, "port": listener.getsockname()[1], "token": token}
            store.set(_STORE_KEY, json.dumps(where))
    else:
        try:
            where = json.loads(store.get(_STORE_KEY))
        except RuntimeError as error:
            raise ClusterError(f"rank 0 did not say where it founds the job, in {_START_LIMIT}") from error
        contact, token = [(str(where["host"]), int(where["port"]))], str(where["token"])
        _refuse_ended(contact, environment)  # It has said so when it could be reached there.
        listener = listen("127.0.0.1" if contact[0][0] in LOOPBACK_HOSTS else "", 0)
        own = environment.get(HOST) or _address_towards(*contact[0])
    member = make_member(
        own, listener.getsockname()[1], identity.node, identity.local_rank, device_type, memory_bytes
    )
    num_members = None if contact else identity.size
    return _begin(worker, member, listener, token, num_members, contact, settings, environment)


def _begin(
    worker: Worker,
    member: Member,
    listener: socket.socket,
    token: str,
    num_members: int | None,
    contact: Sequence[tuple[str, int]],
    settings: Settings,
    environment: Mapping[str, str],
) -> Meeting:
    if contact and _is_elsewhere(*contact[0]):
        refuse_loopback()
    notice, nanny = environment.get(NOTICE_FILE), environment.get(NANNY_FD)
    meeting = Meeting(
        worker,
        member,
        listener,
        token,
        num_founding=num_members,
        contact=contact,
        settings=settings,
        notice_file=Path(notice) if notice else None,
        nanny_fd=int(nanny) if nanny else None,
    )
    if url := environment.get(NOTICE_URL):
        NoticeUrl(url, meeting.leave)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # Where the main thread waits in native code, this runs after that.
        signal.signal(signal.SIGTERM, lambda *_: meeting.leave())
    return meeting


def _refuse_dynamic(environment: Mapping[str, str]) -> None:
    """The launchers under which the loss of one node, or of one process, ends the others."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    num_nodes = environment.get("GROUP_WORLD_SIZE", "1")
    if num_nodes != "1" and environment["TORCHELASTIC_RUN_ID"] != "none":
        raise ConfigError(
            f"torchrun started this job on {num_nodes} nodes by a dynamic rendezvous (--rdzv-backend or "
            "--rdzv-id), where the end of one node's agent ends the others': use --master-addr, "
            "--master-port, --nnodes and --node-rank without them, or `zorselike run`"
        )
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "torchrun has --max-restarts other than 0: it would end all processes of its node to start them "
            "again when one is lost; leave it at 0, its default"
        )


def _open_store(identity: Identity, host: str, port: int, environment: Mapping[str, str]) -> Any:
    import torch.distributed as dist

    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            identity.size,
            is_master=identity.rank == 0 and not has_agent,
            timeout=_START_LIMIT,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise ClusterError(f"the launcher's store at {host}:{port} cannot be reached: {text}") from error
