"""1F1B: one forward, one backward, as many forwards ahead as there are stages behind.

For a plan with one ministage a group, as PipeDream-Flush (Narayanan et al. 2021, section 2.2.1),
Megatron-LM and DeepSpeed run it. For comparison: our runtime runs `ours.py`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders.even_plans import check_even
from zorselike.schedule.orders.order import Order, find_around
from zorselike.schedule.spec import ScheduleSpec
from zorselike.schedule.transfers import list_transfers

NAME = "1F1B"


def one_f_one_b(spec: ScheduleSpec) -> Order:
    """For plans with one ministage a group; in several groups all ranks have equally many microbatches, of
    the same rows. One group is data parallelism with one microbatch's activations at a time.

    Raises:
        ScheduleError: The plan has another shape; says where.
    """
    plan = spec.plan
    ministages = [plan.ministages_of_group(g) for g in range(len(plan.groups))]
    if any(len(of_group) != 1 for of_group in ministages):
        raise ScheduleError(
            f"{NAME} has one ministage a group; use the interleaved order for plans with several"
        )
    num_microbatches = check_even(plan, NAME)
    return Order(tuple(_order(spec, stage, num_microbatches) for (stage,) in ministages), keeps_gathered=True)


def _order(spec: ScheduleSpec, stage: int, num_microbatches: int) -> tuple[Action, ...]:
    """The computations of a stage."""
    forwards = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
    if stage < spec.lowest_backward:
        return tuple(forwards)
    backwards = [Action(Kind.B, stage, m) for m in range(num_microbatches)]
    ahead = min(spec.plan.num_ministages - stage - 1, num_microbatches)
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return (*forwards[:ahead], *steady, *backwards[num_microbatches - ahead :])


# -- transfers that block ----------------------------------------------------------------------


def one_f_one_b_blocking(spec: ScheduleSpec) -> Order:
    """1F1B with transfers where DeepSpeed's `TrainSchedule` has them, for runtimes whose sends and receives
    block: a result leaves before the next computation of the other direction, and a receive stands right
    before its use. Our runtime cannot run that; the simulator can. Raises what `one_f_one_b` does.
    """
    order = one_f_one_b(spec)
    sends: defaultdict[tuple[int, Action], list[Action]] = defaultdict(list)
    receives: defaultdict[tuple[int, Action], list[Action]] = defaultdict(list)
    for source, target, position, send, receive in list_transfers(spec, order.computations):
        computation = order.computations[spec.plan.group_of_rank[source]][position]
        sends[source, computation].append(send)
        receives[target, Action(computation.kind, receive.ministage, receive.microbatch)].append(receive)
    transfers = {}
    for rank, g in spec.plan.group_of_rank.items():
        computations = frozenset(order.computations[g])
        actions: list[Action] = []
        outgoing: list[Action] = []
        for computation in _slots(spec, g):
            incoming = sorted(receives[rank, computation], key=lambda action: action.start or 0)
            actions += [*outgoing, *incoming] if computation.kind is Kind.F else [*incoming, *outgoing]
            actions += [computation] if computation in computations else []
            outgoing = sends[rank, computation]
        transfers[rank] = find_around(actions)
    return replace(order, transfers=transfers)


def _slots(spec: ScheduleSpec, g: int) -> list[Action]:
    """DeepSpeed's `TrainSchedule._step_to_micro_batch`: slots of all stages go on side by side; a stage
    computes forwards in every other slot, backwards in those between. Some are of no microbatch."""
    (stage,) = spec.plan.ministages_of_group(g)
    num_stages = spec.plan.num_ministages
    slots = []
    for number in range(2 * (spec.plan.groups[g].max_microbatches + num_stages - 1)):
        if number % 2 == stage % 2:
            slots.append(Action(Kind.F, stage, (number - stage) // 2))
        else:
            slots.append(Action(Kind.B, stage, (number + stage + 1) // 2 - num_stages))
    return slots
