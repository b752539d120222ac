"""Membership of ten thousand in virtual time: how soon an event settles, with how many messages and links.

The machines are the real ones; links, processes and the clock are simulated (`tests/oracles`). Every delay is
as long as it can be.
"""

from __future__ import annotations

import random
import time
from typing import Any

from simulated_members import Job, Process

from zorselike.elastic.membership import events as e
from zorselike.elastic.membership.round import Settings

from ..report import Figure

FAN_OUT = 128
_LATENCY_S, _TICK_S, _LIMIT_S = 0.05, 0.05, 20.0
_MAX_EVENTS = 10**8
EVENTS = ("loss of the leader", "loss of a relay", "loss of a leaf", "arrival", "the leader leaves")


class _Longest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return b


def run_virtual(num_members: int) -> dict[str, Any]:
    """Each event, in a job of its own."""
    found = {}
    for event in EVENTS:
        began_s = time.monotonic()
        found[event] = measure(num_members, event)
        print(
            f"{num_members} members, {event}: {found[event]}, {time.monotonic() - began_s:.0f} s", flush=True
        )
    return {"members": num_members, "events": found}


def measure(num_members: int, event: str) -> dict[str, float]:
    """Virtual seconds until all who live run the next generation, messages a member, and the most links that
    any of them has had since."""
    job = Job(num_members, settings=Settings(fan_out=FAN_OUT), latency_s=_LATENCY_S, step_s=0.0)
    job.rng = _Longest()
    job.run(10, max_events=_MAX_EVENTS)
    processes = sorted(job.processes.values(), key=lambda process: process.machine.me.number)
    if not all(process.runs for process in processes):
        raise RuntimeError(f"{num_members} members do not start within 10 s of virtual time")
    for process in processes:
        process.most_links = len(process.links)
    before, began_s, last = job.num_messages, job.now, max(job.ran)
    _happen(job, event, processes)
    while not all(process.runs and _number(process) > last for process in job.living()):
        if job.now > began_s + _LIMIT_S:
            raise RuntimeError(f"{event} has not settled within {_LIMIT_S:g} s of virtual time")
        job.run(_TICK_S, max_events=_MAX_EVENTS)
    return {
        "settles_s": job.now - began_s,
        "messages_a_member": (job.num_messages - before) / num_members,
        "most_links": max(process.most_links for process in job.living()),
    }


def _happen(job: Job, event: str, processes: list[Process]) -> None:
    match event:
        case "loss of the leader":
            job.kill(processes[0].id)
        case "loss of a relay":
            job.kill(processes[min(3, len(processes) - 1)].id)
        case "loss of a leaf":
            job.kill(processes[-1].id)
        case "arrival":
            job.arrive(processes[0].id)
        case "the leader leaves":
            job.tell(processes[0], e.Leave(processes[0].id))


def _number(process: Process) -> int:
    return process.generation.number if process.generation is not None else 0


def describe_virtual(found: dict[str, Any]) -> list[Figure]:
    events = found["events"]
    return [
        Figure("virtual_members", found["members"]),
        *(
            Figure(
                f"virtual_settles_s ({name})",
                each["settles_s"],
                2.0,
                at_most=True,
                note=f"{each['messages_a_member']:.1f} messages a member",
            )
            for name, each in events.items()
        ),
        Figure("virtual_most_links", max(each["most_links"] for each in events.values()), 400, at_most=True),
    ]
