"""Whatever an optimizer keeps, and however it keeps it, may wait in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
import volume
from odd_optimizers import ODD_OPTIMIZERS
from offloaded import Factory, Setting, state_tensors
from ranks import RunRanks
from tiny import assert_same, train_planned, train_single
from torch import Tensor
from torch.distributed.tensor import DTensor

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS
from zorselike.runtime.ministage.optimizer_state import ELEMENTWISE
from zorselike.runtime.ministage.sharding import local_tensor

pytestmark = pytest.mark.pooled

NUM_STEPS = 5


@dataclass
class Outcome:
    numbers: list[float]
    """Losses and norms of steps and evaluations."""
    tensors: list[Tensor]
    """This rank's weights, moments, and on rank 0 the whole weights."""
    on_device: list[int]
    """Bytes of the optimizers' state between steps, as its tensors have them."""
    on_host: list[int]


def bytes_on_device(pipe: HeteroPipeline) -> int:
    states = [state for optimizer in pipe.optimizers.values() for state in optimizer.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(local_tensor(value).untyped_storage().nbytes() for value in kept if value.dim())


def train(setting: Setting, offload: Sequence[str], factory: Factory) -> Outcome:
    pipe, case = setting.build(offload, factory), setting.case(offload)
    ledger = pipe._assembly.resources.memory.ledger
    outcome = Outcome([], [], [], [])
    for step in range(NUM_STEPS):
        results = [pipe.step_global(*case.batch(step))]
        outcome.on_device.append(bytes_on_device(pipe))
        outcome.on_host.append(ledger.held("optimizer state", "host"))
        if step == 2:
            results.append(pipe.evaluate_global(*case.batch(9)))
        outcome.numbers += [number for result in results for number in (result.loss, result.grad_norm)]
    with pipe.loaded():
        outcome.tensors += [tensor.clone() for tensor in state_tensors(pipe)]
    outcome.tensors += pipe.full_state_dict().values()
    pipe.close()
    return outcome


def compare_all(rank: int, world_size: int, settings: Sequence[Setting]) -> list[str]:
    """Which optimizers train otherwise where their state is offloaded, or leave some of it on the
    device, or take more and more host memory."""
    complaints = []
    for name, setting in volume.part([*product(ODD_OPTIMIZERS, settings)], least=2 * len(settings)):
        factory = ODD_OPTIMIZERS[name]
        found, expected = train(setting, OFFLOAD_KINDS, factory), train(setting, (), factory)
        assert len(found.tensors) == len(expected.tensors) > 0
        if repr(found.numbers) != repr(expected.numbers):
            complaints.append(f"{name}: {found.numbers} instead of {expected.numbers}, {setting}")
        if not all(map(torch.equal, found.tensors, expected.tensors)):
            complaints.append(f"{name}: weights or state differ, {setting}")
        if any(found.on_device) or found.on_host[-1] != found.on_host[-2]:
            complaints.append(f"{name}: {found.on_device} and {found.on_host} bytes, {setting}")
        if name == "no state":
            assert not any(expected.on_device + found.on_host)
        else:
            assert any(expected.on_device) and any(found.on_host), name
    return complaints


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [[Setting(1), Setting(1, zero=3, max_norm=0.5)], [Setting(2, max_norm=0.5)]],
    ids=["one rank", "two ranks"],
)
def test_any_state_may_be_offloaded(settings: Sequence[Setting], run_ranks: RunRanks) -> None:
    """In fp64, whether updates wait for all gradients or not."""
    for complaints in run_ranks(compare_all, settings[0].num_ranks, settings, timeout=240):
        assert not complaints, "\n".join(complaints)


class Derived(torch.optim.SGD):
    """May do with its parameters what it likes."""


def compare_with_one_process(rank: int, world_size: int) -> None:
    for optimizer in sorted(ELEMENTWISE | {Derived, torch.optim.Adagrad}, key=lambda kind: kind.__name__):
        case = replace(Setting(world_size).case(()), optimizer=partial(optimizer, lr=0.01))
        found = train_planned(case)
        if rank == 0:
            assert_same(found, train_single(case), case)


def test_updates_are_those_of_one_process(run_ranks: RunRanks) -> None:
    """Of 13 numbers and of 1, two ranks have different shares."""
    run_ranks(compare_with_one_process, 2)


def look_at_parameters(rank: int, world_size: int) -> None:
    for dtype, optimizer in product((None, torch.bfloat16), (torch.optim.AdamW, Derived)):
        pipe = Setting(world_size, dtype=dtype).build((), partial(optimizer, lr=0.01))
        for number, ministage in pipe._assembly.ministages.items():
            (group,) = pipe.optimizers[number].param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                shard = ministage.state.masters.get(name, ministage.sharded[name])
                assert isinstance(parameter, DTensor) == (optimizer is Derived), name
                assert local_tensor(parameter.detach()).data_ptr() == local_tensor(shard.detach()).data_ptr()
        pipe.close()


def test_only_elementwise_optimizers_are_given_plain_tensors(run_ranks: RunRanks) -> None:
    """Others may want to know how a parameter is spread over the ranks."""
    run_ranks(look_at_parameters, 2)


def zero_by_hook(named: Any, *, given: bool) -> torch.optim.Optimizer:
    """Its steps change nothing; `given`: by what the factory was given, else by what the hook is."""
    named = list(named)
    optimizer = torch.optim.SGD(named, lr=1.0)

    def zero(stepping: torch.optim.Optimizer, *_: Any) -> None:
        own = (group["params"] for group in stepping.param_groups)
        for parameter in [own for _, own in named] if given else chain(*own):
            if parameter.grad is not None:
                parameter.grad.zero_()

    optimizer.register_step_pre_hook(zero)
    return optimizer


def train_hooked(rank: int, world_size: int) -> None:
    for dtype, given, offload in product((None, torch.bfloat16), (True, False), ((), OFFLOAD_KINDS)):
        setting = Setting(world_size, dtype=dtype)
        pipe, case = setting.build(offload, partial(zero_by_hook, given=given)), setting.case(offload)
        before = pipe.full_state_dict()
        pipe.step_global(*case.batch(0))
        after = pipe.full_state_dict()
        assert all(torch.equal(after[name], own) for name, own in before.items()), (dtype, given, offload)
        pipe.close()


def test_hooks_of_a_step_may_change_gradients(run_ranks: RunRanks) -> None:
    run_ranks(train_hooked, 2)
