"""A member's part in one meeting, and the numbers that all members of a job share."""

from __future__ import annotations

from dataclasses import dataclass, field

from zorselike.elastic.contract import Member
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.roster import Roster


@dataclass(frozen=True)
class Settings:
    """Numbers that all members of a job share."""

    fan_out: int = 128
    """Members below each in the tree by which messages travel."""
    silence_s: float = 10.0
    """As long as the links allow; a member cut off from its leader tries others for three times this."""
    phase_limit_s: float = 600.0
    """How long drawing, forming or filling may take until who is not ready counts as hung."""
    arrivals_s: float = 0.5
    """How long an arrival waits for others that come with it."""
    start_limit_s: float = 600.0
    """How long the founder waits for the members that the job starts with."""
    num_attempts: int = 8
    """Decisions in one meeting, each refused by some member, before it is given up."""
    word_s: float = 2.0
    """How long a leader that was out of touch waits for the nannies of members that have ended."""
    end_s: float = 2.0
    """How long a member waits for those below it to say that they heard of the job's end."""


@dataclass
class Round:
    """This member's part in one meeting."""

    meet: msg.Meet
    parent: str | None
    children: list[Member]
    phase: str = ""
    attempt: int = 0
    awaited: set[str] = field(default_factory=set)
    is_own_missing: bool = True
    is_answered: bool = False
    gathered: msg.Gathered = field(default_factory=msg.Gathered)
    form: msg.Form | None = None

    @property
    def number(self) -> int:
        return self.meet.number

    @property
    def book(self) -> Roster:
        return self.meet.book

    def expect(self, phase: str, attempt: int) -> None:
        """From here on answers to this phase are gathered, one from each child and this member's own."""
        self.phase, self.attempt = phase, attempt
        self.awaited = {child.id for child in self.children}
        self.is_own_missing, self.is_answered = True, False
        self.gathered = msg.Gathered()

    def expects(self, number: int, phase: str, attempt: int) -> bool:
        return (self.number, self.phase, self.attempt) == (number, phase, attempt)

    def add(self, child: str, results: msg.Results) -> None:
        if child in self.awaited:
            self.awaited.discard(child)
            self.gathered.add(results)

    def add_own(self, results: msg.Results) -> None:
        if self.is_own_missing:
            self.is_own_missing = False
            self.gathered.add(results)

    def drop(self, child: str) -> None:
        """Expects nothing of a child that is gone."""
        self.children = [other for other in self.children if other.id != child]
        self.awaited.discard(child)

    def give_up(self, me: str) -> None:
        """Expects nothing more of anybody, and notes who is late."""
        if not self.is_answered:
            late = (*self.awaited, *([me] if self.is_own_missing else ()))
            self.awaited.clear()
            self.is_own_missing = False
            self.gathered.add(msg.Results(late=late))

    def is_complete(self) -> bool:
        """Whether all answers are there; says so once."""
        if self.is_answered or self.awaited or self.is_own_missing:
            return False
        self.is_answered = True
        return True
