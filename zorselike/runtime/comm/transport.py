"""Rows between groups: receives posted early, works waited in order, nothing polled.

CPU ranks use Gloo. CUDA ranks use NCCL, and Gloo through pinned memory on the edges on which a blocking
send could close a cycle (Zorse 5.2; the schedule's checker finds them), such as those that lead back to the
first group, and on those that are too many for a rank's streams. So two ranks have two communicators, one for
activations and one for gradients. They cannot have one: it runs what it is given in order, and a send behind
a receive that is posted early would wait for what the other rank computes from that send.

In its first step and its first evaluation of inputs of a shape a pipeline uses Gloo alone. A receive or send
of NCCL that waits occupies the GPU, and launching a kernel for the first time waits for all that the GPU runs
("Lazy Loading" in the CUDA programming guide): two ranks that do so at once would wait for each other. So
would they later, each before it sends what the other's posted receive waits for, if both wait for all that
their GPUs run: by a forward's `torch.cuda.synchronize`, or by an allocator that gives memory back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike.runtime.comm.device_thread import DeviceThread
from zorselike.runtime.comm.ranks import MOST_PAIR_BLOCKS, Groups, ProcessGroup
from zorselike.runtime.memory.pinned import copy_to_host, make_host_buffer
from zorselike.runtime.memory.streams import Event, Streams
from zorselike.runtime.model.signature import Signature, TensorSpec
from zorselike.schedule.actions import RECEIVES, SENDS, Action, Edge, Kind, edge_of

Tensors = tuple[Tensor, ...]

Arrived = tuple[Tensor, Tensor | None]
"""A tensor on this rank's device, and the host memory that holds the same, if there is any."""

Arrival = Callable[[], Arrived]
"""Waits for a posted receive."""

Place = tuple[int, int]
"""First row of a microbatch's part, and its first position of the sequence."""


def edges_of(schedules: Iterable[Mapping[int, Sequence[Action]]]) -> list[Edge]:
    """Every channel that any of the schedules uses, in one global order."""
    return sorted(
        {
            edge_of(rank, action)
            for actions_by_rank in schedules
            for rank, actions in actions_by_rank.items()
            for action in actions
            if action.kind in SENDS
        }
    )


def share_multiprocessors(edges: Iterable[Edge], processors: Sequence[int]) -> dict[Edge, int]:
    """How many multiprocessors transfers on each of these edges over NCCL may occupy: all that wait at once
    leave half of a GPU to compute. `processors`: of each rank's GPU; 0: unknown."""
    edges = list(edges)
    num_edges = Counter(end for edge in edges for end in edge[:2])

    def share(end: int) -> int:
        return max(1, processors[end] // (2 * num_edges[end])) if processors[end] else MOST_PAIR_BLOCKS

    return {edge: min(MOST_PAIR_BLOCKS, *map(share, edge[:2])) for edge in edges}


@dataclass(frozen=True)
class _Sent:
    """A send in progress; it keeps the memory alive."""

    memory: Tensor
    wait: Callable[[], object]
    """Waits until the memory may be reused."""
    is_over: Callable[[], bool] = lambda: False
    """Whether it may be now, where that can be known without waiting."""
    outlasts_step: bool = False
    """Whether only a thread and host memory are busy with it, so that the next step may begin."""


_NOT_OF_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


class _Channel:
    """One edge as its sender or its receiver sees it, from memory of one device to memory of its kind: over
    Gloo, whose sends buffer, or over NCCL, matched by order alone, which the checker has proven."""

    def __init__(self, process: int, group: ProcessGroup, device: torch.device, *, tag: int = 0) -> None:
        self._process, self._group, self._device, self._tag = process, group, device, tag
        self.kind = "Gloo" if device.type == "cpu" else "NCCL"

    def send(self, tensor: Tensor) -> _Sent:
        """Starts sending."""
        whole = tensor.contiguous()
        work = dist.isend(self._carried(whole), self._process, group=self._group, tag=self._tag)
        assert work is not None, _NO_MEMBER
        return _Sent(whole, work.wait) if self.kind == "Gloo" else _Sent(whole, work.wait, work.is_completed)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        """Posts a receive; the result waits for it and gives the tensor."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        wait = self._post(buffer)

        def arrive() -> Arrived:
            wait()
            return buffer, buffer if self.kind == "Gloo" else None

        return arrive

    def _post(self, buffer: Tensor) -> Callable[[], object]:
        work = dist.irecv(self._carried(buffer), self._process, group=self._group, tag=self._tag)
        assert work is not None, _NO_MEMBER
        return work.wait

    def _carried(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as what carries it knows it."""
        return tensor.view(torch.uint8) if self.kind == "NCCL" and tensor.dtype in _NOT_OF_NCCL else tensor

    def close(self) -> None:
        """Gives back what it holds."""

    def abandon(self) -> None:
        """The same, where the other rank may be gone."""


BY_HOST = "Gloo through pinned memory"
"""What a channel goes over whose rows wait in host memory."""
_NO_MEMBER = "this process is not in the group of the transfer"


class _StagedChannel(_Channel):
    """Device memory over Gloo through pinned host memory: what cannot block a GPU. Copies have streams of
    their own, and a thread waits for them and for Gloo, so that neither compute nor the executor does."""

    def __init__(
        self, process: int, group: ProcessGroup, device: torch.device, *, tag: int, streams: Streams
    ) -> None:
        super().__init__(process, group, torch.device("cpu"), tag=tag)
        self.kind = BY_HOST
        self._gpu = device
        self._streams = streams
        self._thread = DeviceThread("stage", device)

    def send(self, tensor: Tensor) -> _Sent:
        copies = self._streams.send_rows
        copies.wait(self._streams.compute.record())
        with copies.use():
            host, copied = copy_to_host(tensor, copies)
        held = [tensor]

        def pass_on() -> None:
            copied.synchronize()
            held.clear()  # Compute may have its memory again: nothing reads it any more.
            super(_StagedChannel, self).send(host).wait()

        future = self._thread.submit(pass_on)

        def is_over() -> bool:
            # What failed is not, so that who waits hears of it.
            return future.done() and future.exception() is None

        return _Sent(host, future.result, is_over, outlasts_step=True)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Arrival:
        compute, copies = self._streams.compute, self._streams.receive_rows
        host = make_host_buffer(shape, dtype, self._gpu)
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._gpu)
        free = compute.record()
        wait = self._post(host)

        def bring() -> Event:
            wait()
            copies.wait(free)
            with copies.use():
                buffer.copy_(host, non_blocking=True)
            return copies.record()

        future = self._thread.submit(bring)

        def arrive() -> Arrived:
            compute.wait(future.result())
            return buffer, host

        return arrive

    def close(self) -> None:
        self._thread.close()

    def abandon(self) -> None:
        self._thread.abandon()


class Transport:
    """All channels of one rank; those in `by_host` go over Gloo, the others over NCCL."""

    def __init__(
        self,
        groups: Groups,
        edges: Sequence[Edge],
        *,
        by_host: frozenset[Edge],
        device: torch.device,
        streams: Streams,
        processors: Sequence[int] = (),
    ) -> None:
        """`processors`: multiprocessors of each rank's GPU; 0, or none: unknown."""
        self._streams = streams
        self._ranks = groups.ranks
        self._channels: dict[Edge, _Channel] = {}
        self.kinds: dict[Edge, str] = {}
        """What each of this rank's channels goes over."""
        self._receives: defaultdict[tuple[Kind, int, int], dict[Place, list[Arrival]]] = defaultdict(dict)
        """Posted receives of a microbatch's boundary by their place in it, one entry a tensor."""
        self._sends: list[_Sent] = []
        """Of this step."""
        self._earlier_sends: list[_Sent] = []
        """Of the step before, on their way."""
        self._detours: dict[Edge, _Channel] = {}
        """What takes the place of channels over NCCL in a first pass."""
        self._begun: set[tuple[Signature, bool]] = set()
        self._is_first = False
        host = groups.make(range(groups.ranks.world_size), "gloo") if edges else None
        known = processors or [0] * groups.ranks.world_size
        blocks = share_multiprocessors((edge for edge in edges if edge not in by_host), known)
        for edge in edges:
            assert host is not None
            self._open(edge, groups, host, blocks=blocks.get(edge), device=device)
        self._warm_up(device)

    def _open(
        self, edge: Edge, groups: Groups, host: ProcessGroup, *, blocks: int | None, device: torch.device
    ) -> None:
        """`blocks`: what a transfer over NCCL may occupy; None: over Gloo."""
        source, target, direction = edge
        what = f"{'activations' if direction == 'F' else 'gradients'} {source} -> {target}"
        pair = None if blocks is None else groups.make_pair((source, target), max_blocks=blocks, what=what)
        if self._ranks.rank not in (source, target):
            return
        process = self._ranks.process_of[target if self._ranks.rank == source else source]
        tag = 0 if direction == "F" else 1
        if device.type == "cpu":
            channel = _Channel(process, host, device, tag=tag)
        else:
            channel = _StagedChannel(process, host, device, tag=tag, streams=self._streams)
        if pair is not None:
            self._detours[edge] = channel
            channel = _Channel(process, pair, device)
        self._channels[edge], self.kinds[edge] = channel, channel.kind

    def _warm_up(self, device: torch.device) -> None:
        """Makes lazily created communicators exist, in one global order: creating them against
        a busy device can hang."""
        for edge, channel in sorted(self._channels.items()):
            if channel.kind == "NCCL":
                if self._ranks.rank == edge[0]:
                    channel.send(torch.zeros(1, device=device)).wait()
                else:
                    channel.receive((1,), torch.float32)()

    # -- one step --------------------------------------------------------------------------

    def begin(self, inputs: Signature, *, train: bool) -> None:
        """A step or an evaluation of such inputs begins, on all ranks."""
        self._is_first = (inputs, train) not in self._begun
        self._begun.add((inputs, train))

    def _find(self, action: Action) -> _Channel:
        edge = edge_of(self._ranks.rank, action)
        detour = self._detours.get(edge) if self._is_first else None
        return detour or self._channels[edge]

    def post(self, action: Action, boundary: Signature) -> None:
        """Posts the receive of a `RECV_F` (of what enters a ministage) or `RECV_B` (of the
        gradients of what leaves it)."""
        assert action.kind in RECEIVES and action.start is not None and action.stop is not None
        assert action.ministage is not None and action.microbatch is not None
        channel = self._find(action)
        first, last = action.positions or (0, 0)
        if action.positions is not None:
            boundary = boundary.at_positions(last - first)
        num_rows = action.stop - action.start
        waits = [
            channel.receive((num_rows, *spec.shape_per_row), spec.dtype)
            for spec in _travelling(action.kind, boundary)
        ]
        self._receives[action.kind, action.ministage, action.microbatch][action.start, first] = waits

    def take(self, kind: Kind, ministage: int, microbatch: int) -> list[Arrived]:
        """Waits for a microbatch's posted pieces and joins them by row; no copy if there is one."""
        pieces = self._receives.pop((kind, ministage, microbatch))
        received = [
            _join([[wait() for wait in pieces[place]] for place in sorted(places)], dim=1)
            for _, places in groupby(sorted(pieces), key=lambda place: place[0])
        ]
        return _join(received, dim=0)

    def send(self, action: Action, tensors: Tensors, boundary: Signature, begin: Place) -> None:
        """Sends an action's part of `tensors`, whose row 0 and position 0 are `begin` of the batch."""
        assert action.start is not None and action.stop is not None
        channel = self._find(action)
        part: tuple[slice, ...] = (slice(action.start - begin[0], action.stop - begin[0]),)
        if action.positions is not None:
            part += (slice(action.positions[0] - begin[1], action.positions[1] - begin[1]),)
        self._sends = _drop_over(self._sends)
        self._earlier_sends = _drop_over(self._earlier_sends)
        for tensor, _ in zip(tensors, _travelling(action.kind, boundary), strict=True):
            self._sends.append(channel.send(tensor.detach()[part]))

    def finish(self) -> None:
        """Waits until what was sent has left; memory may be reused afterwards. For what is in host memory
        already it waits a step later."""
        for sent in [*self._earlier_sends, *(sent for sent in self._sends if not sent.outlasts_step)]:
            sent.wait()
        self._earlier_sends = _drop_over(sent for sent in self._sends if sent.outlasts_step)
        self._sends.clear()

    def close(self) -> None:
        for channel in self._forget():
            channel.close()

    def abandon(self) -> None:
        """`close` where other ranks may be gone, and connections have ended."""
        for channel in self._forget():
            channel.abandon()

    def _forget(self) -> list[_Channel]:
        for held in (self._sends, self._earlier_sends, self._receives):
            held.clear()
        channels = [*self._channels.values(), *self._detours.values()]
        self._channels.clear()
        self._detours.clear()
        return channels


def _drop_over(sends: Iterable[_Sent]) -> list[_Sent]:
    return [sent for sent in sends if not sent.is_over()]


def _join(parts: Sequence[list[Arrived]], *, dim: int) -> list[Arrived]:
    """Tensors of neighbouring parts as one each; no copy if there is one part."""
    if len(parts) == 1:
        return parts[0]
    return [(torch.cat([tensor for tensor, _ in entries], dim), None) for entries in zip(*parts, strict=True)]


def _travelling(kind: Kind, boundary: Signature) -> tuple[TensorSpec, ...]:
    """All of a boundary goes forward; only what carries gradients comes back."""
    if kind in (Kind.SEND_F, Kind.RECV_F):
        return boundary.tensors
    return tuple(spec for spec in boundary.tensors if spec.requires_grad)
