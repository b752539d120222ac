"""One GPU that plays several unequal ones, and a GPU beside CPUs: what needs no second card.

Each rank may take its own share of the memory and of the multiprocessors. NCCL has one rank a GPU,
so these ranks talk over Gloo. The same jobs run on CPU ranks too, which proves the plans and the
tolerances where there is no GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gpus import need_gpus
from ranks import RunRanks
from tiny import Case, Outcome, adamw, assert_same, module_names, train_all_single, with_groups
from torch import nn

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, Device, Group, Microbatch, Ministage, Plan
from zorselike.runtime.assembly import backend_for
from zorselike.runtime.comm.ranks import Ranks
from zorselike.runtime.processes.world import ProcessInfo

NAMES = module_names(4)
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:5], NAMES[5:])
MULTIPROCESSORS_AT_ONCE = 8
"""A green context has so many multiprocessors, or a multiple."""


@dataclass(frozen=True)
class Share:
    """What one rank may take of the card."""

    memory: float
    multiprocessors: float


SHARES = (Share(0.2, 0.5), Share(0.1, 0.25), Share(0.05, 0.125))


class FloatCase(Case):
    """A case in fp32."""

    def model(self) -> nn.Module:
        return super().model().float()


def make_plan(offload: tuple[str, ...] = (), zero: int = 2) -> Plan:
    """Ranks 0 and 1, then rank 2, visited twice; each with as many rows as its share deserves."""
    first = Group((0, 1), (Microbatch(0, 0, 2), Microbatch(1, 2, 4), Microbatch(0, 4, 6)), zero=zero)
    second = Group((2,), (Microbatch(2, 0, 3), Microbatch(2, 3, 6)), zero=zero)
    ministages = tuple(Ministage(i % 2, tuple(names)) for i, names in enumerate(CUTS))
    plan = Plan(6, (first, second), ministages)
    return with_groups(plan, lambda group: replace(group, offload=offload, recompute="layer"))


def name_devices(plan: Plan, types: tuple[str, ...]) -> Plan:
    """The plan for processes of this machine that drive what `types` say, by rank."""
    node = os.environ.get("ZORSELIKE_NODE") or socket.gethostname()
    return replace(plan, devices=tuple(Device(rank, node, rank, kind) for rank, kind in enumerate(types)))


def train(case: Case, device: torch.device, dtype: torch.dtype | None) -> Outcome:
    pipe = HeteroPipeline(
        case.model(),
        case.plan,
        optimizer=adamw,
        max_norm=case.max_norm,
        seed=case.seed,
        device=device,
        param_dtype=dtype,
    )
    results = [pipe.step_global(*case.batch(step)) for step in range(case.num_steps)]
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    outcome = Outcome(tuple(losses), tuple(norms), (), pipe.full_state_dict())
    pipe.close()
    return outcome


@contextmanager
def limited_to(share: Share) -> Iterator[None]:
    """On the first GPU, with no more of its memory and multiprocessors than the share."""
    torch.cuda.set_device(0)
    torch.cuda.set_per_process_memory_fraction(share.memory, 0)
    green = make_green_context(share)
    if hasattr(green, "Stream"):
        with torch.cuda.stream(green.Stream()):
            yield
        return
    green.set_context()  # torch before 2.13
    try:
        yield
    finally:
        green.pop_context()


def make_green_context(share: Share) -> Any:
    """A context with a share of the multiprocessors; skips where torch or the driver has none."""
    total = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = int(share.multiprocessors * total) // MULTIPROCESSORS_AT_ONCE * MULTIPROCESSORS_AT_ONCE
    try:
        from torch.cuda.green_contexts import GreenContext

        return GreenContext.create(num_sms=max(MULTIPROCESSORS_AT_ONCE, wanted), device_id=0)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no green contexts here: {str(error).splitlines()[0]}")


def train_in_share(rank: int, world_size: int, case: Case, dtype: torch.dtype | None) -> Outcome:
    share = SHARES[rank]
    with limited_to(share):
        outcome = train(case, torch.device("cuda", 0), dtype)
        total = torch.cuda.get_device_properties(0).total_memory
        assert torch.cuda.max_memory_reserved() <= share.memory * total
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(share.memory * total) + 1, dtype=torch.uint8, device="cuda")
    return outcome


def train_on_cpu(rank: int, world_size: int, case: Case, dtype: torch.dtype | None) -> Outcome:
    return train(case, torch.device("cpu"), dtype)


def train_beside_cpus(rank: int, world_size: int, case: Case, num_gpus: int) -> Outcome:
    """The first ranks on the first GPU, the others on the CPU."""
    if rank < num_gpus:
        torch.cuda.set_device(0)
    return train(case, torch.device("cuda", 0) if rank < num_gpus else torch.device("cpu"), None)


def check_losses(case: Case, found: Outcome, run_ranks: RunRanks) -> None:
    """Against fp32 in one process on the CPU, to what bf16 rounds."""
    ((expected,),) = run_ranks(train_all_single, 1, [case])
    assert found.losses == pytest.approx(expected.losses, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [(), OFFLOAD_KINDS])
def test_one_gpu_plays_three_unequal_ones(offload: tuple[str, ...], run_ranks: RunRanks) -> None:
    need_gpus()
    case = FloatCase(make_plan(offload), 4)
    found = run_ranks(train_in_share, 3, case, torch.bfloat16, timeout=240)[0]
    check_losses(case, found, run_ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("zero", range(4))
def test_ranks_that_share_a_gpu_equal_the_cpu(zero: int, run_ranks: RunRanks) -> None:
    need_gpus()
    case = Case(make_plan(OFFLOAD_KINDS, zero), 4, max_norm=0.1)
    ((expected,),) = run_ranks(train_all_single, 1, [case])
    found = run_ranks(train_beside_cpus, 3, case, 3, timeout=240)[0]
    assert_same(found, expected, case)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [(), OFFLOAD_KINDS])
def test_a_gpu_and_two_cpus_equal_the_cpu(offload: tuple[str, ...], run_ranks: RunRanks) -> None:
    need_gpus()
    one, two = make_plan(offload).groups
    # Now the GPU is a group of its own, and the two CPUs the other.
    gpu = replace(one, ranks=(0,), microbatches=(Microbatch(0, 0, 4), Microbatch(0, 4, 6)))
    cpus = replace(two, ranks=(1, 2), microbatches=(Microbatch(1, 0, 1), Microbatch(2, 1, 6)))
    plan = name_devices(replace(make_plan(offload), groups=(gpu, cpus)), ("cuda", "cpu", "cpu"))
    case = Case(plan, 4)
    ((expected,),) = run_ranks(train_all_single, 1, [case])
    found = run_ranks(train_beside_cpus, 3, case, 1, timeout=240)[0]
    assert_same(found, expected, case)


def test_nccl_is_for_ranks_with_a_gpu_each() -> None:
    gpus = ("", "one", "one", "other")
    processes = [ProcessInfo(i, "node", i, "cuda" if gpu else "cpu", gpu=gpu) for i, gpu in enumerate(gpus)]
    ranks = Ranks(0, (3, 2, 1, 0))
    assert backend_for((0, 1), ranks, processes) == backend_for((0,), ranks, processes) == "nccl"
    for members in ((1, 2), (0, 1, 2), (0, 3), (3,)):
        assert backend_for(members, ranks, processes) == "gloo"


def test_slices_of_one_card_are_one_to_nccl_which_refuses_two_ranks_on_it() -> None:
    name, places = "NVIDIA A100 80GB PCIe MIG 1g.10gb", (("a", "07"), ("a", "07"), ("a", "08"), ("b", "07"))
    processes = [
        ProcessInfo(i, node, i, "cuda", name, f"MIG-{i}", place) for i, (node, place) in enumerate(places)
    ]
    ranks = Ranks(0, (0, 1, 2, 3))
    assert backend_for((0, 1), ranks, processes) == backend_for((3, 1, 2, 0), ranks, processes) == "gloo"
    assert backend_for((0, 2, 3), ranks, processes) == "nccl"


@pytest.mark.parametrize("offload", [(), OFFLOAD_KINDS])
def test_three_cpus_play_the_same_job(offload: tuple[str, ...], run_ranks: RunRanks) -> None:
    case = FloatCase(make_plan(offload), 4)
    found = run_ranks(train_on_cpu, 3, case, torch.bfloat16, timeout=120)[0]
    check_losses(case, found, run_ranks)
