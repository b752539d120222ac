"""One rank of each contestant, on the same sleeping layers: ours, FSDP2, torch's pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from zorselike import HeteroPipeline
from zorselike.plan.plan import Plan

from .forked import RankTimes, Timing, run_forked, time_steps
from .sleeping import Device, SleepingLayers, count_rows, squared_error
from second_simulator.meshes import Mesh, order_of
from second_simulator.operations import Links
from slow_links.transport import LinkSleeper, SharedLinks

LEARNING_RATE = 1e-3
_SCHEDULES = {"LoopedBFS": ScheduleLoopedBFS, "Interleaved1F1B": ScheduleInterleaved1F1B}


@dataclass(frozen=True)
class Emulation:
    """What the ranks pretend to be."""

    seconds_of_rank: tuple[float, ...]
    hidden: int = 32
    num_steps: int = 3
    links: Links | None = None

    @property
    def row_bytes(self) -> float:
        """What a row of activations weighs on a link."""
        return 4.0 * self.hidden

    @property
    def layer_bytes(self) -> float:
        """What a layer's parameters weigh."""
        return 4.0 * self.hidden**2


def run_ours(plan: Plan, layers_of_ministage: tuple[int, ...], emulation: Emulation) -> Timing:
    """Times `HeteroPipeline` on a plan; a ministage is one module of so many layers."""
    return _run(_our_rank, plan.num_ranks, emulation, plan, layers_of_ministage)


def run_fsdp(rows_of_rank: tuple[int, ...], layers: tuple[int, ...], emulation: Emulation) -> Timing:
    """Times plain FSDP2: every rank its rows at once through units of so many layers."""
    return _run(_fsdp_rank, len(rows_of_rank), emulation, rows_of_rank, layers)


def run_mesh(mesh: Mesh, emulation: Emulation) -> Timing:
    """Times torch's pipelining, with FSDP2 inside stages of several ranks.

    Torch sorts the ranks of a process group, so ranks are first numbered along the pipeline, as
    a launcher that starts the nodes in that order would.
    """
    order = [rank for ranks in mesh.stages for rank in ranks]
    stages = tuple(tuple(range(s * mesh.dp, (s + 1) * mesh.dp)) for s in range(mesh.pp))
    seconds = tuple(emulation.seconds_of_rank[rank] for rank in order)
    links = emulation.links
    if links is not None:
        links = replace(links, node_of_rank=tuple(links.node_of_rank[rank] for rank in order))
    renumbered = replace(emulation, seconds_of_rank=seconds, links=links)
    return _run(_mesh_rank, mesh.dp * mesh.pp, renumbered, replace(mesh, stages=stages))


def _run(rank_fn: Callable[..., RankTimes], world_size: int, emulation: Emulation, *args: object) -> Timing:
    shared = SharedLinks(emulation.links) if emulation.links else None
    return Timing.of(run_forked(rank_fn, world_size, emulation, shared, *args))


def _begin(rank: int, emulation: Emulation, shared: SharedLinks | None) -> tuple[Device, LinkSleeper | None]:
    links = LinkSleeper(shared, rank) if shared else None
    if links:
        links.install()
    return Device(emulation.seconds_of_rank[rank]), links


def _our_rank(
    rank: int, emulation: Emulation, shared: SharedLinks | None, plan: Plan, layers: tuple[int, ...]
) -> RankTimes:
    device, links = _begin(rank, emulation, shared)
    model = nn.Sequential(*(SleepingLayers(n, emulation.hidden, device) for n in layers))
    with HeteroPipeline(
        model, plan, optimizer=make_sgd, loss_fn=squared_error, count_fn=count_rows, device="cpu"
    ) as pipe:
        inputs = torch.randn(len(pipe.input_rows), emulation.hidden) if pipe.input_rows else None
        targets = torch.randn(len(pipe.target_rows), emulation.hidden) if pipe.target_rows else None
        return time_steps(lambda: _discard(pipe.step(inputs, targets)), device, emulation.num_steps, links)


def make_sgd(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer of every contestant."""
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=LEARNING_RATE)


def _discard(_: object) -> None:
    """A step's result is not asked for: reading it would wait for all ranks."""


def _fsdp_rank(
    rank: int,
    emulation: Emulation,
    shared: SharedLinks | None,
    rows_of_rank: tuple[int, ...],
    layers: tuple[int, ...],
) -> RankTimes:
    device, links = _begin(rank, emulation, shared)
    model = nn.Sequential(*(SleepingLayers(n, emulation.hidden, device) for n in layers))
    mesh = DeviceMesh.from_group(_make_group(None), "cpu", mesh_dim_names=("dp",))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, targets = torch.randn(2, rows_of_rank[rank], emulation.hidden)

    def step() -> None:
        torch.autograd.backward(squared_error(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(step, device, emulation.num_steps, links)


def _make_group(ranks: Sequence[int] | None) -> dist.ProcessGroup:
    """None: of all."""
    # Where a rank is not in it, torch before 2.14 says so by a number.
    return cast(dist.ProcessGroup, dist.new_group(None if ranks is None else list(ranks)))


def _mesh_rank(rank: int, emulation: Emulation, shared: SharedLinks | None, mesh: Mesh) -> RankTimes:
    device, links = _begin(rank, emulation, shared)
    columns = [_make_group([ranks[d] for ranks in mesh.stages]) for d in range(mesh.dp)]
    rows = [_make_group(ranks) for ranks in mesh.stages]
    (stage,) = (s for s, ranks in enumerate(mesh.stages) if rank in ranks)
    replica = mesh.stages[stage].index(rank)
    data_parallel = DeviceMesh.from_group(rows[stage], "cpu", mesh_dim_names=("dp",))
    shape = (mesh.microbatch_rows, emulation.hidden)
    stages = []
    for index in range(stage, len(mesh.layers), mesh.pp):
        part = nn.Sequential(SleepingLayers(mesh.layers[index], emulation.hidden, device))
        if mesh.dp > 1:
            # Gathered once a step and kept, as TorchTitan does with pipelining.
            for module in (part[0], part):
                fully_shard(module, mesh=data_parallel, reshard_after_forward=False)
        stages.append(
            PipelineStage(
                part,
                index,
                len(mesh.layers),
                torch.device("cpu"),
                # Shapes given: nothing has to be inferred by running the layers.
                input_args=torch.empty(shape, device="meta", requires_grad=index > 0),
                output_args=torch.empty(shape, device="meta", requires_grad=True),
                group=columns[replica],
            )
        )
    schedule = _SCHEDULES[mesh.schedule](
        stages, n_microbatches=mesh.num_microbatches, loss_fn=squared_error, scale_grads=False
    )
    _check_order(schedule.pipeline_order[stage], mesh, stage)
    parameters = [p for s in stages for p in s.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    num_rows = mesh.num_microbatches * mesh.microbatch_rows
    inputs, targets = torch.randn(2, num_rows, emulation.hidden)

    def step() -> None:
        schedule.step(
            *((inputs,) if stage == 0 else ()),
            target=targets if stage == mesh.pp - 1 else None,
            losses=[] if stage == mesh.pp - 1 else None,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(step, device, emulation.num_steps, links)


def _check_order(torchs: list[object], mesh: Mesh, stage: int) -> None:
    """Our model of torch's schedules must be what this torch does."""
    theirs = [str(action) for action in torchs if action is not None]
    ours = [f"{virtual}{kind}{microbatch}" for kind, virtual, microbatch in order_of(mesh, stage)]
    if theirs != ours:
        raise RuntimeError(f"{mesh.schedule} of this torch computes in another order than is simulated")
