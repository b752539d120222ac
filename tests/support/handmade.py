"""Simulated steps written by hand, for what reports and drawings say of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from zorselike.cost.purposes import MemoryWalk
from zorselike.cost.sizes import MinistageBytes
from zorselike.cost.step_costs import StepCosts
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.schedule.actions import Action, parse_action
from zorselike.simulator.result import RankTimes, Simulation, Span, Track
from zorselike.simulator.simulated_plan import SimulatedPlan

GIB = 2**30

WORKLOAD = Workload(
    model="chain",
    sequence_length=100,
    dtype="bfloat16",
    layers=(("layers.0", "layer"), ("layers.1", "layer")),
    kinds={"layer": LayerKind(name="layer", num_parameters=1000, forward_flops_per_row=1e9)},
)
CLUSTER = Cluster(
    nodes=(
        Node(name="a", devices=("A100-40",), nic=Link(1e9)),
        Node(name="b", devices=("T4", "T4"), fabric=Link(1e10), nic=Link(1e9)),
    ),
    default_link=Link(1e9),
    name="home",
)
PLAN = Plan(
    global_batch=4,
    groups=(
        Group(ranks=(0,), microbatches=(Microbatch(0, 0, 4),)),
        Group(ranks=(1, 2), microbatches=(Microbatch(1, 0, 2), Microbatch(2, 2, 4))),
    ),
    ministages=(Ministage(0, ("layers.0",)), Ministage(1, ("layers.1",))),
)

SPANS: tuple[tuple[int, Track, float, float, str], ...] = (
    (0, "compute", 0.0, 2.0, "0F0"),
    (0, "send", 2.0, 3.0, "0SEND_F0@1[0:2]"),
    (0, "send", 2.0, 3.0, "0SEND_F0@2[2:4]"),
    (1, "receive", 2.0, 3.0, "1RECV_F0@0[0:2]"),
    (2, "receive", 2.0, 3.0, "1RECV_F0@0[2:4]"),
    (1, "compute", 3.0, 4.0, "1F0"),
    (2, "compute", 3.0, 4.0, "1F0"),
    (1, "compute", 4.0, 6.0, "1B0"),
    (2, "compute", 4.0, 6.0, "1B0"),
    (1, "send", 6.0, 6.5, "1SEND_B0@0[0:2]"),
    (2, "send", 6.0, 7.0, "1SEND_B0@0[2:4]"),
    (0, "receive", 6.0, 6.5, "0RECV_B0@1[0:2]"),
    (0, "receive", 6.0, 7.0, "0RECV_B0@2[2:4]"),
    (1, "reduce", 6.0, 7.0, "1REDUCE_GRAD"),
    (2, "reduce", 6.0, 7.0, "1REDUCE_GRAD"),
    (1, "update", 7.0, 8.0, "1STEP"),
    (2, "update", 7.0, 8.0, "1STEP"),
    (0, "compute", 7.0, 9.0, "0B0"),
    (0, "update", 9.0, 10.0, "0STEP"),
)
"""Ten seconds of two groups: rank 0, then 1 and 2, and back."""

TIMES = (
    RankTimes(
        busy_s=5.0,
        waiting_for_data_s=3.0,
        exposed_communication_s=2.0,
        exposed_copies_s=0.0,
        forward_s=2.0,
        backward_s=2.0,
        update_s=1.0,
    ),
    *(
        RankTimes(
            busy_s=4.0,
            waiting_for_data_s=4.0,
            exposed_communication_s=2.0,
            exposed_copies_s=0.0,
            forward_s=1.0,
            backward_s=2.0,
            update_s=1.0,
        ),
    )
    * 2,
)


def make_spans(rows: Sequence[tuple[int, Track, float, float, str]] = SPANS) -> tuple[Span, ...]:
    return tuple(
        Span(rank, track, start, stop, parse_action(text)) for rank, track, start, stop, text in rows
    )


def make_walk(*device_bytes: int) -> MemoryWalk:
    """A walk that peaks at its largest number, all of it gradients; without numbers, of no action."""
    peak = max(device_bytes, default=0)
    return MemoryWalk(
        device={"gradients": peak},
        host={},
        device_bytes=device_bytes,
        at_peak={"gradients": peak, "activations": 0},
        holders={},
        between_steps={},
        context_bytes=0,
        peak_position=device_bytes.index(peak) if device_bytes else None,
        peak_action=parse_action("0B0") if device_bytes else None,
    )


def make_simulation(
    *,
    spans: Sequence[Span] = make_spans(),
    times: Sequence[RankTimes] = TIMES,
    peaks: Sequence[int] = (10 * GIB, 8 * GIB, 8 * GIB),
    bytes_by_link: Mapping[str, float] | None = None,
    cost: float = 0.0,
) -> Simulation:
    own = [[span for span in spans if span.rank == rank] for rank in range(len(times))]
    return Simulation(
        iteration_s=10.0,
        ranks=tuple(times),
        memory=tuple(
            make_walk(*(peak // (2 - (n == 0)) for n in range(len(spans_of))))
            for peak, spans_of in zip(peaks, own, strict=True)
        ),
        bytes_by_link=bytes_by_link or {},
        cost=cost,
        egress_cost=cost / 4,
        spans=tuple(spans),
        action_times={
            rank: tuple((span.start_s, span.stop_s) for span in spans_of) for rank, spans_of in enumerate(own)
        },
    )


def make_case(simulation: Simulation | None = None, *, assumptions: tuple[str, ...] = ()) -> SimulatedPlan:
    actions: defaultdict[int, list[Action]] = defaultdict(list)
    simulation = simulation or make_simulation()
    for span in simulation.spans:
        actions[span.rank].append(span.action)
    sizes = MinistageBytes(
        gathered_bytes=1, shard_bytes=1, gradient_bytes=1, gradient_shard_bytes=1, state_bytes=1
    )
    costs = StepCosts(
        places=CLUSTER.places,
        network=make_network(CLUSTER, CLUSTER.places),
        forward_s={(0, 0, 4): 2.0, (1, 1, 2): 1.0, (2, 1, 2): 1.0},
        backward_s={(0, 0, 4): 2.0, (1, 1, 2): 2.0, (2, 1, 2): 2.0},
        update_s={(0, 0): 1.0, (1, 1): 1.0, (2, 1): 1.0},
        row_bytes=(0, 100),
        units=((), ()),
        sizes=({0: sizes}, {1: sizes}, {1: sizes}),
        memory_bytes=(40 * GIB, 16 * GIB, 16 * GIB),
        assumptions=assumptions,
    )
    return SimulatedPlan(
        plan=PLAN, workload=WORKLOAD, cluster=CLUSTER, actions=actions, costs=costs, simulation=simulation
    )
