"""Times the same action lists that the executor runs, under a plan's costs.

A list becomes a graph of tasks (`simulator/rank/program.py`), which the event loop (`events.py`) runs several
times over. Not modelled: an update beside computation slows neither down; the sums of target counts over the
last group and of losses after a step take no time; a unit computes for its share of the ministage's time by
bytes of parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from zorselike.cost.network import Flow
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import SENDS, Action, Kind
from zorselike.schedule.checker.channels import Channel
from zorselike.schedule.checker.rendezvous import wraps_around
from zorselike.schedule.contract import NUM_STEPS, NUM_STEPS_OFFLOADING
from zorselike.simulator.deadlock import describe_deadlock
from zorselike.simulator.events import PENDING, run
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.memory import MemoryWalks
from zorselike.simulator.network.rendezvous import Edge, Rendezvous
from zorselike.simulator.rank.labels import Labels, find_action_times, make_spans
from zorselike.simulator.rank.program import Program
from zorselike.simulator.rank.tasks import NOTHING, Tasks
from zorselike.simulator.report.time_breakdown import break_down_time
from zorselike.simulator.result import Simulation


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
        plan: the plan of the lists.
        actions: one step, or one evaluation, of each rank.
        costs: seconds and bytes of the plan's actions.
        record: whether to keep spans and the times of actions.
        num_steps: by default as many as it takes until one is like the next. With 1 all ranks begin
            together, as if each waited for all others after every step.
        buffered_edges: channels that GPUs serve through host memory, as `check` has found them; by default
            those that wrap around the pipeline. Ignored where sends buffer anyway, and for CPU ranks.

    Raises:
        DeadlockError: ranks wait for each other forever.
    """
    if num_steps is None:
        offloads = any(group.offload for group in plan.groups)
        num_steps = NUM_STEPS_OFFLOADING if offloads else NUM_STEPS
    staged = _staged_edges(plan, actions, costs, buffered_edges)
    tasks, programs, labels = _compile(plan, actions, costs, staged, record=record)
    times = run(tasks, num_steps, costs.network.capacities, slowdown=costs.overlap_slowdown)
    last = (num_steps - 1) * len(tasks.seconds)
    if any(times.end[last + program.end] == PENDING for program in programs.values()):
        tasks, programs, labels = _compile(plan, actions, costs, staged, record=True)
        times = run(tasks, num_steps, costs.network.capacities)
        raise describe_deadlock(actions, tasks, programs, labels, times)
    ends = [
        max(times.end[step * len(tasks.seconds) + program.end] for program in programs.values())
        for step in range(num_steps)
    ]
    began = ends[-2] if num_steps > 1 else 0.0
    previous_end_s = {
        rank: times.end[last - len(tasks.seconds) + program.end] if num_steps > 1 else 0.0
        for rank, program in programs.items()
    }
    iteration_s = ends[-1] - began
    last_step = times.part(last, last + len(tasks.seconds))
    egress_cost = _egress_cost(tasks, costs)
    return Simulation(
        iteration_s=iteration_s,
        ranks=tuple(
            break_down_time(programs[rank], tasks, times, num_steps=num_steps, iteration_s=iteration_s)
            for rank in sorted(programs)
        ),
        memory=MemoryWalks(plan, actions, costs),
        bytes_by_link=_bytes_by_link(tasks, costs),
        cost=costs.price_per_hour * iteration_s / 3600 + egress_cost,
        egress_cost=egress_cost,
        allocator_share=costs.allocator_share,
        spans=make_spans(actions, labels, last_step, began),
        action_times=find_action_times(labels, last_step, began, previous_end_s) if record else None,
    )


def _staged_edges(
    plan: Plan,
    actions: Mapping[int, Sequence[Action]],
    costs: StepCosts,
    buffered_edges: Collection[Edge] | None,
) -> frozenset[Edge]:
    """Channels of GPU ranks that go through host memory."""
    if costs.sends_buffer or costs.transfers_block:
        return frozenset()
    if buffered_edges is None:
        edges = {
            Channel(rank, action.peer, "F" if action.kind is Kind.SEND_F else "B")
            for rank, actions_of_rank in actions.items()
            for action in actions_of_rank
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
) -> tuple[Tasks, dict[int, Program], dict[int, Labels]]:
    """The tasks of one step, and each rank's program and labels."""
    tasks = Tasks()
    rendezvous = Rendezvous(plan, costs, tasks)
    programs: dict[int, Program] = {}
    labels: dict[int, Labels] = {}
    for rank in sorted(actions):
        if record:
            labels[rank] = Labels()
        programs[rank] = Program(plan, rank, costs, tasks, rendezvous, staged=staged, labels=labels.get(rank))
        programs[rank].build(actions[rank])
    return tasks, programs, labels


def _bytes_by_link(tasks: Tasks, costs: StepCosts) -> dict[str, float]:
    """Bytes that one step moves over each capacity."""
    found: dict[str, float] = {}
    for count, flow in _count_flows(tasks):
        for capacity in flow.capacities:
            name = costs.network.names[capacity]
            found[name] = found.get(name, 0.0) + count * flow.num_bytes
    return found


def _egress_cost(tasks: Tasks, costs: StepCosts) -> float:
    """Price of the traffic that leaves nodes in one step."""
    prices = costs.egress_price_per_gb
    if not prices:
        return 0.0
    return sum(
        count * flow.num_bytes / 1e9 * prices.get(flow.egress, 0.0)
        for count, flow in _count_flows(tasks)
        if flow.egress is not None
    )


def _count_flows(tasks: Tasks) -> Iterator[tuple[int, Flow]]:
    """The flows of one step, and how many tasks move each."""
    for bundle, count in Counter(tasks.bundle).items():
        if bundle != NOTHING:
            yield from ((count, flow) for flow in tasks.bundles[bundle])
