"""A small model trained with offload, as the tests of mirrors and of optimizers want it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from tiny import Case, adamw, module_names
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.ministage.sharding import local_tensor

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
Parameters = list[tuple[str, nn.Parameter]]
Factory = Callable[[Parameters], torch.optim.Optimizer]


@dataclass(frozen=True)
class Setting:
    """How a `Decoder` is trained by one group."""

    num_ranks: int = 1
    zero: int = 2
    dtype: torch.dtype | None = None
    max_norm: float | None = None
    num_ministages: int = 3
    recompute: str = "none"
    tied: bool = True

    def case(self, offload: Sequence[str]) -> Case:
        cuts = [len(NAMES) * i // self.num_ministages for i in range(self.num_ministages + 1)]
        ministages = [Ministage(0, tuple(NAMES[a:b])) for a, b in itertools.pairwise(cuts)]
        rows = ((0, 1), (1, 3), (3, 4))
        own = tuple(Microbatch(i % self.num_ranks, *rows[i]) for i in range(len(rows)))
        group = Group(tuple(range(self.num_ranks)), own, self.zero, offload=tuple(offload))
        group = replace(group, recompute=self.recompute)  # type: ignore[arg-type]
        return Case(Plan(4, (group,), tuple(ministages)), NUM_LAYERS, tied=self.tied)

    def build(self, offload: Sequence[str], factory: Factory = adamw) -> HeteroPipeline:
        case = self.case(offload)
        return HeteroPipeline(
            case.model() if self.dtype is None else case.model().float(),
            case.plan,
            optimizer=factory,
            param_dtype=self.dtype,
            max_norm=self.max_norm,
        )


IN_PLACE = Setting()
"""Updates change the shards themselves, each as soon as its ministage is reduced."""
DEFERRED = Setting(dtype=torch.bfloat16, max_norm=0.5, recompute="layer")
"""Updates change fp32 masters, all at the end of the step."""


def state_tensors(pipe: HeteroPipeline) -> Iterator[Tensor]:
    """This rank's part of the parameters that train, and of what the optimizers keep of each."""
    for optimizer in pipe.optimizers.values():
        for parameter in optimizer.param_groups[0]["params"]:
            state = optimizer.state.get(parameter, {}).values()
            kept = [value for value in state if isinstance(value, Tensor) and value.dim()]
            yield from (local_tensor(tensor.detach()) for tensor in (parameter, *kept))
