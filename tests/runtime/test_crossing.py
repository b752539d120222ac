"""Shapes of inputs that change, or must not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from ranks import RunRanks
from tiny import Case, Decoder, adamw, module_names
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.plan import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import count_valid_tokens, token_cross_entropy
from zorselike.runtime.model.boundaries import trace_boundaries
from zorselike.runtime.model.partition import Split, partition
from zorselike.runtime.model.signature import Signature

pytestmark = pytest.mark.pooled

NAMES = module_names(2)
GROUPS = (Group((0,), (Microbatch(0, 0, 1), Microbatch(0, 1, 3))), Group((1,), (Microbatch(1, 0, 3),)))
PLAN = Plan(3, GROUPS, (Ministage(0, tuple(NAMES[:2])), Ministage(1, tuple(NAMES[2:]))))


def refuse(rank: int, world_size: int) -> tuple[str, list[str]]:
    """Why, and what a pipeline logs that is not refused."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zorselike").addHandler(handler)
    HeteroPipeline(Decoder(2), PLAN, split="export").close()
    with pytest.raises(ConfigError) as caught:
        HeteroPipeline(Decoder(2), PLAN, split="export", dynamic_shapes=True)
    return str(caught.value), logged


def test_what_export_costs_is_said_once_and_shapes_are_fixed(run_ranks: RunRanks) -> None:
    found = run_ranks(refuse, 2)
    for said, _ in found:
        assert "dynamic_shapes=True needs ministages that take any shape, and those that torch.export" in said
    (logged,) = found[0][1]
    assert logged.startswith("Decoder is cut by torch.export: each ministage is one FSDP unit, which ZeRO 3")
    assert found[1][1] == []


@pytest.mark.parametrize(
    ("split", "mend"), [(None, "dynamic_shapes=True"), ("export", "split= and dynamic_shapes=True")]
)
def test_another_shape_names_the_option(run_ranks: RunRanks, split: Split | None, mend: str) -> None:
    def fail(rank: int, world_size: int) -> str:
        alone = Plan(3, (Group((0,), GROUPS[0].microbatches),), (Ministage(0, tuple(NAMES)),))
        inputs, targets = Case(alone, 2).batch(0)
        with HeteroPipeline(Decoder(2), alone, optimizer=adamw, split=split) as pipe:
            pipe.step(inputs, targets)
            with pytest.raises(ConfigError) as caught:
                pipe.step(inputs[:, :3], targets[:, :3])
            assert torch.isfinite(torch.tensor(pipe.step(inputs, targets).loss))
            return str(caught.value)

    (said,) = run_ranks(fail, 1)
    assert said.endswith("built for int64 [rows, 4]; pad to one shape, or pass " + mend)


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = torch.tanh(super().forward(x))
        return x if padding is None else x.masked_fill(padding[..., None], 0.0)


class Padded(nn.Module):
    """Asks for values: masks rows only where some are padded, and, where `skips`, leaves out a layer then."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(6, 5), nn.ModuleList(Masked() for _ in range(2))
        self.head, self.skips = nn.Linear(5, 6), skips

    def forward(self, tokens: Tensor) -> Tensor:
        padding: Tensor | None = tokens.eq(0)
        if not padding.any():  # type: ignore[union-attr]
            padding = None
        x = self.embed(tokens) / max(tokens.max().item(), 1)
        for layer in self.layers[: 1 if self.skips and padding is None else 2]:
            x = layer(x, padding)
        return self.head(x)  # type: ignore[no-any-return]


TOKENS = torch.tensor([[1, 2, 5], [5, 0, 0], [4, 1, 5], [5, 5, 0], [5, 2, 2]])
"""Rows of which each has the highest token, and some are padded."""


def ask_for_values(rank: int, world_size: int, zero: int | None, skips: bool = False) -> dict[str, Tensor]:
    """Two steps' weights; `zero` None: without a plan."""
    torch.manual_seed(0)
    model = Padded(skips).double()
    if zero is None:
        optimizer = adamw(model.parameters())
        for _ in range(2):
            loss = token_cross_entropy(model(TOKENS), TOKENS) / count_valid_tokens(TOKENS)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.detach() for name, value in model.state_dict().items()}
    # Rank 1's microbatches are one of each kind.
    microbatches = (Microbatch(0, 0, 1), Microbatch(1, 1, 2), Microbatch(1, 2, 3), Microbatch(0, 3, 5))
    group = Group((0, 1), microbatches, zero=zero, recompute="layer")
    plan = Plan(5, (group,), (Ministage(0, ("embed", "layers.0", "layers.1", "head")),))
    with HeteroPipeline(model, plan, optimizer=adamw) as pipe:
        for _ in range(2):
            pipe.step_global(TOKENS, TOKENS)
        return pipe.full_state_dict()


@pytest.mark.parametrize("zero", [2, 3])
def test_a_model_may_branch_on_values_within_a_ministage(zero: int, run_ranks: RunRanks) -> None:
    (expected,), (found, _) = (run_ranks(ask_for_values, n, z) for n, z in ((1, None), (2, zero)))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_values_that_say_which_layers_are_called_are_refused(run_ranks: RunRanks) -> None:
    for end in run_ranks(ask_for_values, 2, 2, True, allow_exit=True):
        assert (
            "calls embed, layers.0, layers.1, head or embed, layers.0, head, as the values" in end.last_line
        )


class Checked(nn.Linear):
    def __init__(self, is_wrong: Callable[[Tensor], bool]) -> None:
        super().__init__(5, 5)
        self.is_wrong = is_wrong

    def forward(self, x: Tensor) -> Tensor:
        if self.is_wrong(x):
            raise ValueError("not finite")
        return super().forward(x)


def test_a_check_of_values_that_raises_is_no_way_to_go() -> None:
    plan = Plan(3, GROUPS[:1], (Ministage(0, ("0", "1")),))
    for is_wrong in (lambda x: bool(x.isnan().any()), lambda x: not x.isfinite().all()):
        parts = partition(nn.Sequential(nn.Linear(5, 5), Checked(is_wrong)), plan)
        trace_boundaries(parts, plan, Signature.of(torch.zeros(3, 5)), {}, trainable=(True,))
    both = [lambda x: bool(x.isnan().any()), lambda x: not x.isfinite().all()]
    parts = partition(nn.Sequential(*map(Checked, both)), plan)
    with pytest.raises(ConfigError, match="ValueError: not finite"):
        trace_boundaries(parts, plan, Signature.of(torch.zeros(3, 5)), {}, trainable=(True,))


def test_what_export_cannot_know_is_named_with_its_place() -> None:
    plan = Plan(3, GROUPS, (Ministage(0, ("embed",)), Ministage(1, ("layers.0", "layers.1", "head"))))
    parts = partition(Padded(), plan)
    with pytest.raises(ConfigError, match=r"torch.export cannot cut .*\(test_crossing.py:\d+\); pass split="):
        trace_boundaries(parts, plan, Signature.of(TOKENS), {}, trainable=(True, True))
