"""What the machine is told, and what it asks to be done."""

from __future__ import annotations

from dataclasses import dataclass

from zorselike.elastic.contract import Generation, Json, Member, Request
from zorselike.elastic.membership.messages import Gone, Message

# -- events: links and clock -------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A link to a member is there, whoever opened it."""

    member: Member


@dataclass(frozen=True)
class Received:
    sender: str
    message: Message


@dataclass(frozen=True)
class Dead:
    """A member's process has certainly ended: its link was closed and nobody listens at its port, or its
    nanny says so."""

    gone: Gone


@dataclass(frozen=True)
class Closed:
    """The other side has no more need of a link."""

    id: str


@dataclass(frozen=True)
class Relinked:
    """A link broke and was made again: messages may be lost."""

    id: str


@dataclass(frozen=True)
class Silent:
    """Nothing was heard of a member for the silence limit, or it cannot be reached."""

    id: str


@dataclass(frozen=True)
class Quiet:
    """Nothing was heard of a member for half that time."""

    id: str


@dataclass(frozen=True)
class Heard:
    """A member that was quiet has answered what was asked of it since."""

    id: str


@dataclass(frozen=True)
class Slept:
    """This process itself stood still for a while."""


@dataclass(frozen=True)
class Rang:
    """A timer's time has come."""

    timer: str
    number: int


# -- events: this process ----------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """This member founds the job, which starts once there are so many members."""

    num_members: int


@dataclass(frozen=True)
class Offered:
    number: int
    offer: Json


@dataclass(frozen=True)
class Decided:
    number: int
    attempt: int
    ranks: tuple[str, ...]
    decision: Json


@dataclass(frozen=True)
class Kept:
    """The decision is that the running generation goes on."""

    number: int
    attempt: int


@dataclass(frozen=True)
class Undecided:
    """No decision is possible."""

    number: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Prepared:
    number: int
    attempt: int
    step: int
    """The last step done, -1 before the first."""
    host: str = ""
    port: int = 0
    """Of the next generation's store, if this member keeps it."""


@dataclass(frozen=True)
class Refused:
    number: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Gated:
    """Whether this member waits at the boundary that the leader proposed."""

    number: int
    attempt: int
    past: int
    """The step already done that was to be the last, or a later one; -1 if it waits."""


@dataclass(frozen=True)
class Formed:
    number: int


@dataclass(frozen=True)
class Filled:
    number: int


@dataclass(frozen=True)
class Lost:
    """The alarm's word."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """This member's own exception ended the generation."""

    reason: str
    step: int
    may_recur: bool = False
    """Whether the same at the same step again is no reason to end the job."""


@dataclass(frozen=True)
class Change:
    """This member asks for another decision."""


@dataclass(frozen=True)
class Leave:
    """This member wants to leave, or another one is told to."""

    id: str


@dataclass(frozen=True)
class Finish:
    """This member is done."""

    is_done: bool = False
    """Whether the job is, as a rank of it says that has done its last step."""


@dataclass(frozen=True)
class Stranded:
    """No member of the job that this process is to join can be reached."""

    reason: str


@dataclass(frozen=True)
class Lease:
    """Whether this side of a job holds its lease: no generation has begun that it does not know of."""

    number: int
    held: bool | None
    """None: there is no lease."""


Event = (
    Opened | Closed | Relinked | Received | Dead | Silent | Quiet | Heard | Slept | Rang | Found | Offered
    | Decided
    | Kept | Undecided | Prepared | Refused | Gated | Formed | Filled | Lost | Failed | Change | Leave
    | Finish | Stranded | Lease
)  # fmt: skip

# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """To a linked member, or to one whose link is being opened, once it is."""

    to: str
    message: Message


@dataclass(frozen=True)
class Open:
    member: Member


@dataclass(frozen=True)
class Close:
    """Ends a link that is no longer needed, so that the other side knows it."""

    id: str


@dataclass(frozen=True)
class SetTimer:
    """Replaces a timer of the same name."""

    timer: str
    number: int
    delay_s: float


@dataclass(frozen=True)
class AskOffer:
    number: int


@dataclass(frozen=True)
class AskDecision:
    number: int
    attempt: int
    request: Request


@dataclass(frozen=True)
class AskPrepare:
    number: int
    attempt: int
    ranks: tuple[str, ...]
    decision: Json
    keeps_store: bool


@dataclass(frozen=True)
class AskLease:
    number: int


@dataclass(frozen=True)
class Gate:
    """Nobody trains past this step before the leader has said whether it is the last."""

    number: int
    attempt: int
    step: int


@dataclass(frozen=True)
class Ungate:
    """The running generation goes on."""


@dataclass(frozen=True)
class Hold:
    """Whether nobody here may train past a step: the others may be going on without this member."""

    holds: bool


@dataclass(frozen=True)
class Interrupt:
    """The generation that was delivered last is over."""

    lost: tuple[Member, ...]


@dataclass(frozen=True)
class Deliver:
    """To the thread that trains; where that waits at a gate, the generation ends there."""

    generation: Generation


@dataclass(frozen=True)
class ReleaseFormed:
    number: int


@dataclass(frozen=True)
class ReleaseFilled:
    number: int


@dataclass(frozen=True)
class Done:
    """A rank has done the job's last step: who has no part in it waits for nothing more."""


LEFT = "this member has left the job, as it said it would"
ALL_LEAVE = "all members leave"
DONE = "the job has done its last step"
"""Reasons why a member is out with nothing amiss."""


@dataclass(frozen=True)
class Over:
    """This member is out: the job has ended, or it was expelled or has left. The last effect of all."""

    reason: str
    may_return: bool = False
    """Whether another process in its place may join the job."""


Effect = (
    Send | Open | Close | SetTimer | AskOffer | AskDecision | AskPrepare | AskLease | Gate | Ungate | Hold
    | Interrupt | Deliver | ReleaseFormed | ReleaseFilled | Done | Over
)  # fmt: skip
