"""The simulation of a plan's own action lists: the same that the runtime executes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from zorselike.plan.plan import Plan
from zorselike.schedule.actions import Action, Kind

from .operations import Links, Meet, Operation, Outcome, Send, Work, simulate_operations

MIN_COST_ROWS = 2
"""A microbatch of fewer rows costs as much as one of these: small kernels do not fill a device."""

BACKWARD_FACTOR = 2.0


@dataclass(frozen=True)
class Workload:
    """What the sleeping layers cost and weigh."""

    seconds_of_rank: tuple[float, ...]
    """Seconds per row and layer of each rank, forward; a backward takes twice that."""
    layers_of_ministage: tuple[int, ...]
    row_bytes: float = 0.0
    layer_bytes: float = 0.0

    def ideal_s(self, num_rows: int) -> float:
        """All rows through all layers on all ranks at once, without a gap."""
        speed = sum(1.0 / seconds for seconds in self.seconds_of_rank)
        return (1.0 + BACKWARD_FACTOR) * num_rows * sum(self.layers_of_ministage) / speed


def compute_s(num_rows: int, num_layers: int, seconds: float, *, backward: bool = False) -> float:
    """Seconds of one microbatch through some layers of one rank."""
    factor = BACKWARD_FACTOR if backward else 1.0
    return factor * max(num_rows, MIN_COST_ROWS) * num_layers * seconds


def simulate(
    plan: Plan,
    actions: Mapping[int, Sequence[Action]],
    workload: Workload,
    links: Links | None = None,
) -> Outcome:
    """Seconds of one step of these actions if only layers and links took time."""
    translator = _Translator(plan, workload)
    operations = {rank: translator.translate(rank, own) for rank, own in actions.items()}
    return simulate_operations(operations, links)


class _Translator:
    """Turns one rank's actions into operations of the simulation."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self._plan = plan
        self._workload = workload

    def translate(self, rank: int, actions: Sequence[Action]) -> list[Operation]:
        operations: list[Operation] = []
        posted: dict[Hashable, list[Hashable]] = defaultdict(list)
        gathered: dict[int, Hashable] = {}
        meetings: dict[Hashable, int] = defaultdict(int)
        for action in actions:
            match action.kind:
                case Kind.F | Kind.B:
                    operations += self._compute(rank, action, posted, gathered, meetings)
                case Kind.SEND_F | Kind.SEND_B:
                    operations.append(self._send(rank, action))
                case Kind.RECV_F | Kind.RECV_B:
                    kind = Kind.F if action.kind is Kind.RECV_F else Kind.B
                    key = (kind, action.ministage, action.microbatch)
                    posted[key].append(_token(action.kind, action, action.peer, rank))
                case Kind.UNSHARD:
                    assert action.ministage is not None
                    meet = self._meet(rank, action, meetings, reductions=1, blocks=False)
                    gathered[action.ministage] = meet.token
                    operations.append(meet)
                case Kind.REDUCE_GRAD:
                    zero = self._plan.groups[self._plan.group_of_rank[rank]].zero
                    operations.append(self._meet(rank, action, meetings, reductions=2 if zero == 0 else 1))
                case Kind.NORM:
                    members = tuple(range(self._plan.num_ranks))
                    operations.append(Meet(("norm",), members))
                case Kind.RESHARD | Kind.STEP:
                    pass
                case _:
                    raise ValueError(f"the simulation does not know {action}")
        return operations

    def _compute(
        self,
        rank: int,
        action: Action,
        posted: Mapping[Hashable, list[Hashable]],
        gathered: Mapping[int, Hashable],
        meetings: dict[Hashable, int],
    ) -> list[Operation]:
        assert action.ministage is not None and action.microbatch is not None
        operations: list[Operation] = []
        backward = action.kind is Kind.B
        if self._plan.group_of(action.ministage).zero == 3:
            operations.append(self._meet(rank, action, meetings, reductions=1))
        own = self._plan.microbatches_of_rank(rank)
        if action.microbatch < len(own):
            seconds = compute_s(
                own[action.microbatch].num_rows,
                self._workload.layers_of_ministage[action.ministage],
                self._workload.seconds_of_rank[rank],
                backward=backward,
            )
            needs = list(posted.get((action.kind, action.ministage, action.microbatch), []))
            if action.ministage in gathered:
                needs.append(gathered[action.ministage])
            operations.append(Work(seconds, tuple(needs)))
        if self._plan.group_of(action.ministage).zero == 3 and backward:
            operations.append(self._meet(rank, action, meetings, reductions=1))
        return operations

    def _send(self, rank: int, action: Action) -> Send:
        assert action.peer is not None and action.start is not None and action.stop is not None
        num_bytes = (action.stop - action.start) * self._workload.row_bytes
        receive = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_B
        return Send(_token(receive, action, rank, action.peer), action.peer, num_bytes)

    def _meet(
        self,
        rank: int,
        action: Action,
        meetings: dict[Hashable, int],
        *,
        reductions: int,
        blocks: bool = True,
    ) -> Meet:
        """A collective over the parameters of a ministage; `reductions` counts passes of the ring."""
        assert action.ministage is not None
        members = self._plan.group_of(action.ministage).flat_ranks
        whole = self._workload.layers_of_ministage[action.ministage] * self._workload.layer_bytes
        num_bytes = reductions * whole * (len(members) - 1) / len(members)
        name = (action.kind, action.ministage)
        meetings[name] += 1
        return Meet((*name, meetings[name]), members, num_bytes, blocks)


def _token(kind: Kind, action: Action, source: int | None, target: int) -> Hashable:
    """The name of a transfer, the same at both ends."""
    assert action.ministage is not None
    if action.kind is Kind.SEND_F:
        boundary = action.ministage + 1
    elif action.kind is Kind.SEND_B:
        boundary = action.ministage - 1
    else:
        boundary = action.ministage
    return (kind, boundary, source, target, action.start, action.stop)
