"""Contests on sleeping ranks: against the bound, even shares, an expert, equal devices, and on ragged nodes
with slow links against the best rectangle that torch can run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zorselike.schedule import ScheduleSpec, build

from .contest import Bench, Case, Run, even_rows
from .plans import make_plan
from .runs import Emulation
from second_simulator.actions import simulate
from second_simulator.meshes import (
    SCHEDULES,
    Mesh,
    candidates,
    loop_layers,
    search,
    simulate_mesh,
    split_layers,
)
from second_simulator.operations import Links

RAGGED_SPEEDS = (4.0,) * 3 + (2.0,) * 5 + (1.0,) * 4
NODES = ((0, 1, 2), (3, 4, 5, 6, 7), (8, 9, 10, 11))
RAGGED_LAYERS = 24
RAGGED_ROWS = 60
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
    case = _best_case(RAGGED_ROWS, UNIT_S * bench.pace, 1 if bench.is_quick else 2)
    ours = bench.ours(case)
    best = sorted(_search(case).values(), key=lambda entry: entry[0])
    bench.say("  best rectangle of each shape, simulated:")
    for seconds, mesh in best:
        bench.say(f"    {seconds:7.3f} s  {mesh.text}")
    theirs = [bench.mesh(case, mesh) for _, mesh in best[: 1 if bench.is_quick else 3]]
    fastest = min(theirs, key=lambda run: run.timing.median_s)
    ratio = fastest.timing.median_s / ours.timing.median_s
    bench.hold("ratio_hand_tuned", {fastest.contestant: ratio}, 1.15)
    ratios = {f"{RAGGED_ROWS} rows": best[0][0] / ours.bound_s}
    if not bench.is_quick:
        # The advantage shrinks as bubbles do: the same with a larger batch, simulated only.
        larger = _best_case(2 * RAGGED_ROWS, UNIT_S, 1)
        theirs_s = min(seconds for seconds, _ in _search(larger).values())
        ratios[f"{2 * RAGGED_ROWS} rows"] = theirs_s / _bound_s(larger)
    bench.hold("  ratio_hand_tuned_of_bounds", ratios)


def devices(unit_s: float, num_steps: int) -> Emulation:
    """The ragged ranks; `unit_s` is one row through one layer on the slow device."""
    links = Links(
        node_of_rank=tuple(node for node, ranks in enumerate(NODES) for _ in ranks),
        latency_s=LATENCY_S,
        bytes_per_s=4 * HIDDEN**2 / (LAYER_OVER_ROW * unit_s),
    )
    seconds = tuple(unit_s / speed for speed in RAGGED_SPEEDS)
    return Emulation(seconds, hidden=HIDDEN, num_steps=num_steps, links=links)


def _best_case(num_rows: int, unit_s: float, num_steps: int) -> Case:
    """The best simulated plan that has a group a node: orders of groups, layers, ministages."""
    return min(_cases(num_rows, unit_s, num_steps), key=_bound_s)


def _cases(num_rows: int, unit_s: float, num_steps: int) -> Iterator[Case]:
    for nodes in itertools.permutations(NODES):
        speeds = [sum(RAGGED_SPEEDS[rank] for rank in ranks) for ranks in nodes]
        splits = split_layers(RAGGED_LAYERS, speeds, 1, 1.0)
        for layers, ministages in itertools.product(splits, range(1, 6)):
            plan, sizes = make_plan(
                nodes,
                RAGGED_SPEEDS,
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
    sizes = {"num_layers": RAGGED_LAYERS, "num_rows": case.plan.global_batch}
    # Single ranks have no data parallelism to spare layers for: only the balance counts there.
    balanced = candidates(NODES, case.cluster, **sizes, slack=1.0)
    spared = candidates(NODES, case.cluster, **sizes, slack=SLACK, max_pp=len(RAGGED_SPEEDS) // 2)
    return search(itertools.chain(balanced, spared), case.cluster)


SPEEDS = (4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0)
NUM_LAYERS = 60
NUM_ROWS = 480
NUM_MICROBATCHES = 32
SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "4,4 | 2,2 | 1,1,1": (((0, 1), (2, 3), (4, 5, 6)), (32, 16, 12)),
    "4,2,1,1 | 4,2,1": (((0, 2, 4, 5), (1, 3, 6)), (32, 28)),
    "4,4,2,2,1,1,1": ((tuple(range(7)),), (NUM_LAYERS,)),
    "4|4|2|2|1|1|1": (tuple((rank,) for rank in range(7)), (16, 16, 8, 8, 4, 4, 4)),
}
"""Groups, and the layers of each."""
BY_SPEED, MIXED, ONE_GROUP, SINGLE_RANKS = SHAPES

EQUAL_SPEEDS = (2.0,) * 6
EQUAL_LAYERS = 24
EQUAL_ROWS = 240


def unequal_case(bench: Bench, shape: str, ministages: int) -> Case:
    """One of the shapes with so many ministages a group."""
    groups, layers = SHAPES[shape]
    return bench.case(
        shape,
        groups,
        layers,
        SPEEDS,
        num_rows=NUM_ROWS,
        num_microbatches=NUM_MICROBATCHES,
        ministages=ministages,
    )


def run_unequal(bench: Bench) -> None:
    """Unequal devices in groups of equal and of mixed ones, and in one group."""
    counts = (4,) if bench.is_quick else (1, 2, 4)
    runs = {
        (shape, ministages): bench.ours(unequal_case(bench, shape, ministages))
        for shape in (BY_SPEED, MIXED, ONE_GROUP)
        for ministages in counts
    }
    bench.hold("share_of_bound", {run.case: run.share_of_bound for run in runs.values()}, 0.95)
    first = runs[BY_SPEED, 4]
    bench.hold("share_of_ideal", {first.case: first.share_of_ideal}, 0.90)
    one_group = {run.case: run.share_of_ideal for (shape, _), run in runs.items() if shape == ONE_GROUP}
    bench.hold("share_of_ideal_one_group", one_group, 0.95)


def run_even_share(bench: Bench) -> None:
    """What people do today on such ranks: equal shares, with FSDP2 or with a pipeline."""
    case = unequal_case(bench, BY_SPEED, 4)
    ours = bench.ours(case)
    theirs = [bench.fsdp(case, even_rows(NUM_ROWS, len(SPEEDS)))]
    # Layers that do not divide go to the fast ranks too, and the number of loops is the best one.
    per_stage = even_rows(NUM_LAYERS, len(SPEEDS))
    meshes = [_pipeline(per_stage, loops, "LoopedBFS") for loops in (1, 2, 4)]
    if not bench.is_quick:
        best = min(meshes, key=lambda mesh: simulate_mesh(mesh, case.cluster).makespan_s)
        theirs.append(bench.mesh(case, best))
    bench.hold("ratio_even_share", {run.contestant: _ratio(run, ours) for run in theirs}, 1.8)


def run_expert_single(bench: Bench) -> None:
    """Seven single ranks with layers in proportion to speed: there an expert is as good."""
    ratios = {}
    for ministages in (2,) if bench.is_quick else (1, 2, 4):
        case = unequal_case(bench, SINGLE_RANKS, ministages)
        ours = bench.ours(case)
        per_stage = SHAPES[SINGLE_RANKS][1]
        for schedule in SCHEDULES:
            theirs = bench.mesh(case, _pipeline(per_stage, ministages, schedule))
            ratios[f"{schedule} x {ministages}"] = _ratio(theirs, ours)
    bench.hold("ratio_expert_single", ratios, 0.97)


def _pipeline(per_stage: tuple[int, ...], loops: int, schedule: str) -> Mesh:
    """Single ranks in torch's pipelining with the same microbatches as ours."""
    stages = tuple((rank,) for rank in range(len(per_stage)))
    rows = NUM_ROWS // NUM_MICROBATCHES
    return Mesh(stages, loop_layers(per_stage, loops), NUM_MICROBATCHES, rows, schedule)


def run_equal_devices(bench: Bench) -> None:
    """Equal devices, where nothing is to be gained: the same shape of ours and of torch's."""
    ratios = {}
    for num_groups in (3,) if bench.is_quick else (1, 3, 6):
        dp = len(EQUAL_SPEEDS) // num_groups
        groups = tuple(tuple(range(g * dp, (g + 1) * dp)) for g in range(num_groups))
        layers = (EQUAL_LAYERS // num_groups,) * num_groups
        ministages = 2
        case = bench.case(
            f"six equal ranks in {num_groups}",
            groups,
            layers,
            EQUAL_SPEEDS,
            num_rows=EQUAL_ROWS,
            num_microbatches=24,
            ministages=ministages,
        )
        ours = bench.ours(case)
        if num_groups == 1:
            ratios["FSDP2"] = _ratio(bench.fsdp(case, even_rows(EQUAL_ROWS, len(EQUAL_SPEEDS))), ours)
            continue
        for schedule in SCHEDULES[:1] if bench.is_quick else SCHEDULES:
            count = 24 // dp
            mesh = Mesh(groups, loop_layers(layers, ministages), count, EQUAL_ROWS // 24, schedule)
            ratios[f"{schedule} dp {dp} pp {num_groups}"] = _ratio(bench.mesh(case, mesh), ours)
    bench.hold("ratio_equal_devices", ratios, 0.97)


def _ratio(theirs: Run, ours: Run) -> float:
    """Above 1: ours is faster."""
    return theirs.timing.median_s / ours.timing.median_s
