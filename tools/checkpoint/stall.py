"""What a save in the background costs the training steps beside it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.state import snapshot
from zorselike.runtime.state.snapshot import Snapshot

from .timed import LoadCost, Subject, load_counting


@dataclass(frozen=True)
class SaveCost:
    """Of one save and the step beside it, on one rank."""

    start_s: float
    """In `pipe.save`, before it returned."""
    wait_s: float
    """That updates waited for copies."""
    stage_s: float
    """That the thread copied."""
    save_s: float
    """From the first copy until it was on the disk."""
    step_s: float
    """The step beside it, the call of `pipe.save` included."""
    plain_s: float
    """The step before, without a save."""

    @property
    def stall_s(self) -> float:
        return self.start_s + self.wait_s + self.stage_s


@dataclass(frozen=True)
class Stall:
    """Of one rank."""

    saves: tuple[SaveCost, ...]
    first_s: float
    """That the first save took to start and to copy: it makes the buffers."""
    load_cost: LoadCost
    """Of loading what the same plan saved."""


@dataclass
class _Clock:
    wait_s: float = 0.0
    stage_s: float = 0.0


@contextmanager
def _clocking() -> Iterator[_Clock]:
    """Counts waits of updates and copies of saves that begin inside."""
    clock, wait, take = _Clock(), snapshot._await, Snapshot.take

    def timed_wait(copied: Event, taken: threading.Event, stream: Stream) -> None:
        begin_s = time.monotonic()
        wait(copied, taken, stream)
        clock.wait_s += time.monotonic() - begin_s

    def timed_take(self: Snapshot) -> None:
        begin_s = time.monotonic()
        take(self)
        clock.stage_s += time.monotonic() - begin_s

    with patch.object(snapshot, "_await", timed_wait), patch.object(Snapshot, "take", timed_take):
        yield clock


def measure_stall(rank: int, subject: Subject, folder: Path, num_rounds: int) -> Stall:
    """Of one rank: steps without a save and steps beside one, in turn. Leaves its last checkpoint under
    `folder / "staged"`."""
    with subject.build(subject.staged_plan()) as pipe, _clocking() as clock:
        saves = []
        first_s = 0.0
        for number in range(num_rounds + 1):
            dist.barrier()
            begin_s = time.monotonic()
            subject.step(pipe)
            dist.barrier()
            clock.wait_s = clock.stage_s = 0.0
            middle_s = time.monotonic()
            save = pipe.save(folder / ("staged" if number == num_rounds else f"staged-{number}"), wait=False)
            start_s = time.monotonic() - middle_s
            subject.step(pipe)
            dist.barrier()
            end_s = time.monotonic()
            assert save is not None
            save.wait()
            if not number:
                first_s = start_s + clock.stage_s
                continue
            saves.append(
                SaveCost(
                    start_s,
                    clock.wait_s,
                    clock.stage_s,
                    save.seconds,
                    end_s - middle_s,
                    middle_s - begin_s,
                )
            )
        dist.barrier()
        return Stall(tuple(saves), first_s, load_counting(pipe, folder / "staged"))


def find_stall_share(ranks: Sequence[Stall]) -> float:
    """Waits and copies of the rank that has more, as a share of the step before: the median over saves."""
    rounds = zip(*(rank.saves for rank in ranks), strict=True)
    return statistics.median(
        max(save.stall_s for save in saves) / max(save.plain_s for save in saves) for saves in rounds
    )


def find_slowdown(ranks: Sequence[Stall]) -> float:
    """By how much a step beside a save is longer than the one before, as a share of that."""
    rounds = zip(*(rank.saves for rank in ranks), strict=True)
    return statistics.median(
        max(save.step_s for save in saves) / max(save.plain_s for save in saves) - 1 for saves in rounds
    )
