"""The positions of the sequence that a rank of a replica computes, and the collectives inside the replica.

Between cut blocks each rank has a slice of the positions, ragged where they do not divide (sequence
parallelism). A block gathers the positions and scatters the sums of its ranks' products, and backwards the
other way round; so gradients of what is whole are sums over positions, and a plain sum over all ranks of a
group is right, whatever their degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zorselike.errors import ConfigError
from zorselike.plan.parts import Replica
from zorselike.plan.pieces import cut_evenly
from zorselike.runtime._compat import all_gather_whole, reduce_scatter_whole
from zorselike.runtime.model.decoder_probe import hidden_states, with_hidden_states
from zorselike.runtime.model.nested import map_tensors


class OwnPositions:
    """One rank's slice of the sequence, and the others of its replica."""

    def __init__(
        self,
        replica: Replica,
        rank: int,
        length: int,
        group: ProcessGroup,
        order: Sequence[int],
        *,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`length`: of the whole sequence; `group`: the replica's ranks; `order`: the place in the replica of
        each of its members; `waiting`: entered where this rank waits for them."""
        self.length = length
        self._edges = cut_evenly(length, replica.degree)
        self._sizes = [stop - start for start, stop in zip(self._edges, self._edges[1:], strict=False)]
        self._widest = max(self._sizes)
        self._place = replica.ranks.index(rank)
        self._group = group
        self.start, self.stop = self._edges[self._place], self._edges[self._place + 1]
        self._order = tuple(order)
        self._waiting = waiting

    @property
    def size(self) -> int:
        """How many positions are this rank's."""
        return self.stop - self.start

    # -- without communication -------------------------------------------------------------

    def slice(self, whole: Tensor) -> Tensor:
        """This rank's positions of `[rows, sequence, ...]`."""
        return whole[:, self.start : self.stop]

    def take(self, whole: Tensor) -> Tensor:
        """The same, for what is kept: a view would hold all positions in memory."""
        return self.slice(whole).clone()

    def widen(self, own: Tensor) -> Tensor:
        """`[rows, own positions, width]` in the place that it has in the whole sequence, zeros around it:
        for code outside the layers, which may ask for the sequence's length."""
        padding = [0, 0] * (own.dim() - 2) + [self.start, self.length - self.stop]
        return F.pad(own, padding)

    def of_targets(self, targets: Any) -> Any:
        """This rank's positions of what its outputs are compared with.

        Raises `ConfigError` for tensors that are not `[rows, sequence, ...]`.
        """

        def cut(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != self.length:
                raise ConfigError(
                    f"targets are {list(tensor.shape)}; with tensor-parallel replicas a rank compares its "
                    f"own positions, so they must be [rows, {self.length}, ...], a target for each position"
                )
            return self.slice(tensor)

        return map_tensors(targets, cut)

    # -- with, between the graphs of a layer that is compiled -------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, own: Tensor) -> Tensor:
        """All positions, of every rank's own; backward sums what all ranks make of them."""
        return _Gather.apply(own, self)  # type: ignore[no-any-return,no-untyped-call]

    def gather_hidden(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a block is called with, its hidden states gathered: a hook before its forward."""
        return with_hidden_states(args, kwargs, self.gather(hidden_states(args, kwargs)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def sum_to_own(self, whole: Tensor) -> Tensor:
        """Own positions of the sum of all ranks' `whole`; backward gathers."""
        return _SumToOwn.apply(whole, self)  # type: ignore[no-any-return,no-untyped-call]

    def all_gather(self, own: Tensor) -> Tensor:
        """`[rows, own, ...]` to `[rows, all, ...]`."""
        sent = own.contiguous()
        if own.shape[1] != self._widest:
            sent = own.new_zeros((own.shape[0], self._widest, *own.shape[2:]))
            sent[:, : own.shape[1]] = own
        degree = len(self._sizes)
        received = sent.new_empty((degree * sent.shape[0], *sent.shape[1:]))
        with self._waiting():
            all_gather_whole(received, sent, self._group)
        slices = dict(zip(self._order, received.chunk(degree), strict=True))
        return torch.cat([slices[place][:, :size] for place, size in enumerate(self._sizes)], dim=1)

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """`[rows, all, ...]` of each rank to `[rows, own, ...]` of their sum."""
        degree, rows = len(self._sizes), whole.shape[0]
        sent = whole.new_zeros((degree * rows, self._widest, *whole.shape[2:]))
        for part, place in zip(sent.chunk(degree), self._order, strict=True):
            part[:, : self._sizes[place]] = whole[:, self._edges[place] : self._edges[place + 1]]
        received = whole.new_empty((rows, self._widest, *whole.shape[2:]))
        with self._waiting():
            reduce_scatter_whole(received, sent, self._group)
        return received if self.size == self._widest else received[:, : self.size].contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, positions: OwnPositions) -> Tensor:
        ctx.positions = positions
        return positions.all_gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.positions.reduce_scatter(grads[0]), None


class _SumToOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, positions: OwnPositions) -> Tensor:
        ctx.positions = positions
        return positions.reduce_scatter(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.positions.all_gather(grads[0]), None
