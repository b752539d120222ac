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
        sent, received = sends[channel], receives[channel]
        for index in range(max(len(sent), len(received))):
            both = index < len(sent) and index < len(received)
            if not both or not _fits(steps, channel, sent[index], received[index]):
                raise _mismatch(actions, channel, index, sent, received)
        matches[channel] = [Match(*pair) for pair in zip(sent, received, strict=True)]
    return matches


def _fits(steps: Mapping[int, Sequence[Step]], channel: Channel, sent: int, received: int) -> bool:
    send, receive = steps[channel.source][sent], steps[channel.target][received]
    neighbour = send.ministage + (1 if channel.direction == "F" else -1)
    return (neighbour, send.start, send.stop) == (receive.ministage, receive.start, receive.stop)


def _mismatch(
    actions: Mapping[int, Sequence[Action]],
    channel: Channel,
    index: int,
    sent: Sequence[int],
    received: Sequence[int],
) -> ScheduleError:
    source, target = channel.source, channel.target
    send_at = sent[index] if index < len(sent) else len(actions[source])
    receive_at = received[index] if index < len(received) else len(actions[target])
    send = actions[source][send_at].text if index < len(sent) else "nothing more"
    receive = actions[target][receive_at].text if index < len(received) else "nothing more"
    places = ((target, receive_at), (source, send_at))
    return error_at(
        actions,
        f"transfer {index} from rank {source} to rank {target} ({channel.direction}): the source lists "
        f"{send} where the target lists {receive}; a channel has no tags, so both ends must list the same "
        "rows in the same order",
        *(places if index < len(received) else places[::-1]),
    )
