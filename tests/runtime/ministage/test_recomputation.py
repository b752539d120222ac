"""What a layer that is computed again is given, and what is drawn in it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from gpus import need_gpus
from ranks import RunRanks
from tiny import SEQUENCE, VOCABULARY, Decoder, adamw, module_names
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan, Recompute
from zorselike.runtime.ministage import unit
from zorselike.runtime.model.nested import tensors_in

DIM = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, *sizes: Tensor, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(hidden), 0.5, self.training)


class Model(nn.Module):
    """Gives its layers what they compute on by keyword: the first nothing else, the second also a number, as
    of sequences, that lives on the CPU whatever the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        first, second = self.layers
        hidden = first(hidden=hidden)
        return second(torch.tensor(DIM), hidden=hidden)  # type: ignore[no-any-return]


def train(recompute: Recompute, device: torch.device) -> list[float]:
    group = Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 4)), recompute=recompute)
    plan = Plan(4, (group,), (Ministage(0, ("layers.0", "layers.1")),))
    with torch.device("meta"):
        model = Model()
    with HeteroPipeline(
        model,
        plan,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        loss_fn=lambda outputs, targets: outputs.square().sum(),
        count_fn=len,
        split=lambda model, names: model,
        device=device,
    ) as pipe:
        inputs = torch.arange(4.0 * DIM).view(4, DIM) / DIM
        return [pipe.step(inputs, torch.zeros(4)).loss for _ in range(3)]


def told(rank: int, world_size: int) -> list[list[Tensor]]:
    """The tensors among the positional arguments of each recomputation, by which torch knows of which GPU the
    random numbers are to be kept."""
    found = []

    def spy(run: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(tensors_in(args))
        return checkpoint(run, *args, **kwargs)

    with mock.patch.object(unit, "checkpoint", spy):
        train("layer", torch.device("cpu"))
    return found


def test_recomputation_is_told_of_tensors_that_layers_are_given_by_keyword(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(told, 1)
    assert found and all(any(len(tensor.shape) == 2 for tensor in tensors) for tensors in found)


def count_forwards(rank: int, world_size: int, plan: Plan) -> dict[str, float]:
    """What layers that count their forwards have counted in two steps."""
    torch.manual_seed(0)
    with HeteroPipeline(Decoder(2, counts=True), plan, optimizer=adamw) as pipe:
        for _ in range(2):
            rows = torch.randint(VOCABULARY, (3, SEQUENCE))
            pipe.step_global(rows, rows)
        return {name: t.item() for name, t in pipe.full_state_dict().items() if name.endswith("seen")}


def test_what_changes_buffers_is_not_computed_again(run_ranks: RunRanks) -> None:
    """They would be changed twice."""
    rows = tuple(Microbatch(0, i, i + 1) for i in range(3))
    names = module_names(2)
    for ministages in ((names,), (names[:2], names[2:])):
        group = Group((0,), rows, recompute="layer")
        plan = Plan(3, (group,), tuple(Ministage(0, tuple(own)) for own in ministages))
        assert set(run_ranks(count_forwards, 1, plan)[0].values()) == {6.0}


@torch.jit.script
def activate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Scripted(nn.Linear):
    """What its backward reads last, a function of TorchScript saves."""

    def forward(self, x: Tensor) -> Tensor:
        return x + activate(super().forward(x))


def train_scripted(rank: int, world_size: int, *recompute: Recompute) -> list[list[float]]:
    found = []
    for own in recompute:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Scripted(DIM, DIM), nn.Linear(DIM, VOCABULARY))
        group = Group((0,), (Microbatch(0, 0, 1), Microbatch(0, 1, 3)), recompute=own)
        plan = Plan(3, (group,), (Ministage(0, ("0", "1", "2")),))
        rows = torch.randint(VOCABULARY, (3, SEQUENCE))
        with HeteroPipeline(model.double(), plan, optimizer=adamw) as pipe:
            found.append([pipe.step_global(rows, rows).loss for _ in range(3)])
    return found


def test_layers_that_end_in_torchscript_are_computed_again(run_ranks: RunRanks) -> None:
    ((expected, found),) = run_ranks(train_scripted, 1, "none", "layer")
    assert found == pytest.approx(expected, rel=1e-12)


def train_both(rank: int, world_size: int, kind: str) -> tuple[list[float], list[float]]:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return train("none", device), train("layer", device)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_dropped_is_dropped_again(kind: str, run_ranks: RunRanks) -> None:
    if kind == "cuda":
        need_gpus()
    ((expected, found),) = run_ranks(train_both, 1, kind)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) == 3
