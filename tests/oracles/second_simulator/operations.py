"""A discrete simulation of what ranks do: the bound that a measured step is held against.

Every rank is one thread that runs its operations in order. Sends cost the sender nothing and
arrive at once, or as the links between nodes allow; a collective completes when its last
member joins it, or as the links allow. Nothing else takes time: no Python, no optimizer.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """Computes for `seconds` once everything in `needs` is there; then `gives` is there."""

    seconds: float
    needs: tuple[Hashable, ...] = ()
    gives: Hashable | None = None


@dataclass(frozen=True)
class Send:
    """Starts to move `num_bytes` to `target`, where `token` is there on arrival."""

    token: Hashable
    target: int
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Meet:
    """Joins a collective; `token` is there when it is complete. `blocks`: waits for that."""

    token: Hashable
    members: tuple[int, ...]
    num_bytes: float = 0.0
    """Bytes that every edge of a ring through the members carries."""
    blocks: bool = True


Operation = Work | Send | Meet


@dataclass(frozen=True)
class Links:
    """What joins the nodes: one link for each ordered pair of nodes, shared by their ranks."""

    node_of_rank: tuple[int, ...]
    latency_s: float
    bytes_per_s: float

    def crosses(self, source: int, target: int) -> bool:
        return self.node_of_rank[source] != self.node_of_rank[target]

    def ring_edges(self, members: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Ordered node pairs that a ring through the members, in order of rank, crosses."""
        ordered = sorted(members)
        nodes = [self.node_of_rank[rank] for rank in ordered]
        return tuple((a, b) for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True) if a != b)


@dataclass(frozen=True)
class Outcome:
    """Seconds of one step: the whole, and what each rank computed in it."""

    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def busy_share(self) -> tuple[float, ...]:
        return tuple(busy / self.makespan_s for busy in self.busy_s)


class SimulatedDeadlockError(RuntimeError):
    """Every rank that is left waits for something that will never be there."""


@dataclass
class _Rank:
    operations: Sequence[Operation]
    position: int = 0
    joined: bool = False
    busy_s: float = 0.0


@dataclass
class _Simulation:
    ranks: list[_Rank]
    links: Links | None
    there_s: dict[Hashable, float] = field(default_factory=dict)
    waiting: dict[Hashable, list[int]] = field(default_factory=lambda: defaultdict(list))
    joined: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    link_free_s: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    ready: list[tuple[float, int, int]] = field(default_factory=list)
    _order: int = 0

    def run(self) -> float:
        for rank in range(len(self.ranks)):
            self._wake(0.0, rank)
        now_s = 0.0
        while self.ready:
            now_s, _, rank = heapq.heappop(self.ready)
            self._advance(rank, now_s)
        stuck = [
            f"rank {r} at {state.operations[state.position]}"
            for r, state in enumerate(self.ranks)
            if state.position < len(state.operations)
        ]
        if stuck:
            raise SimulatedDeadlockError("; ".join(stuck))
        return now_s

    def _wake(self, time_s: float, rank: int) -> None:
        self._order += 1
        heapq.heappush(self.ready, (time_s, self._order, rank))

    def _advance(self, rank: int, now_s: float) -> None:
        """Runs operations until one takes time or has to wait."""
        state = self.ranks[rank]
        while state.position < len(state.operations):
            match state.operations[state.position]:
                case Work(seconds, needs, gives):
                    if self._blocked(rank, needs, now_s):
                        return
                    state.position += 1
                    state.busy_s += seconds
                    if gives is not None:
                        self._provide(gives, now_s + seconds)
                    if seconds > 0:
                        self._wake(now_s + seconds, rank)
                        return
                case Send(token, target, num_bytes):
                    state.position += 1
                    self._provide(token, self._arrival_s(rank, target, num_bytes, now_s))
                case Meet(token, members, num_bytes, blocks):
                    if not state.joined:
                        self._join(token, members, num_bytes, now_s)
                        state.joined = True
                    if blocks and self._blocked(rank, (token,), now_s):
                        return
                    state.joined = False
                    state.position += 1

    def _blocked(self, rank: int, needs: tuple[Hashable, ...], now_s: float) -> bool:
        """Whether something is missing; then the rank is woken when it is there."""
        latest_s = now_s
        for token in needs:
            if token not in self.there_s:
                self.waiting[token].append(rank)
                return True
            latest_s = max(latest_s, self.there_s[token])
        if latest_s > now_s:
            self._wake(latest_s, rank)
        return latest_s > now_s

    def _provide(self, token: Hashable, time_s: float) -> None:
        self.there_s[token] = time_s
        for rank in self.waiting.pop(token, ()):
            self._wake(time_s, rank)

    def _arrival_s(self, source: int, target: int, num_bytes: float, now_s: float) -> float:
        if self.links is None or not self.links.crosses(source, target):
            return now_s
        edge = (self.links.node_of_rank[source], self.links.node_of_rank[target])
        return self._reserve(edge, num_bytes, now_s) + self.links.latency_s

    def _join(self, token: Hashable, members: tuple[int, ...], num_bytes: float, now_s: float) -> None:
        self.joined[token] += 1
        if self.joined[token] < len(members):
            return
        done_s = now_s
        if self.links is not None:
            for edge in self.links.ring_edges(members):
                latency_s = (len(members) - 1) * self.links.latency_s
                done_s = max(done_s, self._reserve(edge, num_bytes, now_s) + latency_s)
        self._provide(token, done_s)

    def _reserve(self, edge: tuple[int, int], num_bytes: float, now_s: float) -> float:
        """When the link has carried the bytes, behind everything given to it before."""
        assert self.links is not None
        self.link_free_s[edge] = max(now_s, self.link_free_s[edge]) + num_bytes / self.links.bytes_per_s
        return self.link_free_s[edge]


def simulate_operations(operations: Mapping[int, Sequence[Operation]], links: Links | None = None) -> Outcome:
    """Runs every rank's operations; raises `SimulatedDeadlockError` if they cannot all end."""
    simulation = _Simulation([_Rank(operations[rank]) for rank in sorted(operations)], links)
    makespan_s = simulation.run()
    return Outcome(makespan_s, tuple(rank.busy_s for rank in simulation.ranks))
