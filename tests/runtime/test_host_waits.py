"""In a step the host waits for nothing that it need not know: everything that it does wait for is listed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from host_waits import DEVICE, HostWaits
from ranks import RunRanks
from replica_cases import ReplicaCase
from tiny import Case, adamw, module_names, with_groups
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan, Recompute
from zorselike.runtime.comm import transport
from zorselike.runtime.comm.transport import _StagedChannel
from zorselike.runtime.memory import pinned
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.ministage.norm_sums import NormGroup, NormSums
from zorselike.runtime.ministage.updates import Clip

NAMES = module_names(3)
EVERYTHING = OFFLOAD_KINDS
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:4], NAMES[4:])


@dataclass(frozen=True)
class Scene:
    plan: Plan
    offload: tuple[str, ...] = ()
    recompute: Recompute = "none"
    dtype: torch.dtype | None = None
    max_norm: float | None = None
    clip: Clip = "global"
    tied: bool = False


def one_group(zero: int, num_ranks: int) -> Plan:
    rows = ((0, 1), (1, 3), (3, 4))
    own = tuple(Microbatch(i % num_ranks, *each) for i, each in enumerate(rows))
    return Plan(
        4, (Group(tuple(range(num_ranks)), own, zero=zero),), tuple(Ministage(0, tuple(c)) for c in CUTS)
    )


def two_groups() -> Plan:
    groups = tuple(Group((rank,), (Microbatch(rank, 0, 2), Microbatch(rank, 2, 4))) for rank in range(2))
    return Plan(4, groups, tuple(Ministage(i % 2, tuple(cut)) for i, cut in enumerate(CUTS)))


def one_replica() -> Plan:
    """Of two ranks that compute all rows together."""
    group = Group(((0, 1),), (Microbatch(0, 0, 2), Microbatch(0, 2, 4)))
    return Plan(4, (group,), tuple(Ministage(0, tuple(cut)) for cut in CUTS), sequence_length=7)


def run(rank: int, world_size: int, scenes: Sequence[Scene]) -> list[tuple[set[str], set[str], int]]:
    """Of each scene's second step and an evaluation: waits here and in threads, and how many copies."""
    return [watch(scene) for scene in scenes]


def watch(scene: Scene) -> tuple[set[str], set[str], int]:
    waits = HostWaits()
    plan = with_groups(scene.plan, lambda g: replace(g, offload=scene.offload, recompute=scene.recompute))
    case = (ReplicaCase if plan.has_replicas else Case)(plan, 3, tied=scene.tied)
    staged = partial(_StagedChannel, streams=waits.streams)
    with waits.making(), mock.patch.object(transport, "_Channel", staged):
        model = case.model()
        pipe = HeteroPipeline(
            model.float() if scene.dtype else model,
            plan,
            optimizer=adamw,
            device=DEVICE,
            param_dtype=scene.dtype,
            max_norm=scene.max_norm,
            clip=scene.clip,
        )
        pipe.step_global(*case.batch(0))
        for optimizer in pipe.optimizers.values():
            for state in optimizer.state.values():
                waits.mark(state["step"], host=True)  # As on a GPU, where it is not fused.
        batches = [[waits.mark(tensor, host=True) for tensor in case.batch(step)] for step in (1, 2)]
        waits.found.clear()
        waits.in_threads.clear()
        with waits.watching():
            results = [pipe.step_global(*batches[0]), pipe.evaluate_global(*batches[1])]
            pipe._totals.close()  # While threads are watched.
        assert all(result.loss > 0 for result in results)
        pipe.close()
    return waits.found, waits.in_threads, waits.num_transfers


def scenes(num_ranks: int) -> list[Scene]:
    """Every kind of norm, dtype, offload, ZeRO stage and transfer."""
    found = [
        Scene(one_group(0, num_ranks), max_norm=0.1, clip="ministage"),
        Scene(one_group(1, num_ranks), ("params",), tied=True),
        Scene(one_group(2, num_ranks), EVERYTHING, "layer", torch.bfloat16, 0.1, tied=True),
        Scene(one_group(2, num_ranks), EVERYTHING, dtype=torch.float16, max_norm=0.1),
        Scene(one_group(3, num_ranks), ("params", "optimizer"), max_norm=0.1, clip="ministage"),
    ]
    if num_ranks == 1:
        return found
    joined = Scene(one_replica(), ("params", "activations"), "layer", torch.bfloat16, 0.1)
    return [*found, Scene(two_groups(), EVERYTHING, max_norm=0.1, tied=True), joined]


_DECIDES = "an optimizer cannot be told by the device to do nothing; read where the first update needs it"
_A_STEP_LATER = "at the next send, or the next end of a step"
_GLOO = "by Gloo only the host can sum; read where the first update needs it"
_BY_NCCL = "of a replica's positions, used next; over NCCL a stream waits, and the host does not"
ALLOWED = {
    "_compat.py: all_gather_whole: work of a collective": _BY_NCCL,
    "_compat.py: reduce_scatter_whole: work of a collective": _BY_NCCL,
    "loss.py: Loss.grad: work of a collective": "how many targets others count; summed by hosts meanwhile",
    "loss.py: Loss.finish: work of a collective": "the same, where no backward came",
    "result.py: StepResult.loss: thread": "not in a step: somebody asks",
    "result.py: SumOverRanks.close: thread": "not in a step",
    "ministage/updates.py: Updates.is_skipped: thread": _DECIDES,
    "ministage/updates.py: Updates._factor: thread": _GLOO,
    "ministage/ties.py: TiedWeights._receive: work of a collective": "another rank's rows, used next",
    "ministage/ties.py: TiedWeights._pass_on.<locals>.<lambda>: work of a collective": _A_STEP_LATER,
    "ministage/ties.py: TiedWeights._pass_on.<locals>.<lambda>: thread": _A_STEP_LATER,
    "comm/transport.py: _StagedChannel.receive.<locals>.arrive: thread": "another rank's rows, used next",
}
"""What the host waits for, by place, and why."""
MAYBE = {"comm/transport.py: Transport.finish: thread": "what was sent a step before, and is not over yet"}
"""The same, where it depends on the machine."""
IN_THREADS = {
    "result.py: SumOverRanks.start.<locals>.reduce: event",
    "result.py: SumOverRanks.start.<locals>.reduce: work of a collective",
    "ministage/norm_sums.py: NormSums.start.<locals>.reduce: event",
    "ministage/norm_sums.py: NormSums.start.<locals>.reduce: work of a collective",
    "ministage/ties.py: TiedWeights._pass_on.<locals>.send: event",
    "comm/transport.py: _StagedChannel.send.<locals>.pass_on: event",
    "comm/transport.py: _StagedChannel.send.<locals>.pass_on: work of a collective",
    "comm/transport.py: _StagedChannel.receive.<locals>.bring: work of a collective",
}
"""What threads wait for instead of it; each must, or would pass on what is not there yet."""


def test_the_host_waits_for_nothing_else_in_a_step(run_ranks: RunRanks) -> None:
    found: set[str] = set()
    in_threads: set[str] = set()
    for num_ranks in (1, 2):
        for own in run_ranks(run, num_ranks, scenes(num_ranks)):
            for scene, (waits, others, num_transfers) in zip(scenes(num_ranks), own, strict=True):
                assert num_transfers > 4 * len(scene.offload)
                found |= waits
                in_threads |= others
    assert sorted(found - MAYBE.keys()) == sorted(ALLOWED)
    assert sorted(in_threads) == sorted(IN_THREADS)


def test_one_rank_clips_without_asking_the_device(run_ranks: RunRanks) -> None:
    """Nor with `clip="ministage"`: the updates of others go on."""
    own = [scene for scene in scenes(1) if scene.max_norm and scene.dtype is not torch.float16]
    for waits, _, _ in run_ranks(run, 1, own)[0]:
        assert not any("updates.py" in place for place in waits)


def sum_where_it_is(rank: int, world_size: int) -> list[tuple[bool, float]]:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    found = []
    for decides, joined in ((False, groups[1]), (False, None), (True, groups[1])):
        memory = Memory.of(torch.device("cpu"), HostWaits().streams)
        sums = NormSums(memory, decides=decides)
        squares = torch.tensor(rank + 1.0, dtype=torch.float64)
        total = sums.start(squares, NormGroup(groups[0], joined), memory.streams.compute)
        found.append((total.is_on_device, float(total.read())))
        assert squares == rank + 1  # It is read again at the end of the step.
        sums.close()
    return found


def test_a_norm_stays_on_the_device_where_ranks_are_joined_there(run_ranks: RunRanks) -> None:
    """Unless an overflow decides about the update."""
    assert run_ranks(sum_where_it_is, 2) == [[(True, 3.0), (False, 3.0), (False, 3.0)]] * 2


# -- what finds them ---------------------------------------------------------------------------


def read_in_every_way(rank: int, world_size: int) -> list[set[str]]:
    found = []
    for wait in WAITS:
        waits = HostWaits()
        device, host = waits.mark(torch.ones(4), host=False), waits.mark(torch.ones(4), host=True)
        with waits.watching():
            wait(device, host)
        found.append({place.rpartition(": ")[2] for place in waits.found})
    return found


WAITS: list[Callable[[Tensor, Tensor], object]] = [
    lambda device, host: float(device.sum()),
    lambda device, host: bool(device[0] > 0),
    lambda device, host: device.tolist(),
    lambda device, host: device[device > 0],
    lambda device, host: device.nonzero(),
    lambda device, host: device.to("cpu"),
    lambda device, host: device.cpu(),
    lambda device, host: host.to(device.device),
    lambda device, host: host.to(DEVICE, non_blocking=True),
    lambda device, host: host.copy_(device),
    lambda device, host: device.copy_(host, non_blocking=True),
    lambda device, host: device.new_tensor(1.0),
    lambda device, host: torch.tensor(1.0, device=device.device),
    lambda device, host: device + host,
]
FREE: list[Callable[[Tensor, Tensor], object]] = [
    lambda device, host: float(host.sum()) + host.tolist()[0],
    lambda device, host: device.copy_(host.pin_memory(), non_blocking=True),
    lambda device, host: host.pin_memory().to(device.device, non_blocking=True),
    lambda device, host: torch.full_like(device, 2.0) + torch.full((4,), 1.0, device=DEVICE),
    lambda device, host: device * host[0] + device.norm().clamp(max=1.0),
]


def test_every_way_to_wait_is_seen(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(read_in_every_way, 1, init=False)
    assert found == [
        {"_local_scalar_dense"},
        {"_local_scalar_dense"},
        {"tolist"},
        {"index"},
        {"nonzero"},
        *[{"blocking copy"}] * 3,
        {"copy of pageable memory"},
        {"blocking copy"},
        {"copy of pageable memory"},
        {"new_tensor"},
        {"value of Python's to the device"},
        {"add of host and device"},
    ]


def compute_freely(rank: int, world_size: int) -> set[str]:
    waits = HostWaits()
    device, host = waits.mark(torch.ones(4), host=False), waits.mark(torch.ones(4), host=True)
    with waits.watching():
        for work in FREE:
            work(device, host)
    return waits.found


def test_what_waits_for_nothing_is_left_alone(run_ranks: RunRanks) -> None:
    assert run_ranks(compute_freely, 1, init=False) == [set()]


def test_a_batch_goes_to_a_gpu_through_pinned_memory() -> None:
    calls: list[object] = []
    batch = torch.ones(2, 1).expand(2, 3)  # Rows may share memory, into which torch copies nothing.
    empty_like = torch.empty_like

    def make_pinned(tensor: Tensor, *, pin_memory: bool) -> Tensor:
        calls.append("pinned" if pin_memory else "pageable")
        return empty_like(tensor)

    with (
        mock.patch.object(torch, "empty_like", make_pinned),
        mock.patch.object(
            Tensor, "to", lambda tensor, *args, **kwargs: calls.append((*args, kwargs)) or tensor
        ),
    ):
        pinned.copy_to_device(batch, torch.device("cuda", 1))
        pinned.copy_to_device(batch, torch.device("cpu"))
    assert calls == [
        "pinned",
        (torch.device("cuda", 1), {"non_blocking": True}),
        (torch.device("cpu"), {"non_blocking": True}),
    ]
