"""Bytes on the device, counted exactly: at every action, of every storage that is ever given back.

What is counted is not what the runtime says of itself but `UntypedStorage.resize_`, through which
FSDP2 and the mirrors give memory back and take it again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import volume
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.schedule.actions import Action, Kind

pytestmark = pytest.mark.pooled

NUM_LAYERS = 5
NAMES = module_names(NUM_LAYERS)
NUM_MINISTAGES = 4
CUTS = [tuple(NAMES[2 * i : 2 * i + 2]) for i in range(NUM_MINISTAGES)]
SHARDS, STATE, WHOLE = "parameter shards", "optimizer state", "gathered parameters"


@dataclass(frozen=True)
class Setting:
    """How a `Decoder` of four ministages is trained."""

    num_ranks: int
    dtype: torch.dtype | None = None
    max_norm: float | None = None
    zero: int = 2
    tied: bool = False
    offload: tuple[str, ...] = ("params", "optimizer")

    @property
    def case(self) -> Case:
        rows = ((0, 1), (1, 3), (3, 4))
        own = tuple(Microbatch(i % self.num_ranks, *rows[i]) for i in range(len(rows)))
        group = Group(tuple(range(self.num_ranks)), own, zero=self.zero, offload=self.offload)
        plan = Plan(4, (group,), tuple(Ministage(0, cut) for cut in CUTS))
        return Case(plan, NUM_LAYERS, tied=self.tied, max_norm=self.max_norm)

    def build(self) -> HeteroPipeline:
        case = self.case
        model = case.model() if self.dtype is None else case.model().float()
        return HeteroPipeline(
            model, case.plan, optimizer=adamw, param_dtype=self.dtype, max_norm=self.max_norm
        )

    @property
    def has_masters(self) -> bool:
        return self.dtype is not None

    @property
    def defers(self) -> bool:
        return self.max_norm is not None or self.dtype is torch.float16

    def bound(self, purpose: str, size_of: dict[int, int]) -> int:
        """Bytes of the two largest ministages; of three where updates are deferred, until nothing is
        gathered any more."""
        most = 3 if self.defers and purpose != WHOLE else 2
        return sum(sorted(size_of.values())[-most:])

    def whole_bytes(self, modules: Sequence[str]) -> int:
        """Of gathered parameters; FSDP2 pads dimension 0 to a multiple of the ranks."""
        itemsize = 2 if self.has_masters else 8
        parameters = [
            parameter
            for name, parameter in self.case.model().named_parameters(remove_duplicate=False)
            if name.startswith(tuple(f"{module}." for module in modules))
        ]
        rows = [-(-p.shape[0] // self.num_ranks) * self.num_ranks for p in parameters]
        return sum(n * p[0].numel() * itemsize for n, p in zip(rows, parameters, strict=True))


# -- what is there ---------------------------------------------------------------------------------


@dataclass
class Counted:
    """Storages that were given back or taken again at least once, by whose they are."""

    sizes: dict[int, tuple[StorageWeakRef, str, int]] = field(default_factory=dict)
    peak: Counter[str] = field(default_factory=Counter)
    """The most at one time since `start`, inside of actions too."""

    def note(self, storage: torch.UntypedStorage, owner: str, num_bytes: int) -> None:
        reference = StorageWeakRef(storage)
        self.sizes[reference.cdata] = (reference, owner, num_bytes)
        self.peak[owner] = max(self.peak[owner], self.held()[owner])

    def held(self) -> Counter[str]:
        """Bytes now."""
        found: Counter[str] = Counter()
        for reference, owner, num_bytes in self.sizes.values():
            if not reference.expired():
                found[owner] += num_bytes
        return found


@contextmanager
def counting() -> Iterator[Counted]:
    """Every `resize_` of a storage inside is counted."""
    counted = Counted()
    resize = torch.UntypedStorage.resize_

    def count(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        frame = sys._getframe(1)
        if frame.f_code.co_name == "grow_storage" and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_code.co_filename.endswith("host_backed.py"):
            counted.note(storage, frame.f_locals["self"]._purpose, size)
        elif "fsdp" in frame.f_code.co_filename:
            counted.note(storage, WHOLE, size)
        return found

    with mock.patch.object(torch.UntypedStorage, "resize_", count):
        yield counted


def on_every_action(pipe: HeteroPipeline, look: Callable[[Action], None]) -> None:
    """Calls `look` before each action."""
    executor = pipe._executor
    enter = executor.enter

    def enter_and_look(action: Action) -> None:
        look(action)
        enter(action)

    executor.enter = enter_and_look


def measure(pipe: HeteroPipeline) -> dict[str, dict[int, int]]:
    """Bytes of each ministage's shards (the first's and tied ones stay) and state on this rank."""
    shards, state = {}, {}

    def stored(tensors: Iterator[Tensor]) -> int:
        return sum(local_tensor(tensor.detach()).untyped_storage().nbytes() for tensor in tensors)

    with pipe.loaded():
        ministages = pipe._assembly.ministages
        for index, ministage in ministages.items():
            named = [
                (n, p) for n, p in ministage.module.named_parameters() if n not in ministage._settings.tied
            ]
            shards[index] = stored(p for _, p in named) if index != min(ministages) else 0
            moments = [
                value
                for parameter_state in pipe.optimizers[index].state.values()
                for value in parameter_state.values()
                if isinstance(value, Tensor) and value.dim()
            ]
            masters = [m for n, m in ministage.trained.items() if ministage.state.masters]
            state[index] = stored(iter([*moments, *masters]))
    return {SHARDS: shards, STATE: state}


# -- what should be there --------------------------------------------------------------------------


class Expected:
    """Which ministages' parts are on the device, by the actions so far."""

    def __init__(self, *, masters: bool) -> None:
        self._masters = masters
        self.here: dict[str, set[int]] = {WHOLE: set(), SHARDS: set(), STATE: set()}
        self.leaving: dict[str, set[int]] = {SHARDS: set(), STATE: set()}
        """On their way to the host: freed when the next ministage leaves, or at the end of the step."""
        self._updated: set[int] = set()

    def do(self, action: Action) -> None:
        index = action.ministage
        if index is None or action.microbatch is not None:
            return
        match action.kind:
            case Kind.UNSHARD:
                self.here[WHOLE].add(index)
            case Kind.REDUCE_GRAD | Kind.RESHARD:
                self.here[WHOLE].discard(index)  # FSDP2 frees what a backward reduces.
            case Kind.LOAD:
                self.here[SHARDS].add(index)
            case Kind.LOAD_STATE:
                self.here[STATE].add(index)
            case Kind.STEP:
                self._updated.add(index)
                if self._masters and index:
                    self.here[SHARDS].add(index)
            case Kind.OFFLOAD if index not in self._updated:
                self.here[SHARDS].remove(index)
            case Kind.OFFLOAD | Kind.OFFLOAD_STATE:
                purpose = SHARDS if action.kind is Kind.OFFLOAD else STATE
                self.here[purpose].remove(index)
                self.leaving[purpose] = {index}

    def end(self) -> None:
        self.leaving = {SHARDS: set(), STATE: set()}
        self._updated.clear()

    def ministages(self, purpose: str) -> set[int]:
        return self.here[purpose] | self.leaving.get(purpose, set())


# -- the two compared ------------------------------------------------------------------------------


def count_steps(rank: int, world_size: int, setting: Setting) -> dict[str, tuple[int, int]]:
    """Two steps with an evaluation in between, counted; the most that was there of each, and the bound."""
    case = setting.case
    with counting() as counted:
        pipe = setting.build()
        pipe.step_global(*case.batch(0))
        sizes = measure(pipe)
        sizes[WHOLE] = {i: setting.whole_bytes(cut) for i, cut in enumerate(CUTS)}
        expected = Expected(masters=setting.has_masters)
        counted.peak.clear()
        ledger = pipe._assembly.resources.memory.ledger
        staying = ledger.held(SHARDS, "device")

        def look(action: Action | None) -> None:
            held = counted.held()
            for purpose, size_of in sizes.items():
                ministages = expected.ministages(purpose)
                # Deferred updates follow one another: one leaves, one is updated, one comes.
                assert len(ministages) <= (2 if not setting.defers or expected.here[WHOLE] else 3)
                bytes_there = sum(size_of[i] for i in ministages)
                text = f"{purpose} before {action}: {held}, not those of {ministages}"
                if purpose == WHOLE and world_size > 1:  # A gather's memory comes when it is waited for.
                    assert held[purpose] <= bytes_there, text
                    continue
                assert held[purpose] == bytes_there, text
                entered = ledger.held(purpose, "device") - (staying if purpose == SHARDS else 0)
                # The end of a reduction frees, RESHARD only enters it.
                assert entered == bytes_there or (purpose == WHOLE and entered > bytes_there), text
            if action is not None:
                expected.do(action)

        on_every_action(pipe, look)
        for step in (1, 2):
            if step == 2:
                pipe.evaluate_global(*case.batch(9))
            pipe.step_global(*case.batch(step))
            expected.end()
            look(None)
        peak = {
            purpose: (counted.peak[purpose], setting.bound(purpose, size)) for purpose, size in sizes.items()
        }
        pipe.close()
    return peak


@pytest.mark.parametrize("num_ranks", [1, 2])
@volume.parametrize(
    ("dtype", "max_norm", "tied"),
    [(None, None, False), (None, 0.1, True), (torch.bfloat16, None, True), (torch.float16, 0.1, False)],
    least=2,
)
def test_two_ministages_are_on_the_device(
    num_ranks: int, dtype: torch.dtype | None, max_norm: float | None, tied: bool, run_ranks: RunRanks
) -> None:
    """Two gathered, shards and state of two each (see `bound`), not a byte more: inside of actions too."""
    setting = Setting(num_ranks, dtype, max_norm, tied=tied)
    for found in run_ranks(count_steps, num_ranks, setting, timeout=120):
        for purpose, (peak, bound) in found.items():
            assert bound / 4 < peak <= bound, f"{purpose}: {peak} of {bound}"


def count_layers(rank: int, world_size: int) -> list[tuple[int, int]]:
    """With ZeRO 3 in fp64 and bf16: the most that was gathered at one time, and the two largest layers."""
    return [count_layers_of(Setting(world_size, dtype, zero=3)) for dtype in (None, torch.bfloat16)]


def count_layers_of(setting: Setting) -> tuple[int, int]:
    case = setting.case
    with counting() as counted:
        pipe = setting.build()
        pipe.step_global(*case.batch(0))
        counted.peak.clear()
        pipe.step_global(*case.batch(1))
        pipe.evaluate_global(*case.batch(2))
        assert counted.held()[WHOLE] == 0
        pipe.close()
    layers = sorted(setting.whole_bytes([name]) for name in NAMES)
    return counted.peak[WHOLE], sum(layers[-2:])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_zero3_gathers_two_layers_at_a_time(num_ranks: int, run_ranks: RunRanks) -> None:
    for found in run_ranks(count_layers, num_ranks):
        for peak, bound in found:
            assert bound / 4 < peak <= bound


def compare_with_resident(rank: int, world_size: int, setting: Setting) -> tuple[int, int]:
    """Bytes of shards and state between steps: as they are offloaded, and all of them."""
    pipe = setting.build()
    pipe.step_global(*setting.case.batch(0))
    ledger = pipe._assembly.resources.memory.ledger
    found = ledger.held(SHARDS, "device") + ledger.held(STATE, "device")
    pipe.close()
    resident = replace(setting, offload=()).build()
    resident.step_global(*setting.case.batch(0))
    ledger = resident._assembly.resources.memory.ledger
    everything = ledger.held(SHARDS, "device") + ledger.held(STATE, "device")
    resident.close()
    return found, everything


def test_between_steps_only_the_first_shards_are_there(run_ranks: RunRanks) -> None:
    setting = Setting(1, torch.bfloat16)
    ((found, everything),) = run_ranks(compare_with_resident, 1, setting)
    parameters = sum(p.numel() for p in setting.case.model().parameters())
    assert everything == (2 + 12) * parameters
    assert found == setting.whole_bytes(CUTS[0])
