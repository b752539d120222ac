"""The race detector under FSDP2 and collectives: FSDP2's own streams, events and waits count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from stand_in import RaceStreams
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.pooled

N = 8
Found = list[tuple[str, str, str]]
"""Kind, earlier and later stream of each race."""


def run(run_ranks: RunRanks, hazard: Callable[..., Found], world_size: int, *args: object) -> Found:
    return [race for races in run_ranks(hazard, world_size, *args) for race in races]


def gather(rank: int, world_size: int, waits: bool) -> Found:
    streams = RaceStreams()
    with streams.watching():
        with streams.gather.use():
            mine, whole = torch.ones(N), torch.empty(world_size * N)
            work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        assert work is not None
        if waits:
            work.wait()
            whole + 1
        else:
            streams.compute.wait(streams.gather.record())  # Not an end of the collective.
            whole + 1
            work.wait()
        dist.all_reduce(whole)
        whole + 1
    return streams.pairs


@pytest.mark.parametrize("waits", [True, False])
def test_a_collective_is_over_when_its_work_is_waited_for(waits: bool, run_ranks: RunRanks) -> None:
    races = run(run_ranks, gather, 2, waits)
    assert {(kind, later) for kind, _, later in races} == (set() if waits else {("write-read", "compute")})
    assert all(earlier.startswith("group ") for _, earlier, _ in races)


class Sharded:
    """Two linear layers under FSDP2, each of them a unit, and a step that gathers ahead."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(N, N), nn.Linear(N, N))
        self.layers = list(self.model)
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        for module in self.model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
        self.shards = [p.to_local().detach() for p in self.model.parameters()]  # type: ignore[attr-defined]

    def step(self, streams: RaceStreams, *, waits: bool = True) -> Tensor:
        """Gathers on the gather stream, computes, updates on the update stream."""
        x = torch.ones(2, N, requires_grad=True)
        with self.gathering(streams, waits):
            handles = [layer.unshard(async_op=True) for layer in self.layers]  # type: ignore[operator]
        y = self.model(x)
        y.square().sum().backward()
        for handle in handles:
            handle.wait()
        streams.update.wait(streams.compute.record())
        with streams.update.use(), torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        if waits:
            streams.compute.wait(streams.update.record())
        return y.detach()

    @contextmanager
    def gathering(self, streams: RaceStreams, waits: bool) -> Iterator[None]:
        """What it gathers are updated weights, into memory that the last copy-out has read."""
        if waits:
            streams.gather.wait(streams.compute.record())
            streams.gather.wait(streams.update.record())
        with streams.gather.use():
            yield


def train_sharded(rank: int, world_size: int, waits: bool) -> Found:
    plain = Sharded(rank, world_size)
    watched = Sharded(rank, world_size)
    streams = RaceStreams()
    nothing = RaceStreams()  # Not watched: only there to be waited for.
    for _ in range(3):
        expected = plain.step(nothing)
        with streams.watching():
            result = watched.step(streams, waits=waits)
        assert torch.equal(result, expected)
    # FSDP2's own streams take part.
    assert sum(count for name, count in streams.num_operators.items() if name.startswith("FSDP's")) > 0
    return streams.pairs


@pytest.mark.parametrize("world_size", [1, 2])
def test_fsdp_is_seen(world_size: int, run_ranks: RunRanks) -> None:
    assert run(run_ranks, train_sharded, world_size, True) == []
    races = run(run_ranks, train_sharded, world_size, False)
    assert ("write-read", "update", "gather" if world_size > 1 else "compute") in races


def forget_waits_of_fsdp(rank: int, world_size: int, method: str) -> Found:
    sharded = Sharded(rank, world_size)
    streams = RaceStreams()
    with streams.watching(), mock.patch.object(torch.cpu.Stream, method, lambda handle, other: None):
        for _ in range(3):
            sharded.step(streams)
    return streams.pairs


@pytest.mark.parametrize("method", ["wait_stream", "wait_event"])
def test_waits_of_fsdp_count(method: str, run_ranks: RunRanks) -> None:
    """FSDP2 orders its reductions after the compute and the compute after its reductions."""
    races = run(run_ranks, forget_waits_of_fsdp, 2, method)
    own = "FSDP's reduce_scatter_stream"
    assert any((own == later) if method == "wait_stream" else (own == earlier) for _, earlier, later in races)


def offload_sharded(rank: int, world_size: int, waits: bool) -> Found:
    """Shards that are freed after each step and loaded ahead of the gather."""
    streams = RaceStreams()
    sharded = Sharded(rank, world_size)
    storages = {id(s.untyped_storage()): s.untyped_storage() for s in sharded.shards}
    mirrors = {key: storage.clone() for key, storage in storages.items()}
    with streams.watching():
        for _ in range(3):
            sharded.step(streams)
            streams.store.wait(streams.update.record())
            with streams.store.use():
                for key, storage in storages.items():
                    mirrors[key].copy_(storage)
            if waits:
                streams.compute.wait(streams.store.record())
            sizes = {key: storage.nbytes() for key, storage in storages.items()}
            for storage in storages.values():
                storage.resize_(0)
            streams.load.wait(streams.compute.record())
            with streams.load.use():
                for key, storage in storages.items():
                    storage.resize_(sizes[key])
                    storage.copy_(mirrors[key])
            if waits:
                streams.compute.wait(streams.load.record())
    return streams.pairs


def test_offload_of_shards_under_fsdp(run_ranks: RunRanks) -> None:
    assert run(run_ranks, offload_sharded, 1, True) == []
    kinds = {race[0] for race in run(run_ranks, offload_sharded, 1, False)}
    assert kinds >= {"write-read", "memory reused"}
