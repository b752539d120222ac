"""Every way in which a model becomes ministages, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from chain import plan_over, run_chain, trace
from hf_like import HFConfig, HFForCausalLM, hf_modules, logits_of
from tiny import DIM, VOCABULARY, Decoder, Layer, module_names
from torch import Tensor, nn

from zorselike.models import build_model
from zorselike.plan import ConfigError, PlanError
from zorselike.runtime.model.export import Exporter
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.partition import Tie, find_ties, partition

TOKENS = torch.arange(12).reshape(3, 4) % VOCABULARY


def assert_covers(parts: list[ModelPart], model: nn.Module) -> None:
    """Every parameter is in one part, under its own name, and is the model's own."""
    held = [(name, p) for part in parts for name, p in part.module.named_parameters()]
    whole = dict(model.named_parameters(remove_duplicate=False))
    assert {id(p) for _, p in held} == {id(p) for p in whole.values()}
    assert all(whole[name] is p for name, p in held)


def assert_same(parts: list[ModelPart], model: nn.Module, tokens: Tensor = TOKENS, **kwargs: Any) -> None:
    with torch.no_grad():
        expected = model(tokens, **kwargs)
    assert torch.equal(run_chain(parts, tokens, **kwargs), expected)


# -- nn.Sequential -------------------------------------------------------------------------


def make_sequential() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            table=nn.Embedding(VOCABULARY, DIM),
            encoder=nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, DIM)),
            act=nn.ReLU(),
            head=nn.Linear(DIM, 5),
        )
    )


def test_sequential_is_cut_between_its_children_with_global_names() -> None:
    model = make_sequential()
    parts = partition(model, plan_over(["table", "encoder.0"], ["encoder.2"], ["head"]))
    assert_covers(parts, model)
    assert_same(parts, model)
    assert [part.units for part in parts] == [("table", "encoder.0"), ("encoder.2",), ("head",)]
    assert [name for name, _ in parts[1].module.named_modules()] == ["", "encoder", "encoder.2", "act"]
    assert parts[0].module is not model


def test_a_sequential_child_may_be_one_module_of_the_plan() -> None:
    model = make_sequential()
    parts = partition(model, plan_over(["table"], ["encoder", "head"]))
    assert parts[1].units == ("encoder", "head")
    assert_same(parts, model)


def test_numbered_children_keep_their_numbers() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 3))
    parts = partition(model, plan_over(["0", "1"], ["2"]))
    assert [name for name, _ in parts[1].module.named_parameters()] == ["2.weight", "2.bias"]


def test_one_activation_used_twice_runs_twice() -> None:
    act = nn.Tanh()
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, DIM), act, nn.Linear(DIM, DIM), act, nn.Linear(DIM, 3), act
    )
    parts = partition(model, plan_over(["0"], ["2"], ["4"]))
    assert_same(parts, model)


def test_tuples_cross_a_sequential_as_one_argument() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.float()[..., None], x > 3

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 2)

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.linear(pair[0]) * pair[1][..., None]  # type: ignore[no-any-return]

    model = nn.Sequential(Pair(), Join())
    plan = plan_over(["0"], ["1"])
    parts = partition(model, plan)
    assert_same(parts, model)
    (_, boundary, _) = trace(parts, plan, TOKENS).boundaries
    assert [(spec.dtype, spec.requires_grad) for spec in boundary.tensors] == [
        (torch.float32, False),
        (torch.bool, False),
    ]
    pair = torch.ones(3, 4, 1), torch.ones(3, 4, dtype=torch.bool)
    (alone,) = partition(nn.Sequential(model[1]), plan_over(["0"]))  # So do inputs, where nothing is cut.
    assert torch.equal(alone.module(*pair), model[1](pair))


# -- TorchTitan's convention ---------------------------------------------------------------


def test_decoder_parts_lack_what_others_have() -> None:
    model = Decoder(3)
    names = module_names(3)
    parts = partition(model, plan_over(names[:2], names[2:4], names[4:]))
    assert_covers(parts, model)
    assert_same(parts, model)
    middle = parts[1].module
    assert isinstance(middle, Decoder) and middle.tok_embeddings is None and middle.output is None
    assert parts[1].units == ("layers.1", "layers.2")
    assert isinstance(model.tok_embeddings, nn.Embedding) and len(model.layers) == 3


class ListDecoder(nn.Module):
    """Layers in a `ModuleList`, in a model within the model."""

    def __init__(self, *, numbers_layers: bool = False) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.table = nn.Embedding(VOCABULARY, DIM)
        self.body.layers = nn.ModuleList(NumberedLayer() for _ in range(3))
        self.head = nn.Linear(DIM, VOCABULARY)
        self.numbers_layers = numbers_layers

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.body is not None:
            x = self.body.table(x) if self.body.table is not None else x
            for i, layer in enumerate(self.body.layers):
                x = layer(x, i if self.numbers_layers else 1, scale=scale)
        return self.head(x) if self.head is not None else x


class NumberedLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor, number: int, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return x + super().forward(x) * number * scale


LIST_NAMES = (["body.table", "body.layers.0"], ["body.layers.1", "body.layers.2"], ["head"])


def test_a_module_list_keeps_global_numbers() -> None:
    model = ListDecoder()
    parts = partition(model, plan_over(*LIST_NAMES))
    assert_covers(parts, model)
    assert_same(parts, model, scale=0.5)
    assert parts[1].units == ("body.layers.1", "body.layers.2")
    assert "scale" in parts[0].accepts and "x" not in parts[0].accepts and "mask" not in parts[0].accepts


def test_a_whole_list_of_layers_becomes_a_unit_each() -> None:
    parts = partition(ListDecoder(), plan_over(["body.table"], ["body.layers", "head"]))
    assert parts[1].units == ("body.layers.0", "body.layers.1", "body.layers.2", "head")


def test_layers_numbered_by_position_do_not_follow_the_convention() -> None:
    """Pruning would shift the numbers: export cuts such a model instead, and right."""
    model = ListDecoder(numbers_layers=True)
    plan = plan_over(*LIST_NAMES)
    parts = partition(model, plan)
    assert isinstance(parts[0].skeleton, Exporter)
    trace(parts, plan, TOKENS)
    assert_same(parts, model)
    parts = partition(model, plan, split="decoder")
    with pytest.raises(ConfigError, match=r"ministage 1 .* calls 'body.layers.1' with .* where the whole"):
        trace(parts, plan, TOKENS)


class Scaled(Decoder):
    """Computes something outside its modules, in whatever part of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


class Dropped(Decoder):
    """The same by a module that no ministage has."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "operation"), [(Scaled, "mul"), (Dropped, "tanh")])
def test_what_a_decoder_does_outside_its_modules_is_not_repeated(kind: type[Decoder], operation: str) -> None:
    model = kind(2)
    names = module_names(2)
    plan = plan_over(names[:2], names[2:])
    parts = partition(model, plan)
    assert isinstance(parts[0].skeleton, Exporter)
    parts = partition(model, plan, split="decoder")
    with pytest.raises(ConfigError, match=f"computes '{operation}' 1 time, its ministages together 2 times"):
        trace(parts, plan, TOKENS)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_our_own_models_follow_the_convention(family: str) -> None:
    model = build_model(family, "debug")
    names = module_names(model.config.num_layers)
    plan = plan_over(names[:3], names[3:4], names[4:])
    parts = partition(model, plan)
    assert all("positions" in part.accepts for part in parts)
    found = trace(parts, plan, TOKENS, document_ids=torch.zeros(3, 4, dtype=torch.int64))
    assert found.unit_calls == tuple(part.units for part in parts)
    assert_same(parts, model, document_ids=torch.tensor([[0, 0, 1, 1]] * 3))


def test_parts_have_hooks_of_their_own() -> None:
    model = Decoder(2)
    names = module_names(2)
    parts = partition(model, plan_over(names[:2], names[2:]))
    parts[0].module.register_forward_hook(lambda *_: None)
    assert not parts[1].module._forward_hooks and not model._forward_hooks


def test_using_a_weight_without_calling_its_module_is_refused() -> None:
    class Stray(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            assert self.tok_embeddings is not None or x.is_floating_point()
            x = (
                nn.functional.embedding(x, self.tok_embeddings.weight)
                if self.tok_embeddings is not None
                else x
            )  # type: ignore[arg-type]
            for layer in self.layers.values():
                x = layer(x)
            return self.output(self.norm(x)) if self.output is not None and self.norm is not None else x

    names = module_names(2)
    plan = plan_over(names[:2], names[2:])
    parts = partition(Stray(2), plan, split="decoder")
    with pytest.raises(ConfigError, match=r"uses 'tok_embeddings.weight' outside the forward of 'tok_emb"):
        trace(parts, plan, TOKENS)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_hook_that_uses_weights_before_the_forward_is_named() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), torch.nn.utils.weight_norm(nn.Linear(4, 4)))
    plan = plan_over(["0", "1"])
    with pytest.raises(ConfigError, match=r"a hook before '1' may do it, .*: use torch.nn.utils.parametr"):
        trace(partition(model, plan), plan, TOKENS)


def test_asking_for_a_weights_dtype_is_no_use_of_it() -> None:
    class Asks(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x if self.output is None else x.to(self.output.weight.dtype) * self.output.weight.shape[1]

    names = module_names(2)
    plan = plan_over(names[:2], names[2:])
    model = Asks(2)
    parts = partition(model, plan, split="decoder")
    trace(parts, plan, TOKENS)
    assert_same(parts, model)


# -- one ministage -------------------------------------------------------------------------


def test_one_ministage_takes_any_model_as_it_is() -> None:
    model = HFForCausalLM()
    plan = plan_over(hf_modules(model.config))
    (part,) = partition(model, plan, unpack=logits_of)
    assert part.units == tuple(hf_modules(model.config))
    assert torch.equal(run_chain([part], TOKENS), model(TOKENS).logits)
    assert trace([part], plan, TOKENS).boundaries[1].tensors[0].shape_per_row == (4, 19)
    assert isinstance(model(TOKENS), OrderedDict)  # the caller's model is not changed


# -- the user's own ------------------------------------------------------------------------


class Looped(nn.Module):
    """On no convention."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
        return x * self.scale


class LoopedPart(nn.Module):
    def __init__(self, model: Looped, names: tuple[str, ...]) -> None:
        super().__init__()
        self.table = model.table if "table" in names else None
        self.blocks = nn.ModuleDict({n[-1]: model.get_submodule(n) for n in names if "blocks" in n})
        self.scale = model.scale if "blocks.1" in names else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) if self.table is not None else x
        for block in self.blocks.values():
            x = block(x)
        return x * self.scale if self.scale is not None else x


LOOPED_PLAN = plan_over(["table", "blocks.0"], ["blocks.1"])


def test_split_by_the_user() -> None:
    model = Looped()
    parts = partition(model, LOOPED_PLAN, split=LoopedPart)
    assert_covers(parts, model)
    assert_same(parts, model)
    assert parts[0].units == ("table", "blocks.0")
    assert trace(parts, LOOPED_PLAN, TOKENS).unit_calls == (("table", "blocks.0"), ("blocks.1",))


def wrong_split(kind: str, model: Looped, names: tuple[str, ...]) -> Any:
    part = LoopedPart(model, names)
    if kind == "type":
        return names
    if kind == "same":
        return model.table
    if kind == "name":
        part.inner = part.blocks
    if kind == "foreign":
        part.table = model.table
    if kind == "missing":
        part.scale = None
    if kind == "shape" and part.scale is not None:
        part.scale = nn.Parameter(torch.ones(3))
    return part


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("type", r"split= returned a tuple for ministage 0 \(table, blocks.0\); return an nn.Module"),
        ("same", "the same module again for ministage 1"),
        ("name", "has a parameter 'inner.0.norm.weight', which the model lacks; keep global names"),
        ("foreign", r"ministage 1 \(blocks.1\) has 'table.weight', which belongs to ministage 0"),
        ("missing", "parameter 'scale' not in what split returned for any ministage"),
        ("shape", r"'scale' is \[3\], and \[1\] in the model"),
    ],
)
def test_a_wrong_split_is_refused(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(Looped(), LOOPED_PLAN, split=lambda model, names: wrong_split(kind, model, names))


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="split = 'titan' is neither 'decoder', 'export' nor a function"):
        partition(Looped(), LOOPED_PLAN, split="titan")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="split is a Linear; pass a function that is given the model and"):
        partition(Looped(), LOOPED_PLAN, split=nn.Linear(1, 1))


def test_parameters_outside_the_plans_modules() -> None:
    with pytest.raises(PlanError, match="the model itself owns parameters"):
        partition(Looped(), LOOPED_PLAN, split="decoder")
    assert isinstance(partition(Looped(), LOOPED_PLAN)[0].skeleton, Exporter)
    (part,) = partition(Looped(), plan_over(["table", "blocks.0", "blocks.1"]))
    assert "scale" in dict(part.module.named_parameters())


def test_a_module_that_the_plan_forgot_is_refused_whatever_the_way() -> None:
    for split in (None, "decoder", "export", LoopedPart):
        with pytest.raises(PlanError, match=r"no ministage has .*'layers.1"):
            partition(Decoder(2), plan_over(["tok_embeddings", "layers.0"], ["norm", "output"]), split=split)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"no ministage has module 'encoder\.2'"):
        partition(make_sequential(), plan_over(["table", "encoder.0"], ["head"]))


# -- ties ----------------------------------------------------------------------------------


def test_ties_have_the_lowest_ministage_as_owner() -> None:
    names = module_names(1)
    plan = plan_over(names[:2], names[2:])
    assert find_ties(Decoder(1, tied=True), plan) == (
        Tie("tok_embeddings.weight", "output.weight", owner_ministage=0, borrower_ministage=1),
    )
    assert find_ties(Decoder(1, tied=True), plan_over(names)) == ()  # one ministage keeps it by itself
    assert find_ties(Decoder(1), plan) == ()


def test_sharing_within_a_module_of_the_plan_is_no_tie() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    assert find_ties(nn.Sequential(inner, nn.Linear(4, 4)), plan_over(["0"], ["1"])) == ()


def test_three_ends_of_a_tie() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1].weight = model[2].weight = model[0].weight
    assert [(t.owner_fqn, t.borrower_fqn) for t in find_ties(model, plan_over(["0"], ["1"], ["2"]))] == [
        ("0.weight", "1.weight"),
        ("0.weight", "2.weight"),
    ]


def test_a_module_used_twice_is_two_modules_with_one_weight() -> None:
    shared = nn.Linear(DIM, DIM)
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), shared, nn.Tanh(), shared)
    parts = partition(model, plan_over(["0", "1"], ["3"]))
    first, second = parts[0].module.get_submodule("1"), parts[1].module.get_submodule("3")
    assert first is shared and second is not shared and second.weight is shared.weight
    assert len(find_ties(model, plan_over(["0", "1"], ["3"]))) == 2
    assert_same(parts, model)


# -- statistics over the batch -------------------------------------------------------------


def test_statistics_over_the_batch_are_refused() -> None:
    def model_with(norm: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4))

    plan = plan_over(["0", "1"], ["2"])
    with pytest.raises(ConfigError, match="'1' is a BatchNorm1d in training mode: its statistics are those"):
        partition(model_with(nn.BatchNorm1d(4)), plan)
    with pytest.raises(ConfigError, match="'1' is a InstanceNorm1d that tracks running statistics"):
        partition(model_with(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)), plan)
    with pytest.raises(ConfigError, match="BatchNorm1d"):
        partition(model_with(nn.BatchNorm1d(4, track_running_stats=False).eval()), plan)
    partition(model_with(nn.BatchNorm1d(4).eval()), plan)
    partition(model_with(nn.InstanceNorm1d(4, affine=True)), plan)


def test_a_model_on_meta_stays_there() -> None:
    with torch.device("meta"):
        model = Decoder(2)
    names = module_names(2)
    plan = plan_over(names[:2], names[2:])
    parts = partition(model, plan)
    trace(parts, plan, TOKENS)
    assert all(p.is_meta for part in parts for p in part.module.parameters())


def test_tracing_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10**6, 10**6), nn.Linear(10**6, 10**6))
    plan = plan_over(["0"], ["1"])
    (_, boundary, _) = trace(partition(model, plan), plan, torch.empty(1, 10**6)).boundaries
    assert boundary.tensors[0].shape_per_row == (10**6,)


def test_hf_like_models_are_exported() -> None:
    config = HFConfig()
    names = hf_modules(config)
    parts = partition(HFForCausalLM(config), plan_over(names[:2], names[2:]), unpack=logits_of)
    assert isinstance(parts[0].skeleton, Exporter)
    assert [part.units for part in parts] == [(), ()]
    assert "attention_mask" in parts[1].accepts
