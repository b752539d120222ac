"""What waits in host memory between uses: whoever holds the tensors sees nothing but their values.

Whatever is read or changed between steps.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import volume
from offloaded import DEFERRED, IN_PLACE, Setting, state_tensors
from ranks import RunRanks
from tiny import adamw
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.errors import ConfigError
from zorselike.plan.plan import OFFLOAD_KINDS
from zorselike.runtime._compat import resize_unlocked
from zorselike.runtime.memory.host_backed import HostBackedTensors
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.streams import Stream, Streams
from zorselike.runtime.ministage.sharding import local_tensor

pytestmark = pytest.mark.pooled

CPU = torch.device("cpu")


# -- a mirror by itself ----------------------------------------------------------------------------


def make(tensors: dict[str, Tensor]) -> tuple[HostBackedTensors, Memory]:
    memory = Memory.of(CPU, Streams())
    streams = memory.streams
    mirror = HostBackedTensors(
        tensors, purpose="optimizer state", memory=memory, homes=[streams.compute], inbound=streams.load_state
    )
    return mirror, memory


def leave(mirror: HostBackedTensors, memory: Memory) -> None:
    mirror.free(mirror.store(memory.streams.compute.record()))


@pytest.mark.parametrize("tensors", [{}, {"empty": torch.empty(0)}], ids=["none", "empty"])
def test_nobody_waits_to_give_back_nothing(tensors: dict[str, Tensor]) -> None:
    memory = Memory.of(CPU, Streams())
    home = Mock(spec=Stream)
    mirror = HostBackedTensors(
        tensors, purpose="parameter shards", memory=memory, homes=[home], inbound=memory.streams.load
    )
    mirror.free(memory.streams.compute.record())
    home.wait.assert_not_called()


def test_values_come_back_into_the_same_tensors() -> None:
    whole = torch.arange(12.0)
    tensors = {
        "row": torch.arange(7.0),
        "column": torch.arange(12.0).view(3, 4).t(),
        "padded": whole[2:9],
        "narrow": torch.arange(5, dtype=torch.int16),
        "empty": torch.empty(0),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    mirror, memory = make(tensors)
    num_bytes = 4 * (7 + 12 + 12) + 2 * 5
    assert mirror.num_bytes == num_bytes == memory.ledger.held("optimizer state", "device")
    for _ in range(3):
        leave(mirror, memory)
        assert memory.ledger.device_bytes == 0
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
        for name, tensor in tensors.items():
            assert torch.equal(mirror.host_copy(name, tensor).whole(), before[name]), name
        mirror.load()
        assert all(torch.equal(tensors[name], value) for name, value in before.items())
        tensors["row"].add_(1)
        before["row"].add_(1)
    assert memory.ledger.peak("optimizer state", "device") == num_bytes
    assert torch.equal(whole[2:9], before["padded"]) and whole[0] == 0 and whole[11] == 11


def test_a_storage_that_several_tensors_share_is_moved_once() -> None:
    whole = torch.arange(16.0)
    tensors = {"low": whole[:8], "all": whole, "high": whole[8:].view(2, 4)}
    mirror, memory = make(tensors)
    assert mirror.num_bytes == memory.ledger.peak("optimizer state", "host") == 64
    leave(mirror, memory)
    assert torch.equal(mirror.host_copy("high", tensors["high"]).whole(), torch.arange(8.0, 16.0).view(2, 4))
    mirror.load()
    assert torch.equal(whole, torch.arange(16.0))


def test_room_is_made_without_values_and_discarded_buffers_are_used_again() -> None:
    tensor = torch.ones(32)
    mirror, memory = make({"x": tensor})
    leave(mirror, memory)
    mirror.make_room(memory.streams.update)
    tensor.fill_(2)
    leave(mirror, memory)
    mirror.load()
    assert float(tensor.sum()) == 64
    host = memory.ledger.peak("optimizer state", "host")
    mirror.discard(memory.streams.update.record())
    assert memory.ledger.device_bytes == 0
    again = HostBackedTensors(
        {"x": torch.zeros(32)},
        purpose="optimizer state",
        memory=memory,
        homes=[memory.streams.compute],
        inbound=memory.streams.load_state,
    )
    leave(again, memory)
    assert memory.ledger.peak("optimizer state", "host") == host == 128


# -- between steps ---------------------------------------------------------------------------------


def step_and_look(rank: int, world_size: int, settings: Sequence[Setting]) -> list[list[float]]:
    """Losses of steps and evaluations with looks, none to two at a time, in between."""
    losses: list[list[float]] = []
    for setting in settings:
        pipe, case = setting.build(OFFLOAD_KINDS), setting.case(OFFLOAD_KINDS)
        losses.append([])
        for step in range(3):
            for _ in range(step):
                with pipe.loaded():
                    assert all(bool(tensor.isfinite().all()) for tensor in state_tensors(pipe))
            if step:
                losses[-1].append(pipe.evaluate_global(*case.batch(9)).loss)
            with pipe.loaded():
                pass
            losses[-1].append(pipe.step_global(*case.batch(step)).loss)
            pipe.full_state_dict()
        pipe.close()
    return losses


def step_resident(rank: int, world_size: int, settings: Sequence[Setting]) -> list[list[float]]:
    losses: list[list[float]] = []
    for setting in settings:
        pipe, case = setting.build(()), setting.case(())
        losses.append([])
        for step in range(3):
            if step:
                losses[-1].append(pipe.evaluate_global(*case.batch(9)).loss)
            losses[-1].append(pipe.step_global(*case.batch(step)).loss)
        pipe.close()
    return losses


@volume.parametrize(
    "setting", [IN_PLACE, DEFERRED, replace(DEFERRED, zero=3), replace(IN_PLACE, zero=0)], least=2
)
def test_looking_changes_nothing(setting: Setting, run_ranks: RunRanks) -> None:
    """Whichever ministage moves last, first and only."""
    settings = [replace(setting, num_ministages=number) for number in (1, 2, 3)]
    assert run_ranks(step_and_look, 1, settings) == run_ranks(step_resident, 1, settings)


def change_between_steps(
    rank: int, world_size: int, setting: Setting, offload: Sequence[str]
) -> tuple[list[float], bool]:
    """Losses where weights, moments, learning rates and groups change between steps."""
    pipe, case = setting.build(offload), setting.case(offload)
    schedulers = pipe.lr_schedulers(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    losses = []
    for step in range(4):
        losses.append(pipe.step_global(*case.batch(step)).loss)
        schedulers.step()
        for optimizer in pipe.optimizers.values():
            optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        with pipe.loaded():
            pass
        with pipe.loaded(), torch.no_grad():
            for tensor in state_tensors(pipe):
                tensor.mul_(0.75)
        losses.append(pipe.evaluate_global(*case.batch(step)).loss)
    with pipe.loaded(), torch.no_grad():
        for optimizer in pipe.optimizers.values():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.zero_()
    state = pipe.full_state_dict()
    is_zero = all(not tensor.any() for tensor in state.values())
    pipe.close()
    return losses, is_zero


@pytest.mark.parametrize(
    "setting", [IN_PLACE, replace(DEFERRED, tied=False), replace(DEFERRED, tied=False, zero=0, num_ranks=2)]
)
def test_what_is_changed_while_loaded_is_what_goes_on(setting: Setting, run_ranks: RunRanks) -> None:
    """Also where layers compute with rounded copies of what is changed."""
    found, expected = (
        run_ranks(change_between_steps, setting.num_ranks, setting, offload)
        for offload in (OFFLOAD_KINDS, ())
    )
    assert found == expected
    assert found[0][1]


def resume(rank: int, world_size: int, setting: Setting, offload: Sequence[str]) -> tuple[list[float], ...]:
    """Losses of a run, and of one that goes on from its middle with another pipeline; whether what
    was loaded from is still there."""
    first, case = setting.build(offload), setting.case(offload)
    losses = [first.step_global(*case.batch(step)).loss for step in range(2)]
    with first.loaded():
        saved = {i: copy.deepcopy(optimizer.state_dict()) for i, optimizer in first.optimizers.items()}
    weights = [first.full_state_dict()]
    torch.distributed.broadcast_object_list(weights)
    losses = [first.step_global(*case.batch(step)).loss for step in (2, 3)]
    first.close()
    model = case.model().float() if setting.dtype is not None else case.model()
    model.to_empty(device="cpu").load_state_dict(weights[0])
    again = HeteroPipeline(
        model, case.plan, optimizer=adamw, param_dtype=setting.dtype, max_norm=setting.max_norm
    )
    with again.loaded():
        for i, optimizer in again.optimizers.items():
            optimizer.load_state_dict(saved[i])
    resumed = [again.step_global(*case.batch(step)).loss for step in (2, 3)]
    again.close()
    sums = [
        float(local_tensor(value).sum())
        for state in saved.values()
        for moments in state["state"].values()
        for value in moments.values()
    ]
    return losses, resumed, sums


@pytest.mark.parametrize(
    "setting", [replace(IN_PLACE, num_ranks=2, tied=False), replace(DEFERRED, tied=False)]
)
def test_a_run_goes_on_from_a_saved_state(setting: Setting, run_ranks: RunRanks) -> None:
    for losses, resumed, sums in run_ranks(resume, setting.num_ranks, setting, OFFLOAD_KINDS):
        assert losses == resumed and sums


def misuse(rank: int, world_size: int) -> list[str]:
    """What is said of things that would crash, or lose something."""
    messages = []

    def expect_refusal(call: Callable[[], object]) -> None:
        with pytest.raises(ConfigError) as refused:
            call()
        messages.append(str(refused.value))

    def load(pipe: HeteroPipeline) -> None:
        with pipe.loaded():
            pass

    expect_refusal(lambda: IN_PLACE.build((), lambda named: torch.optim.LBFGS([p for _, p in named])))
    pipe = IN_PLACE.build(OFFLOAD_KINDS)
    pipe.step_global(*IN_PLACE.case(()).batch(0))
    expect_refusal(pipe.optimizers[0].state_dict)
    with pipe.loaded():
        assert pipe.optimizers[0].state_dict()["state"]
        expect_refusal(lambda: load(pipe))
        expect_refusal(lambda: pipe.step_global(*IN_PLACE.case(()).batch(0)))
        expect_refusal(pipe.full_state_dict)
    pipe.close()
    pipe.close()
    expect_refusal(lambda: load(pipe))
    expect_refusal(pipe.full_state_dict)
    return messages


def test_misuse_is_refused_by_name(run_ranks: RunRanks) -> None:
    closure, outside, *inside, closed, exported = run_ranks(misuse, 1)[0]
    assert "LBFGS" in closure and "loaded()" in outside
    assert len(inside) == 3 and all("leave the block" in message for message in inside)
    assert "closed" in closed and "closed" in exported


def test_other_threads_run_while_a_storage_grows() -> None:
    begun, grows, has_run = threading.Event(), threading.Event(), []

    def run() -> None:
        begun.set()
        grows.wait()
        has_run.append(True)

    other = threading.Thread(target=run)
    other.start()
    begun.wait()
    tensor = torch.ones(2**28, dtype=torch.uint8)  # Its copy takes long enough for a thread to wake.
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # Only who gives the lock up lets others have it.
    grows.set()
    resize_unlocked(tensor.untyped_storage(), 2**28 + 1)
    ran = bool(has_run)
    sys.setswitchinterval(before)
    other.join()
    assert ran and tensor.untyped_storage().nbytes() == 2**28 + 1
