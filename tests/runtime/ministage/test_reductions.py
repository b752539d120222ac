"""What is there when a reduction begins, and in which order gathers and reductions come. Autograd
accumulates a gradient on the stream of the forward whose graph still holds that node: on a GPU nobody waits
for that stream there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from ranks import RunRanks
from tiny import (
    DIM,
    VOCABULARY,
    Case,
    Decoder,
    adamw,
    assert_same,
    module_names,
    train_all_planned,
    train_all_single,
)
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.ministage.ministage import ShardedMinistage

pytestmark = pytest.mark.pooled

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


class OwnParameters(nn.Module):
    """Has some beside its modules, and returns what the last of these does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        scales = torch.linspace(0.5, 1.5, 2 * DIM, device="cpu").chunk(2)
        self.scales = nn.ParameterList(map(nn.Parameter, scales))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return self.head(x) if self.head is not None else x


class OwnParametersCase(Case):
    def model(self) -> nn.Module:
        with torch.device("meta"):
            return OwnParameters().double()


def test_ranks_with_fewer_microbatches_where_a_model_has_parameters_of_its_own(run_ranks: RunRanks) -> None:
    """With ZeRO 3 the others gathered the last module first for a backward. A list of parameters is none that
    is called."""
    microbatches = (Microbatch(0, 0, 2), Microbatch(1, 2, 4), Microbatch(0, 4, 5))
    whole, cut = (("embedding", "scales", "head"),), (("embedding",), ("scales",), ("head",))
    cases = [
        OwnParametersCase(
            Plan(
                5, (Group((1, 0), microbatches, zero=zero),), tuple(Ministage(0, names) for names in modules)
            ),
            num_layers=0,
        )
        for modules in (whole, cut)
        for zero in range(4)
    ]
    (expected,) = run_ranks(train_all_single, 1, cases)
    for case, ours, theirs in zip(cases, run_ranks(train_all_planned, 2, cases)[0], expected, strict=True):
        assert_same(ours, theirs, case)


class Pools(Decoder):
    """As many models for images and texts: who has no use for what its pooler returns leaves it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.pooler = nn.Linear(VOCABULARY, 2)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, self.pooler(x[:, 0])


def train_pools(rank: int, world_size: int, plan: Plan | None) -> list[float]:
    torch.manual_seed(0)
    model, losses = Pools().double(), []
    rows, targets = (torch.randint(VOCABULARY, (4, 3), generator=torch.manual_seed(i)) for i in range(2))
    if plan is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            loss = token_cross_entropy(model(rows)[0], targets) / targets.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    with HeteroPipeline(
        model,
        plan,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5),
        loss_fn=lambda outputs, wanted: token_cross_entropy(outputs[0], wanted),
    ) as pipe:
        return [pipe.step_global(rows, targets).loss for _ in range(2)]


def pools_plan(*ranks: int) -> Plan:
    microbatches = tuple(Microbatch(rank, row, row + 1) for row, rank in enumerate(ranks))
    names = ("tok_embeddings", "layers.0", "norm", "output", "pooler")
    return Plan(4, (Group((0, 1), microbatches, zero=3),), (Ministage(0, names),))


def test_ranks_with_fewer_microbatches_where_the_loss_leaves_out_a_module(run_ranks: RunRanks) -> None:
    """With ZeRO 3 they would reduce it where it is called, and the others last: both would wait for ever."""
    (expected,) = run_ranks(train_pools, 1, None)
    for losses in run_ranks(train_pools, 2, pools_plan(0, 1, 0, 1)):
        assert losses == pytest.approx(expected, rel=1e-12)
    for end in run_ranks(train_pools, 2, pools_plan(0, 1, 0, 0), allow_exit=True):
        assert end.code != 0
        assert "does not depend on what 'pooler' returns; zero = 3" in end.last_line, end.stderr[-2000:]


def train_compiled(rank: int, world_size: int, plan: Plan) -> float:
    """As some have it: compiled layers in the places of layers."""
    torch.manual_seed(0)
    model = Decoder(3).double()
    for name, layer in model.layers.items():
        model.layers[name] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    rows = torch.randint(VOCABULARY, (4, 3))
    with HeteroPipeline(model, plan, optimizer=adamw) as pipe:
        pipe.step_global(rows, rows)
        return pipe.step_global(rows, rows).loss


def test_zero_3_gathers_layers_that_are_compiled_already(run_ranks: RunRanks) -> None:
    """Of which Python cannot ask whether they are true."""
    microbatches = (Microbatch(0, 0, 2), Microbatch(1, 2, 4))
    modules = (Ministage(0, tuple(module_names(3))),)
    expected, found = (
        run_ranks(train_compiled, 2, Plan(4, (Group((0, 1), microbatches, zero=zero),), modules))
        for zero in (2, 3)
    )
    assert found == pytest.approx(expected, rel=1e-12)


def look(_: nn.Module, given: tuple[Tensor, ...], returned: Tensor) -> None:
    """Fails on what has no rows and positions."""
    assert given[0][:, 0].shape == returned[:, 0].shape


def call_hooks(rank: int, world_size: int) -> None:
    """Of one layer, made before and after the pipeline."""
    microbatches = (Microbatch(0, 0, 2), Microbatch(1, 2, 3), Microbatch(0, 3, 5))
    for zero in range(4):
        plan = Plan(5, (Group((0, 1), microbatches, zero=zero),), (Ministage(0, tuple(NAMES)),))
        case, calls = Case(plan, NUM_LAYERS), Counter[str]()
        model = case.model()
        layer = model.get_submodule(NAMES[1])
        layer.register_forward_hook(look)
        with HeteroPipeline(model, plan, optimizer=adamw) as pipe:
            layer.register_forward_pre_hook(lambda *_, calls=calls: calls.update(["forward"]))
            layer.register_full_backward_hook(lambda *_, calls=calls: calls.update(["backward"]))
            pipe.step_global(*case.batch(0))
            assert calls == dict.fromkeys(("forward", "backward"), len(plan.microbatches_of_rank(rank)))
            pipe.step_global(*case.batch(1))


def test_hooks_of_layers_are_called_for_microbatches_alone(run_ranks: RunRanks) -> None:
    run_ranks(call_hooks, 2)
