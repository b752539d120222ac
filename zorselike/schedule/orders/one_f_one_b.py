"""1F1B: one forward, one backward, as many forwards ahead as there are stages behind.

For a plan with one ministage a group, as PipeDream-Flush (Narayanan et al. 2021, section 2.2.1),
Megatron-LM and DeepSpeed run it. To compare with; `zorselike/schedule/lowering/build.py` builds ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.complete import Pair, add_transfers, find_transfers
from zorselike.schedule.orders.fixed_order import as_checked, complete, refuse_other_rows, refuse_uneven
from zorselike.schedule.spec import Demands, work_out_demands

NAME = "1F1B"


def build_one_f_one_b(
    plan: Plan,
    *,
    blocking: bool = False,
    trainable: Sequence[bool] | None = None,
    ties: Sequence[tuple[int, int]] = (),
    defer_steps: bool = False,
    masters: bool = False,
) -> dict[int, list[Action]]:
    """The actions of every rank for one optimizer step.

    Args:
        plan: every group has one ministage; in several groups all ranks have equally many microbatches,
            of the same rows. One group is data parallelism with one microbatch's activations at a time.
        blocking: transfers stand where DeepSpeed's `TrainSchedule` has them, for runtimes whose sends and
            receives block: a result leaves before the next computation of the other direction, and a
            receive stands right before its use. Our runtime cannot run that; the simulator can.

    The other options are those of `build`. `check` accepts the lists for `as_checked(plan)`.

    Raises:
        ScheduleError: The plan has another shape; says where.
    """
    if any(len(plan.ministages_of_group(g)) != 1 for g in range(len(plan.groups))):
        raise ScheduleError(
            f"{NAME} has one ministage a group; use the interleaved order for plans with several"
        )
    num_microbatches = refuse_uneven(plan, NAME)
    demands = work_out_demands(
        as_checked(plan),
        trainable=trainable,
        ties=ties,
        forward_only=False,
        defer_steps=defer_steps,
        masters=masters,
    )
    lists = {
        rank: _order(demands, plan.ministages_of_rank(rank)[0], num_microbatches)
        for rank in sorted(plan.group_of_rank)
    }
    refuse_other_rows(demands, lists, NAME)
    if blocking:
        return complete(demands, _add_blocking_transfers(demands, lists, num_microbatches), masters=masters)
    return complete(demands, add_transfers(demands, lists), masters=masters)


def _order(demands: Demands, stage: int, num_microbatches: int) -> list[Action]:
    """The computations of a stage."""
    forwards = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
    if stage < demands.lowest_backward:
        return forwards
    backwards = [Action(Kind.B, stage, m) for m in range(num_microbatches)]
    ahead = min(demands.plan.num_ministages - stage - 1, num_microbatches)
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return [*forwards[:ahead], *steady, *backwards[num_microbatches - ahead :]]


# -- transfers that block ----------------------------------------------------------------------


class _Slot(NamedTuple):
    """A place for one computation of a stage; slots of all stages go on side by side."""

    kind: Kind
    microbatch: int
    """May be none of the rank's."""


def _slots(stage: int, num_stages: int, num_microbatches: int) -> list[_Slot]:
    """DeepSpeed's `TrainSchedule._step_to_micro_batch`: a stage computes forwards in every other slot,
    backwards in those between."""
    slots = []
    for number in range(2 * (num_microbatches + num_stages - 1)):
        if number % 2 == stage % 2:
            slots.append(_Slot(Kind.F, (number - stage) // 2))
        else:
            slots.append(_Slot(Kind.B, (number + stage + 1) // 2 - num_stages))
    return slots


def _add_blocking_transfers(
    demands: Demands, lists: Mapping[int, Sequence[Action]], num_microbatches: int
) -> dict[int, list[Action]]:
    """Puts the transfers of the computation before, and of the next one, between the two."""
    leaving: dict[tuple[int, Action], tuple[Pair, ...]] = {}
    arriving: defaultdict[tuple[int, Kind, int | None], list[Action]] = defaultdict(list)
    for source, pairs in find_transfers(demands, lists).items():
        for computation, own in zip(lists[source], pairs, strict=True):
            leaving[source, computation] = own
            for send, receive in own:
                assert send.peer is not None
                arriving[send.peer, receive.kind, receive.microbatch].append(receive)
    found = {}
    for rank in lists:
        stage = demands.plan.ministages_of_rank(rank)[0]
        actions: list[Action] = []
        before: _Slot | None = None
        for slot in _slots(stage, demands.plan.num_ministages, num_microbatches):
            last = None if before is None else Action(before.kind, stage, before.microbatch)
            sends = leaving.get((rank, last), ()) if last is not None else ()
            wanted = (rank, Kind.RECV_F if slot.kind is Kind.F else Kind.RECV_B, slot.microbatch)
            incoming = sorted(arriving[wanted], key=lambda action: action.start or 0)
            outgoing = [pair.send for pair in sends]
            actions += [*outgoing, *incoming] if slot.kind is Kind.F else [*incoming, *outgoing]
            computation = Action(slot.kind, stage, slot.microbatch)
            if (rank, computation) in leaving:
                actions.append(computation)
            before = slot
        found[rank] = actions
    return found
