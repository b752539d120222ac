"""Times the very action lists that the executor runs, under a plan's costs.

A list becomes tasks that wait for each other (`simulator/rank/program.py`), once, before the event loop
(`events.py`) runs them several times over. What is not modelled: an update beside computation slows neither
down; the sum of target counts over the last group, and that of the losses after a step, take no time; the
time in which a unit computes is its share of the ministage's by bytes of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import SENDS, Action, Kind
from zorselike.schedule.checker.channels import Channel
from zorselike.schedule.checker.rendezvous import wraps_around
from zorselike.simulator.deadlock import describe_deadlock
from zorselike.simulator.events import PENDING, run
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.memory import MemoryWalks
from zorselike.simulator.network.rendezvous import Edge, Meetings
from zorselike.simulator.rank.labels import Notes
from zorselike.simulator.rank.program import Program
from zorselike.simulator.rank.tasks import NOTHING, Tasks
from zorselike.simulator.report.time_breakdown import account_for
from zorselike.simulator.result import Simulation
from zorselike.simulator.spans import find_action_times, make_spans

NUM_STEPS = 2
"""Steps of which the last is as all that follow: what reaches from one step into the next (ranks that end
early, and begin early) is there after one."""
NUM_STEPS_OFFLOADING = 3
"""Copies to the host that go on beside the next step may hold up the second one more than those after."""


@without_collection()
def simulate(
    plan: Plan,
    actions: Mapping[int, Sequence[Action]],
    costs: StepCosts,
    *,
    record: bool = False,
    num_steps: int | None = None,
    buffered_edges: Collection[Edge] | None = None,
) -> Simulation:
    """The last of some consecutive steps.

    Args:
        plan: what the lists were built for.
        actions: of each rank one step, or one evaluation.
        costs: seconds and bytes of all that they do.
        record: whether to keep spans and the times of actions.
        num_steps: how many; by default as many as it takes until one is like the next. With 1 all ranks
            begin together, as where each waits for all others after every step.
        buffered_edges: channels that devices serve through host memory, as `check` has found them; by
            default those that wrap around the pipeline. Where sends buffer anyway, or the ranks compute on
            CPUs, it is not asked.

    Raises:
        DeadlockError: ranks wait for each other for ever.
    """
    if num_steps is None:
        offloads = any(group.offload for group in plan.groups)
        num_steps = NUM_STEPS_OFFLOADING if offloads else NUM_STEPS
    staged = _staged_edges(plan, actions, costs, buffered_edges)
    tasks, programs, notes = _compile(plan, actions, costs, staged, record=record)
    times = run(tasks, num_steps, costs.network.capacities, slowdown=costs.overlap_slowdown)
    last = (num_steps - 1) * len(tasks.seconds)
    if any(times.end[last + program.end] == PENDING for program in programs.values()):
        tasks, programs, notes = _compile(plan, actions, costs, staged, record=True)
        times = run(tasks, num_steps, costs.network.capacities)
        raise describe_deadlock(actions, tasks, programs, notes, times)
    ends = [
        max(times.end[step * len(tasks.seconds) + program.end] for program in programs.values())
        for step in range(num_steps)
    ]
    began = ends[-2] if num_steps > 1 else 0.0
    ended_before = {
        rank: times.end[last - len(tasks.seconds) + program.end] if num_steps > 1 else 0.0
        for rank, program in programs.items()
    }
    iteration_s = ends[-1] - began
    egress_cost = _egress_cost(tasks, costs)
    return Simulation(
        iteration_s=iteration_s,
        ranks=tuple(
            account_for(programs[rank], tasks, times, num_steps=num_steps, iteration_s=iteration_s)
            for rank in sorted(programs)
        ),
        memory=MemoryWalks(plan, actions, costs),
        bytes_by_link=_bytes_by_link(tasks, costs),
        cost=costs.price_per_hour * iteration_s / 3600 + egress_cost,
        egress_cost=egress_cost,
        allocator_share=costs.allocator_share,
        spans=make_spans(actions, notes, times, last, began),
        action_times=find_action_times(notes, times, last, began, ended_before) if record else None,
    )


def _staged_edges(
    plan: Plan,
    actions: Mapping[int, Sequence[Action]],
    costs: StepCosts,
    buffered_edges: Collection[Edge] | None,
) -> frozenset[Edge]:
    """Channels of devices that go through host memory."""
    if costs.sends_buffer or costs.transfers_block:
        return frozenset()
    if buffered_edges is None:
        edges = {
            Channel(rank, action.peer, "F" if action.kind is Kind.SEND_F else "B")
            for rank, own in actions.items()
            for action in own
            if action.kind in SENDS and action.peer is not None
        }
        buffered_edges = [edge for edge in edges if wraps_around(plan, edge)]
    return frozenset(edge for edge in buffered_edges if not (costs.is_cpu and costs.is_cpu[edge[0]]))


def _compile(
    plan: Plan,
    actions: Mapping[int, Sequence[Action]],
    costs: StepCosts,
    staged: Collection[Edge],
    *,
    record: bool,
) -> tuple[Tasks, dict[int, Program], dict[int, Notes]]:
    """The tasks of one step, and by rank its program and what its tasks are called."""
    tasks = Tasks()
    meetings = Meetings(plan, costs, tasks)
    programs: dict[int, Program] = {}
    notes: dict[int, Notes] = {}
    for rank in sorted(actions):
        if record:
            notes[rank] = Notes()
        programs[rank] = Program(plan, rank, costs, tasks, meetings, staged=staged, notes=notes.get(rank))
        programs[rank].read(actions[rank])
    return tasks, programs, notes


def _bytes_by_link(tasks: Tasks, costs: StepCosts) -> dict[str, float]:
    """Bytes that one step puts on each capacity."""
    names = costs.network.names
    found: dict[str, float] = {}
    for bundle, count in _bundle_counts(tasks).items():
        for flow in tasks.bundles[bundle]:
            for capacity in flow.capacities:
                name = names[capacity]
                found[name] = found.get(name, 0.0) + count * flow.num_bytes
    return found


def _egress_cost(tasks: Tasks, costs: StepCosts) -> float:
    """Money for what leaves nodes in one step."""
    if not costs.egress_price_per_gb:
        return 0.0
    return sum(
        count * flow.num_bytes / 1e9 * costs.egress_price_per_gb.get(flow.egress, 0.0)
        for bundle, count in _bundle_counts(tasks).items()
        for flow in tasks.bundles[bundle]
        if flow.egress is not None
    )


def _bundle_counts(tasks: Tasks) -> dict[int, int]:
    """How many tasks move each bundle in a step."""
    counts: dict[int, int] = {}
    for bundle in tasks.bundle:
        if bundle != NOTHING:
            counts[bundle] = counts.get(bundle, 0) + 1
    return counts
