"""One rank's list of actions as tasks: what its executor does for each action, and what that waits for.

Follows `zorselike/runtime` closely: `executor.py`, `comm/transport.py`, `ministage/sharded_units.py`,
`ministage/ministage.py`. On a CPU rank all streams are its thread, and only transfers and gathers run beside
it; with a device the host only launches the work of the streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from zorselike.cost.step_costs import StepCosts
from zorselike.plan.pieces import positions_of
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.checker.channels import Channel
from zorselike.schedule.contract import reduces_beside
from zorselike.simulator.result import Track
from zorselike.simulator.tasks.copies import HostCopies
from zorselike.simulator.tasks.graph import NOTHING, Tasks, Work
from zorselike.simulator.tasks.labels import Labels
from zorselike.simulator.tasks.rendezvous import Rendezvous, UnitCollectives
from zorselike.simulator.tasks.streams import Stream, Streams


class Program:
    """Builds the tasks of one rank, action by action."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        costs: StepCosts,
        tasks: Tasks,
        rendezvous: Rendezvous,
        *,
        staged: Collection[Channel],
        labels: Labels | None,
    ) -> None:
        """`staged`: channels that a GPU rank serves through host memory."""
        self.rank, self._costs = rank, costs
        self._tasks, self._rendezvous, self._staged = tasks, rendezvous, staged
        self._labels = labels
        self._is_cpu = bool(costs.is_cpu) and costs.is_cpu[rank]
        self._group = plan.group_of_rank[rank]
        group = plan.groups[self._group]
        self._zero = group.zero
        beside = reduces_beside(
            group.zero,
            len(group.flat_ranks),
            overlap=group.overlap_grad_reduce,
            on_gpu=not self._is_cpu,
        )
        self.streams = Streams(tasks, rank, is_cpu=self._is_cpu, reduces_beside=beside)
        self.copies = HostCopies(plan, rank, costs, tasks, self.streams, labels, rendezvous.network)
        self._offloads = bool(group.offload)
        self._rows = [microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank)]
        self._replica = plan.replica_of(rank)
        self._sequence_length = plan.sequence_length or 1
        first, last = positions_of(self._replica, rank, self._sequence_length)
        self._own_share = (last - first) / self._sequence_length
        """Of every row's positions, those that this rank has."""
        self._row_bytes_by = (costs.gradient_row_bytes or costs.row_bytes, costs.row_bytes)
        """By whether they go forward."""
        self._shares = {i: _shares(costs, i) for i in plan.ministages_of_rank(rank)}
        self._host_s = _find_host_s(costs, plan.ministages_of_rank(rank))
        self._ports: dict[tuple[Kind, int], _Port] = {}
        self._incoming: defaultdict[tuple[Kind, int, int], list[tuple[_Port, int]]] = defaultdict(list)
        """Transfers that each computation waits for."""
        self._sent: list[tuple[Stream, int]] = []
        """Sends, each with the stream that waits for it at the end of the step."""
        self._num_gathers: defaultdict[int, int] = defaultdict(int)
        self._gathering: dict[int, Sequence[int]] = {}
        """Gathers of a ministage, by unit, that nothing has waited for yet."""
        self._reduced = NOTHING
        """The newest reduction, which whole gradients wait for."""
        self._before_last_unit: tuple[int, ...] = ()
        """With ZeRO 3: tasks before the last unit of the last computation."""

    def build(self, actions: Sequence[Action]) -> None:
        """Adds the tasks of a whole list, and the end of the step."""
        methods, add_copy, labels, host_s = self._methods(), self.copies.add, self._labels, self._host_s
        if self._costs.step_host_s:
            self.streams.host.work(Work.HOST, self._costs.step_host_s)
        for position, action in enumerate(actions):
            if labels is not None:
                labels.begin(position, self.streams.compute.tail)
            if host_s and (seconds := host_s[action.kind, action.ministage]):
                self._label("host", self.streams.host.work(Work.HOST, seconds))
            add = methods.get(action.kind, add_copy)
            add(action, NOTHING if action.ministage is None else action.ministage)
            if labels is not None:
                labels.end()
        self._finish()

    def _methods(self) -> dict[Kind, Callable[[Action, int], None]]:
        """The method for each kind of action other than a copy."""
        return {
            Kind.F: self._compute,
            Kind.B: self._compute,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.UNSHARD: self._gather,
            Kind.RESHARD: lambda _, i: self._wait_gathered(i),
            Kind.REDUCE_GRAD: self._reduce,
            Kind.TIE_GRAD: self._exchange_gradients,
            Kind.TIE_VALUE: self._send_values,
            Kind.TIE_FETCH: lambda _, i: self._receive_slices(i, as_owner=False),
            Kind.NORM: self._norm,
            Kind.STEP: self._step,
        }

    end: int
    """Last task of the rank's step."""

    def _finish(self) -> None:
        """Waits for sends and for the last update; copies to the host continue into the next step."""
        compute = self.streams.compute
        for stream, task in self._sent:
            stream.wait(task)
        compute.wait(self.streams.host.record())
        # What the update stream itself waits for from here on, such as copies of shards, delays nothing.
        compute.wait(self.streams.update.record())
        compute.wait(self._reduced)
        self.copies.finish()
        self.end = compute.work(Work.EVENT)
        self.streams.finish()

    def _label(self, track: Track, task: int) -> None:
        if self._labels is not None and task != NOTHING:
            self._labels.add(track, task)

    # -- computation -----------------------------------------------------------------------

    def _compute(self, action: Action, i: int) -> None:
        kind, m = action.kind, action.microbatch
        assert m is not None
        is_forward = kind is Kind.F
        seconds = 0.0
        if m < len(self._rows):
            times = self._costs.forward_s if is_forward else self._costs.backward_s
            seconds = times[self.rank, i, self._rows[m]]
        if self._offloads:
            self.copies.await_shards(i)
        for port, task in self._incoming.pop((kind, i, m), ()):
            self._take(port, task, self._row_bytes(kind, i) * self._rows[m] * self._own_share)
        work = Work.FORWARD if is_forward else Work.BACKWARD
        if not is_forward:
            self._wait_gathered(i)
            if self._zero == 3:
                self.copies.free_gradients()  # It reduces inside.
            if self._offloads:
                self.copies.await_activations(i, m)
        if self._replica.degree > 1:
            self.streams.compute.take_part(self._rendezvous.meet(self._replica, kind, i, m))
        if self._zero == 3 and not self._rendezvous.is_alone[self._group]:
            self._compute_gathering(kind, i, m, work, seconds)
        elif is_forward and i in self._gathering:
            self._compute_by_unit(i, work, seconds)
        else:
            self._label("compute", self.streams.compute.work(work, seconds))
        if self._offloads:
            self.copies.activations_in_flight.note_computed()
            if not is_forward:
                self.copies.drop_activations(i, m)

    def _compute_by_unit(self, i: int, work: Work, seconds: float) -> None:
        """Each unit computes once it is gathered."""
        compute, gathers = self.streams.compute, self._gathering.pop(i)
        shares = self._shares[i]
        if len(gathers) != len(shares):  # Units that a replica has alone are not gathered.
            shares = [0.0] * (len(gathers) - 1) + [1.0]
        for gather, share in zip(gathers, shares, strict=True):
            compute.wait(gather)
            self._label("compute", compute.work(work, share * seconds))

    def _compute_gathering(self, kind: Kind, i: int, m: int, work: Work, seconds: float) -> None:
        """ZeRO 3: each unit is gathered while the previous one computes, and reduced after its backward.
        Units between the first and the last are taken together: the longer of computing and communicating
        hides the other, whatever their number."""
        compute = self.streams.compute
        is_forward = kind is Kind.F
        collectives = self._rendezvous.unit_collectives(self._group, kind, i, m, in_turn=self._is_cpu)
        shares = self._shares[i] if is_forward else self._shares[i][::-1]
        if self._is_cpu:
            self._compute_in_turn(collectives, work, shares, seconds)
            return
        if collectives.first_gather != NOTHING:
            self._post_first_gather(collectives, waits=is_forward)
        last = collectives.other_gathers
        if last != NOTHING:
            self._tasks.arrive(last)  # Right after the first.
            self._label("gather", last)
        if len(shares) > 1:
            self._label("compute", compute.work(work, shares[0] * seconds))
            if collectives.other_reductions != NOTHING:
                compute.post(collectives.other_reductions)
            if len(shares) > 2:
                self._label("compute", compute.work(work, sum(shares[1:-1]) * seconds))
        self._before_last_unit = (last, compute.record())
        compute.wait(last)
        self._label("compute", compute.work(work, shares[-1] * seconds))
        self._reduce_units(collectives.other_reductions, collectives.last_reduction)

    def _post_first_gather(self, collectives: UnitCollectives, *, waits: bool) -> None:
        """`waits`: for everything launched on the compute stream, as a forward's gather does; a backward's
        waits until the previous unit's parameters are in use."""
        if waits:
            self.streams.compute.post(collectives.first_gather)
        else:
            for task in self._before_last_unit:
                self._tasks.wait(collectives.first_gather, task)
            self.streams.host.post(collectives.first_gather)
        self.streams.compute.wait(collectives.first_gather)
        self._label("gather", collectives.first_gather)

    def _compute_in_turn(
        self, collectives: UnitCollectives, work: Work, shares: Sequence[float], seconds: float
    ) -> None:
        """CPU ranks: units are gathered, compute and are reduced one after another, in step on all ranks. A
        backward gathers one unit ahead, so it begins with most gathers and ends with the reductions, which
        takes the same time."""
        compute = self.streams.compute
        last_share = shares[-1] if work is Work.FORWARD and len(shares) > 1 else 1.0
        gathers = (collectives.first_gather, collectives.other_gathers)
        for gather, share in zip(gathers, (1 - last_share, last_share), strict=True):
            if gather != NOTHING:
                self._label("gather", gather)
                compute.take_part(gather)
            if share:
                self._label("compute", compute.work(work, share * seconds))
        for reduction in (collectives.other_reductions, collectives.last_reduction):
            if reduction != NOTHING:
                self._label("reduce", reduction)
                compute.take_part(reduction)

    def _reduce_units(self, others: int, last: int) -> None:
        """Reductions of a backward's units, beside the computation of the units that follow."""
        compute = self.streams.compute
        for task in (others, last):
            if task != NOTHING:
                self._label("reduce", task)
                if task == last:
                    compute.post(task)
                compute.wait(task)

    # -- transfers -------------------------------------------------------------------------

    def _row_bytes(self, kind: Kind, i: int) -> int:
        """Bytes of a row at the boundary of ministage `i` that a transfer or computation concerns."""
        return self._row_bytes_by[kind in _FORWARD][i + 1 if kind in _AT_OUTPUT else i]

    def _bytes_of(self, transfer: Action, row_bytes: int) -> float:
        """Of its rows, and of these the positions that it carries."""
        assert transfer.start is not None and transfer.stop is not None
        num_bytes = (transfer.stop - transfer.start) * row_bytes
        if transfer.positions is None:
            return num_bytes
        first, last = transfer.positions
        return num_bytes * (last - first) / self._sequence_length

    def _port(self, kind: Kind, peer: int) -> _Port:
        """This rank's end of a channel."""
        if (kind, peer) not in self._ports:
            channel = Channel.of(self.rank, kind, peer)
            is_staged = channel in self._staged
            stream = self.streams.host if is_staged else self.streams.compute
            self._ports[kind, peer] = _Port(channel, stream, is_staged)
        return self._ports[kind, peer]

    def _next_transfer(self, port: _Port, num_bytes: float) -> int:
        port.num_transfers += 1
        return self._rendezvous.transfer(port.channel, port.num_transfers - 1, num_bytes)

    def _send(self, action: Action, i: int) -> None:
        kind, peer = action.kind, action.peer
        assert peer is not None
        port = self._port(kind, peer)
        num_bytes = self._bytes_of(action, self._row_bytes(kind, i))
        task = self._next_transfer(port, num_bytes)
        self._label("send", task)
        compute = self.streams.compute
        if self._costs.transfers_block and task not in self._rendezvous.eager:
            compute.take_part(task)
            return
        if port.is_staged:
            self._label("to host", self.copies.copy(compute, num_bytes, to_device=False))
        compute.post(task)
        self._sent.append((port.stream, task))

    def _receive(self, action: Action, i: int) -> None:
        kind, peer = action.kind, action.peer
        assert peer is not None and action.microbatch is not None
        port = self._port(kind, peer)
        task = self._next_transfer(port, self._bytes_of(action, self._row_bytes(kind, i)))
        self._label("receive", task)
        is_eager = task in self._rendezvous.eager
        if self._costs.transfers_block:
            if is_eager:
                self.streams.compute.wait(task)
            else:
                self.streams.compute.take_part(task)
            return
        if not is_eager:  # On a device's stream a receive waits for everything launched before.
            port.stream.post(task)
        self._incoming[Kind.F if kind is Kind.RECV_F else Kind.B, i, action.microbatch].append((port, task))

    def _take(self, port: _Port, task: int, num_bytes: float) -> None:
        """A computation waits for a received transfer."""
        port.stream.wait(task)
        if port.is_staged:
            self.copies.copy(self.streams.compute, num_bytes, to_device=True)

    # -- gathers, reductions, updates ------------------------------------------------------

    def _gather(self, _: Action, i: int) -> None:
        """On a device after everything launched on the compute stream, and once the shards are loaded."""
        gather = self.streams.gather
        gather.wait(self.streams.compute.record())
        self.copies.gather_shards(i)
        gathers = self._rendezvous.gather(self._group, i, self._num_gathers[i])
        self._num_gathers[i] += 1
        if gathers:
            gather.post(gathers[0])
            for task in gathers[1:]:
                self._tasks.arrive(task)  # Right after the first.
            for task in gathers:
                self._label("gather", task)
            if not self._is_cpu:
                gather.wait(gathers[-1])
        elif not self._is_cpu:
            gathers = (gather.record(),)
        if gathers:
            self._gathering[i] = gathers

    def _wait_gathered(self, i: int) -> None:
        for task in self._gathering.pop(i, ())[-1:]:
            self.streams.compute.wait(task)

    def _reduce(self, action: Action, i: int) -> None:
        self.copies.await_shards(i)
        self._wait_gathered(i)
        self.copies.free_gradients()
        compute, reduce = self.streams.compute, self.streams.reduce
        compute.wait(self._reduced)
        reduce.wait(compute.record())
        task = self._rendezvous.reduce(self._group, i, action.microbatch)
        if task != NOTHING:
            self._label("reduce", reduce.take_part(task))
        self._reduced = reduce.record()

    def _step(self, _: Action, i: int) -> None:
        self.copies.begin_update(i)
        task = self.streams.update.work(Work.UPDATE, self._costs.update_s[self.rank, i])
        self._label("update", task)
        self.copies.end_update(i, task)

    def _norm(self, _: Action, __: int) -> None:
        """The host waits for the device and for all ranks."""
        host = self.streams.host
        for i in self._shares:
            self.copies.await_reduction(i)
        host.wait(self.streams.compute.record())
        self._label("reduce", host.take_part(self._rendezvous.norm()))

    # -- tied weights ----------------------------------------------------------------------

    def _exchange_gradients(self, _: Action, i: int) -> None:
        self.copies.await_reduction(i)
        self._send_slices(i, as_owner=False)
        self._receive_slices(i, as_owner=True)

    def _send_values(self, _: Action, i: int) -> None:
        self.copies.await_update(i)
        self._send_slices(i, as_owner=True)

    def _send_slices(self, i: int, *, as_owner: bool) -> None:
        """The host copies them from the device and sends them."""
        host = self.streams.host
        for tie in self._rendezvous.ties(i, as_owner=as_owner):
            host.wait(self.streams.compute.record())
            for sender, _, task in self._rendezvous.tie(tie, to_owner=not as_owner):
                if sender == self.rank:
                    host.post(task)
                    self._label("send", task)
                    self._sent.append((host, task))

    def _receive_slices(self, i: int, *, as_owner: bool) -> None:
        """The host waits for them."""
        host = self.streams.host
        for tie in self._rendezvous.ties(i, as_owner=as_owner):
            for _, receiver, task in self._rendezvous.tie(tie, to_owner=as_owner):
                if receiver == self.rank:
                    if task not in self._rendezvous.eager:
                        host.post(task)
                    self._label("receive", task)
                    host.wait(task)


_AT_OUTPUT = frozenset({Kind.SEND_F, Kind.RECV_B, Kind.B})
"""Actions at the boundary after a ministage; others are at the one before it."""
_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})


@dataclass(slots=True)
class _Port:
    """One rank's end of a channel."""

    channel: Channel
    stream: Stream
    """Stream that posts receives, and waits for them and for sends."""
    is_staged: bool
    """Whether rows are copied through host memory."""
    num_transfers: int = 0
    """Number of transfers that this end has reached."""


def _find_host_s(costs: StepCosts, ministages: Sequence[int]) -> dict[tuple[Kind, int | None], float]:
    """Host seconds by kind of action and ministage; empty if no action takes any."""
    if not costs.host_s and not costs.unit_host_s:
        return {}
    found: dict[tuple[Kind, int | None], float] = {}
    for kind in Kind:
        base_s = float(costs.host_s.get(kind.value, 0.0))
        units_s = {i: costs.unit_host_s.get((kind.value, i), 0.0) for i in ministages}
        found |= {(kind, i): base_s + units_s[i] for i in ministages}
        found[kind, None] = base_s + sum(units_s.values())
    return found


def _shares(costs: StepCosts, ministage: int) -> list[float]:
    """Share of a ministage's bytes in each of its gathered units."""
    sizes = [unit.gathered_bytes for unit in costs.units[ministage] if unit.gathered_bytes]
    return [size / sum(sizes) for size in sizes] or [1.0]
