"""A step's time without simulating it: Zorse's latency model (4.3.4, Eq. 1)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from zorselike.cost.network import CollectiveOp
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Group, Plan
from zorselike.schedule.transfers import match_rows


def estimate_step_s(plan: Plan, costs: StepCosts) -> float:
    """`(L_forwards + L_backwards) * N_ministages + L_startup` of the slowest group, in seconds.

    A ministage's forward takes as long as the longest of what overlaps in it: the computation of the group's
    busiest rank, its all-gathers, and sending its output on; its backward (recomputation included) likewise,
    with reductions beside the gathers. Ministages of a group may differ, so theirs are added up where the
    paper multiplies. The start-up is what nothing hides before the last group begins: the first gather, and
    of each group before it the first microbatch's computation and transfer.

    Left out: the drain (the backward that follows the last group's on its way down), the last reduction and
    optimizer step, all waiting inside the pipeline that is not start-up, copies between device and host,
    the host's own time, exchanges of tied weights, the global norm, and contention of gathers with
    transfers and of one group with another.
    """
    form = _ClosedForm(plan, costs)
    work: defaultdict[int, float] = defaultdict(float)
    for i, ministage in enumerate(plan.ministages):
        work[ministage.group] += form.forward_s(i) + form.backward_s(i)
    return max(work.values()) + form.startup_s()


class _ClosedForm:
    """Times of one plan's ministages."""

    def __init__(self, plan: Plan, costs: StepCosts) -> None:
        self._plan, self._costs = plan, costs
        trained = [i for i, units in enumerate(costs.units) if any(unit.reduced_bytes for unit in units)]
        self._lowest_backward = trained[0] if trained else plan.num_ministages
        self._sent: dict[tuple[int, int, int], float] = {}

    def forward_s(self, i: int) -> float:
        """All microbatches of a ministage, forward."""
        group = self._plan.group_of(i)
        compute = self._busiest(i, self._costs.forward_s)
        num_gathers = {0: 0, 1: 1, 2: 1, 3: group.max_microbatches}[group.zero]
        return self._overlap(compute, num_gathers * self._gather_s(i), self._send_s(i, i + 1, i + 1))

    def backward_s(self, i: int) -> float:
        """The same backward; nothing below the lowest ministage that trains. A single ministage stays
        gathered after its forward."""
        if i < self._lowest_backward:
            return 0.0
        group = self._plan.group_of(i)
        compute = self._busiest(i, self._costs.backward_s)
        num_gathers = {0: 0, 1: 0, 2: int(self._plan.num_ministages > 1), 3: group.max_microbatches}[
            group.zero
        ]
        num_reductions = group.max_microbatches if group.reduces_per_microbatch else 1
        collectives = num_gathers * self._gather_s(i) + num_reductions * self._reduce_s(i)
        sending = self._send_s(i, i - 1, i) if i > self._lowest_backward else 0.0
        return self._overlap(compute, collectives, sending)

    def startup_s(self) -> float:
        """From the beginning of the step until the group that begins last begins."""
        first: dict[int, int] = {}
        for i, ministage in enumerate(self._plan.ministages):
            first.setdefault(ministage.group, i)
        begins = 0.0
        for i in range(max(first.values()) + 1):
            group = self._plan.group_of(i)
            if group.zero != 0 and i in first.values():
                begins = max(begins, self._gather_s(i))  # It runs while others compute.
            if i < max(first.values()):
                begins += self._pass_first_s(i)
        return begins

    # -- parts -----------------------------------------------------------------------------

    def _overlap(self, compute: float, *others: float) -> float:
        """The longest; computation is slowed down while anything runs beside it."""
        beside = max(others)
        slowed = compute + (self._costs.overlap_slowdown - 1) * min(compute, beside)
        return max(slowed, beside)

    def _busiest(self, i: int, seconds: Mapping[tuple[int, int, int], float]) -> float:
        group = self._plan.group_of(i)
        return max(
            sum(seconds[rank, i, microbatch.num_rows] for microbatch in own)
            for rank, own in group.microbatches_by_rank.items()
        )

    def _gather_s(self, i: int) -> float:
        sizes = [unit.gathered_bytes for unit in self._costs.units[i]]
        return self._collectives_s(self._plan.group_of(i), "all_gather", sizes)

    def _reduce_s(self, i: int) -> float:
        group = self._plan.group_of(i)
        sizes = [unit.reduced_bytes for unit in self._costs.units[i] if unit.reduced_bytes]
        return self._collectives_s(group, "reduce_scatter" if group.zero else "all_reduce", sizes)

    def _collectives_s(self, group: Group, op: CollectiveOp, sizes: Sequence[int]) -> float:
        """One after the other, one a unit."""
        network = self._costs.network
        times = {
            size: network.time_alone(network.collective(op, group.flat_ranks, size)) for size in {*sizes}
        }
        return sum(times[size] for size in sizes)

    def _send_s(self, i: int, neighbour: int, boundary: int) -> float:
        """All rows that enter ministage `boundary`, or their gradients, between two ministages' groups."""
        if not 0 <= neighbour < self._plan.num_ministages:
            return 0.0
        source, target = (self._plan.ministages[j].group for j in (i, neighbour))
        key = source, target, self._costs.row_bytes[boundary]
        if source == target:
            return 0.0
        if key not in self._sent:
            rows = _count_rows(self._plan.groups[source], self._plan.groups[target])
            self._sent[key] = self._costs.network.time_alone(
                [self._costs.network.transfer(a, b, number * key[2]) for (a, b), number in rows.items()]
            )
        return self._sent[key]

    def _pass_first_s(self, i: int) -> float:
        """Until the next ministage can begin: the group's first microbatch and its way to whoever computes
        its first row; all microbatches where the next ministage is the group's own."""
        source, target = (self._plan.group_of(j) for j in (i, i + 1))
        if source is target:
            return self.forward_s(i)
        first = source.microbatches[0]
        receiver = next(m.rank for m in target.microbatches if m.start <= first.start < m.stop)
        num_bytes = first.num_rows * self._costs.row_bytes[i + 1]
        flow = self._costs.network.transfer(first.rank, receiver, num_bytes)
        return self._costs.forward_s[first.rank, i, first.num_rows] + self._costs.network.time_alone([flow])


def _count_rows(source: Group, target: Group) -> Counter[tuple[int, int]]:
    """Rows that go from each rank of a group to each of another."""
    rows: Counter[tuple[int, int]] = Counter()
    for shared in match_rows(source, target):
        rows[shared.source, shared.target] += shared.stop - shared.start
    return rows
