"""Ragged nodes on slow links: ours against the best rectangle that torch can run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zorselike.schedule import ScheduleSpec, build

from .contest import Bench, Case
from .plans import make_plan
from .runs import Emulation
from second_simulator.actions import simulate
from second_simulator.meshes import Mesh, candidates, search, split_layers
from second_simulator.operations import Links

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
UNIT_S = 0.1 / 1.5
"""One row through one layer on the slow device: so that the shortest forwards, 2 rows through 3 layers
on a fast one, sleep the 0.1 s that a dozen ranks on two cores want."""
SLACK = 1.3
"""Layer splits whose slowest stage is so much worse than the best are searched too: a mesh may
do better with fewer layers in the stage that reaches across nodes."""


def run_hand_tuned(bench: Bench) -> None:
    """Both sides are searched in the simulation; then the best of each is run."""
    case = _best_case(NUM_ROWS, UNIT_S * bench.pace, 1 if bench.is_quick else 2)
    ours = bench.ours(case)
    best = sorted(_search(case).values(), key=lambda entry: entry[0])
    bench.say("  best rectangle of each shape, simulated:")
    for seconds, mesh in best:
        bench.say(f"    {seconds:7.3f} s  {mesh.text}")
    theirs = [bench.mesh(case, mesh) for _, mesh in best[: 1 if bench.is_quick else 3]]
    fastest = min(theirs, key=lambda run: run.timing.median_s)
    ratio = fastest.timing.median_s / ours.timing.median_s
    bench.hold("ratio_hand_tuned", {fastest.contestant: ratio}, 1.15)
    ratios = {f"{NUM_ROWS} rows": best[0][0] / ours.bound_s}
    if not bench.is_quick:
        # The advantage shrinks as bubbles do: the same with a larger batch, simulated only.
        larger = _best_case(2 * NUM_ROWS, UNIT_S, 1)
        theirs_s = min(seconds for seconds, _ in _search(larger).values())
        ratios[f"{2 * NUM_ROWS} rows"] = theirs_s / _bound_s(larger)
    bench.hold("  ratio_hand_tuned_of_bounds", ratios)


def devices(unit_s: float, num_steps: int) -> Emulation:
    """The ragged ranks; `unit_s` is one row through one layer on the slow device."""
    links = Links(
        node_of_rank=tuple(node for node, ranks in enumerate(NODES) for _ in ranks),
        latency_s=LATENCY_S,
        bytes_per_s=4 * HIDDEN**2 / (LAYER_OVER_ROW * unit_s),
    )
    seconds = tuple(unit_s / speed for speed in SPEEDS)
    return Emulation(seconds, hidden=HIDDEN, num_steps=num_steps, links=links)


def _best_case(num_rows: int, unit_s: float, num_steps: int) -> Case:
    """The best simulated plan that has a group a node: orders of groups, layers, ministages."""
    return min(_cases(num_rows, unit_s, num_steps), key=_bound_s)


def _cases(num_rows: int, unit_s: float, num_steps: int) -> Iterator[Case]:
    for nodes in itertools.permutations(NODES):
        speeds = [sum(SPEEDS[rank] for rank in ranks) for ranks in nodes]
        splits = split_layers(NUM_LAYERS, speeds, 1, 1.0)
        for layers, ministages in itertools.product(splits, range(1, 6)):
            plan, sizes = make_plan(
                nodes,
                SPEEDS,
                layers,
                num_rows=num_rows,
                num_microbatches=num_rows // 2,
                ministages=ministages,
                least_rows=2,
            )
            yield Case(f"ragged nodes x {ministages}", plan, sizes, devices(unit_s, num_steps))


def _bound_s(case: Case) -> float:
    return simulate(case.plan, build(ScheduleSpec(case.plan)), case.workload, case.emulation.links).makespan_s


def _search(case: Case) -> dict[tuple[int, int], tuple[float, Mesh]]:
    """The best rectangle of every shape on the devices of a case."""
    sizes = {"num_layers": NUM_LAYERS, "num_rows": case.plan.global_batch}
    # Single ranks have no data parallelism to spare layers for: only the balance counts there.
    balanced = candidates(NODES, case.cluster, **sizes, slack=1.0)
    spared = candidates(NODES, case.cluster, **sizes, slack=SLACK, max_pp=len(SPEEDS) // 2)
    return search(itertools.chain(balanced, spared), case.cluster)
