"""The state of a pipeline as one rank holds it, ministage by ministage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from zorselike.checkpoint.manifest import Base
from zorselike.plan.holdings import VALUE, Box, boxes_held, boxes_written, copies
from zorselike.plan.plan import Plan
from zorselike.runtime.comm.ranks import ProcessGroup, Ranks
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.named_state import NamedState, Part
from zorselike.runtime.state.exchange import GroupChannel, exchange, part_of
from zorselike.runtime.state.inventory import Inventory

BoxesOfRanks = Callable[..., Mapping[int, tuple[Box, ...]]]


class PipelineState:
    """Named state of this rank's ministages, and where the rest of the model's is."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        inventory: Inventory,
        ministages: Mapping[int, ShardedMinistage],
        optimizers: Mapping[int, Optimizer],
        *,
        owner_of: Mapping[str, str],
        names: Sequence[str],
        control: ProcessGroup,
    ) -> None:
        """`owner_of`: of borrowed weights; `names`: all that the model has, in its order; `control`: a Gloo
        group of all ranks."""
        self.plan, self.ranks, self.inventory, self.control = plan, ranks, inventory, control
        self._names = names
        self.base: Base | None = None
        """Where the values of all frozen parameters are from, if checkpoints leave them out."""
        self.ministages: Mapping[int, NamedState] = {
            i: NamedState(
                ministage,
                optimizers.get(i),
                held=partial(self._boxes, boxes_held, i),
                written=partial(self._boxes, boxes_written, i),
                owner_of=owner_of,
                buffers=[
                    name
                    for tensors in (self.inventory.tensors[i], self.inventory.borrowed[i])
                    for name, facts in tensors.items()
                    if not facts.is_parameter
                ],
                gives_buffers=self.inventory.tensors[i] if self.is_first_of(i) else (),
            )
            for i, ministage in ministages.items()
        }

    @property
    def left_out(self) -> frozenset[str]:
        """Names of what checkpoints leave out."""
        if self.base is None:
            return frozenset()
        facts = self.inventory.all_tensors
        return frozenset(name for name, known in facts.items() if known.is_parameter and not known.trains)

    def is_first_of(self, ministage: int) -> bool:
        """Whether this rank speaks for a ministage's group."""
        return self.plan.group_of(ministage).flat_ranks[0] == self.ranks.rank

    def gather_whole(self) -> dict[str, Tensor]:
        """`{global name: CPU tensor}` of all parameters and persistent buffers, under all their names, on
        rank 0, `{}` elsewhere; collective. In the dtype that is kept or that of the model as it was given,
        whichever holds more."""
        whole: dict[str, Tensor] = {}
        facts = self.inventory.all_tensors
        for i, tensors in enumerate(self.inventory.tensors):
            own = self.parts_by_name(i)
            if self.ranks.rank == 0:
                for name, known in tensors.items():
                    dtype = torch.promote_types(known.dtype, known.model_dtype)
                    whole[name] = torch.empty(known.shape, dtype=dtype, device="cpu")

            def write(box: Box, values: Tensor) -> None:
                part_of(box, Box.whole(box.name, VALUE, facts[box.name].shape), whole[box.name]).copy_(values)

            exchange(
                copies(
                    self.inventory.written(self.plan, i, process_of=self.ranks.process_of),
                    {0: [Box.whole(name, VALUE, known.shape) for name, known in tensors.items()]},
                ),
                GroupChannel(self.ranks, self.control),
                read=partial(_read_own, own),
                write=write,
                dtype_of=lambda box: facts[box.name].dtype,
            )
        for alias, name in self.inventory.aliases.items():
            if name in whole:
                whole[alias] = whole[name]
        return {name: whole[name] for name in self._names if name in whole}

    def parts_by_name(self, ministage: int) -> dict[str, list[Part]]:
        """Values that this rank holds of a ministage, by name; `{}` if it is another group's."""
        state = self.ministages.get(ministage)
        parts = state.parts(model_only=True) if state is not None else []
        found: dict[str, list[Part]] = {}
        for part in parts:
            found.setdefault(part.held.name, []).append(part)
        return found

    def _boxes(
        self, find: BoxesOfRanks, ministage: int, name: str, kind: str, shape: tuple[int, ...]
    ) -> tuple[Box, ...]:
        cut = self.inventory.cut.of(ministage).get(name)
        boxes = find(self.plan, ministage, name, kind, shape, process_of=self.ranks.process_of, cut=cut)
        return boxes[self.ranks.rank]


def _read_own(own: Mapping[str, Sequence[Part]], box: Box) -> Tensor:
    assert box.kind == VALUE
    part = next(part for part in own[box.name] if part.held.intersect(box) == box)
    return part_of(box, part.held, part.locate().whole()).to("cpu")
