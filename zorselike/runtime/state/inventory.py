"""What there is to hold of a model: the same on every rank, from model and plan alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zorselike.plan.holdings import VALUE, Box, boxes_held, boxes_written
from zorselike.plan.plan import Plan
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.tensor_parallel.cut_plan import CutPlan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a whole tensor."""

    shape: Shape
    dtype: torch.dtype
    """Of what is kept of its values: fp32 where there are master weights."""
    model_dtype: torch.dtype
    """As the model was given."""
    trains: bool
    is_parameter: bool


@dataclass(frozen=True)
class Inventory:
    """Tensors by ministage and name; each is in one ministage, that which owns it."""

    tensors: tuple[Mapping[str, TensorFacts], ...]
    borrowed: tuple[Mapping[str, TensorFacts], ...]
    """Of each ministage, what it needs too and another owns."""
    aliases: Mapping[str, str]
    """Further names of tensors, and the names under which these are in `tensors`."""
    cut: CutPlan
    """Which of them ranks of tensor-parallel replicas have in pieces."""

    @classmethod
    def of(
        cls,
        parts: Sequence[nn.Module],
        states: Sequence[Mapping[str, Tensor]],
        owner_of: Mapping[str, str],
        param_dtype: torch.dtype | None,
        cut: CutPlan | None = None,
    ) -> Inventory:
        """`parts`: the ministages' modules, sharded or not; `states`: what each had as the model was given,
        perhaps on the meta device; `owner_of`: of borrowed weights; `cut`: what modules may have in
        pieces."""
        cut = cut or CutPlan()
        aliases: dict[str, str] = {}
        known: dict[str, TensorFacts] = {}
        tensors: list[dict[str, TensorFacts]] = []
        borrowed: list[dict[str, TensorFacts]] = []
        for number, (part, state) in enumerate(zip(parts, states, strict=True)):
            names = _owned_names(part, owner_of) | {name: name for name in cut.of(number)}
            trained = cut.trained | {name for name, p in part.named_parameters() if p.requires_grad}
            tensors.append({})
            borrowed.append({})
            for name, tensor in state.items():
                own = names.get(name, name)
                if own != name:
                    aliases[name] = own
                if own in known and own not in tensors[-1]:
                    borrowed[-1][own] = known[own]
                elif own == name:
                    is_parameter = name in names
                    dtype = kept_dtype(tensor.dtype, param_dtype, trains=name in trained)
                    tensors[-1][name] = known[name] = TensorFacts(
                        shape=tuple(tensor.shape),
                        dtype=dtype if is_parameter else tensor.dtype,
                        model_dtype=tensor.dtype,
                        trains=name in trained,
                        is_parameter=is_parameter,
                    )
        return cls(tuple(tensors), tuple(borrowed), aliases, cut)

    @property
    def all_tensors(self) -> dict[str, TensorFacts]:
        """Of all ministages, in model order."""
        return {name: facts for tensors in self.tensors for name, facts in tensors.items()}

    def written(self, plan: Plan, ministage: int, *, process_of: Sequence[int]) -> dict[int, list[Box]]:
        """Values of one ministage that each rank answers for, nothing twice."""
        group = plan.group_of(ministage)
        boxes: dict[int, list[Box]] = {rank: [] for rank in group.flat_ranks}
        for name, facts in self.tensors[ministage].items():
            if facts.is_parameter:
                cut = self.cut.of(ministage).get(name)
                shared = boxes_written(
                    plan, ministage, name, VALUE, facts.shape, process_of=process_of, cut=cut
                )
                for rank, own in shared.items():
                    boxes[rank] += own
            else:
                boxes[group.flat_ranks[0]].append(Box.whole(name, VALUE, facts.shape))
        return boxes

    def wanted(
        self, plan: Plan, ministage: int, kinds_of: Mapping[str, Sequence[str]], *, process_of: Sequence[int]
    ) -> dict[int, list[Box]]:
        """What each rank of a ministage's group has to have, of the kinds that there are of each tensor; of
        what it borrows, the values."""
        group = plan.group_of(ministage)
        boxes: dict[int, list[Box]] = {rank: [] for rank in group.flat_ranks}
        for name, facts in (*self.tensors[ministage].items(), *self.borrowed[ministage].items()):
            is_updated = facts.trains and name in self.tensors[ministage]
            kinds = kinds_of.get(name, (VALUE,)) if is_updated else (VALUE,)
            if facts.is_parameter:
                cut = self.cut.of(ministage).get(name)
                for kind in kinds:
                    held = boxes_held(
                        plan, ministage, name, kind, facts.shape, process_of=process_of, cut=cut
                    )
                    for rank, own in held.items():
                        boxes[rank] += own
            else:
                for rank in group.flat_ranks:
                    boxes[rank].append(Box.whole(name, VALUE, facts.shape))
        return boxes


def _owned_names(module: nn.Module, owner_of: Mapping[str, str]) -> dict[str, str]:
    """Under which name each parameter of a ministage, by any of its names, is owned."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(parameter), name)
        names[name] = owner_of.get(own, own)
    return names


def kept_dtype(model_dtype: torch.dtype, param_dtype: torch.dtype | None, *, trains: bool) -> torch.dtype:
    """Dtype of what is kept of a parameter: what it computes in, but fp32 where that is half and trains."""
    computes = param_dtype if param_dtype and model_dtype.is_floating_point else model_dtype
    return torch.float32 if trains and computes in HALF else computes
