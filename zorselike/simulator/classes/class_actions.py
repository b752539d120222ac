"""Lists of actions of the first rank of each class, and of all ranks by theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action
from zorselike.simulator.classes.rank_classes import RankClasses


def put_firsts_for_peers(
    actions: Mapping[int, Sequence[Action]], classes: RankClasses
) -> dict[int, list[Action]]:
    """The lists as if the first ranks of classes sent to each other."""
    first = classes.first
    return {rank: [_put_first(action, first) for action in own] for rank, own in actions.items()}


def _put_first(action: Action, first: Mapping[int, int]) -> Action:
    peer = action.peer
    if peer is None or first[peer] == peer:
        return action
    return Action(action.kind, action.ministage, action.microbatch, first[peer], action.start, action.stop)


class ActionsByClass(Mapping[int, Sequence[Action]]):
    """All ranks' actions: those of their class, with each rank's own peers and rows."""

    def __init__(self, plan: Plan, firsts: Mapping[int, Sequence[Action]], classes: RankClasses) -> None:
        """`firsts`: lists of first ranks, with their own peers."""
        self._plan, self._firsts, self._classes = plan, firsts, classes
        self._peers = {(rank, b): peer for (_, b), pairs in classes.channels.items() for rank, peer in pairs}

    def __getitem__(self, rank: int) -> Sequence[Action]:
        actions = self._firsts[self._classes.first[rank]]
        return actions if rank in self._firsts else _MemberActions(self, rank, actions)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._classes.first))

    def __len__(self) -> int:
        return len(self._classes.first)

    def adapt(self, rank: int, action: Action) -> Action:
        """An action of the first of its class as this rank has it."""
        kind, ministage, m, peer, start, stop = (
            action.kind,
            action.ministage,
            action.microbatch,
            action.peer,
            action.start,
            action.stop,
        )
        if peer is None or m is None or start is None or stop is None:
            return action
        first = self._classes.first
        microbatches = (self._plan.microbatches_of_rank(own) for own in (rank, first[rank]))
        own_start, first_start = (own[m].start for own in microbatches)
        offset = own_start - first_start
        return Action(kind, ministage, m, self._peers[rank, first[peer]], start + offset, stop + offset)


class _MemberActions(Sequence[Action]):
    """The list of a rank that is not the first of its class."""

    def __init__(self, lists: ActionsByClass, rank: int, actions: Sequence[Action]) -> None:
        self._lists, self._rank, self._actions = lists, rank, actions

    @overload
    def __getitem__(self, position: int) -> Action: ...
    @overload
    def __getitem__(self, position: slice) -> list[Action]: ...
    def __getitem__(self, position: int | slice) -> Action | list[Action]:
        if isinstance(position, slice):
            return [self._lists.adapt(self._rank, action) for action in self._actions[position]]
        return self._lists.adapt(self._rank, self._actions[position])

    def __len__(self) -> int:
        return len(self._actions)
