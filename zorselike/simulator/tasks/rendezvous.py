"""What several ranks do together: transfers between two ranks, and collectives.

Each is created by the rank that reaches it first and found by the others. Collectives of one group run one
after another, in the order in which all its ranks start them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from zorselike.cost.network import CollectiveOp, Flow
from zorselike.cost.step_costs import StepCosts, UnitBytes
from zorselike.plan.pieces import holders_of
from zorselike.plan.plan import Plan, Replica
from zorselike.schedule.actions import Kind
from zorselike.schedule.checker.channels import Channel
from zorselike.simulator.classes.folded_network import Flows
from zorselike.simulator.tasks.graph import NOTHING, Tasks, Work

NORM_BYTES = 8
"""One number in float64."""


class UnitCollectives(NamedTuple):
    """Collectives of the FSDP units inside one ZeRO 3 computation: all-gathers of its first unit and of the
    others (`in_turn`: of all but the last, and of the last), reduce-scatters of all but its last unit, and of
    the last. `NOTHING` where there is none."""

    first_gather: int
    other_gathers: int
    other_reductions: int
    last_reduction: int


class Rendezvous:
    """All rendezvous of one step."""

    def __init__(
        self, plan: Plan, costs: StepCosts, tasks: Tasks, network: Flows, ranks: Collection[int]
    ) -> None:
        """`ranks`: those that are simulated; a collective waits for no others."""
        self._plan, self._costs, self._tasks = plan, costs, tasks
        self.network = network
        self._collectives: dict[Hashable, tuple[int, ...]] = {}
        self._unit_collectives: dict[tuple[int, Kind, int, int], UnitCollectives] = {}
        self._transfers: defaultdict[Channel, list[int]] = defaultdict(list)
        """Of each channel so far; each waits for the previous one."""
        self.eager: set[int] = set()
        """Transfers that do not wait for their receivers."""
        self._last: dict[int, int] = {}
        """Last collective of each group."""
        self._bundles: dict[Hashable, int] = {}
        self._ties: dict[tuple[tuple[int, int], bool], list[tuple[int, int, int]]] = {}
        self._ranks = [tuple(sorted(group.flat_ranks)) for group in plan.groups]
        self._everyone = tuple(sorted(plan.group_of_rank))
        self._parties = [tuple(rank for rank in of_group if rank in ranks) for of_group in self._ranks]
        self._simulated = tuple(sorted(ranks))
        self.is_alone = [len(ranks) == 1 for ranks in self._ranks]

    # -- transfers -------------------------------------------------------------------------

    def transfer(self, channel: Channel, index: int, num_bytes: float) -> int:
        """Transfer number `index` of a channel."""
        transfers = self._transfers[channel]
        if index == len(transfers):
            task = self._add_transfer(channel.source, channel.target, num_bytes)
            if index:
                self._tasks.wait(task, transfers[-1])
            transfers.append(task)
        return transfers[index]

    def _add_transfer(self, source: int, target: int, num_bytes: float) -> int:
        key = (source, target, num_bytes)
        bundle = self._bundles.get(key)
        if bundle is None:
            flow = self.network.transfer(source, target, num_bytes)
            bundle = self._bundles[key] = self._tasks.bundle_of((flow,))
        task = self._tasks.add(Work.TRANSFER, NOTHING, bundle=bundle)
        if 0 < self._costs.eager_bytes >= num_bytes:
            self.eager.add(task)
            self._tasks.arrive(task)
        return self._expect(task, (source, target))

    def _expect(self, task: int, ranks: Sequence[int]) -> int:
        """Makes a task wait until all of these ranks have arrived."""
        self._tasks.parties[task] = ranks
        self._tasks.num_awaited[task] += len(ranks)
        return task

    # -- collectives -----------------------------------------------------------------------

    def gather(self, group: int, ministage: int, index: int) -> tuple[int, ...]:
        """All-gathers number `index` of a ministage, one per unit; none in a group of one rank."""
        if self.is_alone[group]:
            return ()
        key = ("gather", group, ministage, index)
        if key not in self._collectives:
            units = self._costs.units[ministage]
            found = (self._collective(group, "all_gather", [_gathered(unit)]) for unit in units)
            bundles = [bundle for bundle in found if bundle != NOTHING]
            self._collectives[key] = tuple(self._chain(group, bundle) for bundle in bundles)
        return self._collectives[key]

    def reduce(self, group: int, ministage: int, microbatch: int | None) -> int:
        """Reductions of a ministage, all units in one task; `NOTHING` in a group of one rank."""
        key = ("reduce", group, ministage, microbatch)
        if key not in self._collectives:
            op: CollectiveOp = "all_reduce" if self._plan.groups[group].zero == 0 else "reduce_scatter"
            sizes = [_reduced(unit) for unit in reversed(self._costs.units[ministage])]
            bundle = self._collective(group, op, sizes)
            self._collectives[key] = (NOTHING if bundle == NOTHING else self._chain(group, bundle),)
        return self._collectives[key][0]

    def unit_collectives(
        self, group: int, kind: Kind, ministage: int, microbatch: int, *, in_turn: bool
    ) -> UnitCollectives:
        """Collectives of a ZeRO 3 computation, in the order of its units; `in_turn`: each unit is gathered
        after the previous one has computed."""
        key = (group, kind, ministage, microbatch)
        if key not in self._unit_collectives:
            units = self._costs.units[ministage]
            units = units if kind is Kind.F else units[::-1]
            gathered = [_gathered(unit) for unit in units if unit.gathered_bytes]
            reduced = [_reduced(unit) for unit in units] if kind is Kind.B else []
            cut = max(len(gathered) - 1, 1) if in_turn else 1
            parts: list[tuple[CollectiveOp, list[_Size]]] = [
                ("all_gather", gathered[:cut]),
                ("all_gather", gathered[cut:]),
                ("reduce_scatter", reduced[:-1]),
                ("reduce_scatter", reduced[-1:]),
            ]
            bundles = [self._collective(group, op, sizes) for op, sizes in parts]
            first, others, early, last = (
                NOTHING if bundle == NOTHING else self._add(group, bundle) for bundle in bundles
            )
            for before, after in ((first, others), (early, last)):
                if after != NOTHING:
                    self._tasks.wait(after, before)
            self._unit_collectives[key] = UnitCollectives(first, others, early, last)
        return self._unit_collectives[key]

    def norm(self) -> int:
        """All-reduce of the gradient norm over all ranks."""
        if "norm" not in self._collectives:
            flows = self.network.collective("all_reduce", self._everyone, NORM_BYTES)
            task = self._tasks.add(Work.COLLECTIVE, NOTHING, bundle=self._tasks.bundle_of(flows))
            self._collectives["norm"] = (self._expect(task, self._simulated),)
        return self._collectives["norm"][0]

    def meet(self, replica: Replica, kind: Kind, ministage: int, microbatch: int) -> int:
        """The start of a computation on all ranks of a replica, whose collectives keep them together."""
        key = ("meet", replica.first, kind, ministage, microbatch)
        if key not in self._collectives:
            self._collectives[key] = (self._expect(self._tasks.add(Work.EVENT, NOTHING), replica.ranks),)
        return self._collectives[key][0]

    def _collective(self, group: int, op: CollectiveOp, sizes: Sequence[_Size]) -> int:
        """Bundle of collectives that run back to back; `NOTHING` if they move no bytes. Those of pieces run
        side by side, as far as their ranks' links let them."""
        sizes = tuple(size for size in sizes if size.num_bytes)
        if not sizes or self.is_alone[group]:
            return NOTHING
        key = (group, op, sizes)
        if key not in self._bundles:
            flows: list[Flow] = []
            by_rings = self._by_rings(group, sizes)
            for rings, of_rings in by_rings:
                for ranks in rings:
                    found = [self.network.collective(op, ranks, num_bytes) for num_bytes in of_rings]
                    flows += join_flows(found)
            # Without flows too, as on a free link, its ranks wait for each other.
            self._bundles[key] = self._tasks.bundle_of(tuple(flows)) if by_rings else NOTHING
        return self._bundles[key]

    def _by_rings(
        self, group: int, sizes: Sequence[_Size]
    ) -> list[tuple[list[tuple[int, ...]], list[float]]]:
        """Who gathers or reduces what together: what is whole all ranks, pieces their holders each."""
        of_group = self._plan.groups[group]
        degree = of_group.degree
        whole: list[float] = [size.num_bytes for size in sizes if degree == 1 or not size.is_cut]
        cut = [size.num_bytes / degree for size in sizes if degree > 1 and size.is_cut]
        rings: list[tuple[list[tuple[int, ...]], list[float]]] = []
        if whole:
            rings.append(([self._ranks[group]], whole))
        if cut and len(of_group.replicas) > 1:
            rings.append(([tuple(sorted(holders_of(of_group, p))) for p in range(degree)], cut))
        return rings

    def _chain(self, group: int, bundle: int) -> int:
        """Adds a collective after the group's last one."""
        task = self._add(group, bundle)
        self._tasks.wait(task, self._last.get(group, NOTHING))
        self._last[group] = task
        return task

    def _add(self, group: int, bundle: int) -> int:
        return self._expect(self._tasks.add(Work.COLLECTIVE, NOTHING, bundle=bundle), self._parties[group])

    # -- tied weights ----------------------------------------------------------------------

    def ties(self, ministage: int, *, as_owner: bool) -> list[tuple[int, int]]:
        """Ties of a ministage, as (owner, borrower)."""
        end = 0 if as_owner else 1
        return [tie for tie in sorted(self._costs.tie_bytes) if tie[end] == ministage]

    def tie(self, tie: tuple[int, int], *, to_owner: bool) -> list[tuple[int, int, int]]:
        """Slices of a tied weight, `(source rank, target rank, transfer)`: gradients to its owner, or new
        values from it. Each rank sends what it holds to the ranks that hold the same rows."""
        if (tie, to_owner) not in self._ties:
            source, target = tie[::-1] if to_owner else tie
            num_bytes = self._costs.tie_bytes[tie]
            if to_owner:
                num_bytes = self._costs.tie_gradient_bytes.get(tie, num_bytes)
            self._ties[tie, to_owner] = [
                (sender, receiver, self._add_transfer(sender, receiver, share * num_bytes))
                for sender, receiver, share in self._slices(source, target)
            ]
        return self._ties[tie, to_owner]

    def _slices(self, source: int, target: int) -> list[tuple[int, int, float]]:
        """Sender, receiver and share of the weight of each slice that changes ranks."""
        senders, receivers = self._holders(source), self._holders(target)
        is_whole = self._plan.group_of(source).zero == 0
        slices = []
        for position, (receiver, (start, stop)) in enumerate(receivers.items()):
            ranks = list(senders)
            if is_whole:  # One rank sends; a rank that has the weight keeps its own.
                ranks = [receiver if receiver in senders else ranks[position % len(ranks)]]
            for sender in ranks:
                low, high = senders[sender]
                share = min(stop, high) - max(start, low)
                if share > 0 and sender != receiver:
                    slices.append((sender, receiver, share))
        return slices

    def _holders(self, ministage: int) -> dict[int, tuple[float, float]]:
        """Interval of a weight, of [0, 1), that each rank of a ministage's group holds."""
        group = self._plan.ministages[ministage].group
        ranks = self._ranks[group]
        if self._plan.groups[group].zero == 0:
            return dict.fromkeys(ranks, (0.0, 1.0))
        return {rank: (i / len(ranks), (i + 1) / len(ranks)) for i, rank in enumerate(ranks)}


class _Size(NamedTuple):
    """Of a collective over one unit."""

    num_bytes: int
    is_cut: bool


def _gathered(unit: UnitBytes) -> _Size:
    return _Size(unit.gathered_bytes, unit.is_cut)


def _reduced(unit: UnitBytes) -> _Size:
    return _Size(unit.reduced_bytes, unit.is_cut)


def join_flows(collectives: Sequence[tuple[Flow, ...]]) -> tuple[Flow, ...]:
    """Collectives over the same links, back to back, as flows of all their bytes: they take the same time
    alone, and the same part of shared links."""
    if len(collectives) == 1:
        return collectives[0]
    joined = []
    for flows in zip(*collectives, strict=True):
        num_bytes = sum(flow.num_bytes for flow in flows)
        moving_s = sum(flow.num_bytes / flow.max_rate for flow in flows)
        rate = num_bytes / moving_s if moving_s > 0 else flows[0].max_rate
        latency_s = sum(flow.latency_s for flow in flows)
        joined.append(replace(flows[0], num_bytes=num_bytes, max_rate=rate, latency_s=latency_s))
    return tuple(joined)
