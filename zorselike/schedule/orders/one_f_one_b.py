"""1F1B: one forward, one backward, as many forwards ahead as there are stages behind.

With one ministage a group as PipeDream-Flush (Narayanan et al. 2021, section 2.2.1), Megatron-LM and
DeepSpeed run it; interleaved, where every group has several ministages, visited in turn, as Megatron-LM does
(section 2.2.2, `forward_backward_pipelining_with_interleaving`). For comparison: our runtime runs `ours.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders.order import Order, find_around
from zorselike.schedule.spec import ScheduleSpec
from zorselike.schedule.transfers import list_transfers, match_rows


def one_f_one_b(spec: ScheduleSpec) -> Order:
    """For plans with one ministage a group; in several groups all ranks have equally many microbatches, of
    the same rows. One group is data parallelism with one microbatch's activations at a time. Raises
    `ScheduleError`, which says where, if the plan has another shape."""
    plan = spec.plan
    ministages = [plan.ministages_of_group(g) for g in range(len(plan.groups))]
    if any(len(of_group) != 1 for of_group in ministages):
        raise ScheduleError(
            "1F1B has one ministage a group; use the interleaved order for plans with several"
        )
    num_microbatches = _check_even(plan, "1F1B")
    return Order(tuple(_order(spec, stage, num_microbatches) for (stage,) in ministages), keeps_gathered=True)


def _order(spec: ScheduleSpec, stage: int, num_microbatches: int) -> tuple[Action, ...]:
    """The computations of a stage."""
    forwards = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
    backwards = [Action(Kind.B, stage, m) for m in range(num_microbatches)]
    return _alternate(spec, forwards, backwards, spec.plan.num_ministages - stage - 1)


def _alternate(
    spec: ScheduleSpec, forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """A forward and a backward in turn, `ahead` forwards before; without backwards where nothing trains."""
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    order = (*forwards[:ahead], *steady, *backwards[max(0, len(backwards) - ahead) :])
    return tuple(a for a in order if a.kind is Kind.F or (a.ministage or 0) >= spec.lowest_backward)


def interleaved(spec: ScheduleSpec) -> Order:
    """For plans whose ministages visit all groups in turn, equally often, and whose ranks all have equally
    many microbatches, a multiple of the number of groups, of the same rows. Raises `ScheduleError`, which
    says where, if the plan has another shape."""
    plan, name = spec.plan, "interleaved 1F1B"
    num_groups = len(plan.groups)
    groups = [ministage.group for ministage in plan.ministages]
    turn, num_turns = groups[:num_groups], len(groups) // num_groups
    if len(set(turn)) < num_groups or groups != turn * num_turns:
        raise ScheduleError(
            f"{name}: ministages belong to groups {groups}; let them visit all groups in turn, equally often"
        )
    num_microbatches = _check_even(plan, name)
    if num_microbatches % num_groups:
        raise ScheduleError(
            f"{name}: {num_microbatches} microbatches for {num_groups} groups; give a multiple of these"
        )
    computations = (_interleave(spec, turn.index(g), num_microbatches) for g in range(num_groups))
    return Order(tuple(computations), keeps_gathered=True)


def _interleave(spec: ScheduleSpec, place: int, num_microbatches: int) -> tuple[Action, ...]:
    """The computations of the group that comes `place`-th: as many microbatches as there are groups go
    through a ministage, then through the next."""
    ministages = spec.plan.ministages_of_group(spec.plan.ministages[place].group)
    num_groups = len(spec.plan.groups)
    total = num_microbatches * len(ministages)
    cycle = num_groups * len(ministages)
    turns = [(k % cycle // num_groups, k // cycle * num_groups + k % num_groups) for k in range(total)]
    forwards = [Action(Kind.F, ministages[turn], m) for turn, m in turns]
    backwards = [Action(Kind.B, ministages[-1 - turn], m) for turn, m in turns]
    ahead = total
    if num_microbatches > num_groups:
        ahead = 2 * (num_groups - place - 1) + (len(ministages) - 1) * num_groups
    return _alternate(spec, forwards, backwards, ahead)


def _check_even(plan: Plan, name: str) -> int:
    """The most microbatches of any rank; raises `ScheduleError` where ranks of several groups have different
    numbers of them, or of different rows, or where what is offloaded has no place in such an order."""
    counts = {rank: len(plan.microbatches_of_rank(rank)) for rank in sorted(plan.group_of_rank)}
    num_microbatches = counts[min(counts)]
    for rank, count in counts.items():
        if count != num_microbatches and len(plan.groups) > 1:
            raise ScheduleError(
                f"{name}: rank {rank} has {count} microbatches and rank {min(counts)} has "
                f"{num_microbatches}; give every rank of every group the same number"
            )
    for g, group in enumerate(plan.groups):
        if set(group.offload) - {"optimizer"}:
            raise ScheduleError(
                f'{name}: group {g} offloads {list(group.offload)}; this order knows "optimizer" alone'
            )
    _check_same_rows(plan, name)
    return max(counts.values())


def _check_same_rows(plan: Plan, name: str) -> None:
    for ministage, (earlier, later) in enumerate(pairwise(plan.ministages)):
        if earlier.group == later.group:
            continue
        for rows in match_rows(plan.groups[earlier.group], plan.groups[later.group]):
            if rows.source_microbatch != rows.target_microbatch:
                raise ScheduleError(
                    f"{name}: rows [{rows.start}:{rows.stop}) are in microbatch {rows.source_microbatch} of "
                    f"ministage {ministage} and in microbatch {rows.target_microbatch} of ministage "
                    f"{ministage + 1}; lay rows so that microbatch m is the same rows in every group"
                )


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
