"""The action grammar: what one rank does, one small value an action.

Vocabulary and text form follow `torch.distributed.pipelining` (`3F0`, `2UNSHARD`, `0SEND_F2`)
and add what it lacks: `STEP`, `NORM`, copies between device and host, exchanges of tied weights,
and on transfers the peer with the rows of the global batch: `0SEND_F2@4[3:5]`, to or from a tensor-parallel
replica with the positions of the sequence too: `0SEND_F2@4[3:5,0:1024]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does. `F` and `B` compute one microbatch of one ministage."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    """Sends rows of a ministage's output; returns at once where sends buffer."""
    RECV_F = "RECV_F"
    """Posts the receive of rows of a ministage's input; the `F` that needs them waits."""
    SEND_B = "SEND_B"
    """Sends gradients of rows of a ministage's input to the rank that computed the ministage before."""
    RECV_B = "RECV_B"
    """Posts the receive of gradients of rows of a ministage's output; the `B` waits."""
    UNSHARD = "UNSHARD"
    """Starts the all-gathers of a ministage; its `F` and `B` wait for them."""
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduces a ministage's gradients over its group; a rendezvous of the group."""
    TIE_GRAD = "TIE_GRAD"
    """Tied weights: a borrower sends its reduced gradients (at once); an owner, which is lower
    and so later, waits for those of its borrowers and adds them to its own."""
    TIE_VALUE = "TIE_VALUE"
    """Tied weights: the owner sends its new values after its `STEP`; returns at once."""
    TIE_FETCH = "TIE_FETCH"
    """Tied weights: a borrower waits for the owner's `TIE_VALUE` and takes the values over."""
    NORM = "NORM"
    """The global gradient norm, over all ranks; it comes before deferred `STEP`s."""
    STEP = "STEP"
    """A ministage's optimizer update."""
    LOAD = "LOAD"
    """Starts the copy of a ministage's parameter shards from host to device or, with a microbatch, of the
    activations that its backward needs."""
    OFFLOAD = "OFFLOAD"
    """The copy back to the host; shards that have not changed are only freed."""
    LOAD_STATE = "LOAD_STATE"
    """Starts the copy of a ministage's optimizer state, fp32 master weights included, to the device."""
    OFFLOAD_STATE = "OFFLOAD_STATE"
    LOAD_GRAD = "LOAD_GRAD"
    """Starts the copy of reduced gradients that wait for a deferred update back to the device."""
    OFFLOAD_GRAD = "OFFLOAD_GRAD"


COMPUTE = frozenset({Kind.F, Kind.B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFERS = SENDS | RECEIVES
FORWARDS = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
"""Computations and transfers of activations; the others are of gradients."""
NEEDED_BY = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
"""The computation that waits for a receive."""
HOST_COPIES = frozenset(
    {Kind.LOAD, Kind.OFFLOAD, Kind.LOAD_STATE, Kind.OFFLOAD_STATE, Kind.LOAD_GRAD, Kind.OFFLOAD_GRAD}
)
"""Copies between device and host, which no other rank takes part in."""


class Action(NamedTuple):
    """One entry of a rank's list.

    `microbatch` counts the rank's microbatches in the order of the plan; a number past the rank's
    last one is a dummy that joins collectives and runs no user code. `peer`, `start`, `stop` and `positions`
    belong to transfers: rows `[start, stop)` of the global batch, and of them positions `[first, last)` of
    the sequence, all if that is None.
    """

    kind: Kind
    ministage: int | None = None
    microbatch: int | None = None
    peer: int | None = None
    start: int | None = None
    stop: int | None = None
    positions: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """The one-line form, read back by `parse_action`."""
        ministage = "" if self.ministage is None else self.ministage
        microbatch = "" if self.microbatch is None else self.microbatch
        if self.peer is None:
            return f"{ministage}{self.kind.value}{microbatch}"
        positions = "" if self.positions is None else f",{self.positions[0]}:{self.positions[1]}"
        return f"{ministage}{self.kind.value}{microbatch}@{self.peer}[{self.start}:{self.stop}{positions}]"

    def __str__(self) -> str:
        return self.text


_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_PATTERN = re.compile(rf"(\d+)?({_KINDS})(\d+)?(?:@(\d+)\[(\d+):(\d+)(?:,(\d+):(\d+))?\])?", re.ASCII)


def parse_action(text: str) -> Action:
    """The inverse of `Action.text`; raises `ValueError` naming what it could not read."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not an action; expected for example 3F0, 2UNSHARD or 0SEND_F2@4[3:5]")
    kind = match[2]
    ministage, microbatch, peer, start, stop = (
        None if part is None else int(part) for part in match.group(1, 3, 4, 5, 6)
    )
    positions = None if match[7] is None else (int(match[7]), int(match[8]))
    return Action(Kind(kind), ministage, microbatch, peer, start, stop, positions)


def format_actions(actions: Iterable[Action]) -> str:
    """Actions on one line, separated by spaces."""
    return " ".join(action.text for action in actions)


def parse_actions(text: str) -> list[Action]:
    """The inverse of `format_actions`."""
    return [parse_action(word) for word in text.split()]


Edge = tuple[int, int, str]
"""A channel: source rank, target rank, and direction `F` (activations) or `B` (gradients)."""


def edge_of(rank: int, action: Action) -> Edge:
    """The channel that a transfer of `rank` uses."""
    assert action.peer is not None
    direction = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
    if action.kind in SENDS:
        return rank, action.peer, direction
    return action.peer, rank, direction


def edges_of_rank(rank: int, actions: Iterable[Action]) -> set[Edge]:
    """The channels that a rank's actions use."""
    return {edge_of(rank, action) for action in actions if action.kind in TRANSFERS}
