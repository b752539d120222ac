"""All passes: from an order of computations to what every rank does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zorselike.schedule.actions import COMPUTE, Action
from zorselike.schedule.lowering.collectives import add_collectives
from zorselike.schedule.lowering.host_copies import add_host_copies
from zorselike.schedule.lowering.transfers import place_transfers
from zorselike.schedule.orders.order import Around, Order
from zorselike.schedule.spec import ScheduleSpec


def lower(spec: ScheduleSpec, order: Order, ranks: Collection[int] | None = None) -> dict[int, list[Action]]:
    """The actions of every rank, or of those given, by rank; raises `ScheduleError` where ZeRO 2 forbids the
    order."""
    transfers = place_transfers(spec, order, ranks) if order.transfers is None else order.transfers
    lists = {}
    for g, (group, computations) in enumerate(zip(spec.plan.groups, order.computations, strict=True)):
        actions = add_collectives(spec, g, computations, keeps_gathered=order.keeps_gathered)
        for rank in (rank for rank in group.flat_ranks if ranks is None or rank in ranks):
            rank_actions = _add_transfers(actions, transfers.get(rank, ()), spec.num_computed(rank))
            lists[rank] = add_host_copies(spec, rank, rank_actions)
    return dict(sorted(lists.items()))


def _add_transfers(actions: Sequence[Action], around: Sequence[Around], num_computed: int) -> list[Action]:
    """A rank's part of its group's actions, with the transfers around each computation."""
    found: list[Action] = []
    position = 0
    for action in actions:
        if action.kind not in COMPUTE:
            found.append(action)
            continue
        if (action.microbatch or 0) < num_computed:
            before, after = around[position] if around else ((), ())
            found += [*before, action, *after]
        position += 1
    return found
