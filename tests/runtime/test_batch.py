"""What the caller hands in, cut into microbatches: nested, and in named tuples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from zorselike import Broadcast, HeteroPipeline, Plan
from zorselike.errors import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage
from zorselike.runtime.batch import Batch, RankRows, RowIndex, as_tensors, select_rows

pytestmark = pytest.mark.pooled


class Labels(NamedTuple):
    classes: Tensor
    weights: dict[str, Tensor]
    name: str


class Targets(NamedTuple):
    labels: Labels
    others: list[Labels]


def make_targets(rows: int) -> Targets:
    count = torch.arange(rows)
    first = Labels(count, {"rows": 10.0 * count}, "first")
    return Targets(first, [first._replace(classes=-count, name="second")])


def cut(targets: Any, *, kwargs: Mapping[str, Any] | None = None) -> Batch:
    index = RowIndex([Microbatch(0, 3, 5), Microbatch(0, 0, 2)])
    return Batch(index, torch.device("cpu"), inputs=None, targets=targets, kwargs=kwargs or {})


def test_named_tuples_stay_what_they_are() -> None:
    found = cut(make_targets(4)).targets(0)
    assert isinstance(found, Targets) and isinstance(found.others[0], Labels)
    assert found.labels.classes.tolist() == [2, 3] and found.labels.weights["rows"].tolist() == [20.0, 30.0]
    assert found.labels.name == "first" and found.others[0].classes.tolist() == [-2, -3]
    selected = select_rows(make_targets(9), [8, 1])
    assert isinstance(selected, Targets) and selected.labels.classes.tolist() == [8, 1]
    whole = cut(None, kwargs={"mask": Broadcast(make_targets(3))}).kwargs(1, ["mask"])["mask"]
    assert isinstance(whole, Targets) and whole.labels.classes.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("value", "said"), [((), "an empty tuple"), (["a"], "a str is not a tensor")])
def test_inputs_are_tensors(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"inputs: {said}; pass a tensor or a tuple of tensors"):
        as_tensors(value, "inputs")


def test_inputs_that_would_get_a_gradient_are_refused_where_a_step_trains() -> None:
    embedded = torch.zeros(2, 3, requires_grad=True) * 2
    with pytest.raises(ConfigError, match="inputs require a gradient, which a step does not give back"):
        as_tensors((torch.zeros(2), embedded), "inputs", train=True)
    assert as_tensors(embedded.detach(), "inputs", train=True) and as_tensors(embedded, "inputs")


def test_other_containers_keep_their_types() -> None:
    largest = torch.arange(12).view(4, 3).max(dim=1)
    found = cut((OrderedDict(a=torch.arange(4)), largest, 3)).targets(1)
    assert isinstance(found, tuple) and isinstance(found[0], OrderedDict) and found[2] == 3
    assert found[0]["a"].tolist() == [0, 1]
    assert type(found[1]) is type(largest) and found[1].values.tolist() == [2, 5]


class Both(NamedTuple):
    hidden: Tensor
    residual: Tensor


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Both:
        return Both(self.linear(x), x)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, both: Both) -> Tensor:
        hidden, residual = both
        return self.linear(hidden) + residual  # type: ignore[no-any-return]


@pytest.mark.parametrize("zero", [2, 3])
def test_a_step_takes_named_tuples(run_ranks: Any, zero: int) -> None:
    (losses,) = run_ranks(train, 1, zero)
    assert losses[0] == losses[1] > losses[2]


def train(rank: int, size: int, zero: int) -> list[float]:
    group = Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 3)), zero=zero)
    plan = Plan(3, (group,), (Ministage(0, ("0",)), Ministage(0, ("1",))))
    torch.manual_seed(1)
    model, x = nn.Sequential(First(), Second()), torch.randn(3, 2)
    targets = Labels(torch.randn(3, 2), {"scale": torch.ones(3, 1)}, "targets")

    def loss_fn(outputs: Tensor, targets: Labels) -> Tensor:
        assert targets.name == "targets"
        return ((outputs - targets.classes) * targets.weights["scale"]).square().sum()

    with torch.no_grad():
        expected = float(loss_fn(model(x), targets)) / 3
    with HeteroPipeline(model, plan, loss_fn=loss_fn, count_fn=lambda t: len(t.classes)) as pipe:
        found = [pipe.step_global(x, targets).loss for _ in range(2)]
    return [round(value, 5) for value in (expected, *found)]


def test_keyword_arguments_of_a_whole_batch_have_its_rows() -> None:
    plan = Plan(4, (Group((0,), (Microbatch(0, 0, 4),)),), (Ministage(0, ("0",)),))
    own, rows = RankRows(plan, 0), torch.zeros(4, 2)
    for value, said in (
        (torch.zeros(3), "mask= has 3 rows"),
        (torch.zeros(5), "mask= has 5 rows"),
        (torch.zeros(()), "mask= is a tensor without rows"),
    ):
        with pytest.raises(ConfigError, match=said):
            own.select(rows, rows, {"mask": value})
    with pytest.raises(ConfigError, match="mask= is a list of tensors, which is not cut into rows"):
        own.check((rows,), rows, {"mask": [rows]}, train=False)
    for value in (rows.clone().requires_grad_(), Broadcast(torch.zeros(1, requires_grad=True))):
        own.check((rows,), rows, {"mask": value}, train=False)
        with pytest.raises(ConfigError, match="mask= require a gradient"):
            own.check((rows,), rows, {"mask": value}, train=True)
