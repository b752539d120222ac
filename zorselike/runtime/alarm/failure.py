"""Which rank failed first, found from what all ranks report; and how that is said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zorselike.errors import DataError
from zorselike.schedule.actions import Kind, parse_action
from zorselike.text.wording import list_few

_MAX_REASON_LENGTH = 500

_ECHOES = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|closed by (peer|remote)|broken pipe|pair closure"
    r"|connectFullMesh|remote process (has )?(exited|terminated)|(read|write) error|timed out waiting"
    r"|DistNetworkError|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)

_PHASES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.SEND_F: "sending activations",
    Kind.RECV_F: "receiving activations",
    Kind.SEND_B: "sending gradients",
    Kind.RECV_B: "receiving gradients",
    Kind.UNSHARD: "all-gather of parameters",
    Kind.RESHARD: "freeing parameters",
    Kind.REDUCE_GRAD: "gradient reduction",
    Kind.TIE_GRAD: "gradients of tied weights",
    Kind.TIE_VALUE: "values of tied weights",
    Kind.TIE_FETCH: "values of tied weights",
    Kind.NORM: "gradient norm",
    Kind.STEP: "optimizer step",
    Kind.LOAD: "loading from host memory",
    Kind.OFFLOAD: "offloading to host memory",
    Kind.LOAD_STATE: "loading optimizer state from host memory",
    Kind.OFFLOAD_STATE: "offloading optimizer state to host memory",
    Kind.LOAD_GRAD: "loading gradients from host memory",
    Kind.OFFLOAD_GRAD: "offloading gradients to host memory",
}


FailureKind = Literal["error", "dead", "silent", "mistake"]
"""What is known of a rank: it said itself why it leaves; its connection is closed, so its process is gone; it
has not been heard for too long, and may live; or it called what no other rank did."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: `place` is what it was at then, `reason` one line."""

    rank: int
    place: str
    reason: str
    is_echo: bool = False
    """Whether it reads like the consequence of another rank's end."""
    kind: FailureKind = "error"
    exit_code: int = 1
    """With which all ranks end."""


@dataclass(frozen=True)
class State:
    """Progress of one rank."""

    place: str
    """The text of its action or label; empty between steps."""
    rounds: int = 0
    """How many steps (evaluations, ...) are behind it; the same on all ranks that keep up."""
    has_acted: bool = False
    """Whether it was ever in an action of a schedule."""
    call: str = ""
    """The last collective call that it made."""
    called_in: int = 0
    """The round of that call."""

    @property
    def is_busy(self) -> bool:
        return bool(self.place)


def first_of(failures: Sequence[Failure]) -> Failure:
    """The failure that came first, given in order of arrival: an echo can outrun its cause."""
    return min(failures, key=lambda failure: failure.is_echo)


def find_absent(present: Mapping[int, State], left: Mapping[int, State]) -> Failure | None:
    """A rank that left, though another works on a step that needs it; both by rank."""
    furthest = max((state.rounds for state in present.values() if state.is_busy), default=-1)
    for rank, state in left.items():
        if furthest >= state.rounds:
            return Failure(rank, state.place, "it ended while other ranks went on")
    return None


def find_mismatch(present: Mapping[int, State]) -> Failure | None:
    """A rank whose call differs from that of the others in the same round: all would wait forever."""
    calls: dict[int, dict[str, list[int]]] = {}
    for rank, state in sorted(present.items()):
        if state.call:
            calls.setdefault(state.called_in, {}).setdefault(state.call, []).append(rank)
    for ranks_of in calls.values():
        if len(ranks_of) > 1:
            # Of as many, as where some are still in the round before, those that train are right.
            usual, *others = sorted(
                ranks_of, key=lambda call: (-len(ranks_of[call]), call != "step", ranks_of[call])
            )
            rank = ranks_of[others[0]][0]
            reason = (
                f"it called {others[0]}() where {list_few(ranks_of[usual], 'rank')} called {usual}(); all "
                "ranks make the same calls in the same order"
            )
            return Failure(rank, present[rank].place, reason, kind="mistake")
    return None


def exit_code_of(error: BaseException | str) -> int:
    """2 for what the user's data are to blame for, as for all that is refused before work starts; else 1."""
    return 2 if isinstance(error, DataError) else 1


def is_echo(reason: str) -> bool:
    """Whether an error reads like what remains when a peer has ended."""
    return _ECHOES.search(reason) is not None


def reason_of(error: BaseException | str) -> str:
    """`OutOfMemoryError: CUDA out of memory. ...`: the first line of an error."""
    text = str(error).strip()
    line = text.splitlines()[0].rstrip() if text else ""
    if isinstance(error, BaseException):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line[:_MAX_REASON_LENGTH]


def describe_place(place: str) -> str:
    """`in 3B1 (ministage 3, microbatch 1, backward)`, `in start-up`, or `between steps`."""
    if not place:
        return "between steps"
    try:
        action = parse_action(place)
    except ValueError:
        return f"in {place}"
    details = [] if action.ministage is None else [f"ministage {action.ministage}"]
    if action.microbatch is not None:
        details.append(f"microbatch {action.microbatch}")
    details.append(_PHASES.get(action.kind, action.kind.value))
    return f"in {place} ({', '.join(details)})"


def describe_failure(failure: Failure) -> str:
    """`zorselike: rank 2 failed first, in 3B1 (ministage 3, ...): OutOfMemoryError: ...`."""
    return f"zorselike: rank {failure.rank} failed first, {describe_place(failure.place)}: {failure.reason}"


def last_line(failure: Failure, rank: int, place: str) -> str:
    """The last line of a rank that is at `place`, before it ends with the others."""
    if rank == failure.rank:
        return f"{describe_failure(failure)}; this is that rank."
    here = f"in {place}" if place else "between steps"
    return f"{describe_failure(failure)}; this rank ({rank}) was {here} and stops."
