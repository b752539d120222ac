"""The meshes over which a rank's parameters are sharded, and the communicators behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zorselike.plan.pieces import holders_of, pieces_of
from zorselike.plan.plan import Plan
from zorselike.runtime._compat import reduce_scatter_whole
from zorselike.runtime.comm.ranks import Groups, ProcessGroup, Ranks
from zorselike.runtime.processes.world import ProcessInfo
from zorselike.runtime.tensor_parallel.cut_plan import CutPlan
from zorselike.runtime.tensor_parallel.pieces import HeldPiece, TensorParallel
from zorselike.runtime.tensor_parallel.sequence import OwnPositions
from zorselike.text.wording import list_few


class Meshes:
    """Makes them; every process makes every group, in one order."""

    def __init__(
        self, plan: Plan, groups: Groups, processes: Sequence[ProcessInfo], device: torch.device
    ) -> None:
        self._plan, self._groups, self._processes, self._device = plan, groups, processes, device
        self._rank = groups.ranks.rank
        self._own = plan.groups[plan.group_of_rank[self._rank]]

    def of_group(self) -> DeviceMesh:
        """Over the ranks of this rank's group."""
        made = {group.flat_ranks: self._make(group.flat_ranks) for group in self._plan.groups}
        return self._mesh(self._own.flat_ranks, made[self._own.flat_ranks])

    def of_replicas(
        self, cut: CutPlan, waiting: Callable[[], AbstractContextManager[None]]
    ) -> TensorParallel | None:
        """Over the holders of each piece that this rank holds, and inside its replica; None if its group has
        single ranks alone, where nothing is made. `waiting`: entered where ranks of a replica wait for each
        other."""
        inside: dict[tuple[int, ...], ProcessGroup | None] = {}
        holding: dict[tuple[int, int], ProcessGroup | None] = {}
        for number, group in enumerate(self._plan.groups):
            for replica in group.replicas:
                if replica.degree > 1:
                    inside[replica.ranks] = self._make(replica.ranks)
            for piece in range(group.degree) if group.degree > 1 else ():
                holding[number, piece] = self._make(holders_of(group, piece))
        group, own = self._own, self._plan.group_of_rank[self._rank]
        if group.degree == 1:
            return None
        pieces = []
        for piece in pieces_of(group, self._rank):
            holders = holders_of(group, piece)
            mesh = self._mesh(holders, holding[own, piece])
            pieces.append(HeldPiece(piece, mesh, counts=holders[0] == self._rank))
        replica = group.replica_of(self._rank)
        positions = None
        if replica.degree > 1:
            made, length = inside[replica.ranks], self._plan.sequence_length
            assert made is not None and length is not None
            self._warm_up(made)
            process_of = self._groups.ranks.process_of
            order = sorted(range(replica.degree), key=lambda place: process_of[replica.ranks[place]])
            positions = OwnPositions(replica, self._rank, length, made, order, waiting=waiting)
        cuts = {name: found for own_cuts in cut.cuts for name, found in own_cuts.items()}
        return TensorParallel(cut.blocks, cuts, tuple(pieces), positions)

    def _make(self, members: Sequence[int]) -> ProcessGroup | None:
        backend = backend_for(members, self._groups.ranks, self._processes)
        return self._groups.make(members, backend, what=list_few(members, "rank"))

    def _mesh(self, members: Sequence[int], made: ProcessGroup | None) -> DeviceMesh:
        assert made is not None, "this process is a member"
        if len(members) > 1:
            self._warm_up(made)
        if self._own.zero > 0 or len(members) == 1:
            return self._groups.make_mesh([made], self._device.type, [])
        # ZeRO 0: replicas of shards of one, so that FSDP all-reduces and gathers nothing.
        ranks = self._groups.ranks
        alone = self._groups.make_own(backend_for(members, ranks, self._processes))
        layout = [[process] for process in sorted(ranks.processes(members))]
        return self._groups.make_mesh([made, alone], self._device.type, layout)

    def _warm_up(self, group: ProcessGroup) -> None:
        """Makes a group's communicator exist: in a first reduction, in autograd's thread and beside receives
        that wait, making it could hang."""
        whole = torch.zeros(group.size(), device=self._device)
        dist.all_reduce(whole, group=group)
        reduce_scatter_whole(torch.zeros(1, device=self._device), whole, group)


def backend_for(members: Sequence[int], ranks: Ranks, processes: Sequence[ProcessInfo]) -> str:
    """NCCL, where every one of these ranks has a GPU of its own; elsewhere Gloo, which takes a GPU's
    tensors through host memory."""
    cards = [_card_of(processes[process]) for process in ranks.processes(members)]
    return "nccl" if all(cards) and len(set(cards)) == len(cards) else "gloo"


def _card_of(process: ProcessInfo) -> str:
    """What NCCL takes for the GPU of a rank, and refuses to two of them: of a slice (MIG) the whole card."""
    is_slice = "MIG" in process.device_name.split()
    return f"{process.node} {process.gpu_address}" if is_slice else process.gpu
