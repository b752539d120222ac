"""What membership and the running pipeline know of each other.

Membership (`membership`, `meeting`) decides who belongs to the job and leads everybody from one generation
to the next; what a generation computes is not its business: it carries offers and decisions as JSON. The
pipeline (`pipeline`, `switch`, `replicas`) makes offers, decides in the leader's process, runs generations.

    RUN(g, k) -> LOST | NOTICE | ARRIVAL | CHANGE
              -> MEET -> DECIDE + PREPARE -> ABANDON -> FORM(n) -> FILL -> RUN(n, k')

A failure anywhere restarts from MEET with the next number. A generation has the number of the meeting that
made it, so that numbers grow and may leave some out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from zorselike.errors import ClusterError

Json = dict[str, Any]
"""What passes between members: objects of strings, numbers, lists and objects."""

Reason = Literal["start", "loss", "notice", "arrival", "change"]
"""Why a generation begins; a change is another plan for the same members."""


@dataclass(frozen=True)
class Member:
    """One process of the job, for as long as it lives."""

    id: str
    """Made by the process at its start, never used again."""
    number: int
    """In the order of joining; the living member with the lowest number leads. -1 until the first meeting."""
    host: str
    """Where the others reach its control port."""
    port: int
    node: str
    local_rank: int
    device_type: str
    """As the catalogue or the plan names it; 'cpu' without a GPU."""
    memory_bytes: int
    """Of the device."""


@dataclass(frozen=True)
class Generation:
    """One unbroken run of the same members under one plan."""

    number: int
    members: tuple[Member, ...]
    """All who live and stay, in the order of their numbers."""
    leaving: tuple[Member, ...]
    """Take part until it is filled, to give what they have, and then end."""
    ranks: tuple[str, ...]
    """Ids by rank of the process group, among them those of leaving members if the decision needs them there.
    Who is not among them is a spare and waits; it too says formed and filled."""
    host: str
    """Of the store by which the ranks meet; the leader keeps it."""
    port: int
    reason: Reason
    decision: Json
    """The leader's, as `Worker.decide` gave it."""
    after_step: int | None
    """The last step of the generation before, where that ended as planned; None after a loss and at start."""


class LeftError(ClusterError):
    """This member has left, as it or its node was asked to or as all have, or the job's last step is done."""


class StateLostError(ClusterError):
    """The job has run, and nobody has its state any more."""


class GenerationOver(Exception):
    """Raised on the thread that trains where it waits for a generation that has ended meanwhile: abandon it
    and ask for the next one."""


@dataclass(frozen=True)
class Request:
    """What the leader has to decide about."""

    reason: Reason
    members: tuple[Member, ...]
    """All who live, those who leave and those who have arrived among them."""
    lost: tuple[Member, ...]
    """Gone since the last generation that ran."""
    leaving: tuple[Member, ...]
    """Announced that they leave; they still give what they have."""
    arrived: tuple[Member, ...]
    """Not in the last generation that ran, spares told to wait among them."""
    failed: Mapping[str, str]
    """By id, what living members raised in the generation that ended (`Meeting.fail`)."""
    offers: Mapping[str, Json]
    """By id, of all who live, the leaving and the arrived among them."""
    refused: tuple[str, ...]
    """Why members refused earlier decisions of this meeting."""
    refusing: tuple[tuple[str, ...], ...] = ()
    """Ids of those who did, of each decision."""
    has_run: bool = False
    """Whether a generation of this job has run, of whom perhaps nobody is left."""


class Worker(Protocol):
    """What membership asks of its process. Called on membership's threads, never on the one that trains."""

    def offer(self) -> Json:
        """What this member has for the next generation: steps whose state it holds, and whose; what it is
        at. Asked at every meeting."""
        ...

    def decide(self, request: Request) -> tuple[tuple[str, ...], Json] | None:
        """Ids by rank, and the decision; None where the running generation goes on as it is and arrivals wait
        as spares (reasons arrival and change only). In the leader's process alone, on a thread of its own,
        and abandoned if another meeting begins meanwhile. Raises one of our errors where nobody can go on:
        the job then ends with it on every member. `decision["summary"]`, if it is there, is the line that
        `zorselike status` shows."""
        ...

    def prepare(self, ranks: tuple[str, ...], decision: Json) -> None:
        """Draws what can be drawn before anything is torn down; on a thread of its own, in every member. What
        it raises is said to the leader, who decides again."""
        ...

    def interrupt(self, number: int, lost: tuple[Member, ...]) -> None:
        """That generation is over now: frees the thread that trains from whatever it waits for, also where it
        has only been handed the generation and waits for something a moment later. Called once for each
        generation that was delivered, whether it ran already or was being formed or filled."""
        ...


class Control(Protocol):
    """What the thread that trains asks of membership (`meeting.Meeting`).

    Its loop: `next_generation`, form the groups, `formed`, fill, `filled`, then steps with `step_done` after
    each, until that says True or `GenerationOver` or a broken group ends it; abandon; again. An exception of
    its own goes to `fail`.
    """

    id: str
    """Of this member."""

    def next_generation(self) -> Generation:
        """Waits for the next one. Raises `ClusterError` where the job has ended or this member was expelled,
        `LeftError` where it has left as it said it would or the job is done."""
        ...

    def formed(self) -> None:
        """Returns when all have formed their groups; raises `GenerationOver` if the generation ended."""
        ...

    def filled(self) -> None:
        """Returns when all have all state: the generation runs. Raises `GenerationOver`."""
        ...

    def step_done(self, step: int) -> bool:
        """Whether the generation ends after this step, as planned, on every member. May wait for the others'
        answers, never for their steps. Raises `GenerationOver`."""
        ...

    def lost(self, ids: Iterable[str], reason: str) -> None:
        """Members that the alarm says are gone; their nannies say whether their processes have ended."""
        ...

    def fail(self, error: BaseException, *, step: int, may_recur: bool = False) -> None:
        """This member's own exception ended the generation; the same one at the same step for the second time
        ends the job, unless it `may_recur`: the leader's decision then changes what led to it, or fails."""
        ...

    def request_change(self) -> None:
        """Asks the leader for another decision about the same members."""
        ...

    @property
    def is_spare(self) -> bool:
        """Whether the job runs, and this member is no rank of it."""
        ...

    def leave(self) -> None:
        """This member wants to leave at a step boundary."""
        ...

    def close(self, *, is_done: bool = False) -> None:
        """This member is done, and the others need not go on without it: `is_done` says a rank that has the
        job's last step behind it, and spares end."""
        ...
