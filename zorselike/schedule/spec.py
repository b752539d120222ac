"""What a plan asks of its schedule, worked out once for all checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zorselike.plan.plan import Group, Plan
from zorselike.schedule.errors import ScheduleError


@dataclass(frozen=True)
class Demands:
    """A plan with the options that its schedule was built for (see `build`)."""

    plan: Plan
    trains: tuple[bool, ...]
    """Per ministage: whether it has a parameter that trains, and so reduces and steps."""
    ties: tuple[tuple[int, int], ...]
    """Owner and borrower of each tied weight; none if nothing trains."""
    lowest_backward: int
    """The first ministage that runs a backward; the number of ministages if none does."""
    defer_steps: bool
    masters: bool = False
    """Updates overwrite the shards, and so need not have them on the device before."""

    @property
    def has_backward(self) -> bool:
        return self.lowest_backward < self.plan.num_ministages

    @cached_property
    def tied(self) -> frozenset[int]:
        """Ministages that hold an end of a tied weight."""
        return frozenset(ministage for tie in self.ties for ministage in tie)

    @cached_property
    def owners(self) -> frozenset[int]:
        return frozenset(owner for owner, _ in self.ties)

    @cached_property
    def borrowers(self) -> frozenset[int]:
        return frozenset(borrower for _, borrower in self.ties)

    def group_of_rank(self, rank: int) -> Group:
        return self.plan.groups[self.plan.group_of_rank[rank]]

    def rows_of_rank(self, rank: int) -> tuple[tuple[int, int], ...]:
        """`[start, stop)` of each of the rank's microbatches, by its own number."""
        return tuple((own.start, own.stop) for own in self.plan.microbatches_of_rank(rank))

    def remote_neighbour(self, ministage: int, step: int) -> int | None:
        """The group that owns `ministage + step`, if there is such a ministage and another group owns it."""
        neighbour = ministage + step
        if not 0 <= neighbour < self.plan.num_ministages:
            return None
        group = self.plan.ministages[neighbour].group
        return None if group == self.plan.ministages[ministage].group else group


def work_out_demands(
    plan: Plan,
    *,
    trainable: Sequence[bool] | None,
    ties: Sequence[tuple[int, int]],
    forward_only: bool,
    defer_steps: bool,
    masters: bool = False,
) -> Demands:
    """The demands of `build`'s arguments; raises `ScheduleError` if they contradict each other."""
    trains = (True,) * plan.num_ministages if trainable is None else tuple(trainable)
    if len(trains) != plan.num_ministages:
        raise ScheduleError(
            f"trainable has {len(trains)} entries for {plan.num_ministages} ministages: give one for each"
        )
    for owner, borrower in ties:
        if not 0 <= owner < borrower < plan.num_ministages:
            raise ScheduleError(
                f"tie ({owner}, {borrower}) does not name two ministages of 0..{plan.num_ministages - 1}, "
                "the owner, which is the lower one, first"
            )
        if not (trains[owner] and trains[borrower]):
            raise ScheduleError(f"tie ({owner}, {borrower}) has a frozen end: leave frozen weights out")
    if forward_only:
        trains = (False,) * plan.num_ministages
    lowest = next((i for i, trained in enumerate(trains) if trained), plan.num_ministages)
    return Demands(
        plan=plan,
        trains=trains,
        ties=() if forward_only else tuple(sorted(set(ties))),
        lowest_backward=lowest,
        defer_steps=defer_steps,
        masters=masters,
    )
