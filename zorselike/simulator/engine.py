"""Times the same action lists that the executor runs, under a plan's costs.

A list becomes a graph of tasks (`simulator/tasks/`), which the event loop (`events.py`) runs several
times over. Not modelled: an update beside computation slows neither down; the sums of target counts over the
last group and of losses after a step take no time; a unit computes for its share of the ministage's time by
bytes of parameters.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from zorselike.cost.step_costs import StepCosts
from zorselike.plan.plan import Plan
from zorselike.schedule.actions import SENDS, Action, Kind
from zorselike.schedule.checker.channels import Channel
from zorselike.schedule.checker.rendezvous import wraps_around
from zorselike.schedule.contract import NUM_STEPS, NUM_STEPS_OFFLOADING
from zorselike.simulator.classes.folded_network import Flows, FoldedNetwork
from zorselike.simulator.classes.rank_classes import NotAlikeError, RankClasses
from zorselike.simulator.deadlock import describe_deadlock
from zorselike.simulator.events import run
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.memory import MemoryWalks
from zorselike.simulator.report.time_breakdown import TimeBreakdown
from zorselike.simulator.result import Simulation
from zorselike.simulator.tasks.graph import NOTHING, PENDING, Tasks
from zorselike.simulator.tasks.labels import Labels, find_action_times, make_spans
from zorselike.simulator.tasks.program import Program
from zorselike.simulator.tasks.rendezvous import Rendezvous

_CHECKED_EVERY = 64
"""Ranks whose tasks are made from one look whether to go on to the next."""


@without_collection()
def simulate(
    plan: Plan,
    actions: Mapping[int, Sequence[Action]],
    costs: StepCosts,
    *,
    record: bool = False,
    num_steps: int | None = None,
    classes: RankClasses | None = None,
    check: Callable[[], None] | None = None,
) -> Simulation:
    """The last of some consecutive steps, or evaluations, of each rank's list, which more follow; raises
    `DeadlockError` if ranks wait for each other forever.

    Args:
        record: whether to keep spans and the times of actions.
        num_steps: by default as many as it takes until one is like the next. With 1 all ranks begin
            together, as if each waited for all others after every step, and nothing follows.
        classes: of ranks of which only the first of each has actions, between those; raises `NotAlikeError`
            if they are not alike.
        check: is called every now and then, and ends the simulation by what it raises.
    """
    if num_steps is None:
        offloads = any(group.offload for group in plan.groups)
        num_steps = NUM_STEPS_OFFLOADING if offloads else NUM_STEPS
    staged = _find_staged(plan, actions, costs)
    network = costs.network if classes is None else FoldedNetwork(costs, classes)
    tasks, programs, labels = _compile(plan, actions, costs, network, staged, record=record, check=check)
    times = run(
        tasks,
        num_steps,
        costs.network.capacities,
        slowdown=costs.overlap_slowdown,
        is_followed=num_steps > 1,
        check=check,
    )
    num_tasks = len(tasks.seconds)
    last = (num_steps - 1) * num_tasks
    if any(times.end[last + program.end] == PENDING for program in programs.values()):
        if classes is not None:
            raise NotAlikeError
        tasks, programs, labels = _compile(plan, actions, costs, network, staged, record=True)
        times = run(tasks, num_steps, costs.network.capacities)
        raise describe_deadlock(actions, tasks, programs, labels, times)
    previous_end_s = {
        rank: times.end[last - num_tasks + program.end] if num_steps > 1 else 0.0
        for rank, program in programs.items()
    }
    began = max(previous_end_s.values())
    iteration_s = max(times.end[last + program.end] for program in programs.values()) - began
    last_step = times.part(last, last + num_tasks)
    bytes_by_link, egress_cost = _add_up_traffic(tasks, costs, classes)
    return Simulation(
        iteration_s=iteration_s,
        ranks=TimeBreakdown(
            programs,
            tasks,
            times,
            num_steps=num_steps,
            iteration_s=iteration_s,
            first=None if classes is None else classes.first,
        ),
        memory=MemoryWalks(plan, actions, costs),
        bytes_by_link=bytes_by_link,
        cost=costs.price_per_hour * iteration_s / 3600 + egress_cost,
        egress_cost=egress_cost,
        allocator_share=costs.allocator_share,
        num_actions=sum(map(len, actions.values())),
        spans=make_spans(actions, labels, last_step, began),
        action_times=find_action_times(labels, last_step, began, previous_end_s) if record else None,
    )


def _find_staged(plan: Plan, actions: Mapping[int, Sequence[Action]], costs: StepCosts) -> frozenset[Channel]:
    """Channels of GPU ranks that go through host memory: those that wrap around the pipeline."""
    if math.isinf(costs.eager_bytes) or costs.transfers_block:
        return frozenset()
    channels = {
        Channel(rank, action.peer, "F" if action.kind is Kind.SEND_F else "B")
        for rank, actions_of_rank in actions.items()
        if not (costs.is_cpu and costs.is_cpu[rank])
        for action in actions_of_rank
        if action.kind in SENDS and action.peer is not None
    }
    return frozenset(channel for channel in channels if wraps_around(plan, channel))


def _compile(
    plan: Plan,
    actions: Mapping[int, Sequence[Action]],
    costs: StepCosts,
    network: Flows,
    staged: Collection[Channel],
    *,
    record: bool,
    check: Callable[[], None] | None = None,
) -> tuple[Tasks, dict[int, Program], dict[int, Labels]]:
    """The tasks of one step, and each rank's program and labels."""
    tasks = Tasks()
    rendezvous = Rendezvous(plan, costs, tasks, network, actions.keys())
    programs: dict[int, Program] = {}
    labels: dict[int, Labels] = {}
    for number, rank in enumerate(sorted(actions), start=1):
        if check is not None and not number % _CHECKED_EVERY:
            check()
        if record:
            labels[rank] = Labels()
        programs[rank] = Program(plan, rank, costs, tasks, rendezvous, staged=staged, labels=labels.get(rank))
        programs[rank].build(actions[rank])
    return tasks, programs, labels


def _add_up_traffic(
    tasks: Tasks, costs: StepCosts, classes: RankClasses | None
) -> tuple[dict[str, float], float]:
    """Bytes that one step moves over each capacity, and the price of those that leave nodes."""
    num_bytes: defaultdict[int, float] = defaultdict(float)
    price = 0.0
    for bundle, count in Counter(tasks.bundle).items():
        for flow in tasks.bundles[bundle] if bundle != NOTHING else ():
            for capacity in flow.capacities:
                num_bytes[capacity] += count * flow.num_bytes
            if flow.egress is not None:
                per_gb = costs.egress_price_per_gb.get(flow.egress, 0.0)
                price += flow.times * count * flow.num_bytes / 1e9 * per_gb
    names = costs.network.names
    firsts = range(len(names)) if classes is None else classes.first_capacity
    return {name: num_bytes[own] for name, own in zip(names, firsts, strict=True) if own in num_bytes}, price
