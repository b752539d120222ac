"""What models change in place, of what their layers return and are given, trains as in a single process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from ranks import RunRanks
from tiny import DIM, VOCABULARY, Case, Decoder, adamw, module_names
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.plan.parts import RECOMPUTE, Recompute
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import count_valid_tokens, token_cross_entropy

pytestmark = pytest.mark.pooled

LAYERS = 2
ROWS = 5


def activated() -> nn.Module:
    """Linear layers, whose outputs are views, and activations that change these."""
    torch.manual_seed(0)
    activations = (nn.ELU(inplace=True), nn.SiLU(inplace=True), nn.ReLU(inplace=True))
    layers = [layer for own in activations for layer in (nn.Linear(DIM, DIM), own)]
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), *layers, nn.Linear(DIM, VOCABULARY)).double()


class Adding(Decoder):
    """Adds to what its layers return, and returns what it has changed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            entered, h = h, layer(h)
            h += entered
            h[:, 0].mul_(0.5)
        h = self.norm(h) if self.norm is not None else h
        if self.output is not None:
            h = self.output(h)
            h[..., -1] = 0.0
        return h


def adding() -> nn.Module:
    torch.manual_seed(0)
    model = Adding(LAYERS).double()
    for name in ("0", "1"):
        model.layers[name] = nn.Linear(DIM, DIM).double()
    model.output = nn.Linear(DIM, VOCABULARY).double()
    return model


MODELS = {
    "activations": (activated, [str(number) for number in range(8)], 2),
    "additions": (adding, module_names(LAYERS), 3),
}


def make_plan(names: list[str], cut: int, *, zero: int, recompute: Recompute) -> Plan:
    rows = (Microbatch(0, 0, 2), Microbatch(1, 2, 4), Microbatch(0, 4, 5))
    group = Group((0, 1), rows, zero=zero, recompute=recompute)
    return Plan(ROWS, (group,), (Ministage(0, tuple(names[:cut])), Ministage(0, tuple(names[cut:]))))


def train_both(rank: int, world_size: int, kind: str) -> None:
    make, names, cut = MODELS[kind]
    batches = [Case(make_plan(names, cut, zero=0, recompute="none"), 0).batch(step) for step in range(2)]
    alone = make()
    optimizer, losses = adamw(alone.parameters()), []
    for inputs, targets in batches:
        loss = token_cross_entropy(alone(inputs), targets) / count_valid_tokens(targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for zero, recompute in product(range(4), RECOMPUTE):
        plan = make_plan(names, cut, zero=zero, recompute=recompute)
        with HeteroPipeline(make(), plan, optimizer=adamw) as pipe:
            found = [pipe.step_global(*batch).loss for batch in batches]
            state = pipe.full_state_dict()
        torch.testing.assert_close(found, losses, rtol=0, atol=1e-12)
        expected = dict(alone.state_dict()) if rank == 0 else {}
        torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_models_may_change_in_place_what_layers_return(kind: str, run_ranks: RunRanks) -> None:
    run_ranks(train_both, 2, kind)
