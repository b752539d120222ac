"""A step of `torch.distributed.pipelining` on a rectangular mesh, in the order of computations of torch's two
schedules for several stages a rank, with the same model of layers and links as our own plans."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .actions import compute_s
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
