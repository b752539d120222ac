"""Receives that are posted before something of their own rank that their sender waits for.

Between GPUs such a receive is a kernel that waits, on the device, for what the host has not issued yet, and
the host may be kept from issuing it by that very kernel (`schedule/lowering/reach.py`). Lowering posts none;
an order that places its transfers itself may, and has its edges go over host memory then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zorselike.schedule.actions import Action
from zorselike.schedule.checker.channels import Channel, Match
from zorselike.schedule.checker.steps import NONE
from zorselike.schedule.checker.waits import Place, Waits


class Early(NamedTuple):
    """A receive that is posted too early."""

    edge: Channel
    posted: Place
    needed: Place
    """The last action of the same rank that its sender waits for."""

    def describe(self, actions: Mapping[int, Sequence[Action]]) -> str:
        (rank, posted), (_, needed) = self.posted, self.needed
        return (
            f"rank {rank} posts {actions[rank][posted]} before {actions[rank][needed]}, "
            f"for which rank {self.edge.source} waits before it sends"
        )


def find_early(
    waits: Waits, arrivals: Sequence[Place], matches: Mapping[Channel, Sequence[Match]]
) -> Iterator[Early]:
    """Of each edge the first, if any, by the order in which a whole run's actions arrived
    (`rendezvous.Execution`)."""
    import numpy as np  # Takes as long as all else that is imported.

    row_of = {rank: row for row, rank in enumerate(waits.arrives)}
    # Per rank: of each rank, the last position that its present action waits for.
    reached = {rank: np.full(len(row_of), -1, np.int32) for rank in row_of}
    events: dict[int, np.ndarray] = {}
    receives = {
        (channel.source, pair.sent): (channel, pair.received)
        for channel, pairs in matches.items()
        for pair in pairs
    }
    found: set[Channel] = set()
    for rank, at in arrivals:
        own = reached[rank]
        earlier = waits.after[rank][at - 1] if at else ()
        for event in (*earlier, *waits.before[rank][at]):
            np.maximum(own, events[event], out=own)
        own[row_of[rank]] = at
        event = waits.arrives[rank][at]
        if event == NONE:
            continue
        events[event] = np.maximum(events[event], own) if event in events else own.copy()
        if (rank, at) in receives:
            channel, posted = receives[rank, at]
            needed = int(own[row_of[channel.target]])
            if needed > posted and channel not in found:
                found.add(channel)
                yield Early(channel, (channel.target, posted), (channel.target, needed))
