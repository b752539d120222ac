"""How a group holds its ministages: ZeRO stage, reduction, recomputation and offload together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from zorselike.plan.plan import OFFLOAD_IN_FLIGHT, RECOMPUTE, GradReduce, Recompute
from zorselike.planner.problem import Fixed


@dataclass(frozen=True)
class Mode:
    """Settings of one group."""

    zero: int = 2
    grad_reduce: GradReduce = "once"
    recompute: Recompute = "none"
    offload: tuple[str, ...] = ()
    overlap_grad_reduce: bool = True

    @property
    def reduces_per_microbatch(self) -> bool:
        """As `Group.reduces_per_microbatch`."""
        return self.zero == 3 or self.grad_reduce == "microbatch"

    @property
    def reduction(self) -> Literal["reduce_scatter", "all_reduce"]:
        """How gradients are reduced."""
        return "reduce_scatter" if self.zero else "all_reduce"

    @property
    def may_bound_in_flight(self) -> bool:
        """Whether it offloads nothing that bounds on microbatches in flight do not allow."""
        return {*self.offload} <= {*OFFLOAD_IN_FLIGHT}

    @property
    def may_return(self) -> bool:
        """Whether a group may come back to each of several ministages again and again, as bounds on
        microbatches in flight have it: ZeRO 2 gathers once for all microbatches, so it may not."""
        return self.zero != 2 or self.reduces_per_microbatch

    @property
    def complexity(self) -> int:
        """What a person has to think of: of two modes that are equally fast the lesser is preferred."""
        often, recomputes = self.reduces_per_microbatch, self.recompute == "layer"
        return 4 * often + 2 * recomputes + 2 * len(self.offload) + (not self.overlap_grad_reduce)

    def __str__(self) -> str:
        parts = [f"ZeRO {self.zero}"]
        if self.grad_reduce == "microbatch":
            parts.append("reduced per microbatch")
        if not self.overlap_grad_reduce:
            parts.append("waits for reductions")
        if self.recompute == "layer":
            parts.append("recomputed")
        if self.offload:
            parts.append(f"offloads {' and '.join(self.offload)}")
        return ", ".join(parts)


Family = tuple[Mode, ...]
"""Modes that compute and copy as much for a row: the fastest first, later ones need less memory."""

_OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("params",), ("optimizer",), ("params", "optimizer"))
_STASHING = tuple((*kept, "activations") for kept in _OFFLOADS)


def list_families(fixed: Fixed) -> tuple[Family, ...]:
    """All modes that what the user fixed leaves: those that do nothing twice first, then those that recompute
    layers or offload activations or both, then with gathers or reductions of every microbatch. A fixed
    offload that is none of the usual sets is taken as it is.

    All let reductions run beside what follows, unless that is fixed otherwise: where memory has no room for
    it, the builder of candidates lets a group wait."""
    sets = (_OFFLOADS, _STASHING) if fixed.offload is None else ((fixed.offload,),)
    often: tuple[tuple[GradReduce, tuple[int, ...]], ...] = (("once", (0, 1, 2)), ("microbatch", (2, 3)))
    families = []
    for (grad_reduce, stages), offloads, recompute in product(often, sets, RECOMPUTE):
        overlap = fixed.overlap_grad_reduce is not False
        modes = (
            Mode(zero, grad_reduce, recompute, offload, overlap or zero == 3)
            for offload in offloads
            for zero in stages
        )
        families.append(tuple(mode for mode in modes if _keeps(mode, fixed)))
    return tuple(family for family in families if family)


def _keeps(mode: Mode, fixed: Fixed) -> bool:
    is_half = "params" in mode.offload and "optimizer" not in mode.offload
    if fixed.offload is None and mode.zero < 2 and is_half:
        return False  # Devices keep them whole, and hosts have room for more.
    return (
        fixed.zero in (None, mode.zero)
        and fixed.recompute in (None, mode.recompute)
        and fixed.grad_reduce in (None, mode.grad_reduce)
    )
