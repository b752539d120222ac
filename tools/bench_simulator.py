"""How long the simulator takes: 100,000 actions, and a step of 128 GPUs.

    python tools/bench_simulator.py --json figures.json     # under two minutes on one core

Times are CPU seconds of this process, which is what the simulator has of a core, and medians of several
runs; the wall clock stands beside them. Each run simulates two steps of the schedule (three where
something is offloaded), of which it reports the last. The walk over memory is made when somebody asks for
it, and is timed by itself, as is the making of the schedule.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.report import (
    Figure,
    describe_machine,
    format_figures,
    format_machine,
    list_figures,
    make_parser,
    write_json,
)
from zorselike.cost.assemble import make_costs
from zorselike.cost.profile import Profile
from zorselike.cost.step_costs import StepCosts
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.schedule import Action, ScheduleSpec, build
from zorselike.simulator import simulate

NUM_RUNS = 5
GIGABIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule and what it costs."""

    name: str
    plan: Plan
    actions: Mapping[int, Sequence[Action]]
    costs: StepCosts
    build_s: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one case took."""

    name: str
    num_ranks: int
    num_actions: int
    iteration_s: float
    """Seconds of the simulated step."""
    build_s: float
    cpu_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    memory_s: float
    """Seconds of the walk over all ranks' memory."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.cpu_s)


def make_workload(num_layers: int) -> Workload:
    """Layers of Llama 65B at 512 tokens a row, in fp16."""
    width, inner, tokens, words = 8192, 22016, 512, 32000
    parameters = 4 * width**2 + 3 * width * inner
    boundary = width * tokens
    layer = LayerKind(
        name="layer",
        num_parameters=parameters,
        forward_flops_per_row=2.0 * parameters * tokens,
        input_elements_per_row=boundary,
        output_elements_per_row=boundary,
        activation_bytes_per_row=2 * boundary,
    )
    ends = (
        LayerKind(
            name="embedding",
            num_parameters=words * width,
            forward_flops_per_row=0.0,
            output_elements_per_row=boundary,
        ),
        LayerKind(
            name="head",
            num_parameters=words * width,
            forward_flops_per_row=2.0 * words * width * tokens,
            input_elements_per_row=boundary,
        ),
    )
    middle = tuple((f"layers.{i}", "layer") for i in range(num_layers))
    return Workload(
        model="llama 65b",
        sequence_length=tokens,
        dtype="float16",
        layers=(("embedding", "embedding"), *middle, ("head", "head")),
        kinds={kind.name: kind for kind in (layer, *ends)},
    )


def make_plan(
    groups: Sequence[tuple[int, int]], workload: Workload, *, num_rows: int, ministages: int, offload: bool
) -> Plan:
    """Groups of `(ranks, rows of a microbatch)` in order; layers and rows in even parts."""
    made: list[Group] = []
    for size, most in groups:
        first = sum(len(group.ranks) for group in made)
        microbatches = []
        for r in range(size):
            start, stop = num_rows * r // size, num_rows * (r + 1) // size
            microbatches += [
                Microbatch(first + r, row, min(row + most, stop)) for row in range(start, stop, most)
            ]
        kinds = ("params", "optimizer") if offload else ()
        made.append(Group(tuple(range(first, first + size)), tuple(microbatches), offload=kinds))
    modules = [module for module, _ in workload.layers]
    count = len(groups) * ministages
    cuts = [len(modules) * i // count for i in range(count + 1)]
    owned = tuple(Ministage(i % len(groups), tuple(modules[cuts[i] : cuts[i + 1]])) for i in range(count))
    return Plan(num_rows, tuple(made), owned).validate()


def make_node(name: str, device: str, region: str, bandwidth: float) -> Node:
    """Eight GPUs, and 25 Gb/s to other nodes."""
    return Node(
        name=name, devices=(device,) * 8, region=region, fabric=Link(bandwidth, 1e-5), nic=Link(25 * GIGABIT)
    )


def hundred_thousand() -> Case:
    """Four groups of eight V100, a node each."""
    nodes = tuple(make_node(f"v100-{n}", "V100-16", "here", 130e9) for n in range(4))
    cluster = Cluster(nodes=nodes, default_link=Link(25 * GIGABIT, 5e-5))
    workload = make_workload(40)
    plan = make_plan([(8, 1)] * 4, workload, num_rows=1096, ministages=4, offload=False)
    return make_case("100,000 actions", plan, workload, cluster)


def cluster_c() -> Case:
    """The largest cluster of the paper (Zorse, Table 4), in two regions."""
    counts = (("a10g", "A10G", "one", 2), ("t4-one", "T4", "one", 6))
    counts += (("v100", "V100-16", "two", 2), ("t4-two", "T4", "two", 6))
    nodes = tuple(
        make_node(f"{name}-{n}", device, region, 130e9 if device == "V100-16" else 10e9)
        for name, device, region, count in counts
        for n in range(count)
    )
    cluster = Cluster(
        nodes=nodes,
        default_link=Link(25 * GIGABIT, 5e-5),
        region_links={("one", "two"): Link(5 * GIGABIT, 0.03)},
        shared_links={("one", "two"): 5 * GIGABIT},
    )
    workload = make_workload(80)
    groups = [(16, 4), (48, 2), (16, 4), (48, 2)]
    plan = make_plan(groups, workload, num_rows=2048, ministages=4, offload=True)
    return make_case("cluster C", plan, workload, cluster)


def make_case(name: str, plan: Plan, workload: Workload, cluster: Cluster) -> Case:
    costs = make_costs(plan, workload, cluster, Profile(model=workload.model))
    begin_s = time.process_time()
    actions = build(ScheduleSpec(plan, masters=True))
    return Case(name=name, plan=plan, actions=actions, costs=costs, build_s=time.process_time() - begin_s)


def time_case(case: Case) -> Timing:
    cpu_s, wall_s = [], []
    for _ in range(NUM_RUNS):
        cpu, wall = time.process_time(), time.perf_counter()
        found = simulate(case.plan, case.actions, case.costs)
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    begin_s = time.process_time()
    list(found.memory)
    return Timing(
        name=case.name,
        num_ranks=case.plan.num_ranks,
        num_actions=sum(map(len, case.actions.values())),
        iteration_s=found.iteration_s,
        build_s=case.build_s,
        cpu_s=tuple(cpu_s),
        wall_s=tuple(wall_s),
        memory_s=time.process_time() - begin_s,
    )


CASES: tuple[tuple[Callable[[], Case], str, float], ...] = (
    (hundred_thousand, "simulate_100k_s", 1.0),
    (cluster_c, "simulate_cluster_c_s", 5.0),
)
"""What is simulated, the name of its figure, and the most seconds that it may take."""


def main() -> int:
    """Times all cases; the exit status says whether every target was met."""
    arguments = make_parser(__doc__).parse_args()
    timings, figures = [], []
    for make, name, target in CASES:
        timing = time_case(make())
        timings.append(timing)
        figures.append(Figure(name, timing.median_s, target, at_most=True))
        print(
            f"{timing.name}: {timing.num_ranks} ranks, {timing.num_actions:,} actions, "
            f"a step of {timing.iteration_s:.3f} s; CPU seconds {timing.median_s:.3f} "
            f"({min(timing.cpu_s):.3f} to {max(timing.cpu_s):.3f}), wall clock "
            f"{statistics.median(timing.wall_s):.3f}; building {timing.build_s:.3f}, "
            f"memory {timing.memory_s:.3f}",
            flush=True,
        )
    print("\n" + format_figures(figures))
    machine = describe_machine()
    print("\n" + format_machine(machine))
    write_json(arguments.json, list_figures(figures) | {"runs": timings, "machine": machine})
    return int(any(figure.is_met is False for figure in figures))


if __name__ == "__main__":
    raise SystemExit(main())
