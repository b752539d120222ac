"""One rank's list of actions as tasks: what its executor does with each, and what that waits for.

Follows `zorselike/runtime` closely: `executor.py`, `transport.py`, `sharded_units.py`, `ministage.py`.
Where a rank computes by itself, all lanes are its thread, and only transfers and gathers run beside it;
with a device the host only starts what its streams do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import SENDS, Action, Kind
from zorselike.simulator.network.rendezvous import Channel, Edge, Inside, Meetings
from zorselike.simulator.rank.copies import HostCopies
from zorselike.simulator.rank.labels import Notes
from zorselike.simulator.rank.streams import Lane, Lanes
from zorselike.simulator.rank.tasks import NOTHING, Tasks, Work
from zorselike.simulator.result import Track


class Program:
    """Enters the tasks of one rank, action by action."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        costs: StepCosts,
        tasks: Tasks,
        meetings: Meetings,
        *,
        staged: Collection[Edge],
        notes: Notes | None,
    ) -> None:
        """`staged`: channels that a device's rank serves through its host's memory."""
        self.rank, self._costs = rank, costs
        self._tasks, self._meetings, self._staged = tasks, meetings, staged
        self._notes = notes
        self._is_cpu = bool(costs.is_cpu) and costs.is_cpu[rank]
        self.lanes = Lanes(tasks, rank, is_cpu=self._is_cpu)
        self.copies = HostCopies(plan, rank, costs, tasks, self.lanes, notes)
        self._group = plan.group_of_rank[rank]
        self._zero = plan.groups[self._group].zero
        self._offloads = bool(plan.groups[self._group].offload)
        self._rows = [microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank)]
        self._shares = {i: _shares(costs, i) for i in plan.ministages_of_rank(rank)}
        self._host_s = _find_host_s(costs, plan.ministages_of_rank(rank))
        self._ports: dict[tuple[Kind, int], _Port] = {}
        self._incoming: defaultdict[tuple[Kind, int, int], list[tuple[_Port, int]]] = defaultdict(list)
        """Transfers that a computation waits for."""
        self._sent: list[tuple[Lane, int]] = []
        """What was sent, and which lane waits for it at the end."""
        self._num_gathers: defaultdict[int, int] = defaultdict(int)
        self._gathering: dict[int, Sequence[int]] = {}
        """Gathers of a ministage that nothing has waited for yet, by unit."""
        self._ahead: tuple[int, ...] = ()
        """With ZeRO 3: what came before the last unit of the last computation."""

    def read(self, actions: Sequence[Action]) -> None:
        """Enters a whole list, and the end of the step."""
        readers, copy, notes = self._readers(), self.copies.read, self._notes
        host_s = self._host_s
        if self._costs.step_host_s:
            self.lanes.host.work(Work.HOST, self._costs.step_host_s)
        for position, action in enumerate(actions):
            if notes is not None:
                notes.begin(position, self.lanes.compute.tail)
            if host_s and (seconds := host_s[action.kind, action.ministage]):
                self._note("host", self.lanes.host.work(Work.HOST, seconds))
            reader = readers.get(action.kind, copy)
            reader(action, NOTHING if action.ministage is None else action.ministage)
            if notes is not None:
                notes.end()
        self._finish()

    def _readers(self) -> dict[Kind, Callable[[Action, int], None]]:
        """Who reads which kind of action; copies are another's."""
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
            Kind.TIE_FETCH: lambda _, i: self._take_slices(i, as_owner=False),
            Kind.NORM: self._norm,
            Kind.STEP: self._step,
        }

    end: int
    """The task with which the rank's step ends."""

    def _finish(self) -> None:
        """Waits for what was sent and for the last update; copies to the host go on."""
        compute = self.lanes.compute
        for lane, task in self._sent:
            lane.join(task)
        compute.join(self.lanes.host.record())
        # What the updating lane itself waits for from here on, such as copies of shards, holds up nobody.
        compute.join(self.lanes.update.record())
        self.copies.finish()
        self.end = compute.work(Work.MEETING)
        self.lanes.finish()

    def _note(self, track: Track, task: int) -> None:
        if self._notes is not None and task != NOTHING:
            self._notes.add(track, task)

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
            self._take(port, task, self._row_bytes(kind, i) * self._rows[m])
        work = Work.FORWARD if is_forward else Work.BACKWARD
        if not is_forward:
            self._wait_gathered(i)
            if self._zero == 3:
                self.copies.settle_retired()  # It reduces inside.
            if self._offloads:
                self.copies.await_activations(i, m)
        if self._zero == 3 and not self._meetings.is_alone[self._group]:
            self._compute_gathering(kind, i, m, work, seconds)
        elif is_forward and i in self._gathering:
            self._compute_by_unit(i, work, seconds)
        else:
            self._note("compute", self.lanes.compute.work(work, seconds))
        if self._offloads and not is_forward:
            self.copies.drop_activations(i, m)

    def _compute_by_unit(self, i: int, work: Work, seconds: float) -> None:
        """Each unit computes once it is gathered."""
        compute, gathers = self.lanes.compute, self._gathering.pop(i)
        shares = self._shares[i] if len(gathers) > 1 else [1.0]
        for gather, share in zip(gathers, shares, strict=True):
            compute.join(gather)
            self._note("compute", compute.work(work, share * seconds))

    def _compute_gathering(self, kind: Kind, i: int, m: int, work: Work, seconds: float) -> None:
        """ZeRO 3: each unit is gathered before it computes, the next one meanwhile, and reduced after its
        backward. Units between the first and the last are taken together: what computes or moves longer
        hides the other, whatever their number."""
        compute = self.lanes.compute
        is_forward = kind is Kind.F
        inside = self._meetings.inside(self._group, kind, i, m, in_turn=self._is_cpu)
        shares = self._shares[i] if is_forward else self._shares[i][::-1]
        if self._is_cpu:
            self._compute_in_turn(inside, work, shares, seconds)
            return
        if inside.first_gather != NOTHING:
            self._post_first_gather(inside, waits=is_forward)
        last = inside.other_gathers
        if last != NOTHING:
            self._tasks.arrive(last)  # Right after the first.
            self._note("gather", last)
        if len(shares) > 1:
            self._note("compute", compute.work(work, shares[0] * seconds))
            if inside.other_reductions != NOTHING:
                compute.post(inside.other_reductions)
            if len(shares) > 2:
                self._note("compute", compute.work(work, sum(shares[1:-1]) * seconds))
        self._ahead = (last, compute.record())
        compute.join(last)
        self._note("compute", compute.work(work, shares[-1] * seconds))
        self._reduce_inside(inside.other_reductions, inside.last_reduction)

    def _post_first_gather(self, inside: Inside, *, waits: bool) -> None:
        """`waits`: for all that compute was given, as a forward's does; a backward's waits for that of the
        unit before to be used."""
        if waits:
            self.lanes.compute.post(inside.first_gather)
        else:
            for ahead in self._ahead:
                self._tasks.wait(inside.first_gather, ahead)
            self.lanes.host.post(inside.first_gather)
        self.lanes.compute.join(inside.first_gather)
        self._note("gather", inside.first_gather)

    def _compute_in_turn(self, inside: Inside, work: Work, shares: Sequence[float], seconds: float) -> None:
        """Without a device nothing runs beside its thread: units are gathered, compute and are reduced one
        after the other, on all ranks. A backward gathers one unit ahead, so it begins with most gathers and
        ends with the reductions, which takes as long."""
        compute = self.lanes.compute
        last_share = shares[-1] if work is Work.FORWARD and len(shares) > 1 else 1.0
        for gather, share in ((inside.first_gather, 1 - last_share), (inside.other_gathers, last_share)):
            if gather != NOTHING:
                self._note("gather", gather)
                compute.meet(gather)
            if share:
                self._note("compute", compute.work(work, share * seconds))
        for reduction in (inside.other_reductions, inside.last_reduction):
            if reduction != NOTHING:
                self._note("reduce", reduction)
                compute.meet(reduction)

    def _reduce_inside(self, others: int, last: int) -> None:
        """What a backward's units reduce, beside the units that follow."""
        compute = self.lanes.compute
        for task in (others, last):
            if task == NOTHING:
                continue
            self._note("reduce", task)
            if task == last:
                compute.post(task)
            compute.join(task)

    # -- transfers -------------------------------------------------------------------------

    def _row_bytes(self, kind: Kind, i: int) -> int:
        """Bytes of a row that crosses a boundary of ministage `i` with a transfer or computation."""
        return self._costs.row_bytes[i + 1 if kind in _AFTERWARDS else i]

    def _port(self, kind: Kind, peer: int) -> _Port:
        """This rank's end of a channel."""
        if (kind, peer) not in self._ports:
            direction = "F" if kind in (Kind.SEND_F, Kind.RECV_F) else "B"
            ends = (self.rank, peer) if kind in SENDS else (peer, self.rank)
            edge = (*ends, direction)
            is_staged = edge in self._staged
            lane = self.lanes.host if is_staged else self.lanes.compute
            self._ports[kind, peer] = _Port(self._meetings.channel(edge), lane, is_staged)
        return self._ports[kind, peer]

    def _next_transfer(self, port: _Port, num_bytes: float) -> int:
        turn = port.num_transfers
        port.num_transfers = turn + 1
        return self._meetings.transfer(port.channel, turn, num_bytes)

    def _send(self, action: Action, i: int) -> None:
        kind, start, stop, peer = action.kind, action.start, action.stop, action.peer
        assert start is not None and stop is not None and peer is not None
        port = self._port(kind, peer)
        num_bytes = (stop - start) * self._row_bytes(kind, i)
        task = self._next_transfer(port, num_bytes)
        self._note("send", task)
        compute = self.lanes.compute
        if self._costs.transfers_block:
            compute.meet(task)
            return
        if port.is_staged:
            self._note("to host", self.copies.copy(compute, num_bytes, to_device=False))
        compute.post(task)
        self._sent.append((port.lane, task))

    def _receive(self, action: Action, i: int) -> None:
        kind, start, stop, peer = action.kind, action.start, action.stop, action.peer
        assert start is not None and stop is not None and peer is not None and action.microbatch is not None
        port = self._port(kind, peer)
        task = self._next_transfer(port, (stop - start) * self._row_bytes(kind, i))
        self._note("receive", task)
        if self._costs.transfers_block:
            self.lanes.compute.meet(task)
            return
        if self._costs.sends_buffer:
            self._tasks.arrive(task)
        else:  # What is posted to a device's stream waits for what that was given before.
            port.lane.post(task)
        self._incoming[Kind.F if kind is Kind.RECV_F else Kind.B, i, action.microbatch].append((port, task))

    def _take(self, port: _Port, task: int, num_bytes: float) -> None:
        """A computation waits for what was received."""
        port.lane.join(task)
        if port.is_staged:
            self.copies.copy(self.lanes.compute, num_bytes, to_device=True)

    # -- gathers, reductions, updates ------------------------------------------------------

    def _gather(self, _: Action, i: int) -> None:
        """On a device after all that compute was given so far, and once the shards are there."""
        gather = self.lanes.gather
        gather.join(self.lanes.compute.record())
        self.copies.gather_shards(i)
        turn = self._num_gathers[i]
        self._num_gathers[i] = turn + 1
        gathers = self._meetings.gather(self._group, i, turn)
        if gathers:
            gather.post(gathers[0])
            for task in gathers[1:]:
                self._tasks.arrive(task)  # Right after the first.
            for task in gathers:
                self._note("gather", task)
            if not self._is_cpu:
                gather.join(gathers[-1])
        elif not self._is_cpu:
            gathers = (gather.record(),)
        if gathers:
            self._gathering[i] = gathers

    def _wait_gathered(self, i: int) -> None:
        for task in self._gathering.pop(i, ())[-1:]:
            self.lanes.compute.join(task)

    def _reduce(self, action: Action, i: int) -> None:
        self.copies.await_shards(i)
        self._wait_gathered(i)
        self.copies.settle_retired()
        task = self._meetings.reduce(self._group, i, action.microbatch)
        if task != NOTHING:
            self._note("reduce", self.lanes.compute.meet(task))

    def _step(self, _: Action, i: int) -> None:
        self.copies.begin_update(i)
        task = self.lanes.update.work(Work.UPDATE, self._costs.update_s[self.rank, i])
        self._note("update", task)
        self.copies.end_update(i, task)

    def _norm(self, _: Action, __: int) -> None:
        """The host waits for the device, and for all ranks."""
        host = self.lanes.host
        host.join(self.lanes.compute.record())
        self._note("reduce", host.meet(self._meetings.norm()))

    # -- tied weights ----------------------------------------------------------------------

    def _exchange_gradients(self, _: Action, i: int) -> None:
        self._give_slices(i, as_owner=False)
        self._take_slices(i, as_owner=True)

    def _send_values(self, _: Action, i: int) -> None:
        self.copies.await_update(i)
        self._give_slices(i, as_owner=True)

    def _give_slices(self, i: int, *, as_owner: bool) -> None:
        """The host takes them off the device and sends them."""
        host = self.lanes.host
        for tie in self._meetings.ties(i, as_owner=as_owner):
            host.join(self.lanes.compute.record())
            for giver, _, task in self._meetings.tie(tie, to_owner=not as_owner):
                if giver == self.rank:
                    host.post(task)
                    self._note("send", task)
                    self._sent.append((host, task))

    def _take_slices(self, i: int, *, as_owner: bool) -> None:
        """The host waits for them."""
        host = self.lanes.host
        for tie in self._meetings.ties(i, as_owner=as_owner):
            for _, taker, task in self._meetings.tie(tie, to_owner=as_owner):
                if taker == self.rank:
                    if self._costs.sends_buffer:
                        self._tasks.arrive(task)
                    else:
                        host.post(task)
                    self._note("receive", task)
                    host.join(task)


_AFTERWARDS = frozenset({Kind.SEND_F, Kind.RECV_B, Kind.B})
"""What concerns the boundary after a ministage."""


@dataclass(slots=True)
class _Port:
    """One rank's end of a channel."""

    channel: Channel
    lane: Lane
    """Who posts receives, and waits for what they bring and for what was sent."""
    is_staged: bool
    """Whether what travels is copied through the host's memory."""
    num_transfers: int = 0
    """That this end has come to."""


def _find_host_s(costs: StepCosts, own: Sequence[int]) -> dict[tuple[Kind, int | None], float]:
    """Host seconds of each kind of action of each of a rank's ministages; nothing if none takes any."""
    if not costs.host_s and not costs.unit_host_s:
        return {}
    found: dict[tuple[Kind, int | None], float] = {}
    for kind in Kind:
        base_s = float(costs.host_s.get(kind.value, 0.0))
        units_s = {i: costs.unit_host_s.get((kind.value, i), 0.0) for i in own}
        found |= {(kind, i): base_s + units_s[i] for i in own}
        found[kind, None] = base_s + sum(units_s.values())
    return found


def _shares(costs: StepCosts, ministage: int) -> list[float]:
    """What part of a ministage each of its gathered units is, by bytes."""
    sizes = [unit.gathered_bytes for unit in costs.units[ministage] if unit.gathered_bytes]
    return [size / sum(sizes) for size in sizes] or [1.0]
