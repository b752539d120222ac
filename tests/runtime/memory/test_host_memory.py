"""Host memory for what is offloaded: as much as is asked for, once, and given back at the end."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import volume
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch.multiprocessing.reductions import StorageWeakRef

from zorselike import HeteroPipeline
from zorselike.cost.purposes import Purpose
from zorselike.errors import ConfigError
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime import host_checks
from zorselike.runtime.host_checks import refuse_crowded_hosts
from zorselike.runtime.memory import memory as rank_memory
from zorselike.runtime.memory.host_room import HostRoom
from zorselike.runtime.memory.memory import HostPool, Ledger
from zorselike.schedule.actions import Action

GIB = 2**30
NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
CUTS = (NAMES[:2], NAMES[2:4], NAMES[4:])


# -- the pool by itself ----------------------------------------------------------------------------


def make_pool() -> tuple[HostPool, Ledger]:
    ledger = Ledger()
    return HostPool(ledger, pin=False), ledger


def test_a_slab_is_no_larger_than_its_buffers() -> None:
    """Each is rounded to 64 bytes, so that any dtype may begin there; nothing to powers of two."""
    pool, ledger = make_pool()
    sizes = [1000, 64, 1, 0, 65, 3 * 2**20 + 8]
    pool.reserve("parameter shards", sizes)
    exact = 1024 + 64 + 64 + 128 + 3 * 2**20 + 64
    assert ledger.held("parameter shards", "host") == exact
    buffers = [pool.take("parameter shards", size) for size in sizes]
    assert [buffer.numel() for buffer in buffers] == sizes
    assert all(buffer.dtype == torch.uint8 for buffer in buffers)
    assert all(buffer.data_ptr() % 64 == 0 for buffer in buffers if buffer.numel())
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert all(bool((buffer == number).all()) for number, buffer in enumerate(buffers))
    assert ledger.held("parameter shards", "host") == exact
    buffers[0][:1000].view(torch.float64).view(5, 25)


def test_what_is_given_back_is_taken_again() -> None:
    pool, ledger = make_pool()
    first = pool.take("activations", 100)
    pool.give_back("activations", first)
    assert pool.take("activations", 100).data_ptr() == first.data_ptr()
    assert pool.take("activations", 100).data_ptr() != first.data_ptr()
    assert ledger.held("activations", "host") == 2 * 128
    pool.give_back("activations", pool.take("activations", 0))
    assert ledger.held("activations", "host") == 2 * 128


def test_room_is_made_only_for_what_is_missing() -> None:
    pool, ledger = make_pool()
    pool.reserve("activations", [256, 256, 512])
    pool.reserve("activations", [512, 256])
    assert ledger.held("activations", "host") == 1024
    pool.reserve("activations", [256, 256, 256])
    assert ledger.held("activations", "host") == 1280
    taken = [pool.take("activations", 256) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in taken}) == 3
    assert ledger.held("activations", "host") == 1280
    pool.reserve("activations", [256])
    assert ledger.held("activations", "host") == 1536


def test_purposes_do_not_share() -> None:
    pool, ledger = make_pool()
    pool.give_back("activations", pool.take("activations", 256))
    pool.take("optimizer state", 256)
    assert [ledger.held(purpose, "host") for purpose in Purpose].count(256) == 2


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    room = HostRoom(3 * GIB // 2, "available memory")
    monkeypatch.setattr(rank_memory, "find_host_room", lambda: room)
    pool, ledger = make_pool()
    with pytest.raises(ConfigError, match=r"2\.00 GiB more .*optimizer state.* 1\.50 GiB .available memory"):
        pool.reserve("optimizer state", [GIB, GIB])
    assert ledger.held("optimizer state", "host") == 0
    pool.reserve("optimizer state", [2**20])
    assert ledger.held("optimizer state", "host") == 2**20


def test_closing_gives_memory_back_from_under_who_holds_it() -> None:
    pool, _ = make_pool()
    held = [pool.take("activations", 2**20), pool.take("optimizer state", 64)]
    pool.close()
    pool.close()
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in held)


def test_a_node_is_full_for_all_its_ranks_together() -> None:
    rooms = [HostRoom(num_gib * GIB, "available memory") for num_gib in (3, 2, 8)]
    needed = [GIB, GIB, 5 * GIB]
    refuse_crowded_hosts(["a", "a", "b"], needed, rooms, "it puts {} more", mend="offload less")
    needed[1] += GIB
    said = r"3\.00 GiB more .*'a' .*rank 0: 1\.00 GiB, rank 1: 2\.00 GiB.* 2\.00 GiB .avail.*; ZORSELIKE_HOST"
    with pytest.raises(ConfigError, match=said):
        refuse_crowded_hosts(["a", "a", "b"], needed, rooms, "it puts {} more", mend="offload less")


# -- what a pipeline takes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How a `Decoder` of three ministages is trained."""

    offload: tuple[str, ...] = OFFLOAD_KINDS
    recompute: str = "none"
    dtype: torch.dtype | None = None
    max_norm: float | None = None
    zero: int = 2
    num_ranks: int = 1

    @property
    def case(self) -> Case:
        rows = ((0, 1), (1, 3), (3, 4), (4, 6))
        own = tuple(Microbatch(i % self.num_ranks, *rows[i]) for i in range(len(rows)))
        group = Group(tuple(range(self.num_ranks)), own, zero=self.zero, offload=self.offload)
        group = replace(group, recompute=self.recompute)  # type: ignore[arg-type]
        return Case(Plan(6, (group,), tuple(Ministage(0, tuple(cut)) for cut in CUTS)), NUM_LAYERS)

    def build(self) -> HeteroPipeline:
        model = self.case.model().float()
        return HeteroPipeline(
            model, self.case.plan, optimizer=adamw, param_dtype=self.dtype, max_norm=self.max_norm
        )


def host_bytes(pipe: HeteroPipeline) -> dict[str, int]:
    """By purpose, in slabs that are there."""
    slabs = pipe._assembly.resources.memory.pool._slabs
    held = {purpose: pipe._assembly.resources.memory.ledger.held(purpose, "host") for purpose in Purpose}
    assert sum(held.values()) == sum(slab.numel() for slab in slabs)
    return held


def grow(rank: int, world_size: int, settings: Sequence[Setting]) -> list[list[dict[str, int]]]:
    """Host memory before the first step, after it, and after ten with evaluations in between."""
    found = []
    for setting in settings:
        pipe = setting.build()
        bytes_then = [host_bytes(pipe)]
        for step in range(10):
            pipe.step_global(*setting.case.batch(step))
            if step in (2, 5):
                pipe.evaluate_global(*setting.case.batch(step))
                pipe.full_state_dict()
            if step in (0, 9):
                bytes_then.append(host_bytes(pipe))
        found.append(bytes_then)
        pipe.close()
    return found


def rounded(sizes: Sequence[int]) -> int:
    return sum(-(-size // 64) * 64 for size in sizes)


def expected_bytes(setting: Setting) -> dict[str, int]:
    """Of one rank after its first step, from the shapes of the model alone."""
    shapes = {name: parameter.shape.numel() for name, parameter in setting.case.model().named_parameters()}
    of_ministage = [
        [count for name, count in shapes.items() if name.startswith(tuple(f"{module}." for module in cut))]
        for cut in CUTS
    ]
    computes_in = 4 if setting.dtype is None else 2
    num_state_tensors = 2 if setting.dtype is None else 3
    everything = list(shapes.values())
    found = dict.fromkeys(Purpose, 0)
    if "params" in setting.offload:
        found["parameter shards"] = rounded([computes_in * n for own in of_ministage[1:] for n in own])
    if "optimizer" in setting.offload:
        found["optimizer state"] = num_state_tensors * rounded([4 * n for n in everything])
        if setting.max_norm is not None:
            found["gradient shards"] = rounded([4 * n for n in everything])
    return found


SETTINGS = [
    Setting(("params",)),
    Setting(("optimizer",)),
    Setting(("optimizer",), max_norm=0.1),
    Setting(("params", "optimizer"), dtype=torch.bfloat16),
    Setting(("params", "optimizer"), dtype=torch.bfloat16, max_norm=0.1),
]


def test_host_memory_is_that_of_the_shapes(run_ranks: RunRanks) -> None:
    """Not a byte more than 64 for each tensor; all of it is there after the first step."""
    for setting, (_, first, last) in zip(SETTINGS, run_ranks(grow, 1, SETTINGS)[0], strict=True):
        assert first == last == expected_bytes(setting), setting


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_nothing_grows_over_ten_steps(recompute: str, num_ranks: int, run_ranks: RunRanks) -> None:
    everything = Setting(recompute=recompute, num_ranks=num_ranks)
    settings = [
        everything,
        replace(everything, dtype=torch.bfloat16, max_norm=0.1),
        replace(everything, dtype=torch.float16, zero=3),
        replace(everything, zero=0, max_norm=0.1),
    ]
    for found in run_ranks(grow, num_ranks, volume.part(settings), timeout=120):
        for before, first, last in found:
            assert first == last
            assert before["parameter shards"] == first["parameter shards"] > 0
            assert first["activations"] > 0 and first["optimizer state"] > 0


def take_in_a_step(rank: int, world_size: int, settings: Sequence[Setting]) -> list[set[str]]:
    """By setting: what host memory is taken for while the first step's actions run."""
    allocate, found = HostPool._allocate, []
    for setting in settings:
        taken: set[str] = set()
        running: list[Action] = []

        def note(pool: HostPool, purpose: str, num_bytes: int, taken=taken, running=running) -> torch.Tensor:
            taken.update([purpose] if running else [])
            return allocate(pool, purpose, num_bytes)

        with (
            mock.patch.object(HostPool, "_allocate", note),
            setting.build() as pipe,
            pipe.watching(running.append, running.remove),
        ):
            pipe.step_global(*setting.case.batch(0))
        found.append(taken)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_step_takes_memory_but_for_activations_of_unknown_size(
    num_ranks: int, run_ranks: RunRanks
) -> None:
    """A GPU may have to end what waits for other ranks before it pins some."""
    settings = [
        Setting(recompute="layer", num_ranks=num_ranks, max_norm=0.1),
        Setting(dtype=torch.bfloat16, num_ranks=num_ranks, max_norm=0.1, zero=3),
        Setting(num_ranks=num_ranks, zero=0),
    ]
    for found in run_ranks(take_in_a_step, num_ranks, settings):
        assert all(taken <= {"activations"} for taken in found), found


def build_without_room(rank: int, world_size: int, setting: Setting, later: bool) -> tuple[str, bool]:
    """What is said, and whether the weights are still what they were."""
    full = HostRoom(100, "memory limit of the container or job")
    module = host_checks if later else rank_memory
    if not later:
        with mock.patch.object(module, "find_host_room", lambda: full), pytest.raises(ConfigError) as refused:
            setting.build()
        return str(refused.value), True
    pipe = setting.build()
    before = pipe.full_state_dict()
    with mock.patch.object(module, "find_host_room", lambda: full), pytest.raises(ConfigError) as refused:
        pipe.step_global(*setting.case.batch(0))
    after = pipe.full_state_dict()
    return str(refused.value), all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("later", [False, True])
def test_a_full_host_is_told_before_the_first_step(later: bool, run_ranks: RunRanks) -> None:
    message, is_unchanged = run_ranks(build_without_room, 1, Setting(dtype=torch.bfloat16), later)[0]
    assert "MiB" in message and "0.00 GiB" not in message and "offload less" in message and is_unchanged
    assert "ZORSELIKE_HOST_MEMORY" in message
    assert ("first step" in message) is later


def use_one_after_the_other(rank: int, world_size: int) -> tuple[list[int], int]:
    """By pipeline: host bytes that are left when it is closed though somebody holds it, and how many
    slabs are alive in the end."""
    left, slabs, pipes = [], [], []
    for number in range(4):
        setting = Setting(recompute="layer" if number % 2 else "none", num_ranks=world_size)
        pipe = setting.build()
        pipe.step_global(*setting.case.batch(0))
        own = [slab.untyped_storage() for slab in pipe._assembly.resources.memory.pool._slabs]
        slabs += [StorageWeakRef(storage) for storage in own]
        pipe.close()
        left.append(sum(storage.nbytes() for storage in own))
        pipes.append(pipe)
    del pipe, own
    pipes.clear()
    gc.collect()
    return left, sum(not slab.expired() for slab in slabs)


def test_pipelines_one_after_the_other_give_it_back(run_ranks: RunRanks) -> None:
    for left, num_alive in run_ranks(use_one_after_the_other, 2):
        assert left == [0] * 4 and num_alive == 0
