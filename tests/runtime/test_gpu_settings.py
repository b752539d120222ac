"""What GPUs need, as far as a CPU can tell: that it is asked for, in the order that it is needed in."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch.distributed.fsdp import FSDPModule

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime import assembly
from zorselike.runtime.arguments import find_patience
from zorselike.runtime.assembly import Assembly
from zorselike.runtime.comm import ranks
from zorselike.runtime.comm.ranks import Groups, Ranks
from zorselike.runtime.comm.transport import Transport, share_multiprocessors
from zorselike.runtime.memory.streams import make_streams
from zorselike.runtime.ministage.updates import default_optimizer
from zorselike.runtime.processes.world import ProcessInfo, describe_process

NAMES = module_names(3)
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:])


def one_group(num_ranks: int, zero: int) -> Case:
    microbatches = tuple(Microbatch(rank, rank, rank + 1) for rank in range(num_ranks))
    group = Group(tuple(range(num_ranks)), microbatches, zero=zero)
    return Case(Plan(num_ranks, (group,), tuple(Ministage(0, tuple(cut)) for cut in CUTS)), 3)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, "32 expandable_segments:True None"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1 expandable_segments:True None"),
        ({"PYTORCH_ALLOC_CONF": "a:b"}, "32 a:b None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:b"}, "32 None a:b"),
    ],
)
def test_the_environment_is_set_before_cuda_starts_but_what_the_user_has_set_stays(
    given: dict[str, str], settings: str
) -> None:
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = f"import os, zorselike; print(*(os.environ.get(name) for name in {names}))"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=environment | given, text=True).split() == settings.split()


def test_under_wsl_the_allocator_keeps_its_default() -> None:
    """Its drivers refuse some of what expandable segments need (pytorch/pytorch#192330)."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = (
        "import os, platform; platform.release = lambda: '6.6.87.2-microsoft-standard-WSL2'; "
        f"import zorselike; print(*(os.environ.get(name) for name in {names}))"
    )
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert found.split() == ["None", "None"]


def find_contexts(rank: int, world_size: int, zero: int) -> list[tuple[int, list[int]]]:
    """FSDP2's context of each ministage and its streams: before a step, and after."""
    case = one_group(world_size, zero)
    made: list[FSDPModule] = []
    found = []
    with HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe:
        made = pipe._assembly.resources.fsdp_roots
        for step in range(2):
            for root in made:
                context: Any = root._get_fsdp_state()._comm_ctx
                streams = [
                    v for v in vars(context).values() if isinstance(v, torch.Stream | torch.cpu.Stream)
                ]
                found.append((id(context), [id(stream) for stream in streams]))
            if step == 0:
                pipe.step_global(*case.batch(0))
    assert len(found) == 2 * len(CUTS) and found[0][1]
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_ministages_share_the_streams_of_fsdp(zero: int, run_ranks: RunRanks) -> None:
    for found in run_ranks(find_contexts, 2, zero):
        assert all(context == found[0] for context in found)


def list_first_calls(rank: int, world_size: int, zero: int) -> tuple[list[str], list[str]]:
    """Collectives before the transport opens, and those of a step."""
    case = one_group(world_size, zero)
    calls: list[str] = []
    names = ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor", "all_gather_single")

    def note(name: str, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} {dist.get_world_size(kwargs.get('group'))}")
            return call(*args, **kwargs)

        return noted

    def opened(*args: Any, **kwargs: Any) -> Any:
        calls.append("transport")
        return Transport(*args, **kwargs)

    patches = [mock.patch.object(dist, n, note(n, getattr(dist, n))) for n in names if hasattr(dist, n)]
    with mock.patch.object(assembly, "Transport", opened):
        for patch in patches:
            patch.start()
        pipe = HeteroPipeline(case.model(), case.plan, optimizer=adamw)
        for patch in patches:
            patch.stop()
    pipe.close()
    at = calls.index("transport")
    return calls[:at], calls[at:]


@pytest.mark.parametrize("zero", [0, 2])
def test_groups_reduce_once_before_any_edge_opens(zero: int, run_ranks: RunRanks) -> None:
    for before, _ in run_ranks(list_first_calls, 2, zero):
        assert before[0] == "all_reduce 2" and before[1].startswith("reduce_scatter")


class _Options:
    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=0)


def test_transfers_between_two_ranks_get_few_multiprocessors() -> None:
    made: list[Any] = []

    def new_group(ranks: list[int], **options: Any) -> Any:
        made.append((ranks, options))
        return mock.Mock(spec=dist.ProcessGroup)

    groups = Groups(Ranks(0, (0, 1, 2)))
    nccl = SimpleNamespace(Options=_Options)
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.multiple(
            ranks, unbound_default_group=nullcontext, let_wait=mock.DEFAULT, has_nccl=lambda group: False
        ),
    ):
        groups.make_pair((1, 0))
        groups.make((0, 1, 2), "nccl")
    (pair, of_pair), (everyone, of_everyone) = made
    assert pair == [0, 1] and of_pair["backend"] == "nccl" and of_pair["pg_options"].config.max_ctas == 4
    assert everyone == [0, 1, 2] and of_everyone["pg_options"] is None


def test_transfers_that_wait_leave_half_of_a_gpu_to_compute() -> None:
    """Of a T4's 40 multiprocessors eight receives of four each would leave eight."""
    fan = [(0, other, way) for other in range(1, 5) for way in "FB"] + [(1, 2, "F")]
    assert {*share_multiprocessors(fan[:-1], [40, 132, 132, 132, 132]).values()} == {2}
    assert {*share_multiprocessors(fan[:-1], [132] * 5).values()} == {4}
    few = share_multiprocessors(fan, [132, 10, 132, 0, 132])
    assert [few[edge] for edge in ((0, 1, "F"), (0, 2, "F"), (1, 2, "F"))] == [1, 4, 1]


@pytest.mark.parametrize("blocks", [False, True])
def test_launches_that_block_leave_no_transfer_to_nccl(blocks: bool) -> None:
    """A receive that is posted early would wait for what its own rank has not sent yet."""
    pair = [
        ProcessInfo(i, "node", i, "cuda", gpu=f"GPU-{i}", blocks_launches=blocks and i == 1) for i in (0, 1)
    ]
    own = SimpleNamespace(ranks=Ranks(0, (0, 1)), processes=pair)
    own.compiled = SimpleNamespace(report=SimpleNamespace(buffered_edges=frozenset()))
    assert Assembly._goes_by_host(own, (0, 1, "F")) is blocks  # type: ignore[arg-type]
    with mock.patch.dict(os.environ, CUDA_LAUNCH_BLOCKING=str(int(blocks))):
        assert describe_process("cpu", rank=0).blocks_launches is blocks


@pytest.mark.parametrize(("devices", "seconds"), [(("cpu", "cpu"), 5), (("cpu", "cuda"), 30)])
def test_gpus_are_given_time_to_allocate(devices: tuple[str, ...], seconds: float) -> None:
    """Their allocator may wait for the device, and so for other ranks, with Python's lock."""
    assert find_patience([mock.Mock(device=device) for device in devices]) == seconds


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_the_default_optimizer_is_fused_on_a_gpu(is_on_gpu: bool) -> None:
    class Parameter(torch.nn.Parameter):
        is_cuda = is_on_gpu  # type: ignore[assignment]

    optimizer = default_optimizer([("weight", Parameter(torch.zeros(2)))])
    assert bool(optimizer.defaults["fused"]) is is_on_gpu


def test_no_stream_of_ours_but_that_of_updates_is_dealt_to_nccl() -> None:
    with (
        mock.patch.object(torch.cuda, "Stream", lambda device, priority=0: priority),
        mock.patch.object(torch.cuda, "current_stream", lambda device: "compute"),
    ):
        streams = make_streams(torch.device("cuda", 0))
        made = {name: stream._stream for name, stream in vars(streams).items() if name != "_device"}
        made["checkpoints"] = streams.make("checkpoints")._stream
    assert made.pop("compute") == "compute"
    assert {name for name, priority in made.items() if priority == 0} == {"update"} and len(made) == 14
