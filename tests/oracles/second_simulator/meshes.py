"""A step of `torch.distributed.pipelining` on a rectangular mesh, in the order of computations of torch's two
schedules for several stages a rank, with the same model of layers and links as our own plans; and the best of
all meshes and layer splits that it could run."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .actions import BACKWARD_FACTOR, compute_s
from .operations import Links, Meet, Operation, Outcome, Send, Work, simulate_operations

SCHEDULES = ("LoopedBFS", "Interleaved1F1B")


@dataclass(frozen=True)
class Mesh:
    """One rectangular configuration."""

    stages: tuple[tuple[int, ...], ...]
    """Ranks of each pipeline stage, equally many."""
    layers: tuple[int, ...]
    """Layers of each virtual stage in model order; virtual stage `i` is on stage `i % pp`."""
    num_microbatches: int
    microbatch_rows: int
    schedule: str

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def dp(self) -> int:
        return len(self.stages[0])

    @property
    def loops(self) -> int:
        """Virtual stages a rank."""
        return len(self.layers) // self.pp

    @property
    def text(self) -> str:
        per_stage = "/".join(str(sum(self.layers[i :: self.pp])) for i in range(self.pp))
        rows = f"{self.num_microbatches} x {self.microbatch_rows} rows"
        return f"dp {self.dp} x pp {self.pp}, {self.loops} loops, layers {per_stage}, {rows}, {self.schedule}"


@dataclass(frozen=True)
class Cluster:
    """Ranks with their speeds, and what layers weigh on the links."""

    seconds_of_rank: tuple[float, ...]
    links: Links | None = None
    row_bytes: float = 0.0
    layer_bytes: float = 0.0


def looped_bfs(stage: int, pp: int, loops: int, num_microbatches: int) -> list[tuple[str, int, int]]:
    """`(F or B, virtual stage, microbatch)` in the order of torch's `ScheduleLoopedBFS`."""
    own = [loop * pp + stage for loop in range(loops)]
    forward = [("F", s, m) for s in own for m in range(num_microbatches)]
    backward = [("B", s, m) for s in reversed(own) for m in reversed(range(num_microbatches))]
    return forward + backward


def interleaved_1f1b(stage: int, pp: int, loops: int, num_microbatches: int) -> list[tuple[str, int, int]]:
    """The same in the order of torch's `ScheduleInterleaved1F1B`."""
    per_round = num_microbatches // max(1, num_microbatches // pp)
    total = loops * num_microbatches
    warmup = min((loops - 1) * per_round + 2 * (pp - 1 - stage), total)
    counts: dict[tuple[str, int], int] = defaultdict(int)

    def nth(kind: str, loop: int) -> tuple[str, int, int]:
        virtual = loop * pp + stage
        counts[kind, virtual] += 1
        return kind, virtual, counts[kind, virtual] - 1

    order = []
    for step in range(total + warmup):
        if step < total:
            order.append(nth("F", step // per_round % loops))
        if step >= warmup:
            order.append(nth("B", loops - 1 - (step - warmup) // per_round % loops))
    return order


def order_of(mesh: Mesh, stage: int) -> list[tuple[str, int, int]]:
    """What each rank of a stage computes, in order."""
    generate = looped_bfs if mesh.schedule == "LoopedBFS" else interleaved_1f1b
    return generate(stage, mesh.pp, mesh.loops, mesh.num_microbatches)


def simulate_mesh(mesh: Mesh, cluster: Cluster) -> Outcome:
    """Seconds of one step of a mesh if only layers and links took time."""
    operations = {
        rank: _rank_operations(mesh, cluster, stage, replica)
        for stage, ranks in enumerate(mesh.stages)
        for replica, rank in enumerate(ranks)
    }
    return simulate_operations(operations, cluster.links)


def _rank_operations(mesh: Mesh, cluster: Cluster, stage: int, replica: int) -> list[Operation]:
    rank = mesh.stages[stage][replica]
    last = len(mesh.layers) - 1
    message_bytes = mesh.microbatch_rows * cluster.row_bytes
    operations: list[Operation] = []
    gathers = {s: _collective("gather", mesh, cluster, s) for s in range(stage, last + 1, mesh.pp)}
    if mesh.dp > 1:
        # Parameters stay gathered for the whole step (`reshard_after_forward=False`): the least
        # traffic that torch's pipelining can be set to.
        operations += gathers.values()
    backwards: dict[int, int] = defaultdict(int)
    for kind, virtual, microbatch in order_of(mesh, stage):
        step = 1 if kind == "F" else -1
        needs: list[object] = [gathers[virtual].token] if mesh.dp > 1 else []
        if 0 <= virtual - step <= last:
            needs.append((kind, virtual, microbatch, replica))
        elif kind == "B":
            needs.append(("loss", microbatch, replica))
        seconds = compute_s(
            mesh.microbatch_rows, mesh.layers[virtual], cluster.seconds_of_rank[rank], backward=kind == "B"
        )
        turns = kind == "F" and virtual == last
        operations.append(Work(seconds, tuple(needs), ("loss", microbatch, replica) if turns else None))
        if 0 <= virtual + step <= last:
            target = mesh.stages[(virtual + step) % mesh.pp][replica]
            operations.append(Send((kind, virtual + step, microbatch, replica), target, message_bytes))
        backwards[virtual] += kind == "B"
        if kind == "B" and backwards[virtual] == mesh.num_microbatches and mesh.dp > 1:
            operations.append(_collective("reduce", mesh, cluster, virtual))
    return operations


def _collective(name: str, mesh: Mesh, cluster: Cluster, virtual: int) -> Meet:
    members = mesh.stages[virtual % mesh.pp]
    whole = mesh.layers[virtual] * cluster.layer_bytes
    num_bytes = whole * (len(members) - 1) / len(members)
    return Meet((name, virtual), members, num_bytes, blocks=name == "reduce")


def loop_layers(per_stage: Sequence[int], loops: int) -> tuple[int, ...]:
    """Cuts each stage's layers into `loops` virtual stages, as even as can be, in model order."""
    return tuple(n * (loop + 1) // loops - n * loop // loops for loop in range(loops) for n in per_stage)


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
