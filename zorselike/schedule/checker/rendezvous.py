"""Runs all lists together: do they end, and where must sends buffer?

Where ranks get stuck does not depend on timing, since each action waits for fixed others: one run
proves all runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import SENDS, Action, Edge, edges_of_rank
from zorselike.schedule.checker.channels import Channel
from zorselike.schedule.checker.steps import NONE
from zorselike.schedule.checker.waits import Place, Waits
from zorselike.schedule.errors import error_at


class Execution:
    """A run of all lists, as far as they get."""

    def __init__(self, waits: Waits, actions: Mapping[int, Sequence[Action]], *, rendezvous: bool) -> None:
        """`rendezvous`: whether a send waits until its receive is posted, except on `buffered` edges."""
        self._waits, self._actions, self._rendezvous = waits, actions, rendezvous
        self.buffered: set[Channel] = set()
        self.arrivals: list[Place] = []
        """Actions in an order in which they may begin."""
        self._missing = [len(members) for members in waits.members]
        """Per event: arrivals still to come."""
        self._at = dict.fromkeys(actions, 0)
        self._num_arrived = dict.fromkeys(actions, 0)
        """Per rank: actions that have arrived; one more than `_at` during an action's last waits."""
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        self._ready = deque(sorted(actions))

    def run(self) -> None:
        """Advances until every rank has ended or waits."""
        while self._ready:
            self._advance(self._ready.popleft())

    def stuck(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in sorted(self._at) if self._at[rank] < len(self._actions[rank])]

    def buffer(self, edges: Sequence[Channel]) -> None:
        """Lets sends on these edges return at once, so that their ranks continue."""
        self.buffered.update(edges)
        for rank in self.stuck():
            if self.blocked_edge(rank) in edges:
                self._waiting[self._waits.posted[rank][self._at[rank]]].remove(rank)
                self._ready.append(rank)

    def _advance(self, rank: int) -> None:
        before, arrives = self._waits.before[rank], self._waits.arrives[rank]
        after, posted = self._waits.after[rank], self._waits.posted[rank]
        missing = self._missing
        for at in range(self._at[rank], len(before)):
            self._at[rank] = at
            if self._num_arrived[rank] == at:
                if before[at] and self._wait(rank, before[at]):
                    return
                self._num_arrived[rank] = at + 1
                self.arrivals.append((rank, at))
                if arrives[at] != NONE:
                    self._arrive(arrives[at])
            if after[at] and self._wait(rank, after[at]):
                return
            met = posted[at] == NONE or not missing[posted[at]]
            if self._rendezvous and not met and self._edge(rank, at) not in self.buffered:
                self._waiting[posted[at]].append(rank)
                return
        self._at[rank] = len(before)

    def _wait(self, rank: int, events: Sequence[int]) -> bool:
        """Whether the rank must wait for one of the events; it is woken when that one is complete."""
        for event in events:
            if self._missing[event]:
                self._waiting[event].append(rank)
                return True
        return False

    def _arrive(self, event: int) -> None:
        self._missing[event] -= 1
        if not self._missing[event] and event in self._waiting:
            self._ready.extend(self._waiting.pop(event))

    # -- who waits for whom ----------------------------------------------------------------

    def _edge(self, rank: int, position: int) -> Channel:
        action = self._actions[rank][position]
        assert action.peer is not None
        return Channel.of(rank, action.kind, action.peer)

    def blocked_edge(self, rank: int) -> Channel | None:
        """The edge on which a stuck rank waits to send, if that is what it waits for."""
        position = self._at[rank]
        if self._num_arrived[rank] == position or self._actions[rank][position].kind not in SENDS:
            return None
        return self._edge(rank, position)

    def waits_for(self, rank: int) -> dict[int, int]:
        """Whom a stuck rank waits for, and the position of the action that it waits for there."""
        position = self._at[rank]
        if self._num_arrived[rank] == position:
            events = self._waits.before[rank][position]
        elif self.blocked_edge(rank) is not None:
            events = (self._waits.posted[rank][position],)
        else:
            events = self._waits.after[rank][position]
        found: dict[int, int] = {}
        for event in events:
            if self._missing[event]:
                for other, due in self._waits.members[event]:
                    if self._num_arrived[other] <= due:
                        found[other] = min(due, found.get(other, due))
        return found

    def find_cycle(self, start: int) -> list[int] | None:
        """The shortest way along "waits for" from a stuck rank back to itself; None if there is none."""
        came_from: dict[int, int] = {}
        queue = deque([start])
        while queue:
            rank = queue.popleft()
            for other in sorted(self.waits_for(rank)):
                if other == start:
                    return _walk_back(came_from, start, rank)
                if other not in came_from:
                    came_from[other] = rank
                    queue.append(other)
        return None

    def describe(self, cycle: Sequence[int]) -> str:
        """A cycle in words, one rank a line."""
        lines = []
        for rank, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            mine = self._actions[rank][self._at[rank]]
            due = self._actions[other][self.waits_for(rank)[other]]
            here = self._actions[other][self._at[other]]
            lines.append(f"rank {rank} at {mine} waits for {due} of rank {other}, which is at {here}")
        return "\n".join(lines)

    def places(self, cycle: Sequence[int]) -> list[Place]:
        """Where the ranks of a cycle stand."""
        return [(rank, self._at[rank]) for rank in cycle]


def _walk_back(came_from: Mapping[int, int], start: int, last: int) -> list[int]:
    cycle = [last]
    while cycle[-1] != start:
        cycle.append(came_from[cycle[-1]])
    return cycle[::-1]


def check_ends(waits: Waits, actions: Mapping[int, Sequence[Action]]) -> list[Place]:
    """Proves that all ranks end if sends buffer, and gives an order in which actions may begin; raises
    `ScheduleError` with the cycle if not."""
    execution = Execution(waits, actions, rendezvous=False)
    execution.run()
    if stuck := execution.stuck():
        cycle = _first_cycle(execution, stuck)
        raise error_at(
            actions,
            f"ranks {sorted(cycle)} wait for each other forever, even if sends buffer:\n"
            f"{execution.describe(cycle)}",
            *execution.places(cycle),
        )
    return execution.arrivals


def find_buffered_edges(
    plan: Plan, waits: Waits, actions: Mapping[int, Sequence[Action]], buffered: Sequence[Channel] = ()
) -> tuple[frozenset[Channel], tuple[str, ...]]:
    """The edges that must buffer where a send otherwise waits for its receive, beside those that do anyway,
    and each cycle in words.

    Of a cycle the wrap-around edges are taken if there are any, that is forward to a group
    earlier in the pipeline or backward to a later one; else all edges on which its ranks send.
    `check_ends` must have passed.
    """
    execution = Execution(waits, actions, rendezvous=True)
    execution.buffer(buffered)
    cycles = []
    execution.run()
    while stuck := execution.stuck():
        cycle = _choose_cycle(plan, execution, stuck)
        edges = [edge for rank in cycle if (edge := execution.blocked_edge(rank)) is not None]
        wrapping = [edge for edge in edges if wraps_around(plan, edge)]
        cycles.append(execution.describe(cycle))
        execution.buffer(wrapping or edges)
        execution.run()
    return frozenset(execution.buffered), tuple(cycles)


def wraps_around(plan: Plan, edge: Edge) -> bool:
    """Whether an edge leads from a later group to an earlier one (gradients: the other way)."""
    *ends, direction = edge
    source, target = (plan.group_of_rank[end] for end in ends)
    return source > target if direction == "F" else source < target


def find_wrapping(plan: Plan, rank: int, actions: Iterable[Action]) -> frozenset[Edge]:
    """Edges of a rank that wrap around: between GPUs they go over host memory, wherever there is a cycle."""
    return frozenset(edge for edge in edges_of_rank(rank, actions) if wraps_around(plan, edge))


def _choose_cycle(plan: Plan, execution: Execution, stuck: Sequence[int]) -> list[int]:
    """A cycle through a wrap-around send if there is one, else any."""

    def is_other(rank: int) -> bool:
        edge = execution.blocked_edge(rank)
        return edge is None or not wraps_around(plan, edge)

    return _first_cycle(execution, sorted(stuck, key=is_other))


def _first_cycle(execution: Execution, ranks: Sequence[int]) -> list[int]:
    cycle = next(filter(None, map(execution.find_cycle, ranks)), None)
    assert cycle is not None, f"ranks {ranks} wait for nothing that is still to come"
    return cycle
