"""The race detector finds each hazard that offloading has, and nothing in code that waits.

Every function below runs on a forked rank and returns the kinds of races found, with the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from sanitizer import sanitize
from stand_in import RaceStreams, StreamRace
from stream_work import Trace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N = 8
Found = list[tuple[str, str, str]]
"""Kind, earlier and later stream of each race."""


def resize(tensor: Tensor, num_elements: int) -> None:
    tensor.untyped_storage().resize_(num_elements * tensor.itemsize)


def scene(body: Callable[..., object]) -> Callable[..., Found]:
    """What a rank runs: `body(streams, host, shard, *args)` under watch, with two buffers made before it."""

    def run_watched(rank: int, world_size: int, *args: object) -> Found:
        streams, host, shard = RaceStreams(), torch.ones(N), torch.zeros(N)
        with streams.watching():
            body(streams, host, shard, *args)
        return streams.pairs

    return run_watched


def run(run_ranks: RunRanks, hazard: Callable[..., Found], *args: object) -> Found:
    (races,) = run_ranks(hazard, 1, *args, init=False)
    return list(races)


# -- order of accesses -----------------------------------------------------------------------


@scene
def load_then_compute(streams: RaceStreams, host: Tensor, shard: Tensor, waits: bool) -> None:
    with streams.load.use():
        shard = torch.empty(N)
        shard.copy_(host, non_blocking=True)
    if waits:
        streams.compute.wait(streams.load.record())
    shard + 1


@scene
def early_event(streams: RaceStreams, host: Tensor, shard: Tensor) -> None:
    event = streams.load.record()
    with streams.load.use():
        shard.copy_(host)
    streams.compute.wait(event)
    shard + 1


def test_an_event_recorded_too_early_orders_nothing(run_ranks: RunRanks) -> None:
    assert run(run_ranks, early_event) == [("write-read", "load", "compute")]


@scene
def overwrite_while_read(streams: RaceStreams, host: Tensor, shard: Tensor, waits: bool) -> None:
    shard.add_(1)
    streams.store.wait(streams.compute.record())
    with streams.store.use():
        host.copy_(shard)
    if waits:
        streams.compute.wait(streams.store.record())
    shard.add_(1)


def host_buffer_reuse(rank: int, world_size: int, waits: bool, apart: bool) -> Found:
    streams = RaceStreams()
    host, first, second = torch.zeros(2 * N), torch.zeros(N), torch.ones(N)
    with streams.watching():
        with streams.fetch.use():
            first.copy_(host[:N])
        if waits:
            streams.stash.wait(streams.fetch.record())
        with streams.stash.use():
            host[N if apart else N - 1 :][:N].copy_(second)
    return streams.pairs


def test_slices_of_one_buffer_that_do_not_overlap_are_apart(run_ranks: RunRanks) -> None:
    assert run(run_ranks, host_buffer_reuse, False, True) == []


@scene
def through_a_third(streams: RaceStreams, host: Tensor, shard: Tensor, waits: bool) -> None:
    with streams.load.use():
        shard.copy_(host)
    streams.gather.wait(streams.load.record())
    gathered = streams.gather.record() if waits else streams.update.record()
    streams.compute.wait(gathered)
    shard + 1


@scene
def wait_for_current(streams: RaceStreams, host: Tensor, shard: Tensor, inside: bool) -> None:
    streams.begin()
    shard.add_(1)
    with streams.store.use():
        streams.store.wait((streams.current if inside else streams.compute).record())
        host.copy_(shard)


def test_inside_use_the_current_stream_is_that_stream(run_ranks: RunRanks) -> None:
    assert run(run_ranks, wait_for_current, True) == [("write-read", "compute", "store")]
    assert run(run_ranks, wait_for_current, False) == []


def begin_elsewhere(rank: int, world_size: int) -> Found:
    streams = RaceStreams()
    other = streams.make("a caller's")
    with streams.watching():
        with other.use():
            streams.begin()
            assert streams.compute is other
            with streams.load.use(), streams.update.use():
                assert streams.current is streams.update
            assert streams.current is other
        streams.begin()
        assert streams.compute is streams.default
    return streams.pairs


def test_begin_takes_the_current_stream(run_ranks: RunRanks) -> None:
    assert run(run_ranks, begin_elsewhere) == []


@scene
def host_synchronises(streams: RaceStreams, host: Tensor, shard: Tensor, waits: bool) -> None:
    with streams.load.use():
        shard.copy_(host)
    event = streams.load.record()
    if waits:
        event.synchronize()
    with streams.update.use():
        shard.add_(1)


def host_reads(rank: int, world_size: int, waits: bool, checks: bool) -> Found:
    streams = RaceStreams(checks_host_reads=checks)
    norm = torch.ones(1)
    with streams.watching():
        norm.mul_(2)
        if waits:
            streams.compute.record().synchronize()
        norm.item()
    return streams.pairs


def test_reads_of_the_host_are_checked_on_demand(run_ranks: RunRanks) -> None:
    assert run(run_ranks, host_reads, False, False) == []
    assert run(run_ranks, host_reads, True, True) == []
    assert run(run_ranks, host_reads, False, True) == [("host read", "compute", "compute")]


# -- memory ----------------------------------------------------------------------------------


@scene
def free_by_resize(streams: RaceStreams, host: Tensor, shard: Tensor, waits: bool) -> None:
    shard.mul_(2)
    streams.store.wait(streams.compute.record())
    with streams.store.use():
        host.copy_(shard)
    if waits:
        streams.compute.wait(streams.store.record())
    resize(shard, 0)
    torch.zeros(3)


@scene
def free_by_reference(streams: RaceStreams, host: Tensor, shard: Tensor) -> None:
    activation = torch.ones(N) * 2
    streams.stash.wait(streams.compute.record())
    with streams.stash.use():
        host.copy_(activation)
    del activation
    torch.zeros(3)


def test_memory_is_freed_by_the_last_reference(run_ranks: RunRanks) -> None:
    assert run(run_ranks, free_by_reference) == [("memory reused", "stash", "compute")]


@scene
def wait_before_the_next_allocation(streams: RaceStreams, host: Tensor, shard: Tensor) -> None:
    activation = torch.ones(N) * 2
    streams.stash.wait(streams.compute.record())
    with streams.stash.use():
        host.copy_(activation)
        del activation
        torch.zeros(3)  # Of another pool.
    streams.compute.wait(streams.stash.record())
    torch.zeros(3)


def test_a_pool_may_wait_until_it_allocates(run_ranks: RunRanks) -> None:
    assert run(run_ranks, wait_before_the_next_allocation) == []


@scene
def pool_of_the_other_stream(streams: RaceStreams, host: Tensor, shard: Tensor, on_load: bool) -> None:
    """Refilled on a stream, the memory is that stream's, whoever had it before."""
    resize(shard, 0)
    with streams.load.use():
        resize(shard, N)
        shard.copy_(host)
    streams.compute.wait(streams.load.record())
    shard + 1
    resize(shard, 0)
    with (streams.load if on_load else streams.compute).use():
        torch.zeros(3)


def test_memory_belongs_to_the_stream_that_refilled_it(run_ranks: RunRanks) -> None:
    assert run(run_ranks, pool_of_the_other_stream, True) == [("memory reused", "compute", "load")]
    assert run(run_ranks, pool_of_the_other_stream, False) == []


@scene
def use_of_fresh_memory(streams: RaceStreams, host: Tensor, shard: Tensor, waits: bool) -> None:
    """Memory without a kernel of its own is still that of kernels queued before on its stream."""
    host + 1
    if waits:
        streams.load.wait(streams.compute.record())
    shard = torch.empty(N)
    with streams.load.use():
        shard.copy_(host)


@scene
def use_after_free(streams: RaceStreams, host: Tensor, shard: Tensor) -> None:
    resize(shard, 0)
    shard.view(2, N // 2), torch.empty_like(shard)
    with pytest.raises(StreamRace, match=r"freed, 'layers\.0'"):
        streams.name_storage(shard, "layers.0")
        shard + 1


def test_freed_memory_is_not_read(run_ranks: RunRanks) -> None:
    assert run(run_ranks, use_after_free) == [("freed", "", "compute")]


def host_memory(rank: int, world_size: int) -> Found:
    streams = RaceStreams()
    shard = torch.zeros(N)
    with streams.watching():
        torch.ones(N)
        host = torch.empty(N)
        streams.mark_host(host)
        with streams.load.use():
            host.fill_(1)
            shard.copy_(host)
        del host
        torch.zeros(3)
    return streams.pairs


def test_host_memory_is_of_no_pool(run_ranks: RunRanks) -> None:
    assert run(run_ranks, host_memory) == []


def count_resident(rank: int, world_size: int) -> list[int]:
    streams = RaceStreams()
    seen: list[int] = []
    streams.on_resize = seen.append
    with streams.watching():
        shards = [torch.ones(N), torch.ones(2 * N)]
        seen.append(streams.resident_bytes())
        for shard in shards:
            resize(shard, 0)
        resize(shards[1], 2 * N)
        shards.clear()
        del shard
        seen.append(streams.resident_bytes())
    return seen


def test_resident_bytes_are_those_of_what_is_resized(run_ranks: RunRanks) -> None:
    assert run_ranks(count_resident, 1, init=False) == [[0, 0, 0, 8 * N, 0]]


# -- hazards, each with and without the wait that mends it ------------------------------------

HAZARDS: dict[str, tuple[Callable[..., Found], tuple[str, str, str]]] = {
    "what is loaded is read after the load": (load_then_compute, ("write-read", "load", "compute")),
    "what is stored is not changed meanwhile": (overwrite_while_read, ("read-write", "store", "compute")),
    "a host buffer is reused after it was read": (
        partial(host_buffer_reuse, apart=False),
        ("read-write", "fetch", "stash"),
    ),
    "order is transitive": (through_a_third, ("write-read", "load", "compute")),
    "what the host waits for is before what it starts": (
        host_synchronises,
        ("write-write", "load", "update"),
    ),
    "memory is freed by resize after its last use": (free_by_resize, ("memory reused", "store", "compute")),
    "fresh memory is used after its allocation": (
        use_of_fresh_memory,
        ("write-write", "compute", "load"),
    ),
}


NOT_SANITIZED = {
    "a host buffer is reused after it was read": "the two ranges overlap, but begin at different bytes",
    "fresh memory is used after its allocation": "it knows of no use before: allocating is no kernel",
}
"""What torch's own sanitizer does not find, and why."""


def judge_twice(rank: int, world_size: int, name: str, waits: bool) -> tuple[Found, Found]:
    """The races of a hazard by the clocks and by torch's sanitizer."""
    initialise, trace = RaceStreams.__init__, Trace()

    def write_down(streams: RaceStreams) -> None:
        initialise(streams)
        streams.judges.append(trace)

    with mock.patch.object(RaceStreams, "__init__", write_down):
        return HAZARDS[name][0](rank, world_size, waits), [*sanitize(trace.work)]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard_is_found_where_nothing_waits(name: str, waits: bool, run_ranks: RunRanks) -> None:
    races = [] if waits else [HAZARDS[name][1]]
    ((found, sanitized),) = run_ranks(judge_twice, 1, name, waits, init=False)
    assert found == races
    assert sanitized == ([] if name in NOT_SANITIZED else races)


# -- operators -------------------------------------------------------------------------------


def through_a_view(rank: int, world_size: int) -> Found:
    streams = RaceStreams()
    flat = torch.zeros(2 * N)
    with streams.watching():
        with streams.load.use():
            flat[:N].copy_(torch.ones(N))
            torch.add(torch.ones(N), 1, out=flat[N:])
        flat.view(2, N).t().detach()  # Looks at no bytes.
        torch.cat([flat.view(2, N)[0], torch.ones(1)])
        flat[N + 1 :].sum()
    return streams.pairs


def test_views_share_memory(run_ranks: RunRanks) -> None:
    assert run(run_ranks, through_a_view) == [("write-read", "load", "compute")] * 2


@scene
def storage_copy(streams: RaceStreams, host: Tensor, shard: Tensor) -> None:
    with streams.load.use():
        shard.untyped_storage().copy_(host.untyped_storage())
    with torch.inference_mode():
        nn.functional.linear(torch.ones(1, N), shard.view(1, N))


def test_copies_of_storages_and_inference_mode_are_seen(run_ranks: RunRanks) -> None:
    assert run(run_ranks, storage_copy) == [("write-read", "load", "compute")]


def backward_of_a_layer(rank: int, world_size: int, waits: bool, recompute: bool) -> Found:
    """A weight that is freed after the forward and loaded again for the backward."""
    streams = RaceStreams()
    layer = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N, bias=False))
    weight = layer[2].weight.detach()
    mirror = weight.clone()
    x = torch.ones(2, N, requires_grad=True)
    with streams.watching():
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        resize(weight, 0)
        streams.load.wait(streams.compute.record())
        with streams.load.use():
            resize(weight, N * N)
            # As a copy of storages: it leaves autograd's version of the weight alone.
            weight.untyped_storage().copy_(mirror.untyped_storage())
        if waits:
            streams.compute.wait(streams.load.record())
        before = streams.num_operators["compute"]
        y.sum().backward()
        assert streams.num_operators["compute"] > before + 5
    return streams.pairs


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("waits", [True, False])
def test_backward_is_seen(waits: bool, recompute: bool, run_ranks: RunRanks) -> None:
    races = run(run_ranks, backward_of_a_layer, waits, recompute)
    assert set(races) == (set() if waits else {("write-read", "load", "compute")})


def stops_at_once(rank: int, world_size: int) -> Found:
    streams = RaceStreams(raises=True)
    shard = torch.zeros(N)
    streams.name_storage(shard, "shards of ministage 3")
    with streams.watching(), streams.load.use():
        shard.add_(1)
    streams.label = "3F0"
    with streams.watching(), pytest.raises(StreamRace) as error:
        shard + 1
    message = str(error.value)
    assert (
        "write-read, 'shards of ministage 3': 3F0 aten.add.Tensor on 'compute' does not wait for" in message
    )
    assert "aten.add_.Tensor on 'load'" in message
    assert message.count("test_stand_in.py") >= 2 and "stops_at_once" in message
    return []


def test_a_race_is_told_with_both_places(run_ranks: RunRanks) -> None:
    assert run(run_ranks, stops_at_once) == []


def after_watching(rank: int, world_size: int) -> Found:
    streams = RaceStreams()
    originals = (torch.UntypedStorage.resize_, torch.cpu.stream, torch.cpu.Stream.wait_stream, dist.Work.wait)
    with streams.watching():
        assert torch.cpu.stream is not originals[1]
    assert originals == (
        torch.UntypedStorage.resize_,
        torch.cpu.stream,
        torch.cpu.Stream.wait_stream,
        dist.Work.wait,
    )
    return streams.pairs


def test_everything_is_put_back(run_ranks: RunRanks) -> None:
    assert run(run_ranks, after_watching) == []
