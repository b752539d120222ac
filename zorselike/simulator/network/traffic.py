"""Flows over time: how much of each has moved, and when it will end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from zorselike.cost.network import Flow
from zorselike.simulator.network.flows import FlowShares

Event = tuple[float, int]
"""Seconds, and what ends then: a task (0 and more), or in the traffic (below 0) the first flow of a kind, or
the latency of a flow."""


class Traffic:
    """All flows in progress.

    Flows of one kind have the same rate, whenever they began. So one count of bytes serves all of them, and a
    flow ends when the count has grown by the flow's bytes: a change of rates costs one new event per kind,
    for its first flow to end, not one per flow.
    """

    def __init__(self, capacities: Sequence[float], bundles: Sequence[tuple[Flow, ...]], heap: list[Event]):
        """`bundles`: flows that start together, as indexed by tasks."""
        self._shares = FlowShares(capacities)
        self._bundles = [
            tuple(
                (self._shares.find_kind(flow.capacities, flow.max_rate), flow.num_bytes, flow.latency_s)
                for flow in bundle
                if flow.num_bytes > 0 or flow.latency_s > 0
            )
            for bundle in bundles
        ]
        """Flows of each bundle: kind, bytes, seconds of latency."""
        self._heap = heap
        self._num_kinds = len(self._shares.rates)
        self._moved = [0.0] * self._num_kinds
        """By kind: bytes moved until `_since` by a flow that began when the first of these did."""
        self._since = [0.0] * self._num_kinds
        self._rates = [0.0] * self._num_kinds
        """By kind: bytes per second from `_since` on."""
        self._due = [math.inf] * self._num_kinds
        """By kind: when the first of its flows ends; an event at another time is void."""
        self._queues: list[list[tuple[float, int]]] = [[] for _ in range(self._num_kinds)]
        """By kind: a heap of its flows as (count of bytes at which it ends, task)."""
        self._stale: set[int] = set()
        """Kinds whose flows started or ended since all was settled."""
        self._waiting: dict[int, tuple[int, float, int]] = {}
        """Kind, bytes and task of flows still in their latency, by the code of its event."""
        self._num_waits = 0
        self._num_left: dict[int, int] = {}
        """Number of flows in progress of each task that has several."""

    def start(self, now: float, task: int, bundle: int) -> bool:
        """Starts a task's flows; returns whether all end at once."""
        flows = self._bundles[bundle]
        for kind, num_bytes, latency_s in flows:
            if latency_s > 0:
                self._num_waits += 1
                code = -self._num_kinds - self._num_waits
                self._waiting[code] = (kind, num_bytes, task)
                heappush(self._heap, (now + latency_s, code))
            else:
                self._move(now, kind, num_bytes, task)
        if len(flows) > 1:
            self._num_left[task] = len(flows)
        return not flows

    def _move(self, now: float, kind: int, num_bytes: float, task: int) -> None:
        """Starts moving a flow's bytes, after its latency."""
        queue = self._queues[kind]
        if queue:
            self._advance(now, kind)
        else:
            # From 0 again, for round-off grows with the count.
            self._moved[kind], self._since[kind] = 0.0, now
        heappush(queue, (self._moved[kind] + num_bytes, task))
        self._shares.add(kind)
        self._stale.add(kind)

    def _advance(self, now: float, kind: int) -> None:
        """Updates a kind's count of bytes."""
        since = self._since[kind]
        if since < now:
            self._moved[kind] += (now - since) * self._rates[kind]
            self._since[kind] = now

    @property
    def is_settled(self) -> bool:
        """Whether rates are up to date and every kind has its event."""
        return not self._stale and not self._shares.unsettled

    def settle(self, now: float) -> None:
        """Updates rates and events after all that happened now, before time advances."""
        stale, due, queues, rates = self._stale, self._due, self._queues, self._shares.rates
        stale.update(self._shares.settle())
        for kind in stale:
            if not queues[kind]:
                continue
            self._advance(now, kind)
            rate = self._rates[kind] = rates[kind]
            first = now + (queues[kind][0][0] - self._moved[kind]) / rate if rate > 0 else math.inf
            if first != due[kind]:
                due[kind] = first
                if first < math.inf:
                    heappush(self._heap, (first, -1 - kind))
        stale.clear()

    def handle(self, now: float, code: int) -> Sequence[int]:
        """Handles an event of the traffic; returns the tasks that end."""
        tasks: list[int] = []
        kind = -1 - code
        if kind >= self._num_kinds:
            kind, num_bytes, task = self._waiting.pop(code)
            if num_bytes > 0:
                self._move(now, kind, num_bytes, task)
            else:
                self._end_flow(task, tasks)
        elif self._due[kind] == now:
            self._end_first(now, kind, tasks)
        return tasks

    def _end_first(self, now: float, kind: int, tasks: list[int]) -> None:
        """Ends the first flows of a kind; adds the tasks that end to `tasks`."""
        queue = self._queues[kind]
        moved = self._moved[kind] = queue[0][0]
        self._since[kind], self._due[kind] = now, math.inf
        while queue and queue[0][0] <= moved:
            self._shares.remove(kind)
            self._end_flow(heappop(queue)[1], tasks)
        self._stale.add(kind)

    def _end_flow(self, task: int, tasks: list[int]) -> None:
        """Ends a flow; adds its task to `tasks` if it was its last flow."""
        count = self._num_left.get(task, 1) - 1
        if count:
            self._num_left[task] = count
        else:
            self._num_left.pop(task, None)
            tasks.append(task)
