"""Transfers through host memory: who waits for what, and how long memory is held. Streams are recorded."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from tiny import SEQUENCE, Case, adamw, module_names
from torch.multiprocessing.reductions import StorageWeakRef

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.assembly import Assembly
from zorselike.runtime.comm import transport
from zorselike.runtime.comm.device_thread import DeviceThread
from zorselike.runtime.comm.ranks import Groups, Ranks
from zorselike.runtime.comm.transport import Transport, _Channel, _StagedChannel
from zorselike.runtime.memory.streams import Event, Stream, Streams
from zorselike.runtime.model.signature import Signature
from zorselike.schedule.actions import Action, Kind

OFFLOAD = ("activations",)
PACKAGE = Path(__file__).parents[3] / "zorselike"


class Told(Event):
    """Over when `release` says so."""

    def __init__(self, stream: Recorder) -> None:
        self.stream, self.position = stream, len(stream.log)
        self.released = stream.released

    def synchronize(self) -> None:
        assert self.released.wait(30)


class Recorder(Stream):
    """What it was told, and what ran on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[Any] = []
        self.released = threading.Event()

    def record(self) -> Told:
        self.log.append("record")
        return Told(self)

    def wait(self, event: Event) -> None:
        assert isinstance(event, Told)
        self.log.append(f"wait for {event.stream.name}")

    @contextmanager
    def use(self) -> Iterator[None]:  # type: ignore[override]
        self.log.append("copy")
        yield


class Recorders(Streams):
    def __init__(self) -> None:
        self.compute = Recorder("compute")
        self.send_rows = self.receive_rows = self.made = Recorder("copies")


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread."""
    while not condition():
        time.sleep(1e-3)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float32])
def test_integers_that_nccl_does_not_know_go_over_it_as_bytes(dtype: torch.dtype) -> None:
    given = torch.arange(6).view(2, 3).to(dtype)
    sent: list[torch.Tensor] = []
    work = mock.Mock()

    def send(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        sent.append(tensor)
        return work

    def receive(buffer: torch.Tensor, *_: Any, **__: Any) -> Any:
        buffer.copy_(sent.pop())
        return work

    channel = _Channel(1, mock.Mock(), torch.device("cuda", 0))
    with mock.patch.object(dist, "isend", send), mock.patch.object(dist, "irecv", receive):
        channel.send(given)
        assert sent[0].dtype is (torch.float32 if dtype is torch.float32 else torch.uint8)
        buffer = torch.empty((2, 3), dtype=dtype)
        channel._post(buffer)
    assert torch.equal(buffer.long(), given.long())


def transfer(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="gloo")
    streams = Recorders()
    channel = _StagedChannel(1 - rank, group, torch.device("cpu"), tag=0, streams=streams)
    if rank == 0:
        tensors = [torch.full((3, 2), float(number)) for number in range(3)]
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        sends = [channel.send(tensor) for tensor in tensors]
        tensors.clear()
        assert streams.compute.log == ["record"] * 3  # It waits for nothing.
        assert streams.made.log == ["wait for compute", "copy", "record"] * 3
        # Device memory is held until it is copied, host memory until it has left.
        assert not any(sent.is_over() for sent in sends) and not any(each.expired() for each in storages)
        dist.barrier()
        streams.made.released.set()
        until(lambda: all(sent.is_over() for sent in sends))
        assert all(each.expired() for each in storages)
        for sent in sends:
            sent.wait()
    else:
        arrivals = [channel.receive((3, 2), torch.float32) for _ in range(3)]
        assert streams.compute.log == ["record"] * 3 and streams.made.log == []  # Nothing is there to copy.
        dist.barrier()
        # All are brought, in order, though nobody has asked yet.
        until(lambda: len(streams.made.log) == 9)
        assert streams.made.log == ["wait for compute", "copy", "record"] * 3
        for number, arrive in enumerate(arrivals):
            tensor, host = arrive()
            assert host is not None and host.data_ptr() != tensor.data_ptr()
            assert tensor.eq(number).all() and host.eq(number).all()
            assert streams.compute.log[3:] == ["wait for copies"] * (number + 1)
    dist.barrier()
    channel.close()


def test_a_thread_waits_and_a_stream_of_its_own_copies(run_ranks: RunRanks) -> None:
    run_ranks(transfer, 2)


def end_a_step(rank: int, world_size: int) -> None:
    """Rank 0 sends something that a GPU has not computed when the step ends, and so has another step."""
    streams = Recorders()
    edge, boundary = (0, 1, "F"), Signature.of((torch.zeros(1, 2),))
    with mock.patch.object(transport, "_Channel", partial(_StagedChannel, streams=streams)):
        groups = Groups(Ranks(rank, (0, 1)))
        device = torch.device("cpu")
        channels = Transport(groups, [edge], by_host=frozenset({edge}), device=device, streams=streams)
    if rank == 0:
        send = Action(Kind.SEND_F, 1, 0, start=0, stop=1, peer=1)
        for number in range(2):
            channels.send(send, (torch.full((1, 2), float(number)),), boundary, (0, 0))
            if number:
                threading.Timer(0.05, streams.made.released.set).start()
            channels.finish()
            assert streams.made.released.is_set() is bool(number)  # Only a step later it waits.
    else:
        for number in range(2):
            channels.post(Action(Kind.RECV_F, 1, number, start=0, stop=1, peer=0), boundary)
        streams.made.released.set()
        for number in range(2):
            ((tensor, _),) = channels.take(Kind.RECV_F, 1, number)
            assert tensor.eq(number).all()
    channels.close()
    dist.barrier()
    groups.close()


def test_the_next_step_begins_before_rows_in_host_memory_have_left(run_ranks: RunRanks) -> None:
    run_ranks(end_a_step, 2)


def fail(rank: int, world_size: int) -> None:
    channel = _StagedChannel(0, dist.new_group(backend="gloo"), torch.device("cpu"), tag=0, streams=Streams())
    with mock.patch.object(dist, "isend", side_effect=RuntimeError("connection closed")):
        sent = channel.send(torch.zeros(1))
        with pytest.raises(RuntimeError, match="connection closed"):
            sent.wait()
        assert not sent.is_over()
    channel.close()


def test_a_send_that_failed_is_not_over(run_ranks: RunRanks) -> None:
    run_ranks(fail, 1)


def plan() -> Plan:
    rows = ((0, 1), (1, 3), (3, 4))
    groups = (
        Group((0,), tuple(Microbatch(0, *each) for each in rows), offload=("activations",)),
        Group(
            (1, 2),
            tuple(Microbatch(1 + i % 2, *each) for i, each in enumerate(rows)),
            offload=("activations",),
        ),
    )
    names = module_names(3)
    cuts = (names[:2], names[2:3], names[3:4], names[4:])
    return Plan(4, groups, tuple(Ministage(i % 2, tuple(cut)) for i, cut in enumerate(cuts)))


def train(rank: int, world_size: int, staged: bool) -> list[float]:
    case = Case(plan(), 3)
    made = partial(_StagedChannel, streams=Streams()) if staged else transport._Channel
    with (
        mock.patch.object(transport, "_Channel", made),
        HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe,
    ):
        kinds = {*pipe._assembly.transport.kinds.values()}
        assert kinds == {"Gloo through pinned memory" if staged else "Gloo"}
        results = [pipe.step_global(*case.batch(step)) for step in range(3)]
        return [number for result in results for number in (result.loss, result.grad_norm)]


def test_a_step_over_it_is_the_same_step(run_ranks: RunRanks) -> None:
    assert run_ranks(train, 3, True) == run_ranks(train, 3, False)


def train_and_evaluate(rank: int, world_size: int, direct: bool) -> tuple[list[float], list[list[int]]]:
    """Losses of evaluations and steps in turn, the last of shorter rows; how much this rank sends in each
    over the group of everyone and over those of pairs; `direct`: channels have a pair's group as of NCCL."""
    case = Case(plan(), 3)
    losses: list[float] = []
    counts: list[list[int]] = []
    sizes: Counter[int] = Counter()
    send = transport._Channel.send

    def count(channel: transport._Channel, tensor: torch.Tensor) -> transport._Sent:
        sizes[channel._group.size()] += 1
        return send(channel, tensor)

    with (
        mock.patch.object(transport._Channel, "send", count),
        mock.patch.object(Groups, "make_pair", lambda groups, ends, **_: groups.make(ends, "gloo")),
        mock.patch.object(Assembly, "_goes_by_host", lambda *_: not direct),
        HeteroPipeline(case.model(), case.plan, optimizer=adamw, dynamic_shapes=True) as pipe,
    ):
        for step, length in enumerate((SEQUENCE, SEQUENCE, SEQUENCE - 1)):
            for run in (pipe.evaluate_global, pipe.step_global):
                sizes.clear()
                losses.append(run(*(tensor[:, :length] for tensor in case.batch(step))).loss)
                counts.append([sizes[3], sizes[2]])
    return losses, counts


def test_the_first_pass_of_each_kind_occupies_no_gpu(run_ranks: RunRanks) -> None:
    """What the first launch of a kernel waits for is none of NCCL's; another shape may have other kernels."""
    found = run_ranks(train_and_evaluate, 3, True)
    for (losses, counts), (expected, by_host) in zip(
        found, run_ranks(train_and_evaluate, 3, False), strict=True
    ):
        assert losses == expected
        assert by_host[:2] * 3 == by_host and by_host[0][1] == by_host[1][1] == 0
        assert counts[:2] == counts[4:] == by_host[:2] and by_host[0][0] + by_host[1][0] > 0
        assert counts[2:4] == [own[::-1] for own in by_host[:2]]


# -- threads -----------------------------------------------------------------------------------


def test_a_thread_has_the_device_before_it_does_anything() -> None:
    chosen: list[tuple[int, torch.device]] = []

    def choose(device: torch.device) -> None:
        chosen.append((threading.get_ident(), device))

    with mock.patch.object(torch.cuda, "set_device", choose):
        thread = DeviceThread("test", torch.device("cuda", 1))
        own = thread.submit(threading.get_ident).result()
        assert chosen == [(own, torch.device("cuda", 1))] and own != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            thread.submit(lambda: 1 / 0).result()
        assert thread.submit(lambda: 7).result() == 7
        thread.close()


def test_no_other_thread_calls_cuda() -> None:
    made = re.compile(r"\b(Thread|ThreadPoolExecutor)\(")
    with_threads = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if made.search(path.read_text())
    }
    assert with_threads == {*THREADS}
    for name, why in THREADS.items():
        if why == NO_TORCH:
            assert not re.search(r"^\s*(import|from) torch", (PACKAGE / name).read_text(), re.MULTILINE)


NO_TORCH = "it never imports torch"
THREADS = {
    "checkpoint/lease.py": NO_TORCH,
    "elastic/contingency.py": "it plans, and draws what `drawing.py` does",
    "elastic/meeting/meeting.py": "it opens a store",
    "elastic/meeting/threads.py": "what it runs is what `elastic/worker.py` does, or opens a store",
    "elastic/meeting/notice_url.py": NO_TORCH,
    "elastic/running.py": "it connects to a store",
    "elastic/worker.py": "one draws, which sets the device first; one drops what no card remembers",
    "profiler/machine/host_link_timing.py": "CPU ranks' copies",
    "runtime/_compat.py": "what aborts groups sets the device first",
    "runtime/alarm/stall.py": "who asks NCCL sets the device first",
    "runtime/alarm/watch.py": NO_TORCH,
    "runtime/comm/connections.py": NO_TORCH,
    "runtime/comm/device_thread.py": "sets the device first",
    "runtime/memory/pinned.py": "pages are touched by CPU operators",
    "train/stop.py": "it waits for signals",
}
"""Who makes threads, and why they open no context on the first card."""
