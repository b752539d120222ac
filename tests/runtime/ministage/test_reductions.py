"""What is there when a reduction begins. Autograd accumulates a gradient on the stream of the forward
whose graph still holds that node: on a GPU nobody waits for that stream there.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.ministage.ministage import ShardedMinistage

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
TWO_AND_ONE = Plan(
    3,
    (
        Group((0, 1), (Microbatch(0, 0, 1), Microbatch(0, 1, 2), Microbatch(1, 2, 3))),
        Group((2,), (Microbatch(2, 0, 3),)),
    ),
    (Ministage(0, tuple(NAMES[:3])), Ministage(1, tuple(NAMES[3:]))),
)


def look_at_reductions(rank: int, world_size: int, dtype: torch.dtype | None) -> list[tuple[int, int, int]]:
    """By reduction of this rank: outputs of forwards that live; and of all parameters that accumulate in the
    dtype of reductions or in their own those that get a zero on top."""
    case = Case(TWO_AND_ONE, NUM_LAYERS)
    pipe = HeteroPipeline(case.model(), case.plan, optimizer=adamw, param_dtype=dtype)
    outputs: list[weakref.ref[Tensor]] = []
    found: list[tuple[int, int, int]] = []
    seen: list[tuple[bool, bool]] = []
    forward, reduce = ShardedMinistage.forward, ShardedMinistage.reduce
    accumulate = FSDPParam.accumulate_unsharded_grad_if_needed

    def note_forward(self: ShardedMinistage, *args: object, **kwargs: object) -> object:
        output = forward(self, *args, **kwargs)  # type: ignore[arg-type]
        outputs.append(weakref.ref(output))  # type: ignore[arg-type]
        return output

    def note_reduce(self: ShardedMinistage) -> None:
        num_alive = sum(output() is not None for output in outputs)
        seen.clear()
        reduce(self)
        found.append((num_alive, sum(any(both) for both in seen), sum(all(both) for both in seen)))

    def note(self: FSDPParam) -> None:
        seen.append((self.unsharded_accumulated_grad is not None, self.unsharded_param.grad is not None))
        accumulate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedMinistage, "forward", note_forward)
        patch.setattr(ShardedMinistage, "reduce", note_reduce)
        patch.setattr(FSDPParam, "accumulate_unsharded_grad_if_needed", note)
        for step in range(2):
            pipe.step_global(*case.batch(step))
    pipe.close()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_reductions_begin_with_no_graph_of_a_forward(dtype: torch.dtype | None, run_ranks: RunRanks) -> None:
    for found in run_ranks(look_at_reductions, 3, dtype):
        assert len(found) == 2
        for num_alive, num_parameters, num_with_zeros in found:
            assert (num_alive, num_with_zeros) == (0, 0)
            assert num_parameters > 8
