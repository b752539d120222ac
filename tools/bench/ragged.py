"""Ragged nodes on slow links: ours against the best rectangle that torch can run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from zorselike.schedule.build import build

from .actions_bound import simulate
from .contest import MIN_SLEEP_DOZEN_S, Bench, Case, shortest_forward
from .meshes import Mesh, candidates, search, split_layers
from .plans import make_plan
from .runs import Emulation
from .simulation import Links

SPEEDS = (4.0,) * 3 + (2.0,) * 5 + (1.0,) * 4
NODES = ((0, 1, 2), (3, 4, 5, 6, 7), (8, 9, 10, 11))
NUM_LAYERS = 24
NUM_ROWS = 60
"""Divisible by 2, 3, 4, 6 and 12, so that every rectangular mesh can run it."""
HIDDEN = 128
LAYER_OVER_ROW = 24.0
"""A layer's parameters take as long over a link as this many rows through the layer, forward, on
the slow device: a T4 at 20 TFLOP/s, sequences of 512 tokens, two bytes a parameter and 13 Gbit/s
between nodes. A row of activations is 1/128 of a layer (real hidden sizes of 5,000 to 6,000)."""
LATENCY_S = 0.001
SLACK = 1.3
"""Layer splits whose slowest stage is so much worse than the best are searched too: a mesh may
do better with fewer layers in the stage that reaches across nodes."""


def run_hand_tuned(bench: Bench) -> None:
    """Both sides are searched in the simulation; then the best of each is run."""
    case = _best_case(bench)
    ours = bench.ours(case)
    best = sorted(search(_rectangles(case), case.cluster).values(), key=lambda entry: entry[0])
    bench.say("  best rectangle of each shape, simulated:")
    for seconds, mesh in best:
        bench.say(f"    {seconds:7.3f} s  {mesh.text}")
    theirs = [bench.mesh(case, mesh) for _, mesh in best[: 1 if bench.is_quick else 3]]
    fastest = min(theirs, key=lambda run: run.timing.median_s)
    ratio = fastest.timing.median_s / ours.timing.median_s
    bench.hold("ratio_hand_tuned", {fastest.contestant: ratio}, 1.15)


def devices(unit_s: float, num_steps: int) -> Emulation:
    """The ragged ranks; `unit_s` is one row through one layer on the slow device."""
    links = Links(
        node_of_rank=tuple(node for node, ranks in enumerate(NODES) for _ in ranks),
        latency_s=LATENCY_S,
        bytes_per_s=4 * HIDDEN**2 / (LAYER_OVER_ROW * unit_s),
    )
    seconds = tuple(unit_s / speed for speed in SPEEDS)
    return Emulation(seconds, hidden=HIDDEN, num_steps=num_steps, links=links)


def _best_case(bench: Bench) -> Case:
    """The best simulated plan that has a group a node: orders of groups, layers, ministages."""
    best: tuple[float, Case] | None = None
    for nodes in itertools.permutations(NODES):
        speeds = [sum(SPEEDS[rank] for rank in ranks) for ranks in nodes]
        for layers, ministages in itertools.product(split_layers(NUM_LAYERS, speeds, 1, 1.0), (1, 2, 3, 4, 5)):
            plan, sizes = make_plan(
                nodes,
                SPEEDS,
                layers,
                num_rows=NUM_ROWS,
                num_microbatches=[NUM_ROWS // 2] * len(nodes),
                ministages=ministages,
                least_rows=2,
            )
            unit_s = MIN_SLEEP_DOZEN_S / 1.5
            case = Case(f"ragged nodes x {ministages}", plan, sizes, devices(unit_s, min(2, bench.num_steps)))
            seconds = simulate(plan, build(plan), case.workload, case.emulation.links).makespan_s
            if best is None or seconds < best[0]:
                best = (seconds, case)
    assert best is not None
    return best[1]


def _rectangles(case: Case) -> Iterator[Mesh]:
    sizes = {"num_layers": NUM_LAYERS, "num_rows": NUM_ROWS}
    # Single ranks have no data parallelism to spare layers for: only the balance counts there.
    yield from candidates(NODES, case.cluster, **sizes, slack=1.0)
    yield from candidates(NODES, case.cluster, **sizes, slack=SLACK, max_pp=len(SPEEDS) // 2)
