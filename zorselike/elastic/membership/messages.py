"""What members say to each other, as JSON objects on the wire."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from zorselike.elastic.contract import Json, Member, Reason
from zorselike.elastic.membership.roster import UNKNOWN, Roster
from zorselike.errors import FileError
from zorselike.text.dataclass_tables import read_dataclass, read_table, write_dataclass


@dataclass(frozen=True)
class Gone:
    """A member whose process has certainly ended."""

    id: str
    last: int = UNKNOWN
    """Number of the last generation that it belonged to, or had agreed to belong to."""


@dataclass(frozen=True)
class Text:
    """A member's words, such as why it refuses a decision."""

    id: str
    text: str


@dataclass(frozen=True)
class Vote:
    """A member takes part in a meeting."""

    id: str
    offer: dict[str, Any]
    bases: tuple[Roster, ...] = ()
    """Its last generation and those it agreed to since; empty if that is the one which the leader named."""
    in_doubt: bool = False
    leaving: bool = False
    failed: str = ""
    fatal: str = ""


@dataclass(frozen=True)
class Results:
    """What a member and all below it in the tree answer in one phase of a meeting."""

    votes: tuple[Vote, ...] = ()
    refused: tuple[Text, ...] = ()
    host: str = ""
    """Of the store, if its keeper is among them."""
    port: int = 0
    step: int = -1
    """Prepare: the last step done. Stop: a step already done that should have been the last or later."""
    late: tuple[str, ...] = ()
    """Members that do not answer, though their processes live."""


# -- from the leader down the tree -------------------------------------------------------------


@dataclass(frozen=True)
class Meet:
    """A meeting begins: every member votes."""

    number: int
    reason: Reason
    urgent: bool
    """Whether the running generation is over."""
    base: int
    """Number of the last generation that the leader knows to have run."""
    book: Roster
    """All who take part, the leader first."""
    dead: tuple[Gone, ...]
    lost: tuple[Member, ...]
    insists: bool = False
    """Whether it counts even for those who still hear a leader of a lower number."""


@dataclass(frozen=True)
class Prepare:
    number: int
    attempt: int
    ranks: tuple[str, ...]
    decision: dict[str, Any]
    keeper: str
    """Makes the next generation's store."""


@dataclass(frozen=True)
class Stop:
    """Asks whether the running generation can end after a step; who can waits there for the answer."""

    number: int
    attempt: int
    step: int


@dataclass(frozen=True)
class Form:
    """The next generation, to be formed and filled."""

    number: int
    reason: Reason
    ranks: tuple[str, ...]
    decision: dict[str, Any]
    host: str
    port: int
    after_step: int = -1
    leaving: tuple[Member, ...] = ()
    staying: Roster | None = None
    """Who remains, where some of the meeting's book leave."""


@dataclass(frozen=True)
class Fill:
    """All have formed their groups."""

    number: int


@dataclass(frozen=True)
class Run:
    """All are filled: the generation runs."""

    number: int


@dataclass(frozen=True)
class Keep:
    """The meeting changed nothing."""

    number: int


@dataclass(frozen=True)
class End:
    """The job has ended."""

    number: int
    reason: str
    may_go_on: bool = False
    """Whether others, who cannot be reached, may go on."""


# -- up the tree and across --------------------------------------------------------------------


@dataclass(frozen=True)
class Up:
    """The answer of a whole subtree in a phase of a meeting."""

    number: int
    phase: str
    attempt: int
    results: Results


@dataclass(frozen=True)
class Report:
    """For the leader: what a member saw, or wants."""

    dead: tuple[Gone, ...] = ()
    silent: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    failed: tuple[Text, ...] = ()
    fatal: str = ""
    change: bool = False


@dataclass(frozen=True)
class Refuse:
    """A meeting comes too late, or is called by one who need not lead; for its leader."""

    number: int
    """The highest that is known."""
    leader: Member | None = None
    """Who leads and lives, if the meeting was called by another one for no reason."""


@dataclass(frozen=True)
class Seek:
    """To whoever should lead now: the sender has lost its leader, or its way to it."""

    number: int
    """The highest that is known."""
    dead: tuple[Gone, ...]
    silent: tuple[str, ...]


@dataclass(frozen=True)
class Redirect:
    """Go to this member instead."""

    member: Member


@dataclass(frozen=True)
class Join:
    """A process wants to become a member."""

    member: Member


@dataclass(frozen=True)
class Welcome:
    """To an arrival, which waits until a meeting takes it in."""

    roster: Roster
    """Who to turn to if the leader is lost; its number is 0 before the first generation."""


@dataclass(frozen=True)
class Expel:
    """The receiver is no member any more."""

    number: int
    """Of the generation that goes on without it."""
    reason: str


@dataclass(frozen=True)
class Still:
    """The sender runs this generation, and asks whether the receiver does, or answers that."""

    number: int
    asks: bool = False


@dataclass(frozen=True)
class Bye:
    """The sender has finished its work, or has left as it said; its link ends."""

    number: int
    """Of the last generation that it was of, or had agreed to."""


@dataclass(frozen=True)
class Done:
    """A rank of this generation has done the job's last step; told to all, that spares need not wait on."""

    number: int


Message = (
    Meet | Prepare | Stop | Form | Fill | Run | Keep | End | Up | Report | Refuse | Seek | Redirect | Join
    | Welcome | Expel | Still | Bye | Done
)  # fmt: skip
Downward = Meet | Prepare | Stop | Form | Fill | Run | Keep | End

_KINDS: dict[str, type[Message]] = {
    kind.__name__.lower(): kind
    for kind in (
        Meet, Prepare, Stop, Form, Fill, Run, Keep, End, Up, Report, Refuse, Seek, Redirect, Join, Welcome,
        Expel, Still, Bye, Done,
    )
}  # fmt: skip


def write(message: Message) -> Json:
    return {"kind": type(message).__name__.lower()} | write_dataclass(message, omit_defaults=True)


def encode(message: Message) -> bytes:
    """The same as a line of the wire."""
    return json.dumps(write(message), separators=(",", ":")).encode()


def read(table: object) -> Message:
    """Raises `FileError` if it is no message."""
    values = dict(read_table(table, "the message"))
    kind = values.pop("kind", None)
    found = _KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise FileError("a message of no known kind")
    return read_dataclass(found, values, "the message")


@dataclass
class Gathered:
    """The answers of one phase, as they come up the tree."""

    votes: list[Vote] = field(default_factory=list)
    refused: list[Text] = field(default_factory=list)
    host: str = ""
    port: int = 0
    step: int = -1
    late: list[str] = field(default_factory=list)

    def add(self, results: Results) -> None:
        self.votes += results.votes
        self.refused += results.refused
        self.late += results.late
        self.step = max(self.step, results.step)
        if results.port:
            self.host, self.port = results.host, results.port

    def result(self) -> Results:
        return Results(
            tuple(self.votes), tuple(self.refused), self.host, self.port, self.step, tuple(self.late)
        )
