"""What a schedule is built for, and proven against: a plan with the options that change its actions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from zorselike.plan.pieces import positions_of
from zorselike.plan.plan import Group, Plan
from zorselike.schedule.errors import ScheduleError

TiedMinistages = tuple[int, int]
"""Ministages of a tied weight: its owner (the lowest) and one borrower."""


@dataclass(frozen=True)
class ScheduleSpec:
    """A plan and the options of its schedule; raises `ScheduleError` if they contradict each other."""

    plan: Plan
    _: KW_ONLY
    trainable: tuple[bool, ...] | None = None
    """Per ministage, whether it has a parameter that trains (None: all have). Ministages below the lowest
    such one run no backward, frozen ones above it neither reduce nor step."""
    ties: tuple[TiedMinistages, ...] = ()
    """Tied weights that train and span two ministages."""
    forward_only: bool = False
    """An evaluation in place of an optimizer step."""
    defer_steps: bool = False
    """All updates wait for the global gradient norm."""
    masters: bool = False
    """Updates change fp32 master weights and overwrite the shards, which a step need not load for that."""
    sequence_length: int | None = None
    """Tokens of a row, where other than the plan's. The ranks of a tensor-parallel replica share them."""

    def __post_init__(self) -> None:
        num_ministages, trainable = self.plan.num_ministages, self.trainable
        if trainable is not None and len(trainable) != num_ministages:
            raise ScheduleError(
                f"trainable has {len(trainable)} entries for {num_ministages} ministages: give one for each"
            )
        for owner, borrower in self.ties:
            if not 0 <= owner < borrower < num_ministages:
                raise ScheduleError(
                    f"tie ({owner}, {borrower}) does not name two ministages of 0..{num_ministages - 1}, "
                    "the owner, which is the lower one, first"
                )
            if trainable is not None and not (trainable[owner] and trainable[borrower]):
                raise ScheduleError(f"tie ({owner}, {borrower}) has a frozen end: leave frozen weights out")
        if self.plan.has_replicas:
            most = max(group.degree for group in self.plan.groups)
            if self.num_positions < most:
                raise ScheduleError(
                    f"rows of {self.num_positions} tokens (sequence_length) are too short for a replica of "
                    f"{most} ranks, each of which needs one: give longer rows or smaller replicas"
                )

    @property
    def num_positions(self) -> int:
        """Of a row; 0 if nobody said, which a plan without replicas does not ask."""
        return self.sequence_length or self.plan.sequence_length or 0

    def positions_of(self, rank: int) -> tuple[int, int]:
        """Positions `[first, last)` of every row that a rank has between layers."""
        return positions_of(self.plan.replica_of(rank), rank, self.num_positions)

    @cached_property
    def trains(self) -> tuple[bool, ...]:
        """Per ministage, whether it reduces and steps."""
        if self.forward_only:
            return (False,) * self.plan.num_ministages
        return self.trainable or (True,) * self.plan.num_ministages

    @cached_property
    def lowest_backward(self) -> int:
        """The first ministage that runs a backward; the number of ministages if none does."""
        return next((i for i, trains in enumerate(self.trains) if trains), self.plan.num_ministages)

    @property
    def has_backward(self) -> bool:
        return self.lowest_backward < self.plan.num_ministages

    @cached_property
    def tied(self) -> frozenset[int]:
        """Ministages that hold an end of a tied weight."""
        return self.owners | self.borrowers

    @cached_property
    def owners(self) -> frozenset[int]:
        """Ministages that own a tied weight."""
        return frozenset(owner for owner, _ in self.ties if not self.forward_only)

    @cached_property
    def borrowers(self) -> frozenset[int]:
        """Ministages that borrow a tied weight."""
        return frozenset(borrower for _, borrower in self.ties if not self.forward_only)

    def group_of_rank(self, rank: int) -> Group:
        return self.plan.groups[self.plan.group_of_rank[rank]]

    def num_computed(self, rank: int) -> int:
        """How many microbatches of a ministage a rank computes: those it has, and with ZeRO 3 dummies up to
        the most of its group."""
        group = self.group_of_rank(rank)
        return group.max_microbatches if group.zero == 3 else len(group.microbatches_by_rank[rank])

    def remote_neighbour(self, ministage: int, step: int) -> int | None:
        """The group of `ministage + step`, if there is such a ministage and another group has it."""
        neighbour = ministage + step
        if not 0 <= neighbour < self.plan.num_ministages:
            return None
        group = self.plan.ministages[neighbour].group
        return None if group == self.plan.ministages[ministage].group else group
