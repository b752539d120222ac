"""Parameters outside the plan's modules, used in ministages behind the one that has them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from chain import plan_over, trace
from ranks import RunRanks
from tiny import DIM, SEQUENCE, VOCABULARY, Case, Layer, Outcome, assert_same, train_planned, train_single
from torch import Tensor, nn

from zorselike.plan import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.model.partition import partition

pytestmark = pytest.mark.pooled

NAMES = ("table", "decoder.layers.0", "decoder.layers.1", "decoder.layers.2", "head")


class Stack(nn.Module):
    """Has a table of positions of its own, registered before its layers and used behind the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.positions = nn.Parameter(torch.randn(SEQUENCE, DIM))


class Skips(nn.Module):
    def __init__(self, *, borrows: bool = False) -> None:
        super().__init__()
        self.skips = nn.Parameter(torch.randn(3))
        self.start = nn.Parameter(torch.randn(2, DIM))
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.decoder = Stack()
        self.head = nn.Linear(DIM, VOCABULARY)
        self.borrows = borrows

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.table(ids)
        shown, rowed = self.start[0], self.start[1].expand(len(ids), -1)
        for layer, skip in zip(self.decoder.layers, self.skips, strict=True):
            x = layer(x) + skip * first
            if layer is self.decoder.layers[1]:
                x = x + self.decoder.positions * shown
        x = x + rowed[:, None]
        return x @ self.table.weight.T if self.borrows else self.head(x)  # type: ignore[no-any-return]


class SkipsCase(Case):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Skips().double()


UNEVEN = (Microbatch(0, 0, 2), Microbatch(1, 2, 4), Microbatch(0, 4, 5))


def plan_of(*cuts: int, zero: int = 2, **changes: object) -> Plan:
    """Two ranks, then one; ministages in turn."""
    second = Group((2,), (Microbatch(2, 0, 3), Microbatch(2, 3, 5)), zero=zero)
    ends = (0, *cuts, len(NAMES))
    ministages = tuple(Ministage(i % 2, NAMES[a:b]) for i, (a, b) in enumerate(pairwise(ends)))
    return Plan(5, (Group((0, 1), UNEVEN, zero=zero, **changes), second), ministages).validate()  # type: ignore[arg-type]


ONE_RANK = Plan(
    5,
    (Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 5)), zero=3),),
    tuple(Ministage(0, (name,)) for name in NAMES),
)
PLANS = {
    "zero 0": plan_of(2, zero=0),
    "zero 2, offloaded": plan_of(1, 2, 3, offload=("params", "optimizer", "activations"), recompute="layer"),
    "zero 3": plan_of(1, 2, 3, 4, zero=3),
}


def single(rank: int, world_size: int) -> Outcome:
    return train_single(SkipsCase(ONE_RANK, 3))


def planned(rank: int, world_size: int, plan: Plan) -> Outcome:
    return train_planned(SkipsCase(plan, 3))


@pytest.mark.parametrize("name", PLANS)
def test_they_train_exactly(name: str, run_ranks: RunRanks) -> None:
    (expected,) = run_ranks(single, 1)
    assert_same(run_ranks(planned, 3, PLANS[name])[0], expected, SkipsCase(PLANS[name], 3))


def test_they_outlive_the_gather_of_their_ministage(run_ranks: RunRanks) -> None:
    assert_same(run_ranks(planned, 1, ONE_RANK)[0], run_ranks(single, 1)[0], SkipsCase(ONE_RANK, 3))


# -- on the meta device ------------------------------------------------------------------------


class OwnStack(Stack):
    """Initialises what it has itself, and asks its layers for theirs."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions)
        for layer in self.layers:
            layer.up.reset_parameters()  # type: ignore[union-attr, operator]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.decoder = nn.Embedding(VOCABULARY, DIM), OwnStack()
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.decoder.positions
        for layer in self.decoder.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class MetaCase(Case):
    def model(self) -> nn.Module:
        with torch.device("meta"):
            return Plain().double()


ALONE = Plan(5, (Group((0, 1), UNEVEN, zero=3),), (Ministage(0, NAMES),))


def single_from_meta(rank: int, world_size: int) -> Outcome:
    return train_single(MetaCase(ALONE, 3))


def planned_from_meta(rank: int, world_size: int, plan: Plan) -> Outcome:
    return train_planned(MetaCase(plan, 3))


@pytest.mark.parametrize("plan", [ALONE, plan_of(1, 3), plan_of(2)], ids=["alone", "apart", "two"])
def test_what_is_around_layers_initialises_itself(plan: Plan, run_ranks: RunRanks) -> None:
    (expected,) = run_ranks(single_from_meta, 1)
    found = run_ranks(planned_from_meta, plan.num_ranks, plan)[0]
    assert_same(found, expected, MetaCase(plan, 3))


def test_a_modules_own_is_refused_with_the_mend() -> None:
    plan = plan_over(NAMES[:2], NAMES[2:])
    model = Skips(borrows=True)
    ids = torch.zeros(3, SEQUENCE, dtype=torch.int64)
    with pytest.raises(
        ConfigError, match=r"uses 'table.weight', which the plan gives to another ministage: register it once"
    ):
        trace(partition(model, plan), plan, ids)
    model.again = nn.Module()
    model.again.weight = model.table.weight
    plan = plan_over(NAMES[:2], [*NAMES[2:], "again"])
    trace(partition(model, plan), plan, ids)
