"""Few microbatches in place of many, for the walk of one device (`planner/estimate/memory.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate, pairwise

from zorselike.plan.plan import Microbatch
from zorselike.planner.candidate.candidate import Sizes
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.orders.order import Order
from zorselike.schedule.spec import ScheduleSpec

FEW_MICROBATCHES = 4
"""Microbatches of a device that are walked: more than are on their way to the host at once."""
MORE_MICROBATCHES = 16
"""Likewise where they are in flight and gradients are reduced after each."""


def return_to_ministages(spec: ScheduleSpec, own_group: int, num_held: int | None) -> Order:
    """Orders in which each group returns to its ministages, and holds the most that it may in the schedule's
    own: one after the other while the deepest is updated; or with `num_held` of each and all gradients, the
    first having gone backward."""
    number = spec.plan.groups[own_group].max_microbatches
    num_first = number if num_held is None else num_held
    orders = []
    for g in range(len(spec.plan.groups)):
        own = spec.plan.ministages_of_group(g)
        going_back = [i for i in reversed(own) if i >= spec.lowest_backward]
        actions = [Action(Kind.F, i, m) for i in own for m in range(num_first)]
        begun = range(0 if num_held is None else 1)
        actions += [Action(Kind.B, i, m) for m in begun for i in going_back]
        actions += [Action(Kind.F, i, m) for i in own for m in range(num_first, number)]
        actions += [Action(Kind.B, i, m) for i in going_back for m in range(len(begun), number)]
        orders.append(tuple(actions))
    return Order(tuple(orders), keeps_gathered=True, alternating=frozenset(range(spec.plan.num_ministages)))


def add_largest(sizes: Sizes, number: int) -> int:
    """Rows of the largest so many microbatches."""
    return sum(sizes if number >= len(sizes) else nlargest(number, sizes))


def take_few(sizes: Sizes) -> tuple[Sizes, float]:
    """Few microbatches in place of many, and how many rows each of theirs stands for."""
    if len(sizes) <= FEW_MICROBATCHES:
        return sizes, 1.0
    few = (max(sizes),) * FEW_MICROBATCHES
    return few, sum(sizes) / sum(few)


def take_more(sizes: Sizes, microbatches_per_device: int) -> tuple[Sizes, float]:
    """The same where gradients are reduced after each microbatch of few in flight: what counts is the second
    reduction, with almost all in flight still there and the shards of the first one's gradients."""
    if not sizes:
        return sizes, 1.0
    number = min(max(len(sizes), 2), microbatches_per_device, MORE_MICROBATCHES)
    more = (max(sizes),) * number
    left = max(number - 1, 1) / number
    """Share of what is walked that is there at the second reduction; in a run all in flight but one are left,
    or the one."""
    held = sum(sizes) * max(len(sizes) - 1, 1) / len(sizes)
    return more, held / (left * sum(more))


def make_microbatches(rank: int, sizes: Sizes) -> tuple[Microbatch, ...]:
    ends = list(accumulate(sizes, initial=0))
    return tuple(Microbatch(rank, start, stop) for start, stop in pairwise(ends))


def find_peak_bytes(
    actions: Sequence[Action], device_bytes: Sequence[int], receiver: int, more_bytes: int
) -> int:
    """The most that is held at once where each gradient that a ministage was sent and has not used stands for
    that of several microbatches, and so takes more."""
    num_waiting = peak = 0
    for action, num_bytes in zip(actions, device_bytes, strict=True):
        if action.ministage == receiver:
            num_waiting += (action.kind is Kind.RECV_B) - (action.kind is Kind.B)
        peak = max(peak, num_bytes + num_waiting * more_bytes)
    return peak
