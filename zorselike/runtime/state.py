"""The whole model's state on one rank, whatever the plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zorselike.runtime.assembly import Assembly


def gather_full_state(assembly: Assembly) -> dict[str, Tensor]:
    """`{global name: CPU tensor}` of all parameters and persistent buffers on rank 0, `{}`
    elsewhere; collective. One ministage is whole at a time on a rank that gives it."""
    plan, ranks = assembly.plan, assembly.ranks
    state: dict[str, Tensor] = {}
    for index, described_state in enumerate(assembly.compiled.state):
        giver = plan.group_of(index).flat_ranks[0]
        whole: dict[str, Tensor] = {}
        if index in assembly.ministages:
            whole = assembly.ministages[index].gather_state(assembly.group_control, ranks.process_of[giver])
        for name, described in described_state.items():
            if ranks.rank == 0:
                if giver != 0:
                    whole[name] = torch.empty(described.shape, dtype=described.dtype)
                    dist.recv(whole[name], ranks.process_of[giver], group=assembly.control)
                state[name] = whole.pop(name)
            elif ranks.rank == giver:
                dist.send(whole.pop(name).contiguous(), ranks.process_of[0], group=assembly.control)
    for tie in assembly.compiled.ties:
        if tie.owner_fqn in state:  # The borrower's copy may be rounded.
            state[tie.borrower_fqn] = state[tie.owner_fqn]
    return state


def count_parameters(module: nn.Module) -> int:
    """Parameters of a module, as a whole model counts them."""
    return sum(parameter.numel() for parameter in module.parameters())
