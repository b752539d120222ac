"""Flows in time: how much of each has moved, and when it will be over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappush

from zorselike.cost.network import Flow
from zorselike.simulator.flows import FlowShares

Event = tuple[float, int]
"""Seconds, and what happens then: a task (0 and more) or a flow (below 0) is over."""


class Traffic:
    """All flows in progress. Every change of a rate puts a new end on the heap; an end that is not the
    flow's last one is stale."""

    def __init__(self, capacities: Sequence[float], bundles: Sequence[tuple[Flow, ...]], heap: list[Event]):
        """`bundles`: flows that start together, as tasks refer to them."""
        self._shares = FlowShares(capacities)
        self._bundles = bundles
        self._heap = heap
        self._task: list[int] = []
        """Whose flow it is; by flow in progress, whose numbers are used again."""
        self._flow: list[Flow] = []
        self._left: list[float] = []
        """Bytes, at `_since`."""
        self._since: list[float] = []
        self._due: list[float] = []
        self._moves: list[bool] = []
        """Whether its latency is over."""
        self._free: list[int] = []
        self._num_left: dict[int, int] = {}
        """By task: flows in progress, where there are several."""

    def start(self, now: float, task: int, bundle: int) -> bool:
        """A task's flows begin; returns whether all are over at once."""
        num_flows = 0
        for flow in self._bundles[bundle]:
            if flow.num_bytes <= 0 and flow.latency_s <= 0:
                continue
            num_flows += 1
            number = self._enter(task, flow, now)
            if flow.latency_s > 0:
                self._due[number] = now + flow.latency_s
                heappush(self._heap, (now + flow.latency_s, -1 - number))
            else:
                self._move(number, now)
        if num_flows > 1:
            self._num_left[task] = num_flows
        return num_flows == 0

    def _enter(self, task: int, flow: Flow, now: float) -> int:
        if self._free:
            number = self._free.pop()
            self._task[number], self._flow[number] = task, flow
            self._left[number], self._since[number], self._moves[number] = flow.num_bytes, now, False
            return number
        self._task.append(task)
        self._flow.append(flow)
        self._left.append(flow.num_bytes)
        self._since.append(now)
        self._due.append(now)
        self._moves.append(False)
        return len(self._task) - 1

    def _move(self, number: int, now: float) -> None:
        """The latency is over, and bytes begin to move."""
        flow = self._flow[number]
        self._moves[number] = True
        self._since[number] = now
        changed = self._shares.add(number, flow.capacities, flow.max_rate)
        if changed:
            self._reschedule(changed, now)
        self._schedule(number, now)

    def _schedule(self, number: int, now: float) -> None:
        rate = self._shares.rates[number]
        due = now + self._left[number] / rate if rate > 0 else math.inf
        self._due[number] = due
        if due < math.inf:
            heappush(self._heap, (due, -1 - number))

    def _reschedule(self, flows: Sequence[int], now: float) -> None:
        """Their rates have changed."""
        for number in flows:
            # The rate so far, from what was due: the shares know only the new one.
            due, since = self._due[number], self._since[number]
            if due < math.inf:
                span = due - since
                self._left[number] *= (due - now) / span if span > 0 else 0.0
            self._since[number] = now
            self._schedule(number, now)

    def handle(self, now: float, number: int) -> int | None:
        """An event of a flow; returns the task that it ends, if it ends one."""
        if self._due[number] != now:
            return None
        if not self._moves[number]:
            if self._left[number] > 0:
                self._move(number, now)
                return None
        else:
            changed = self._shares.remove(number)
            if changed:
                self._reschedule(changed, now)
        self._due[number] = -1.0
        self._free.append(number)
        task = self._task[number]
        count = self._num_left.get(task, 1) - 1
        if count:
            self._num_left[task] = count
            return None
        self._num_left.pop(task, None)
        return task
