"""Every send meets its receive, in the same order at both ends.

A channel leads from one rank to another in one direction, forward or backward. It has no tags:
its n-th send meets its n-th receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zorselike.schedule.actions import FORWARDS, SENDS, TRANSFERS, Action, Kind
from zorselike.schedule.checker.steps import Step
from zorselike.schedule.errors import ScheduleError, error_at


class Channel(NamedTuple):
    """An edge of the transport; `direction` is `F` for activations and `B` for gradients."""

    source: int
    target: int
    direction: str

    @classmethod
    def of(cls, rank: int, kind: Kind, peer: int) -> Channel:
        """The channel of a rank's send or receive."""
        ends = (rank, peer) if kind in SENDS else (peer, rank)
        return cls(*ends, "F" if kind in FORWARDS else "B")


class Match(NamedTuple):
    """Positions of a send in its source's list and of its receive in its target's list."""

    sent: int
    received: int


def match_transfers(
    actions: Mapping[int, Sequence[Action]], steps: Mapping[int, Sequence[Step]]
) -> dict[Channel, list[Match]]:
    """Every channel's transfers in order; raises `ScheduleError` where the ends differ."""
    sends: defaultdict[Channel, list[int]] = defaultdict(list)
    receives: defaultdict[Channel, list[int]] = defaultdict(list)
    for rank, rank_steps in steps.items():
        for position, step in enumerate(rank_steps):
            if step.kind in TRANSFERS:
                ends = sends if step.kind in SENDS else receives
                ends[Channel.of(rank, step.kind, step.peer)].append(position)
    matches = {}
    for channel in sorted(sends.keys() | receives.keys()):
        sent = [*sends[channel], len(steps[channel.source])]
        received = [*receives[channel], len(steps[channel.target])]
        pairs = [Match(*pair) for pair in zip(sent, received, strict=False)]
        for index, pair in enumerate(pairs):
            if not _fits(steps, channel, pair):
                raise _mismatch(actions, channel, index, pair)
        matches[channel] = pairs[:-1]
    return matches


def _fits(steps: Mapping[int, Sequence[Step]], channel: Channel, pair: Match) -> bool:
    """Both ends list the same rows and positions, or nothing more."""
    sends, receives = steps[channel.source], steps[channel.target]
    if pair.sent == len(sends) or pair.received == len(receives):
        return pair == (len(sends), len(receives))
    send, receive = sends[pair.sent], receives[pair.received]
    neighbour = send.ministage + (1 if channel.direction == "F" else -1)
    return (neighbour, *send[4:]) == (receive.ministage, *receive[4:])


def _mismatch(
    actions: Mapping[int, Sequence[Action]], channel: Channel, index: int, pair: Match
) -> ScheduleError:
    source, target, direction = channel
    send, receive = (
        actions[rank][position].text if position < len(actions[rank]) else "nothing more"
        for rank, position in ((source, pair.sent), (target, pair.received))
    )
    places = ((target, pair.received), (source, pair.sent))
    return error_at(
        actions,
        f"transfer {index} from rank {source} to rank {target} ({direction}): the source lists "
        f"{send} where the target lists {receive}; a channel has no tags, so both ends must list the same "
        "rows in the same order",
        *(places if pair.received < len(actions[target]) else places[::-1]),
    )
