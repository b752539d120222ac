"""Bits under the worst timing: sleeps on every stream, and not-a-number in every storage that grows.

A wait that is missing somewhere shows as other bits once a stream is late enough; memory that is read before
it was written shows as not-a-number.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from typing import Any
from unittest import mock

import torch

from zorselike.plan.plan import OFFLOAD_KINDS
from zorselike.runtime import _compat
from zorselike.runtime.memory import host_backed
from zorselike.schedule.actions import Action
from zorselike.schedule.contract import MOST_DIRECT_EDGES

from ...bench.forked import run_forked
from .part import Record
from .training import TINY, Outcome, Training, be_deterministic, device_of, one_group, train

SUBSETS = tuple(chain.from_iterable(combinations(OFFLOAD_KINDS, n) for n in range(4)))
ZEROS = (2, 3)
_SCRATCH_ELEMENTS, _MOST_PASSES = 2**26, 12
"""What a late stream adds to, and how often: up to some milliseconds. Nobody reads it."""
_SHARE = 0.2
"""Of streams that are made late before an action."""
_NOT_A_NUMBER = 0xFF
"""Byte of which any float is not a number."""


@dataclass
class Disturbance:
    """What was done to a run."""

    seed: int
    num_filled: int = 0
    num_sleeps: int = 0
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)
    """Every CUDA stream that was made or asked for meanwhile, by address: ours, FSDP2's, autograd's."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @cached_property
    def _scratch(self) -> torch.Tensor:
        return torch.zeros(_SCRATCH_ELEMENTS, device="cuda")

    def enter(self, _: Action) -> None:
        """Before each action: some streams get something long to do first, sometimes the host too."""
        for stream in list(self.streams.values()):
            if self._random.random() < _SHARE:
                with torch.cuda.stream(stream):
                    for _pass in range(self._random.randrange(_MOST_PASSES)):
                        self._scratch.add_(1)
                self.num_sleeps += 1
        if self.streams and self._random.random() < _SHARE:
            time.sleep(self._random.random() * 1e-3)

    def fill(self, storage: torch.UntypedStorage, start: int) -> None:
        """Writes not-a-number to what a storage has grown by, on the current stream as whoever grew it."""
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        whole[start:].fill_(_NOT_A_NUMBER)
        self.num_filled += 1


@contextmanager
def disturbing(seed: int) -> Iterator[Disturbance]:
    """Inside, storages grow to not-a-number and streams are noted; `enter` is to be told the actions."""
    own = Disturbance(seed)
    make = torch.cuda.Stream.__new__

    def filling(resize: Callable[[torch.UntypedStorage, int], Any]) -> Any:
        def resize_and_fill(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            if size > before and storage.device.type != "meta":
                own.fill(storage, before)
            return result

        return resize_and_fill

    def make_and_note(cls: Any, *args: Any, **kwargs: Any) -> Any:
        stream = make(cls, *args, **kwargs)
        own.streams.setdefault(stream.cuda_stream, stream)
        return stream

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", filling(torch.UntypedStorage.resize_)),
        mock.patch.object(host_backed, "grow_storage", filling(_compat.grow_storage)),
    ):
        torch.cuda.Stream.__new__ = staticmethod(make_and_note)  # type: ignore[method-assign]
        try:
            yield own
        finally:
            torch.cuda.Stream.__new__ = staticmethod(make)  # type: ignore[method-assign]


_POOL = 32
"""Streams that torch deals of each priority."""
_WAIT_CYCLES, _LOOK_S = 1 << 30, 0.2
"""How long a stream waits, which is longer than until it is looked which others got through."""


def run_queues(record: Record) -> None:
    """Streams share hardware queues: which of those that torch deals stand behind receives that wait."""
    if record.is_small:
        record.leave_out("streams beside those that wait", "there is no device here")
        return
    device = device_of("cuda")
    streams = [torch.cuda.Stream(device, priority=priority) for priority in (0, -1) for _ in range(_POOL)]
    scratch = torch.zeros(len(streams), 1, device=device)

    def start(number: int, *, waits: bool) -> torch.cuda.Event:
        with torch.cuda.stream(streams[number]):
            if waits:
                _compat.hold_stream(_WAIT_CYCLES)
            scratch[number].add_(1)  # Behind a wait it is this that stands at the head of a queue.
            return torch.cuda.current_stream().record_event()

    for waiting in (0, 1, MOST_DIRECT_EDGES // 2, MOST_DIRECT_EDGES):  # The first loads the kernels.
        torch.cuda.synchronize()
        first = [start(number, waits=True) for number in range(waiting)]
        others = [start(number, waits=False) for number in range(waiting, len(streams))]
        time.sleep(_LOOK_S)
        assert not any(event.query() for event in first), "they waited too briefly"
        held = [number for number, event in enumerate(others, waiting) if not event.query()]
        record.put(f"held back by {waiting}", held)
        record.say(f"behind {waiting} streams that wait stand {len(held)} of {len(others)}: {held}")
        copies = [number for number in held if number >= _POOL]
        record.check(f"{waiting} streams that wait hold none of the runtime's back", not copies, str(copies))


def run_delays(record: Record) -> None:
    """All subsets of what can be offloaded, under ZeRO 2 and 3, on a rank alone and on two that share it."""
    training = TINY if record.is_small else Training(dtype=torch.bfloat16)
    ends = (SUBSETS[0], SUBSETS[-1])
    for ranks in (1, 2):
        subsets = SUBSETS if ranks == 1 else ends
        cases = [(zero, subset) for zero in ZEROS for subset in subsets]
        if record.is_small:
            cases = list(zip(ZEROS, ends, strict=True))[-ranks:]
        found = run_forked(
            _compare, ranks, record.settings.device, training, cases, timeout_s=record.patience_s
        )
        for number, (zero, subset) in enumerate(cases):
            told = [of_rank[number] for of_rank in found]
            wrong = [f"rank {rank}: {each.difference}" for rank, each in enumerate(told) if each.difference]
            wrong += ["no storage grew"] * (not all(each.num_filled for each in told))
            what = f"ZeRO {zero}, {ranks} ranks, offloaded: {' '.join(subset) or 'nothing'}"
            record.check(f"{what}: bits as undisturbed", not wrong, "; ".join(wrong))
        counts = [(each.num_filled, each.num_sleeps) for each in found[0]]
        record.say(f"{ranks} ranks: storages filled and sleeps, by case: {counts}")


@dataclass(frozen=True)
class _Compared:
    """One case on one rank."""

    difference: str
    """From the undisturbed resident run; empty if there is none."""
    num_filled: int
    num_sleeps: int


def _compare(
    rank: int, kind: str, training: Training, cases: list[tuple[int, tuple[str, ...]]]
) -> list[_Compared]:
    be_deterministic()
    device = device_of(kind)
    ranks = torch.distributed.get_world_size()

    def run(
        zero: int, subset: tuple[str, ...] = (), enter: Callable[[Action], None] | None = None
    ) -> Outcome:
        plan = one_group(training, ranks=ranks, zero=zero, offload=subset)
        return train(training, plan, device, entering=enter)

    expected = {zero: run(zero) for zero in dict(cases)}
    zero = cases[0][0]
    again = run(zero).differs_from(expected[zero])
    assert not again, f"not even two equal runs under ZeRO {zero} are equal: {again}"
    found = []
    for number, (zero, subset) in enumerate(cases):
        with disturbing(seed=1000 * number + rank) as own:
            outcome = run(zero, subset, own.enter)
        found.append(_Compared(outcome.differs_from(expected[zero]), own.num_filled, own.num_sleeps))
    return found
