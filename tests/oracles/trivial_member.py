"""A member that trains nothing, at most a few milliseconds a step; says what happens to it as lines of JSON.

As a program: `python trivial_member.py [--step-s S] [--steps N]`, its place in the job from the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from typing import Any

from zorselike.elastic.contract import GenerationOver, Json, Member, Request
from zorselike.errors import ClusterError


class TrivialWorker:
    """Everybody who stays is a rank; nothing needs preparing."""

    def __init__(self) -> None:
        self.step = 0
        self.is_over = threading.Event()
        self.lost: list[str] = []
        self.keeps_spares = False

    def offer(self) -> Json:
        return {"step": self.step}

    def decide(self, request: Request) -> tuple[tuple[str, ...], Json] | None:
        if self.keeps_spares and request.reason == "arrival":
            return None
        leaving = {member.id for member in request.leaving}
        ranks = tuple(id for id in request.offers if id not in leaving)
        steps = [int(offer.get("step", 0)) for offer in request.offers.values()]
        return ranks, {"step": max(steps), "summary": f"{len(ranks)} ranks"}

    def prepare(self, ranks: tuple[str, ...], decision: Json) -> None:
        pass

    def interrupt(self, number: int, lost: tuple[Member, ...]) -> None:
        self.lost += [member.id for member in lost]
        self.is_over.set()


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps({"time": time.monotonic(), "pid": os.getpid()} | what) + "\n")
    sys.stdout.flush()


def train(meeting: Any, worker: TrivialWorker, *, step_s: float, num_steps: int) -> None:
    """Until so many steps are done, or this member is out."""
    while True:
        try:
            generation = meeting.next_generation()
            say(event="delivered", generation=generation.number, reason=generation.reason)
            worker.is_over.clear()
            meeting.formed()
            meeting.filled()
            start = generation.after_step
            worker.step = max(worker.step, int(generation.decision["step"]) if start is None else start)
            say(event="runs", generation=generation.number, members=[m.id for m in generation.members])
            while worker.step < num_steps:
                time.sleep(step_s)
                worker.step += 1
                if meeting.step_done(worker.step):
                    break
            else:
                meeting.close()
                say(event="finished", step=worker.step)
                return
        except GenerationOver:
            say(event="over")
        except ClusterError as error:
            say(event="out", reason=str(error))
            return


def main() -> None:
    import torch.distributed  # noqa: F401  # As a worker that trains has done long before.

    from zorselike.elastic.meeting.environment import from_environment

    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    worker = TrivialWorker()
    meeting = from_environment(worker, device_type="cpu", memory_bytes=0)
    member = meeting.member
    say(event="started", id=meeting.id, host=member.host, port=member.port)
    train(meeting, worker, step_s=options.step_s, num_steps=options.steps)


if __name__ == "__main__":
    main()
