"""Which ranks do the same at the same time: the coarsest partition that their traffic respects.

Ranks begin in one class where they compute the same rows in the same time, capacities where they carry as
much. Classes are split while their members exchange rows with, or share wires with, others of different
classes (colour refinement). In the end every rank of a class has one partner each in the same other classes,
and rates that are fair to one of them are fair to all: max-min fair shares are unique.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from zorselike.cost.network import Flow
from zorselike.cost.step_costs import StepCosts
from zorselike.errors import ClusterError
from zorselike.plan.plan import Plan
from zorselike.schedule.transfers import match_rows

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

WORTH_FOLDING = 0.75
"""Of the ranks: with more classes, all are simulated."""
_TYPICAL_BYTES = 1e8


class NotAlikeError(Exception):
    """Ranks of a class turn out to differ in what they put on wires."""


@dataclass(frozen=True)
class RankClasses:
    """Ranks and capacities by class, each class named by its first member."""

    first: Mapping[int, int]
    """By rank: the first of its class."""
    first_capacity: Sequence[int]
    """By capacity: the first of its class."""
    channels: Mapping[tuple[int, int], Sequence[tuple[int, int]]]
    """By classes of source and target: all pairs of ranks that exchange rows as their members do."""

    @cached_property
    def members(self) -> Mapping[int, Sequence[int]]:
        """By class of ranks."""
        return _group((first, rank) for rank, first in self.first.items())

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Number of members of each class of capacities."""
        return Counter(self.first_capacity)


def find_rank_classes(plan: Plan, costs: StepCosts, *, with_norm: bool = False) -> RankClasses | None:
    """None where too few ranks are alike to be worth it; `with_norm`: all ranks reduce a norm together."""
    if costs.tie_bytes or plan.has_replicas or len(plan.group_of_rank) < 2:
        return None  # Slices of tied weights go to single ranks; those of a replica have different parts.
    return _Refinement(plan, costs, with_norm=with_norm).run()


class _Rows(NamedTuple):
    """What two ranks exchange, as one of them sees it; its own first."""

    relation: int
    microbatch: int
    start: int
    other_microbatch: int
    num_rows: int
    position: int
    """Of the other among those with whom this rank exchanges rows of this relation."""
    other_position: int
    """Of this rank among those of the other. Without it several partners of one rank could be alike."""


class _Refinement:
    """Splits classes until nothing tells their members apart."""

    def __init__(self, plan: Plan, costs: StepCosts, *, with_norm: bool) -> None:
        self._plan, self._costs, self._network = plan, costs, costs.network
        self._rows: dict[int, list[tuple[_Rows, int]]] = {rank: [] for rank in sorted(plan.group_of_rank)}
        self._others: dict[int, tuple[int, ...]] = {}
        """By rank: with whom it exchanges rows, in the order of these."""
        self._sizes = _number({id(own): tuple(sorted(own.items())) for own in costs.sizes})
        """Of dictionaries of sizes, of which many ranks have the same."""
        self._ways: dict[tuple[int, int], Flow] = {}
        self._match()
        self._copies = {rank: self._list_copies(rank) for rank in self._rows}
        self._rings = [
            (g, flow)
            for g, group in enumerate(plan.groups)
            for flow in self._network.collective("all_gather", sorted(group.flat_ranks), _TYPICAL_BYTES)
        ]
        if with_norm:
            everyone = self._network.collective("all_reduce", [*self._rows], _TYPICAL_BYTES)
            self._rings += [(-1, flow) for flow in everyone]

    def _match(self) -> None:
        """Rows that ranks exchange, and the ways of them."""
        owners = [ministage.group for ministage in self._plan.ministages]
        relations = {(min(pair), max(pair)) for pair in pairwise(owners) if pair[0] != pair[1]}
        groups = self._plan.groups
        for relation, (a, b) in enumerate(sorted(relations)):
            matched = match_rows(groups[a], groups[b])
            partners: defaultdict[int, set[int]] = defaultdict(set)
            for rows in matched:
                partners[rows.source].add(rows.target)
                partners[rows.target].add(rows.source)
            at = {rank: {other: i for i, other in enumerate(sorted(own))} for rank, own in partners.items()}
            begins = {
                (rank, m): own.start
                for group in (groups[a], groups[b])
                for rank, microbatches in group.microbatches_by_rank.items()
                for m, own in enumerate(microbatches)
            }
            for source, sent, target, received, start, stop in matched:
                ends = ((source, sent, target, received), (target, received, source, sent))
                for rank, m, other, other_m in ends:
                    offset, i, j = start - begins[rank, m], at[rank][other], at[other][rank]
                    own = _Rows(relation, m, offset, other_m, stop - start, i, j)
                    self._rows[rank].append((own, other))
                    if (rank, other) not in self._ways:
                        self._ways[rank, other] = self._network.transfer(rank, other, _TYPICAL_BYTES)
        for rows_of_rank in self._rows.values():
            rows_of_rank.sort()
        # Rows say by their positions which of the others they are exchanged with.
        self._others = {
            rank: (*dict.fromkeys(other for _, other in rows),) for rank, rows in self._rows.items()
        }

    def _list_copies(self, rank: int) -> list[Flow]:
        """To and from the host; none where nothing says how fast they are."""
        try:
            return [self._network.copy(rank, _TYPICAL_BYTES, to_device=way) for way in (True, False)]
        except ClusterError:
            return []

    def run(self) -> RankClasses | None:
        ranks = _number({rank: self._describe(rank) for rank in self._rows})
        exchanged = _number({rank: tuple(own for own, _ in rows) for rank, rows in self._rows.items()})
        ranks = _number({rank: (own, exchanged[rank]) for rank, own in ranks.items()})
        capacities = _number(dict(enumerate(self._network.capacities)))
        while True:
            num_before = len({*ranks.values()}), len({*capacities.values()})
            if num_before[0] > WORTH_FOLDING * len(ranks):
                return None
            ways = {pair: self._describe_flow(flow, capacities) for pair, flow in self._ways.items()}
            ranks, capacities = (
                _number({rank: (ranks[rank], *self._look(rank, ranks, ways, capacities)) for rank in ranks}),
                self._split_capacities(ranks, capacities),
            )
            if (len({*ranks.values()}), len({*capacities.values()})) == num_before:
                return self._make(ranks, capacities)

    def _describe(self, rank: int) -> Hashable:
        """What a rank computes, and for how long."""
        costs, plan = self._costs, self._plan
        rows = tuple(microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank))
        ministages = plan.ministages_of_rank(rank)
        return (
            plan.group_of_rank[rank],
            rows,
            costs.context_bytes[rank] if costs.context_bytes else 0,
            bool(costs.is_cpu) and costs.is_cpu[rank],
            self._sizes[id(costs.sizes[rank])],
            tuple(costs.update_s.get((rank, i)) for i in ministages),
            tuple(
                (costs.forward_s[rank, i, n], costs.backward_s[rank, i, n])
                for i in ministages
                for n in sorted({*rows})
            ),
        )

    def _look(
        self,
        rank: int,
        ranks: Mapping[int, int],
        ways: Mapping[tuple[int, int], Hashable],
        capacities: Mapping[int, int],
    ) -> tuple[Hashable, ...]:
        """What a rank sees around it."""
        others = self._others[rank]
        return (
            tuple(ranks[other] for other in others),
            tuple((ways[rank, other], ways[other, rank]) for other in others),
            tuple(self._describe_flow(flow, capacities) for flow in self._copies[rank]),
        )

    def _describe_flow(self, flow: Flow, capacities: Mapping[int, int]) -> Hashable:
        return describe_flow(flow, self._costs, capacities)

    def _split_capacities(self, ranks: Mapping[int, int], capacities: Mapping[int, int]) -> dict[int, int]:
        """By what passes each of them."""
        passing: defaultdict[int, Counter[Hashable]] = defaultdict(Counter)
        for (source, target), flow in self._ways.items():
            for index in flow.capacities:
                passing[index]["way", ranks[source], ranks[target]] += 1
        for rank, copies in self._copies.items():
            for way, flow in enumerate(copies):
                for index in flow.capacities:
                    passing[index]["copy", ranks[rank], way] += 1
        for group, flow in self._rings:
            ring = self._describe_flow(flow, capacities)
            for index in flow.capacities:
                passing[index]["ring", group, ring] += 1
        return _number({i: (own, frozenset(passing[i].items())) for i, own in capacities.items()})

    def _make(self, ranks: Mapping[int, int], capacities: Mapping[int, int]) -> RankClasses | None:
        first, first_capacity = _name_first(ranks), _name_first(capacities)
        channels = _group(((first[a], first[b]), (a, b)) for a, b in self._ways)
        sizes = Counter(first.values())
        if any(len({len(pairs), sizes[a], sizes[b]}) > 1 for (a, b), pairs in channels.items()):
            return None
        return RankClasses(first, [first_capacity[i] for i in range(len(first_capacity))], channels)


def describe_flow(flow: Flow, costs: StepCosts, capacities: Mapping[int, int] | Sequence[int]) -> Hashable:
    """All that the time and the price of a flow depend on, capacities by class."""
    price = 0.0 if flow.egress is None else costs.egress_price_per_gb.get(flow.egress, 0.0)
    path = tuple(sorted(capacities[index] for index in flow.capacities))
    return flow.num_bytes, flow.max_rate, flow.latency_s, price, path


def _number(described: Mapping[int, Hashable]) -> dict[int, int]:
    """The same number for what is described alike."""
    numbers: dict[Hashable, int] = {}
    return {key: numbers.setdefault(own, len(numbers)) for key, own in described.items()}


def _name_first(classes: Mapping[int, int]) -> dict[int, int]:
    names: dict[int, int] = {}
    return {key: names.setdefault(own, key) for key, own in classes.items()}


def _group(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
