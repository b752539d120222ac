"""`zorselike run` and `zorselike join`: workers of an elastic job on this node, a nanny beside each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from zorselike.cli.options import check_at_least
from zorselike.errors import ClusterError, ConfigError

_Command = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="-- COMMAND...", help_behavior_hint="(required)"),
]
_Node = Annotated[
    str | None,
    tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: ZORSELIKE_NODE, else the hostname)"),
]

_KILL_AFTER_S = 60.0
"""After a second signal workers may finish their step so long."""
_MOST_ADDRESSES = 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """Start the workers of an elastic job on this node, each with a nanny that starts another if it dies.

    The first node founds the job and prints the lines by which other nodes join it and by which its status is
    shown; the environment variable ZORSELIKE_JOB_TOKEN, made where it is not set, is what all of them need.
    SIGTERM, or Ctrl-C, makes this node's workers leave at the next step boundary; so does SIGKILL.
    """

    command: _Command
    """Program of a worker, such as python train.py."""

    ranks: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Workers on this node."""

    members: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: --ranks)")] = None
    """Members that the job starts with, on all nodes; more may join later."""

    address: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "127.0.0.1:29600"
    """Where the job is founded; other nodes must reach it."""

    join: Annotated[
        str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="(default: a job is founded)")
    ] = None
    """Address of a member of a job that runs or is being started: this node's workers join it."""

    node: _Node = None
    """Name of this node."""

    def run(self) -> int:
        from zorselike.elastic.meeting.environment import TOKEN, make_token, read_address, read_settings
        from zorselike.runtime.processes.identity import NODE_VARIABLE

        check_at_least("run", 1, {"--ranks": self.ranks})
        if not self.command:
            raise ConfigError("run: name the worker's program after --, such as -- python train.py")
        environment = dict(os.environ)
        read_settings(environment)
        node = self.node or environment.get(NODE_VARIABLE) or socket.gethostname()
        environment[NODE_VARIABLE] = node
        if self.ranks > 1:  # As torchrun does: each would take all cores for itself, and all wait for all.
            environment.setdefault("OMP_NUM_THREADS", "1")
        if self.join is not None:
            if self.members is not None:
                raise ConfigError("run: --members is said where the job is founded, not with --join")
            if self.address != type(self).address:
                raise ConfigError("run: --address founds a job, and --join joins one; keep one of them")
            token = check_token("run", environment)
            found = find_job(*read_address("run: --join", self.join), token)
            environments = [environment | found for _ in range(self.ranks)]
        else:
            if not environment.get(TOKEN):
                environment[TOKEN] = make_token()
            environments = self._found(environment, node)
        return keep(self.command, environments)

    def _found(self, environment: Mapping[str, str], node: str) -> list[dict[str, str]]:
        from zorselike.elastic.meeting.environment import (
            FOUND,
            JOIN,
            MEMBERS,
            TOKEN,
            check_host,
            listen,
            read_address,
        )

        members = self.ranks if self.members is None else self.members
        check_at_least("run", self.ranks, {"--members": members})
        host, port = read_address("run: --address", self.address)
        if port == 0:
            raise ConfigError("run: --address must name a port, at which other nodes find the job")
        check_host("run: --address", host)
        try:  # Only the founder would learn of it, and the others wait for it.
            listen(host, port).close()
        except ClusterError as error:
            raise ClusterError(f"run: --address: {error}") from None
        token = f"{TOKEN}={environment[TOKEN]}"
        command = " ".join(self.command)
        print(
            f"job founded on {node}, starts with {members} members; on other nodes\n"
            f"  {token} zorselike run --join {host}:{port} --ranks N -- {command}\n"
            f"  {token} zorselike status {host}:{port} --watch\n"
            f"  {token} zorselike leave {host}:{port} --node NAME",
            file=sys.stderr,
            flush=True,
        )
        founder = {**environment, FOUND: self.address, MEMBERS: str(members)}
        return [founder, *({**environment, JOIN: self.address} for _ in range(self.ranks - 1))]


@dataclass(frozen=True, kw_only=True)
class Join:
    """Start one more worker here, which joins a running job; the same as run --join with one rank."""

    address: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HOST:PORT")]
    """Of any member of the job."""

    command: _Command
    """Program of the worker, the same as the others'."""

    node: _Node = None
    """Name of this node."""

    def run(self) -> int:
        return Run(command=self.command, join=self.address, node=self.node).run()


def check_token(command: str, environment: Mapping[str, str]) -> str:
    from zorselike.elastic.meeting.environment import TOKEN

    token = environment.get(TOKEN, "")
    if not token:
        raise ConfigError(
            f"{command}: set {TOKEN} to the job's token, which `zorselike run` prints at its start"
        )
    return token


def find_job(host: str, port: int, token: str) -> dict[str, str]:
    """What tells workers where the members of a job are, the given one first; that alone, with a word on
    stderr, where the job has yet to start.

    Raises `ClusterError` if who listens there is no member of a job with this token.
    """
    from zorselike.elastic.meeting.asking import NobodyThere, ask
    from zorselike.elastic.meeting.environment import ANSWERED, JOIN
    from zorselike.elastic.membership.round import Settings

    given = f"{host}:{port}"
    try:
        members = ask(host, port, token, {"ask": "status"})["status"]["members"]
    except NobodyThere as error:
        wait_s = Settings().start_limit_s
        print(f"{error}; workers wait up to {wait_s / 60:g} min for one", file=sys.stderr, flush=True)
        return {JOIN: given}
    addresses = list(dict.fromkeys([given, *(f"{m['host']}:{m['port']}" for m in members)]))
    return {JOIN: ",".join(addresses[:_MOST_ADDRESSES]), ANSWERED: "1"}


def keep(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs a nanny for each worker until all have ended; the first exit code that is not 0, but for workers
    that came too late in the place of lost ones, while others have ended well."""
    from zorselike.elastic.meeting.environment import RUN
    from zorselike.elastic.meeting.nanny import LATE, MISTAKE, UNFOUNDED

    line = [sys.executable, "-m", "zorselike.elastic.meeting.nanny", "--", *command]
    nannies = [
        subprocess.Popen(
            line,
            env={**environment, "LOCAL_RANK": str(number), RUN: str(os.getpid())},
            start_new_session=True,
        )
        for number, environment in enumerate(environments)
    ]
    kill_s: float | None = None
    num_signals = 0

    def pass_on(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        for nanny in nannies:
            if nanny.poll() is None:
                nanny.send_signal(signal.SIGTERM)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while any(nanny.poll() is None for nanny in nannies):
            time.sleep(0.1)
            if num_signals == 0 and UNFOUNDED in [nanny.returncode for nanny in nannies]:
                pass_on()  # Else the others would wait for that founder.
            if num_signals > 1 and kill_s is None:
                kill_s = time.monotonic() + _KILL_AFTER_S
            if kill_s is not None and time.monotonic() > kill_s:
                for nanny in nannies:
                    if nanny.poll() is None:
                        os.killpg(nanny.pid, signal.SIGKILL)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    ended = [MISTAKE if nanny.returncode == UNFOUNDED else nanny.returncode for nanny in nannies]
    codes = dict.fromkeys(128 - code if code < 0 else code for code in ended)  # As a shell says it.
    return next((code for code in codes if code not in (0, LATE)), 0 if 0 in codes else LATE)
