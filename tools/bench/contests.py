"""Contests on ranks with fast links: against the bound, even shares, an expert, equal devices."""

from __future__ import annotations

from .contest import Bench, Case, Run, even_rows
from second_simulator.meshes import SCHEDULES, Mesh, loop_layers, simulate_mesh

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
