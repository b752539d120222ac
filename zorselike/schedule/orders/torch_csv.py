"""Schedules as CSV in the form of `torch.distributed.pipelining`, out and in.

A row is a rank, a cell an action such as `0F0`, `1B2`, `2UNSHARD` or `0SEND_F2`; an empty cell
is a bubble. Source: `_Action`, `_dump_csv` and `_load_csv` in torch's
`distributed/pipelining/schedules.py`. There a stage has one rank and all stages have the same
microbatches, so only plans of that shape go either way.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import COMPUTE, TRANSFERS, Action, Kind, parse_action
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders.order import Order, find_alternating, find_around
from zorselike.schedule.spec import ScheduleSpec

_KNOWN_TO_TORCH = COMPUTE | TRANSFERS | {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}


def to_torch_csv(plan: Plan, actions: Mapping[int, Sequence[Action]]) -> str:
    """The schedule as torch's CSV with communication (`format="compute_comms"`).

    What torch does not know is left out: row ranges and peers of transfers, `STEP`, `NORM`, copies
    between device and host, and exchanges of tied weights. Raises `ScheduleError`, which says why, if torch
    cannot express the plan.
    """
    _refuse_other_shapes(plan)
    for g, group in enumerate(plan.groups):
        if group.reduces_per_microbatch:
            raise ScheduleError(
                f"torch's CSV cannot express group {g}: it reduces after every microbatch, and torch once; "
                'set zero to 0, 1 or 2 and grad_reduce = "once"'
            )
    file = io.StringIO()
    writer = csv.writer(file)
    for rank in sorted(actions):
        known = (action for action in actions[rank] if action.kind in _KNOWN_TO_TORCH)
        writer.writerow([action._replace(peer=None, start=None, stop=None).text for action in known])
    return file.getvalue()


def read_torch_csv(spec: ScheduleSpec, text: str) -> Order:
    """The order of computations in a file, with the places of its transfers, if it has any.

    Gathers and reductions of the file are left out: lowering adds those that the plan's ZeRO stage asks
    for. Nothing says that such a schedule is complete or ends: `check` does, once it is lowered. The plan has
    one rank a group and the same microbatches in all groups; microbatch `k` of the file is the `k`-th of
    these. Raises `ScheduleError`, which says where, if the file does not fit the plan.
    """
    plan = spec.plan
    _refuse_other_shapes(plan)
    rows = list(csv.reader(io.StringIO(text)))
    if len(rows) != plan.num_ranks:
        raise ScheduleError(
            f"the file has {len(rows)} rows and the plan {plan.num_ranks} ranks: give a row each"
        )
    lists = {rank: _read_row(plan, rank, cells) for rank, cells in enumerate(rows)}
    has_transfers = any(action.kind in TRANSFERS for actions in lists.values() for action in actions)
    computations = tuple(
        tuple(action for action in lists[rank] if action.kind in COMPUTE)
        for group in plan.groups
        for rank in group.flat_ranks
    )
    return Order(
        computations,
        alternating=find_alternating(computations, [ministage.group for ministage in plan.ministages]),
        transfers={rank: find_around(actions) for rank, actions in lists.items()} if has_transfers else None,
    )


def _refuse_other_shapes(plan: Plan) -> None:
    """A stage of torch's is one rank, and microbatch `k` is the same rows in all of them."""
    rows: list[tuple[int, int]] = []
    for g, group in enumerate(plan.groups):
        if len(group.flat_ranks) > 1:
            raise ScheduleError(
                f"torch's CSV cannot express group {g}: it has {len(group.flat_ranks)} ranks, and a stage of "
                "torch's pipelining one; give every group a single rank"
            )
        group_rows = [(microbatch.start, microbatch.stop) for microbatch in group.microbatches]
        if g and group_rows != rows:
            raise ScheduleError(
                f"torch's CSV cannot express group {g}: its microbatches differ from those of group 0, and "
                "there microbatch k is the same rows in every stage; give all groups the same"
            )
        rows = group_rows


def _read_row(plan: Plan, rank: int, cells: Iterable[str]) -> list[Action]:
    """The computations and transfers of a row, transfers completed by their peer and rows."""
    actions = []
    for column, cell in enumerate(cells):
        if not cell.strip():
            continue
        try:
            action = parse_action(cell)
        except ValueError as error:
            raise ScheduleError(
                f"row {rank}, cell {column}: '{cell.strip()}' is no action that runs here; a backward is one "
                "B (I, W and OVERLAP_F_B are not supported)"
            ) from error
        if action.kind in _KNOWN_TO_TORCH - COMPUTE - TRANSFERS:
            continue
        fault = _find_misfit(plan, rank, action)
        if fault:
            raise ScheduleError(f"row {rank}, cell {column}: '{cell.strip()}' does not fit the plan: {fault}")
        actions.append(_complete(plan, rank, action) if action.kind in TRANSFERS else action)
    return actions


def _find_misfit(plan: Plan, rank: int, action: Action) -> str | None:
    ministages = plan.ministages_of_rank(rank)
    if action.kind not in _KNOWN_TO_TORCH or action.peer is not None:
        return "torch's CSV has no such action"
    if action.ministage not in ministages:
        return f"rank {rank} owns ministages {list(ministages)}"
    count = len(plan.microbatches_of_rank(rank))
    if action.microbatch is None or action.microbatch >= count:
        return f"microbatches are 0..{count - 1}"
    if action.kind in TRANSFERS and not 0 <= action.ministage + _direction(action.kind) < plan.num_ministages:
        return "nothing comes before the first ministage or after the last"
    return None


def _direction(kind: Kind) -> int:
    """Where the other end of a transfer is: 1 for the following ministage, -1 for the one before."""
    return 1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1


def _complete(plan: Plan, rank: int, transfer: Action) -> Action:
    """The transfer with the peer and the rows that the plan gives its microbatch."""
    assert transfer.ministage is not None and transfer.microbatch is not None
    (peer,) = plan.group_of(transfer.ministage + _direction(transfer.kind)).flat_ranks
    rows = plan.microbatches_of_rank(rank)[transfer.microbatch]
    return transfer._replace(peer=peer, start=rows.start, stop=rows.stop)
