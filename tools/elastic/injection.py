"""Faults that happen to real ranks at a named place: in a phase of a step, of a save, or of a recovery."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import zorselike.runtime.state.save as saving
from zorselike.elastic.pipeline import ElasticPipeline
from zorselike.elastic.replicas import Replicas
from zorselike.elastic.running import Running
from zorselike.schedule.actions import Action, Kind

FaultKind = Literal["kill", "stop", "pause", "raise", "memory", "exit", "leave", "term", "cut"]
"""`stop` is SIGSTOP until the others have long gone on, `pause` for a moment only; `term` is SIGTERM; `cut`
takes the link to the other nodes away (of a namespace: `partition`)."""
Phase = (
    Literal["any", "forward", "backward", "reduce", "update", "mirror", "commit"]
    | Literal["meet", "plan", "draw", "abandon", "form", "fill"]
)
STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "reduce", "update", "mirror", "commit")
RECOVERY_PHASES: tuple[Phase, ...] = ("meet", "plan", "draw", "abandon", "form", "fill")
_ACTIONS = {
    "forward": (Kind.F, Kind.SEND_F, Kind.RECV_F),
    "backward": (Kind.B, Kind.SEND_B, Kind.RECV_B),
    "reduce": (Kind.REDUCE_GRAD, Kind.TIE_GRAD, Kind.NORM),
    "update": (Kind.STEP, Kind.TIE_VALUE, Kind.TIE_FETCH),
}


LINK = "elastic0"
"""Between nodes in namespaces."""


class Failure(Exception):
    """What a rank is made to fail with."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, once: in the step after `step` steps, or in the recovery from that step."""

    step: int
    rank: int
    """Counted modulo the ranks that there are then."""
    kind: FaultKind
    share: float = 0.5
    """Of the actions in the phase, how many come before."""
    phase: Phase = "any"
    others: tuple[int, ...] = ()
    """Ranks that are killed at the same moment."""
    mends_s: float | None = None
    """After which what was cut is mended; None: never."""


class Injector:
    """What is to happen to this process."""

    def __init__(self, pipe: ElasticPipeline, faults: Sequence[Fault], folder: Path) -> None:
        self._pipe, self._faults, self._folder = pipe, faults, folder
        self._due: dict[Phase, tuple[int, Fault]] = {}
        """Of phases that no step has."""
        worker, meant = pipe.worker, self._meet
        worker.offer = partial(meant, "meet", worker.offer)  # type: ignore[method-assign]
        worker.decide = partial(meant, "plan", worker.decide)  # type: ignore[method-assign]
        worker.prepare = partial(meant, "draw", worker.prepare)  # type: ignore[method-assign]
        _before(Running, "leave_alone", partial(self._act_in, "abandon"))
        _before(Running, "form", partial(self._act_in, "form"))
        _before(Running, "fill", partial(self._act_in, "fill"))
        _before(Replicas, "_mirror", partial(self._act_in, "mirror"))
        _before(saving.Saver, "_write", partial(self._act_in, "commit", False))
        recover = pipe._recover

        def recover_and_arm(error: BaseException) -> None:
            recover(error)
            if pipe.pipe is not None:  # The step is done again, by itself.
                self.arm()

        pipe._recover = recover_and_arm  # type: ignore[method-assign]
        commits = saving.commit  # type: ignore[attr-defined]
        saving.commit = partial(self._meet, "commit", commits)  # type: ignore[attr-defined]

    def arm(self) -> None:
        """Before a step: sees which faults are for this rank now, and have not happened."""
        pipe = self._pipe
        inner = pipe.pipe
        assert inner is not None and pipe.rank is not None
        self._due = {}
        (self._folder / f"process{pipe.rank}").write_text(str(os.getpid()))
        for number, fault in enumerate(self._faults):
            is_here = fault.rank % pipe.plan.num_ranks == pipe.rank or fault.phase == "plan"
            is_due = fault.step == pipe.num_steps and not self._marker(number).exists()
            if not is_due or not is_here or self._would_end_all(fault):
                continue
            if fault.phase != "any" and fault.phase not in _ACTIONS:
                self._due[fault.phase] = number, fault
                continue
            actions = inner.assembly.compiled.step_actions[pipe.rank]
            kinds = _ACTIONS.get(fault.phase, tuple(Kind))
            places = [i for i, action in enumerate(actions) if action.kind in kinds] or [0]
            left = [places[int(fault.share * len(places))]]
            executor = inner._executor
            executor.enter = partial(_enter_and_count, executor.enter, left, partial(self.act, number, fault))

    def arm_save(self) -> bool:
        """Whether a save is to follow now, in which something is to happen to somebody."""
        pipe = self._pipe
        for number, fault in enumerate(self._faults):
            is_due = fault.step == pipe.num_steps and not self._marker(number).exists()
            if fault.phase == "commit" and is_due and not self._would_end_all(fault):
                if pipe.rank == fault.rank % pipe.plan.num_ranks:
                    self._due["commit"] = number, fault
                return True
        return False

    def _would_end_all(self, fault: Fault) -> bool:
        """Whether nobody would be left to go on: who replaces ranks that are gone may not have come yet."""
        if self._pipe.plan.num_ranks > 1 or fault.kind == "pause":
            return False
        return fault.kind != "raise" or fault.phase in RECOVERY_PHASES

    def _meet(self, phase: Phase, then: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._act_in(phase)
        return then(*arguments, **options)

    def _act_in(self, phase: Phase, leads: bool = True) -> None:
        if phase == "commit" and leads != (self._pipe.rank == 0):
            return  # Rank 0 as it commits, the others as they write.
        due = self._due.pop(phase, None)
        if due is not None:
            self.act(*due)

    def _marker(self, number: int) -> Path:
        return self._folder / f"fault{number:03}"

    def act(self, number: int, fault: Fault) -> None:
        """Once."""
        written = self._folder / f"new-fault{number:03}.{os.getpid()}"
        written.write_text(json.dumps([time.monotonic(), os.getpid(), fault.kind, number]))
        try:
            os.link(written, self._marker(number))
        except FileExistsError:
            return
        for other in fault.others:
            os.kill(int((self._folder / f"process{other}").read_text()), signal.SIGKILL)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop" | "pause":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise Failure(f"at {fault}")
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory, as it were")
            case "exit":
                os._exit(3)
            case "leave":
                self._pipe.leave()
            case "cut":
                subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
                if fault.mends_s is not None:
                    mend = f"sleep {fault.mends_s}; exec ip link set {LINK} up"
                    subprocess.Popen(["sh", "-c", mend], start_new_session=True)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)


def _enter_and_count(
    enter: Callable[[Action], None], left: list[int], act: Callable[[], None], action: Action
) -> None:
    """Acts after so many actions."""
    enter(action)
    left[0] -= 1
    if left[0] == -1:
        act()


def _before(kind: type, name: str, act: Callable[[], None]) -> None:
    """Has something happen before a method, in this process."""
    inner = getattr(kind, name)

    def both(self: Any, *arguments: Any, **options: Any) -> Any:
        act()
        return inner(self, *arguments, **options)

    setattr(kind, name, both)
