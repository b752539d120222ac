"""`zorselike status` and `zorselike leave`: what a running job does, and a node's leaving."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from zorselike.cli.job.run import check_token
from zorselike.errors import ConfigError
from zorselike.text.layout import align_columns
from zorselike.text.wording import count

_WATCH_S = 2.0
_Address = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HOST:PORT")]


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show a running job's members, generation, plan, steps and last events.

    The environment variable ZORSELIKE_JOB_TOKEN must be the job's.
    """

    address: _Address
    """Of any member."""

    watch: bool = False
    """Show it again every two seconds, until Ctrl-C."""

    json: bool = False
    """Print it as one line of JSON."""

    def run(self) -> None:
        from zorselike.elastic.meeting.environment import read_address

        token = check_token("status", os.environ)
        host, port = read_address("status", self.address)
        while True:
            status = ask_leader(host, port, token)
            text = json.dumps(status) if self.json else format_status(status)
            if self.watch and not self.json and sys.stdout.isatty():
                print("\033[H\033[2J", end="")
            print(text, flush=True)
            if not self.watch:
                return
            time.sleep(_WATCH_S)


def ask_leader(host: str, port: int, token: str) -> dict[str, Any]:
    """The leader's status; that of whoever answers where the leader does not."""
    from zorselike.elastic.meeting.asking import ask
    from zorselike.errors import ClusterError

    status: dict[str, Any] = ask(host, port, token, {"ask": "status"})["status"]
    leader = status["leader"]
    if leader["id"] != status["id"]:
        with contextlib.suppress(ClusterError):
            status = ask(leader["host"], leader["port"], token, {"ask": "status"})["status"]
    return status


def format_status(status: dict[str, Any]) -> str:
    generation = status["generation"]
    state = status["state"] + (f" ({status['stage']})" if status["stage"] else "")
    lines = [
        f"generation {generation}: {state}, {count(len(status['members']), 'member')}, step {status['step']}"
        if generation
        else f"not started: {state}, {count(1 + len(status['arrivals']), 'member')} came"
    ]
    if status["summary"]:
        lines.append(status["summary"])
    ranks = {id: rank for rank, id in enumerate(status["ranks"])}
    rows = [
        (
            str(member["number"]),
            f"{member['node']} local rank {member['local_rank']}",
            member["device_type"],
            f"rank {ranks[member['id']]}" if member["id"] in ranks else "spare",
            f"{member['host']}:{member['port']}"
            + (" leads" if member["id"] == status["leader"]["id"] else ""),
        )
        for member in status["members"]
    ]
    rows += [
        ("-", f"{member['node']} local rank {member['local_rank']}", member["device_type"], "waits", "")
        for member in status["arrivals"]
    ]
    lines += ["  " + line for line in align_columns(rows, left={1, 2, 3, 4})]
    for event in status["events"][-10:]:
        lines.append(f"{time.strftime('%H:%M:%S', time.localtime(event['time']))} {event['text']}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Make a node leave a running job at the next step boundary, with nothing lost."""

    address: _Address
    """Of any member."""

    node: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Name of the node, as `zorselike status` shows it."""

    local_rank: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all of them)")
    ] = None
    """Only this one of the node's members."""

    def run(self) -> None:
        from zorselike.elastic.meeting.asking import ask
        from zorselike.elastic.meeting.environment import read_address

        token = check_token("leave", os.environ)
        host, port = read_address("leave", self.address)
        request = {"ask": "leave", "node": self.node, "local_rank": self.local_rank}
        leaving = ask(host, port, token, request)["leaving"]
        if not leaving:
            raise ConfigError(
                f"leave: no member of the job is on node '{self.node}'"
                + (f" with local rank {self.local_rank}" if self.local_rank is not None else "")
                + f"; `zorselike status {self.address}` shows them"
            )
        print(f"{count(len(leaving), 'member')} of {self.node} will leave at the next step boundary")
