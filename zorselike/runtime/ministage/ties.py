"""Weights tied across layers that different ministages (or FSDP units) hold.

FSDP2 unties them: two units cannot share a parameter. So the lowest holder owns the weight and alone has
optimizer state; every other end borrows: it keeps a sharded copy, sends slices of its reduced gradient to the
owner's shards, and receives the new values after the owner's step. Rows of dimension 0 are matched by
interval intersection, so the two groups may differ in size and ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from zorselike.plan.holdings import rows_held
from zorselike.plan.plan import Plan
from zorselike.runtime.comm.device_thread import DeviceThread
from zorselike.runtime.comm.ranks import ProcessGroup, Ranks
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.pinned import copy_to_host, make_host_buffer
from zorselike.runtime.memory.streams import Event
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.runtime.model.partition import Tie


@dataclass(frozen=True)
class _Slice:
    """Rows of a weight that one rank gives to another."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True)
class _End:
    """This rank's shard of a tied weight, at one end of the tie."""

    ministage: ShardedMinistage
    name: str
    parameter: nn.Parameter
    first_row: int

    def read(self, target: str) -> Tensor:
        """What one end has for `target`, and what it changes as that: its reduced gradient for owners, its
        value for borrowers."""
        if target == "owner":
            return self.ministage.gradients.local(self.name)
        return local_tensor(self.parameter.detach())

    def rows(self, local: Tensor, piece: _Slice) -> Tensor:
        return local[piece.start - self.first_row : piece.stop - self.first_row]


class TiedWeights:
    """All ties of a model, as one rank takes part in them."""

    def __init__(
        self,
        ties: Sequence[Tie],
        plan: Plan,
        ministages: Mapping[int, ShardedMinistage],
        ranks: Ranks,
        group: ProcessGroup | None,
        memory: Memory,
    ) -> None:
        """`ministages`: this rank's; `group`: all ranks, a Gloo group of this object alone."""
        self._device, self._streams = memory.device, memory.streams
        is_used = bool(ties) and memory.streams.is_concurrent
        self._thread = DeviceThread("ties", memory.device) if is_used else None
        self._ties = [
            {
                "owner": (tie.owner_ministage, tie.owner_fqn),
                "borrower": (tie.borrower_ministage, tie.borrower_fqn),
            }
            for tie in ties
        ]
        self._is_starting = False
        self._plan = plan
        self._ranks = ranks
        self._process_group = group
        self._ends: dict[tuple[int, str], _End] = {}
        self._sends: list[Callable[[], object]] = []
        """What waits for each of this step, and keeps its memory."""
        self._earlier_sends: list[Callable[[], object]] = []
        """The same, of the step before."""
        self._kept: dict[tuple[int, str], list[tuple[_Slice, Tensor]]] = {}
        for index, tie in enumerate(self._ties):
            for end, (number, name) in tie.items():
                if number in ministages:
                    parameter = ministages[number].sharded[name]
                    first_row, _ = self._holders(number, parameter.shape[0])[ranks.rank]
                    self._ends[index, end] = _End(ministages[number], name, parameter, first_row)

    def synchronise(self) -> None:
        """Gives every borrower its owner's values; collective, at construction."""
        self._is_starting = True
        for ministage in range(self._plan.num_ministages):
            self.send_values(ministage)
        for ministage in range(self._plan.num_ministages):
            self.receive_values(ministage)
        self.finish()
        self._finish_earlier()
        self._is_starting = False

    def exchange_grads(self, ministage: int) -> None:
        """As a borrower sends reduced gradients; as an owner waits for them and adds them."""
        for held in self._ends.values():
            if held.ministage.index == ministage:
                held.ministage.await_reduction()
        self._send(ministage, "borrower", "owner")
        self._receive(ministage, "borrower", "owner")

    def send_values(self, ministage: int) -> None:
        """As an owner sends the values that its step gave."""
        self._send(ministage, "owner", "borrower")

    def receive_values(self, ministage: int) -> None:
        """As a borrower takes over the owner's values."""
        self._receive(ministage, "owner", "borrower")

    def finish(self) -> None:
        """At the end of a step: waits until all that was sent has left; where a thread waits for a GPU and
        sends out of host memory, all of the step before, so that the next may begin."""
        self._finish_earlier()
        self._earlier_sends, self._sends = self._sends, []
        if self._thread is None:
            self._finish_earlier()

    def _finish_earlier(self) -> None:
        for wait in self._earlier_sends:
            wait()
        self._earlier_sends.clear()

    def close(self) -> None:
        """Ends the thread that sends, if there is one, when all has left."""
        self._finish_earlier()
        if self._thread is not None:
            self._thread.close()

    def abandon(self) -> None:
        """The same, without waiting for other ranks."""
        self.recover()
        if self._thread is not None:
            self._thread.abandon()

    def recover(self) -> None:
        """After an unfinished step on a rank alone: drops what one end has handed to another."""
        self._sends.clear()
        self._earlier_sends.clear()
        self._kept.clear()

    # ---------------------------------------------------------------------------------------

    def _changing_ends(self, ministage: int, which: str) -> Iterator[tuple[int, _End]]:
        """This rank's ends of ties in a ministage, owners or borrowers: of a frozen weight only its first
        values are exchanged."""
        for (index, end), held in self._ends.items():
            changes = self._is_starting or held.parameter.requires_grad
            if end == which and self._ties[index][end][0] == ministage and changes:
                yield index, held

    def _send(self, ministage: int, source: str, target: str) -> None:
        self._finish_earlier()  # They have left long since, and their memory is wanted.
        for index, end in self._changing_ends(ministage, source):
            for piece in self._slices(index, source, target):
                if piece.source != self._ranks.rank:
                    continue
                # A copy: the shard changes, or is freed, while the slice is on its way.
                rows = end.rows(end.read(target), piece).detach()
                content, copied = copy_to_host(rows, self._streams.compute)
                if piece.target == self._ranks.rank:
                    self._kept.setdefault((index, target), []).append((piece, content))
                else:
                    process = self._ranks.process_of[piece.target]
                    self._pass_on(content, copied, process, _tag(index, target))

    def _pass_on(self, content: Tensor, copied: Event, process: int, tag: int) -> None:
        def send() -> dist.Work:
            copied.synchronize()
            work = dist.isend(content, process, group=self._process_group, tag=tag)
            assert work is not None
            return work

        if self._thread is None:
            work = send()
            self._sends.append(lambda: (work.wait(), content))
        else:
            future = self._thread.submit(send)
            self._sends.append(lambda: (future.result().wait(), content))

    def _receive(self, ministage: int, source: str, target: str) -> None:
        for index, end in self._changing_ends(ministage, target):
            local = end.read(target)
            pending = []
            for piece in self._slices(index, source, target):
                if piece.target == self._ranks.rank and piece.source != self._ranks.rank:
                    shape = (piece.stop - piece.start, *end.parameter.shape[1:])
                    buffer = make_host_buffer(shape, local.dtype, self._device)
                    process = self._ranks.process_of[piece.source]
                    work = dist.irecv(buffer, process, group=self._process_group, tag=_tag(index, target))
                    assert work is not None
                    pending.append((piece, buffer, work))
            apply = _add if target == "owner" else _take_over
            for piece, content in self._kept.pop((index, target), []):
                apply(end.rows(local, piece), content)
            for piece, buffer, work in pending:
                work.wait()
                apply(end.rows(local, piece), buffer)

    def _slices(self, index: int, source: str, target: str) -> Iterator[_Slice]:
        """Who gives which rows to whom, in an order that both ends derive alike."""
        tie = self._ties[index]
        ends = [self._ends[index, end] for end in tie if (index, end) in self._ends]
        num_rows = ends[0].parameter.shape[0]
        sources = self._holders(tie[source][0], num_rows)
        targets = self._holders(tie[target][0], num_rows)
        is_replicated = self._plan.group_of(tie[source][0]).zero == 0
        for position, (target_rank, (start, stop)) in enumerate(targets.items()):
            givers = list(sources.items())
            if is_replicated:
                # Everyone holds everything: one of them gives, so that nothing is added twice.
                givers = [givers[position % len(givers)]]
                if target_rank in sources:
                    givers = [(target_rank, sources[target_rank])]
            for source_rank, (low, high) in givers:
                first, last = max(start, low), min(stop, high)
                if first < last:
                    yield _Slice(source_rank, target_rank, first, last)

    def _holders(self, ministage: int, num_rows: int) -> dict[int, tuple[int, int]]:
        """Rows of dimension 0 that each rank of a ministage's group holds."""
        return rows_held(self._plan, ministage, num_rows, process_of=self._ranks.process_of)


def _tag(index: int, target: str) -> int:
    return 2 * index + (1 if target == "owner" else 0)


def _add(rows: Tensor, content: Tensor) -> Tensor:
    return rows.add_(content.to(rows.device, non_blocking=True))


def _take_over(rows: Tensor, content: Tensor) -> Tensor:
    return rows.copy_(content, non_blocking=True)


def borrowed_names(ties: Sequence[Tie]) -> frozenset[str]:
    """Global names of the weights that somebody else owns."""
    return frozenset(tie.borrower_fqn for tie in ties)


def tied_names(ties: Sequence[Tie]) -> frozenset[str]:
    """Global names of all ends of ties."""
    return borrowed_names(ties) | {tie.owner_fqn for tie in ties}
