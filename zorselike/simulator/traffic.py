"""Flows in time: how much of each has moved, and when it will be over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappush

from zorselike.cost.network import Flow
from zorselike.simulator.flows import FlowShares

Event = tuple[float, int]
"""Seconds, and what happens then: a task (0 and more) is over, or a watch (below 0) ends."""


class Traffic:
    """All flows in progress.

    Flows whose rates change together are watched together: one event, for the first of them to be over,
    instead of one for each. When it comes, those that are left are watched anew. A flow whose rate changes
    again moves to another watch.
    """

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
        self._watch: list[int] = []
        """The number of the watch that it is in."""
        self._watched: dict[int, Sequence[int]] = {}
        """By watch: flows that were in it at first."""
        self._num_watches = 0
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
            number = self._enter(task, flow)
            if flow.latency_s > 0:
                self._due[number] = now + flow.latency_s
                self._begin_watch((number,), self._due[number])
            else:
                self._move(number, now)
        if num_flows > 1:
            self._num_left[task] = num_flows
        return num_flows == 0

    def _enter(self, task: int, flow: Flow) -> int:
        if self._free:
            number = self._free.pop()
            self._task[number], self._flow[number] = task, flow
            self._left[number], self._moves[number] = flow.num_bytes, False
            return number
        self._task.append(task)
        self._flow.append(flow)
        self._left.append(flow.num_bytes)
        self._since.append(0.0)
        self._due.append(0.0)
        self._moves.append(False)
        self._watch.append(-1)
        return len(self._task) - 1

    def _move(self, number: int, now: float) -> None:
        """The latency is over, and bytes begin to move."""
        flow = self._flow[number]
        self._moves[number] = True
        self._since[number] = now
        self._shares.add(number, flow.capacities, flow.max_rate)
        rate = self._shares.rates[number]
        if rate > 0:
            due = self._due[number] = now + self._left[number] / rate
            self._begin_watch((number,), due)
        else:  # Until it is settled.
            self._due[number] = math.inf
            self._watch[number] = -1

    @property
    def is_settled(self) -> bool:
        """Whether all rates are what they are to be from now on."""
        return not self._shares.unsettled

    def settle(self, now: float) -> None:
        """Before the time goes on: finds the rates after all that happened now."""
        changed = self._shares.settle()
        if changed:
            self._update(changed, now)

    def _update(self, flows: Sequence[int], now: float) -> None:
        """These flows have other rates from now on."""
        rates, left, due, since = self._shares.rates, self._left, self._due, self._since
        first = math.inf
        for number in flows:
            # What has moved since, from what was due: the shares know only the new rate.
            end, begin = due[number], since[number]
            if begin < now and end < math.inf:
                left[number] *= (end - now) / (end - begin)
            since[number] = now
            rate = rates[number]
            end = due[number] = now + left[number] / rate if rate > 0 else math.inf
            if end < first:
                first = end
        if first < math.inf:
            self._begin_watch(flows, first)

    def _begin_watch(self, flows: Sequence[int], first: float) -> None:
        """Of these the first one is over at `first`."""
        number = self._num_watches = self._num_watches + 1
        watch = self._watch
        for flow in flows:
            watch[flow] = number
        self._watched[number] = flows
        heappush(self._heap, (first, -number))

    def handle(self, now: float, code: int) -> Sequence[int]:
        """A watch ends; returns the tasks that are over."""
        watch, due = self._watch, self._due
        flows = [flow for flow in self._watched.pop(-code) if watch[flow] == -code]
        if not flows:
            return ()
        tasks: list[int] = []
        others: list[int] = []
        for flow in flows:
            if due[flow] > now:
                others.append(flow)
            elif not self._moves[flow] and self._left[flow] > 0:
                self._move(flow, now)
            else:
                if self._moves[flow]:
                    self._shares.remove(flow)
                self._leave(flow, tasks)
        if others:
            self._begin_watch(others, min(due[flow] for flow in others))
        return tasks

    def _leave(self, number: int, tasks: list[int]) -> None:
        """A flow is over; its task is added to `tasks` if it was the last one of it."""
        self._watch[number] = -1
        self._free.append(number)
        task = self._task[number]
        count = self._num_left.get(task, 1) - 1
        if count:
            self._num_left[task] = count
        else:
            self._num_left.pop(task, None)
            tasks.append(task)
