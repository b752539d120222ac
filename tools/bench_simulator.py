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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.report import Figure, conclude, make_parser
from zorselike.cost.assemble import make_costs
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.schedule import ScheduleSpec, build
from zorselike.simulator import simulate

NUM_RUNS = 5
GIGABIT = 1e9 / 8


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

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_ranks} ranks, {self.num_actions:,} actions, a step of "
            f"{self.iteration_s:.3f} s; CPU seconds {self.median_s:.3f} ({min(self.cpu_s):.3f} to "
            f"{max(self.cpu_s):.3f}), wall clock {statistics.median(self.wall_s):.3f}; building "
            f"{self.build_s:.3f}, memory {self.memory_s:.3f}"
        )


def make_workload(num_layers: int) -> Workload:
    """Layers of Llama 65B at 512 tokens a row, in fp16."""
    width, inner, tokens, words = 8192, 22016, 512, 32000
    parameters, boundary = 4 * width**2 + 3 * width * inner, width * tokens

    def make(name: str, num_parameters: int, flops: float, enters: int, leaves: int, kept: int) -> LayerKind:
        return LayerKind(
            name=name,
            num_parameters=num_parameters,
            forward_flops_per_row=flops,
            input_elements_per_row=enters,
            output_elements_per_row=leaves,
            activation_bytes_per_row=kept,
        )

    kinds = (
        make("layer", parameters, 2.0 * parameters * tokens, boundary, boundary, 2 * boundary),
        make("embedding", words * width, 0.0, 0, boundary, 0),
        make("head", words * width, 2.0 * words * width * tokens, boundary, 0, 0),
    )
    middle = tuple((f"layers.{i}", "layer") for i in range(num_layers))
    return Workload(
        model="llama 65b",
        sequence_length=tokens,
        dtype="float16",
        layers=(("embedding", "embedding"), *middle, ("head", "head")),
        kinds={kind.name: kind for kind in kinds},
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


def time_hundred_thousand() -> Timing:
    """Four groups of eight V100, a node each."""
    nodes = tuple(make_node(f"v100-{n}", "V100-16", "here", 130e9) for n in range(4))
    cluster = Cluster(nodes=nodes, default_link=Link(25 * GIGABIT, 5e-5))
    workload = make_workload(40)
    plan = make_plan([(8, 1)] * 4, workload, num_rows=1096, ministages=4, offload=False)
    return time_case("100,000 actions", plan, workload, cluster)


def time_cluster_c() -> Timing:
    """The largest cluster of the paper (Zorse, Table 4), in two regions."""
    counts = (
        ("a10g", "A10G", "one", 2),
        ("t4-one", "T4", "one", 6),
        ("v100", "V100-16", "two", 2),
        ("t4-two", "T4", "two", 6),
    )
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
    return time_case("cluster C", plan, workload, cluster)


def time_case(name: str, plan: Plan, workload: Workload, cluster: Cluster) -> Timing:
    costs = make_costs(plan, workload, cluster, Profile(model=workload.model))
    begin_s = time.process_time()
    actions = build(ScheduleSpec(plan, masters=True))
    build_s = time.process_time() - begin_s
    cpu_s, wall_s = [], []
    for _ in range(NUM_RUNS):
        cpu, wall = time.process_time(), time.perf_counter()
        found = simulate(plan, actions, costs)
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    begin_s = time.process_time()
    list(found.memory)
    return Timing(
        name=name,
        num_ranks=plan.num_ranks,
        num_actions=sum(map(len, actions.values())),
        iteration_s=found.iteration_s,
        build_s=build_s,
        cpu_s=tuple(cpu_s),
        wall_s=tuple(wall_s),
        memory_s=time.process_time() - begin_s,
    )


CASES = ((time_hundred_thousand, "simulate_100k_s", 1.0), (time_cluster_c, "simulate_cluster_c_s", 5.0))
"""What is simulated, the name of its figure, and the most seconds that it may take."""


def main() -> int:
    """Times all cases; the exit status says whether every target was met."""
    arguments = make_parser(__doc__).parse_args()
    timings, figures = [], []
    for time_it, name, target in CASES:
        timings.append(time_it())
        figures.append(Figure(name, timings[-1].median_s, target, at_most=True))
        print(timings[-1], flush=True)
    return conclude(arguments.json, figures, runs=timings)


if __name__ == "__main__":
    raise SystemExit(main())
