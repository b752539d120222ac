"""Whether the hosts of a job have room for a plan. What reserves speaks for its rank alone; it is there so
that no step need pin memory, for which a GPU may have to end what waits for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zorselike.cost.memory import walk_memory
from zorselike.cost.parameter_bytes import ParameterBytes, count_shards
from zorselike.cost.purposes import Purpose
from zorselike.cost.sizes import MinistageBytes
from zorselike.errors import ConfigError
from zorselike.plan.pieces import pieces_of
from zorselike.runtime.assembly import Assembly, CompiledPlan
from zorselike.runtime.comm.ranks import Ranks
from zorselike.runtime.memory.host_room import HostRoom, find_host_room
from zorselike.runtime.memory_report import expect_moments, own_layer_inputs
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.optimizer_state import count_moments, knows_moments
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.runtime.model.boundaries import Trace
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.processes.world import ProcessInfo
from zorselike.schedule.actions import Kind
from zorselike.text.wording import show_bytes


def refuse_unfitting_plan(
    compiled: CompiledPlan,
    ranks: Ranks,
    processes: Sequence[ProcessInfo],
    *,
    param_dtype: torch.dtype | None,
) -> None:
    """Before anything is allocated: raises `ConfigError` if the ranks of a node would put more into host
    memory than it has: what they offload, and on CPU ranks all that they hold. Counts parameters, gradients
    and master weights; moments and activations are known later."""
    plan, own_processes = compiled.plan, [processes[process] for process in ranks.process_of]
    needed = []
    for rank, process in enumerate(own_processes):
        sizes = measure_parts(compiled, rank, param_dtype)
        walk = walk_memory(plan, rank, compiled.step_actions[rank], sizes)
        on_device = 0 if process.device == "cuda" else walk.device_peak_bytes
        needed.append(walk.host_peak_bytes + on_device)
    less = "offload less, " if any(group.offload for group in plan.groups) else ""
    refuse_crowded_hosts(
        [process.node for process in own_processes],
        needed,
        [HostRoom(process.host_room_bytes, process.host_room_limit) for process in own_processes],
        "the plan puts at least {}",
        mend=f"{less}give its ranks fewer layers there, or train a smaller model",
    )


def measure_parts(
    compiled: CompiledPlan, rank: int, param_dtype: torch.dtype | None
) -> dict[int, MinistageBytes]:
    """The sizes of a rank's ministages on it, from their parameters' shapes."""
    own = compiled.plan.ministages_of_rank(rank)
    return {i: _measure(compiled, compiled.parts[i], rank, param_dtype) for i in own}


def _measure(
    compiled: CompiledPlan, part: ModelPart, rank: int, param_dtype: torch.dtype | None
) -> MinistageBytes:
    group = compiled.plan.group_of(part.index)
    cuts = compiled.cut.of(part.index)
    gathered, gradients, masters = _Share(), _Share(), _Share()
    for name, parameter in part.module.named_parameters():
        dtype = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
        one, cut = ParameterBytes(dtype.itemsize), cuts.get(name)
        num_elements, num_holders = parameter.numel(), len(group.flat_ranks)
        if cut is not None:
            own = sum(cut.edges[piece + 1] - cut.edges[piece] for piece in pieces_of(group, rank))
            num_elements, num_holders = num_elements * own // cut.edges[-1], len(group.replicas)
        num_shards = count_shards(group.zero, num_holders)
        gathered.add(num_elements * one.weight, num_shards)
        if parameter.requires_grad:
            gradients.add(num_elements * one.gradient, num_shards)
            masters.add(num_elements * one.state, num_shards)
    return MinistageBytes(
        gathered_bytes=gathered.whole,
        shard_bytes=gathered.shard,
        gradient_bytes=gradients.whole,
        gradient_shard_bytes=gradients.shard,
        state_bytes=masters.shard,
        masters=masters.whole > 0,
    )


@dataclass
class _Share:
    """Bytes while they are gathered, and what of them a rank keeps."""

    whole: int = 0
    shard: int = 0

    def add(self, num_bytes: int, num_shards: int) -> None:
        self.whole += num_bytes
        self.shard += num_bytes // num_shards


def reserve_activations(assembly: Assembly, trace: Trace) -> None:
    """Before the first step: host buffers for the inputs of all recomputed layers that it offloads."""
    plan, rank = assembly.plan, assembly.ranks.rank
    group = plan.groups[plan.group_of_rank[rank]]
    if assembly.resources.activations is None or group.recompute != "layer":
        return
    microbatches = plan.microbatches_of_rank(rank)
    sizes = [
        each.at(microbatches[action.microbatch].num_rows)
        for action in assembly.compiled.step_actions[rank]
        if action.kind is Kind.OFFLOAD and action.microbatch is not None and action.ministage is not None
        for each in own_layer_inputs(assembly, trace, action.ministage)
    ]
    assembly.resources.memory.pool.reserve(Purpose.ACTIVATIONS, sizes)


def reserve_state(assembly: Assembly) -> None:
    """Before the first step, after `check_host_room`: host buffers for the moments that its updates make, if
    it is known how many these are, and for deferred gradients."""
    actions = assembly.compiled.step_actions[assembly.ranks.rank]
    deferred = {action.ministage for action in actions if action.kind is Kind.OFFLOAD_GRAD}
    moments: list[int] = []
    gradients: list[int] = []
    for i, ministage in assembly.ministages.items():
        optimizer = assembly.updates.optimizers.get(i)
        if optimizer is not None and ministage.state.offloads and not ministage.state.moment_bytes:
            num_moments = count_moments(optimizer) if knows_moments(optimizer) else 0
            moments += num_moments * [local_tensor(p.detach()).nbytes for p in ministage.trained.values()]
        if i in deferred:
            gradients += [
                local_tensor(p.detach()).numel() * ParameterBytes(p.itemsize).gradient
                for p in ministage.sharded.values()
                if p.requires_grad
            ]
    pool = assembly.resources.memory.pool
    pool.reserve(Purpose.OPTIMIZER_STATE, [size for size in moments if size])
    pool.reserve(Purpose.GRADIENT_SHARDS, [size for size in gradients if size])


def check_host_room(assembly: Assembly) -> None:
    """Before the first step: raises `ConfigError` if what the ranks of a node will still put on the host is
    more than that has left. Collective."""
    needed = sum(_needed_later(ministage, assembly) for ministage in assembly.ministages.values())
    numbers = torch.zeros(assembly.ranks.world_size, 2, dtype=torch.int64, device="cpu")
    numbers[assembly.ranks.rank] = torch.tensor([needed, find_host_room().num_bytes], device="cpu")
    dist.all_reduce(numbers, group=assembly.control)
    processes = [assembly.processes[process] for process in assembly.ranks.process_of]
    limits = [process.host_room_limit for process in processes]
    refuse_crowded_hosts(
        [process.node for process in processes],
        [int(own) for own, _ in numbers],
        [HostRoom(int(room), limit) for (_, room), limit in zip(numbers, limits, strict=True)],
        "the first step would put {} more of optimizer state and gradients",
        mend="offload less there, or give its ranks fewer layers",
    )


def _needed_later(ministage: ShardedMinistage, assembly: Assembly) -> int:
    """Host bytes for moments and deferred gradients of one ministage, which come with the first step."""
    if "optimizer" not in assembly.plan.group_of(ministage.index).offload:
        return 0
    actions = assembly.compiled.step_actions[assembly.ranks.rank]
    defers = any(action.kind is Kind.OFFLOAD_GRAD for action in actions)
    return expect_moments(ministage, assembly) + (ministage.sizes.gradient_shard_bytes if defers else 0)


def refuse_crowded_hosts(
    nodes: Sequence[str], needed: Sequence[int], rooms: Sequence[HostRoom], what: str, *, mend: str
) -> None:
    """By rank: the node on which it runs, bytes that it needs, and what is left there. `what` says of so many
    bytes what puts them into host memory."""
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, other in enumerate(nodes) if other == node]
        total = sum(needed[rank] for rank in ranks)
        room = min((rooms[rank] for rank in ranks), key=lambda room: room.num_bytes)
        if total > room.num_bytes:
            listed = ", ".join(f"rank {rank}: {show_bytes(needed[rank], 2)}" for rank in ranks)
            raise ConfigError(
                f"{what.format(show_bytes(total, 2))} into the host memory of node '{node}' ({listed}), "
                f"which has {room} left: {mend}"
            )
