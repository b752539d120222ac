"""Models that register modules in another order than they run them: plans follow the order of running."""

from __future__ import annotations

import pytest
import torch
from chain import plan_over, run_chain, trace
from ranks import RunRanks
from tiny import VOCABULARY, Case, Decoder, Outcome, assert_same, module_names, train_planned, train_single
from torch import Tensor, nn

from zorselike.plan import ConfigError, PlanError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.model.export import Exporter
from zorselike.runtime.model.partition import partition

pytestmark = pytest.mark.pooled

TOKENS = torch.arange(12).reshape(3, 4) % VOCABULARY
NAMES = module_names(2)
CUT = plan_over(NAMES[:2], NAMES[2:])
SWAPPED = plan_over(["tok_embeddings", "layers.1"], ["layers.0", "norm", "output"])


def head_first(model: Decoder) -> Decoder:
    """Registers its layers last."""
    model._modules["layers"] = model._modules.pop("layers")
    return model


class Plain(Decoder):
    """Has no convention."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("split", [None, "export"])
def test_a_model_without_a_convention_is_exported(split: str | None) -> None:
    model = head_first(Plain(2))
    parts = partition(model, CUT, split=split)  # type: ignore[arg-type]
    assert isinstance(parts[0].skeleton, Exporter)
    trace(parts, CUT, TOKENS)
    with torch.no_grad():
        assert torch.equal(run_chain(parts, TOKENS), model(TOKENS))
    with pytest.raises(PlanError, match="no ministage has module 'output'"):
        partition(model, plan_over(NAMES[:2], ["layers.1", "norm"]))


@pytest.mark.parametrize("split", [None, "decoder"])
def test_a_decoder_is_cut_between_its_layers(split: str | None) -> None:
    parts = partition(head_first(Decoder(2)), CUT, split=split)  # type: ignore[arg-type]
    trace(parts, CUT, TOKENS)
    assert [part.units for part in parts] == [("tok_embeddings", "layers.0"), ("layers.1", "norm", "output")]


def test_where_nothing_is_cut_order_is_the_plans() -> None:
    for names in (NAMES, NAMES[::-1]):
        (part,) = partition(head_first(Plain(2)), plan_over(names))
        assert part.units == tuple(names)


def test_an_order_in_which_the_model_does_not_run_is_refused() -> None:
    wrong = (
        r"ministages\[1\].modules: 'layers.0' comes after 'layers.1' in the plan and before it in the model"
    )
    for model in (Decoder(2), Plain(2)):
        with pytest.raises(PlanError, match=wrong):
            partition(model, SWAPPED)
    sequential = nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(PlanError, match="'1' comes after '2' in the plan"):
        partition(sequential, plan_over(["0", "2"], ["1"]))
    parts = partition(Decoder(2), SWAPPED, split="decoder")
    with pytest.raises(ConfigError, match=r"calls 'layers.1' with .* where the whole model calls 'layers.0'"):
        trace(parts, SWAPPED, TOKENS)


class Images(nn.Module):
    """Its inputs cannot be guessed, so that its order is unknown before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(3, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.table(x)))  # type: ignore[no-any-return]


def test_a_wrong_order_that_only_the_first_step_shows_is_named_there() -> None:
    plan = plan_over(["table", "second"], ["first"])
    parts = partition(Images(), plan)
    with pytest.raises(ConfigError, match="'first' comes after 'second' in the plan and before it"):
        trace(parts, plan, torch.zeros(3, 3))


class Named(nn.Module):
    """Keeps what it consists of in a dictionary, in which nothing can be None."""

    def __init__(self, by_key: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"table": nn.Embedding(VOCABULARY, 3), "norm": nn.LayerNorm(3)})
        self.by_key = by_key

    def forward(self, x: Tensor) -> Tensor:
        if self.by_key:
            return self.parts["norm"](self.parts["table"](x))  # type: ignore[no-any-return]
        return self.parts.norm(self.parts.table(x))  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize("by_key", [False, True])
def test_a_dictionary_of_modules_that_lacks_one_is_named_with_the_mend(by_key: bool) -> None:
    plan = plan_over(["parts.table"], ["parts.norm"])
    for split in (None, "decoder"):
        parts = partition(Named(by_key), plan, split=split)  # type: ignore[arg-type]
        if split is None:
            trace(parts, plan, TOKENS)
            continue
        with pytest.raises(
            ConfigError,
            match=r"fails on .*'?norm'? \(test_run_order.py:\d+\); what another ministage has of a list or "
            "dictionary of modules is not in it here; leave split='decoder' out",
        ):
            trace(parts, plan, TOKENS)


# -- on ranks ----------------------------------------------------------------------------------


class HeadFirst(Case):
    def model(self) -> nn.Module:
        with torch.device("meta"):
            return head_first(Plain(self.num_layers)).double()


UNEVEN = (Microbatch(0, 0, 2), Microbatch(1, 2, 3))
ALONE = Plan(3, (Group((0, 1), UNEVEN, zero=3),), (Ministage(0, tuple(NAMES)),))
APART = Plan(
    3,
    (Group((0,), (Microbatch(0, 0, 3),)), Group((1,), (Microbatch(1, 0, 1), Microbatch(1, 1, 3)))),
    tuple(
        Ministage(i % 2, tuple(names))
        for i, names in enumerate((NAMES[:1], NAMES[1:2], NAMES[2:3], NAMES[3:]))
    ),
)


def single(rank: int, world_size: int) -> Outcome:
    return train_single(HeadFirst(ALONE, 2))


def planned(rank: int, world_size: int, plan: Plan) -> Outcome:
    return train_planned(HeadFirst(plan, 2))


def test_it_trains_exactly(run_ranks: RunRanks) -> None:
    (expected,) = run_ranks(single, 1)
    for plan in (ALONE, APART):
        assert_same(run_ranks(planned, 2, plan)[0], expected, HeadFirst(plan, 2))


def refused(rank: int, world_size: int) -> None:
    names = tuple(NAMES[:1] + NAMES[:0:-1])
    planned(rank, world_size, Plan(3, ALONE.groups, (Ministage(0, names),)))


def test_zero_3_needs_the_order_of_calls(run_ranks: RunRanks) -> None:
    for end in run_ranks(refused, 2, allow_exit=True):
        assert end.code != 0
        assert (
            "ministage 0 calls 'layers.0' where the plan lists 'output'; zero = 3 needs each module "
            "of it called once, in the plan's order: list them in that order, or set zero = 2 in groups[0]"
        ) in end.last_line
