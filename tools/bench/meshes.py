"""Every rectangular mesh and layer split that `torch.distributed.pipelining` could run: `pp` stages of `dp`
ranks, all ranks of a stage with equally many rows, all ranks with equally many virtual stages. All are
simulated; the best are then run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from .plans import loop_layers
from second_simulator.actions import BACKWARD_FACTOR, compute_s
from second_simulator.meshes import SCHEDULES, Cluster, Mesh, simulate_mesh


def stage_layouts(nodes: Sequence[Sequence[int]], dp: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Stages of `dp` consecutive ranks, for every order in which the nodes can be laid."""
    seen = set()
    for order in itertools.permutations(nodes):
        ranks = [rank for node in order for rank in node]
        stages = tuple(tuple(ranks[i : i + dp]) for i in range(0, len(ranks), dp))
        if stages not in seen:
            seen.add(stages)
            yield stages


def split_layers(
    num_layers: int, speeds: Sequence[float], least: int, slack: float
) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, at least `least`, whose slowest stage is within `slack` of the best."""
    best = _best_bottleneck(num_layers, speeds, least)
    most = [max(least, int(best * slack * speed + 1e-9)) for speed in speeds]

    def extend(prefix: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        stage = len(prefix)
        if stage == len(speeds):
            if left == 0:
                yield prefix
            return
        rest = len(speeds) - stage - 1
        for layers in range(
            max(least, left - sum(most[stage + 1 :])), min(most[stage], left - rest * least) + 1
        ):
            yield from extend((*prefix, layers), left - layers)

    yield from extend((), num_layers)


def _best_bottleneck(num_layers: int, speeds: Sequence[float], least: int) -> float:
    """The smallest possible time of the slowest stage, in layers over speed: one layer at a time
    to the stage that would then be the fastest."""
    layers = [least] * len(speeds)
    for _ in range(num_layers - sum(layers)):
        stage = min(range(len(speeds)), key=lambda i: (layers[i] + 1) / speeds[i])
        layers[stage] += 1
    return max(n / speed for n, speed in zip(layers, speeds, strict=True))


def candidates(
    nodes: Sequence[Sequence[int]],
    cluster: Cluster,
    *,
    num_layers: int,
    num_rows: int,
    slack: float = 1.0,
    max_loops: int = 8,
    max_pp: int = 64,
) -> Iterator[Mesh]:
    """All meshes over all ranks: factorisations, node orders, layer splits, loops, microbatches."""
    num_ranks = sum(len(node) for node in nodes)
    for dp in (n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and num_rows % n == 0):
        pp = num_ranks // dp
        if pp > max_pp:
            continue
        sizes = [rows for rows in range(2, num_rows // dp + 1) if num_rows // dp % rows == 0]
        for stages, loops in itertools.product(stage_layouts(nodes, dp), range(1, max_loops + 1)):
            if pp * loops > num_layers or (pp == 1 and loops > 1):
                continue
            speeds = [dp / max(cluster.seconds_of_rank[rank] for rank in ranks) for ranks in stages]
            for per_stage in split_layers(num_layers, speeds, loops, slack):
                layers = loop_layers(per_stage, loops)
                for rows, schedule in itertools.product(sizes, SCHEDULES):
                    count = num_rows // dp // rows
                    if schedule == "Interleaved1F1B" and count % max(1, count // pp):
                        continue
                    yield Mesh(stages, layers, count, rows, schedule)


def lower_bound_s(mesh: Mesh, cluster: Cluster) -> float:
    """A time that no step of the mesh can beat: of any rank, its own work, plus the way of the
    first microbatch to it and of the last gradient back, and with LoopedBFS (where all backwards
    follow all forwards) the way of the last microbatch to the loss and back."""
    rows = mesh.num_microbatches * mesh.microbatch_rows
    bound_s = 0.0
    for replica in range(mesh.dp):
        seconds = [cluster.seconds_of_rank[ranks[replica]] for ranks in mesh.stages]

        def through(num_rows: int, layers: int, stage: int, seconds: list[float] = seconds) -> float:
            return (1.0 + BACKWARD_FACTOR) * compute_s(num_rows, layers, seconds[stage])

        first = [through(mesh.microbatch_rows, mesh.layers[s], s) for s in range(mesh.pp)]
        last = [through(mesh.microbatch_rows, mesh.layers[s - mesh.pp], s) for s in range(mesh.pp)]
        for s in range(mesh.pp):
            own_s = through(rows, sum(mesh.layers[s :: mesh.pp]), s)
            turn_s = sum(last[s + 1 :]) if mesh.schedule == "LoopedBFS" else 0.0
            bound_s = max(bound_s, own_s + sum(first[:s]) + turn_s)
    return bound_s


def search(meshes: Iterable[Mesh], cluster: Cluster) -> dict[tuple[int, int], tuple[float, Mesh]]:
    """The best simulated mesh of every shape `(dp, pp)` with its seconds.

    Those that their lower bound rules out are not simulated.
    """
    best: dict[tuple[int, int], tuple[float, Mesh]] = {}
    for mesh in meshes:
        shape = (mesh.dp, mesh.pp)
        if shape in best and lower_bound_s(mesh, cluster) >= best[shape][0]:
            continue
        seconds = simulate_mesh(mesh, cluster).makespan_s
        if shape not in best or seconds < best[shape][0]:
            best[shape] = (seconds, mesh)
    return best
