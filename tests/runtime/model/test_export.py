"""Models that only `torch.export` can cut: exact for every number of rows, refused with a reason."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import volume
from chain import grads_of, plan_over, run_chain, trace, train_chain
from hf_like import HFConfig, HFForCausalLM, hf_modules, logits_of
from ranks import RunRanks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zorselike.plan import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.partition import find_ties, partition
from zorselike.runtime.model.signature import Broadcast, TensorSpec

pytestmark = pytest.mark.pooled

LENGTH = 6
VOCABULARY = 19
ROWS = (1, 2, 3, 5)


def tokens(rows: int) -> Tensor:
    return torch.arange(rows * LENGTH).reshape(rows, LENGTH) * 7 % VOCABULARY


def padding(rows: int) -> Tensor:
    """The last tokens of the last rows are padding."""
    return (torch.arange(LENGTH) < LENGTH - torch.arange(rows)[:, None] % 4).long()


def hf_plan(config: HFConfig, *cuts: int) -> Plan:
    names = hf_modules(config)
    ends = [0, *cuts, len(names)]
    return plan_over(*(names[a:b] for a, b in pairwise(ends)), rows=ROWS)


def hf_model(**changes: Any) -> HFForCausalLM:
    """Of two layers: what one more would add to a graph is what the second adds."""
    torch.manual_seed(0)
    return HFForCausalLM(HFConfig(num_hidden_layers=2, **changes)).double()


# -- exactness -----------------------------------------------------------------------------


def test_an_hf_like_model_is_exact_for_every_number_of_rows() -> None:
    model = hf_model()
    plan = hf_plan(model.config, 2, 3)
    parts = partition(model, plan, unpack=logits_of)
    found = trace(parts, plan, tokens(3), attention_mask=padding(3))
    # Masks and rotary tables are not sent: every ministage makes its own.
    assert [str(spec) for b in found.boundaries for spec in b.tensors] == [
        "int64 [rows, 6]",
        "float64 [rows, 6, 16]",
        "float64 [rows, 6, 16]",
        "float64 [rows, 6, 19]",
    ]
    for rows in ROWS:
        with torch.no_grad():
            expected = model(tokens(rows), attention_mask=padding(rows)).logits
        assert torch.equal(run_chain(parts, tokens(rows), attention_mask=padding(rows)), expected)


def test_arguments_that_are_not_tensors_and_positions_by_row() -> None:
    model = hf_model()
    plan = hf_plan(model.config, 2)
    parts = partition(model, plan, unpack=logits_of)
    kwargs = {"position_ids": torch.arange(LENGTH) + torch.arange(3)[:, None], "logits_to_keep": 2}
    found = trace(parts, plan, tokens(3), use_cache=None, **kwargs)
    assert found.boundaries[2].tensors[0].shape_per_row == (2, VOCABULARY)
    with torch.no_grad():
        expected = model(tokens(3), **kwargs).logits
    assert torch.equal(run_chain(parts, tokens(3), **kwargs), expected)


def train_hf_like(rank: int, world_size: int, tied: bool) -> list[float]:
    """The largest difference of gradients, for every number of rows."""
    model = hf_model(tie_word_embeddings=tied)
    plan = hf_plan(model.config, 1, 3)
    parts = partition(model, plan, unpack=logits_of)
    found = trace(parts, plan, tokens(2), attention_mask=padding(2))
    differences = []
    for rows in ROWS:
        kwargs = {"attention_mask": padding(rows)}
        targets = tokens(rows).roll(1, 1)

        def loss_fn(logits: Tensor, targets: Tensor = targets) -> Tensor:
            return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

        loss_fn(model(tokens(rows), **kwargs).logits).backward()
        expected = grads_of(model)
        model.zero_grad()
        train_chain(parts, found, loss_fn, tokens(rows), **kwargs)
        differences.append(largest_difference(expected, grads_of(model)))
        model.zero_grad()
    return differences


def largest_difference(expected: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> float:
    assert all(grad is not None for grad in expected.values())
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items())  # type: ignore[operator, union-attr]


@volume.parametrize("tied", [False, True])
def test_gradients_are_those_of_the_whole_model(tied: bool, run_ranks: RunRanks) -> None:
    (differences,) = run_ranks(train_hf_like, 1, tied)
    assert max(differences) < 1e-12


class LearnedPositions(nn.Module):
    """Everything that can cross: a table without rows, flags made of the inputs, a tuple's member,
    a value that passes a ministage by, a change in place."""

    def __init__(self, *, loose: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.positions = nn.Embedding(LENGTH, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        if loose:
            self.bias = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        h = self.table(ids) + (self.bias if hasattr(self, "bias") else 0)
        first, second = (h * 2).split(4, dim=-1)
        for layer in self.layers:
            h += torch.tanh(layer(h + positions) * self.scale) * (ids != 3)[..., None]
        h = h + torch.cat((second, first), dim=-1) * weights[:, :, None] * torch.tensor(0.5)
        return self.head(h)  # type: ignore[no-any-return]


POSITIONS_PLAN = plan_over(
    ["table", "positions"], ["layers.0"], ["layers.1", "layers.2"], ["head"], rows=(LENGTH, 2)
)


def train_learned_positions(rank: int, world_size: int, loose: bool) -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = LearnedPositions(loose=loose).double()
    parts = partition(model, POSITIONS_PLAN)
    differences = []
    for rows in (LENGTH, 2):
        inputs = (tokens(rows), torch.rand(rows, LENGTH, dtype=torch.float64))
        found = trace(parts, POSITIONS_PLAN, *inputs)
        model(*inputs).square().sum().backward()
        expected = grads_of(model)
        model.zero_grad()
        train_chain(parts, found, lambda out: out.square().sum(), *inputs)
        differences.append(largest_difference(expected, grads_of(model)))
        model.zero_grad()
    crossing = [str(spec) for spec in found.boundaries[2].tensors]
    return crossing, max(differences)


@pytest.mark.parametrize("loose", [False, True])
def test_everything_that_a_later_ministage_needs_crosses(loose: bool, run_ranks: RunRanks) -> None:
    ((crossing, difference),) = run_ranks(train_learned_positions, 1, loose)
    assert difference < 1e-12
    assert sorted(crossing) == sorted(
        [
            "float64 [rows, 6]",  # the weights, an input
            "float64 [rows, 6, 8]",  # the table of positions, once per row
            "float64 [rows, 6, 8]",  # what the layer is called with, computed before the call
            "float64 [rows, 6, 4]",
            "float64 [rows, 6, 4]",
            "float64 [rows, 6, 8]",
            "int64 [rows, 6]",
        ]
    )


def test_dropout_only_in_training() -> None:
    model = hf_model(dropout=0.5)
    plan = hf_plan(model.config, 2)
    parts = partition(model, plan, unpack=logits_of)
    trace(parts, plan, tokens(2))
    assert not torch.equal(run_chain(parts, tokens(2)), run_chain(parts, tokens(2)))
    for part in parts:
        part.module.eval()
    with torch.no_grad():
        expected = model.eval()(tokens(2)).logits
    assert torch.equal(run_chain(parts, tokens(2)), expected)


def test_graphs_compute_in_the_given_dtype() -> None:
    model = hf_model().float()
    plan = hf_plan(model.config, 2)
    parts = partition(model, plan, unpack=logits_of)
    found = trace(parts, plan, tokens(2), param_dtype=torch.bfloat16)
    assert found.boundaries[1].tensors == (TensorSpec((LENGTH, 16), torch.bfloat16, requires_grad=True),)
    model.to(torch.bfloat16)
    model.model.rotary_emb.init_buffers()  # FSDP2 leaves buffers as they are
    with torch.no_grad():
        expected = model(tokens(2)).logits
    found_logits = run_chain(parts, tokens(2))
    assert found_logits.dtype == torch.bfloat16
    assert torch.equal(found_logits, expected)


def test_a_module_of_the_plan_holds_the_parameters_that_the_graph_uses() -> None:
    """As FSDP2 does, the parameters are replaced between construction and use."""
    model = hf_model()
    plan = hf_plan(model.config, 2)
    parts = partition(model, plan, unpack=logits_of)
    trace(parts, plan, tokens(2))
    norm = parts[1].module.get_submodule("model.norm")
    norm.register_parameter("weight", nn.Parameter(torch.zeros(16, dtype=torch.float64)))
    assert not run_chain(parts, tokens(2)).any()


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = HFForCausalLM(HFConfig(num_hidden_layers=2))
    plan = hf_plan(model.config, 2)
    parts = partition(model, plan, unpack=logits_of)
    (_, boundary, _) = trace(parts, plan, tokens(2)).boundaries
    assert len(boundary.tensors) == 1
    materialised = hf_model().float()
    for part in parts:
        for module in part.module.modules():
            for key, _ in list(module.named_parameters(recurse=False)):
                name = next(n for n, m in part.module.named_modules() if m is module)
                setattr(module, key, materialised.get_parameter(f"{name}.{key}"))
        part.module.get_submodule("model.rotary_emb").init_buffers()  # every part has it
    with torch.no_grad():
        assert torch.equal(run_chain(parts, tokens(2)), materialised(tokens(2)).logits)


@pytest.mark.parametrize("unpack", [None, lambda out: (out[1],), lambda out: out[1]])
def test_a_tuple_reaches_the_loss_whole(unpack: Any) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.body(x)) * y
            return self.first(h), self.second(h)

    model, plan = TwoHeads(), plan_over(["body"], ["first", "second"], rows=ROWS)
    inputs = torch.rand(3, 4), torch.rand(3, 8)
    parts = partition(model, plan, unpack=unpack)
    trace(parts, plan, *inputs)
    with torch.no_grad():
        found, expected = run_chain(parts, *inputs), model(*inputs)
    expected = expected if unpack is None else unpack(expected)
    assert type(found) is type(expected)
    assert all(map(torch.equal, found, expected))


def test_ties_of_an_exported_model() -> None:
    model = hf_model(tie_word_embeddings=True)
    (tie,) = find_ties(model, hf_plan(model.config, 2))
    assert (tie.owner_fqn, tie.borrower_fqn) == ("model.embed_tokens.weight", "lm_head.weight")


# -- the whole runtime ---------------------------------------------------------------------


def train_on_ranks(rank: int, world_size: int, tied: bool) -> tuple[list[float], list[float], float]:
    """Losses of one process and of an uneven plan, and the largest difference of weights."""
    from zorselike import HeteroPipeline

    reference, model = hf_model(tie_word_embeddings=tied), hf_model(tie_word_embeddings=tied)
    names = hf_modules(model.config)
    first = Group((0, 1), (Microbatch(0, 0, 2), Microbatch(1, 2, 3), Microbatch(0, 3, 6)), zero=2)
    second = Group((2,), (Microbatch(2, 0, 3), Microbatch(2, 3, 5), Microbatch(2, 5, 6)), zero=3)
    cuts = (names[:2], names[2:3], names[3:4], names[4:])
    plan = Plan(6, (first, second), tuple(Ministage(i % 2, tuple(cut)) for i, cut in enumerate(cuts)))
    optimizer = adamw(reference.parameters())
    pipe = HeteroPipeline(model, plan, optimizer=adamw, unpack=logits_of)
    expected, found = [], []
    for _ in range(3):
        batch, targets = tokens(6), tokens(6).roll(1, 1).masked_fill(padding(6) == 0, -100)
        logits = reference(batch, attention_mask=padding(6)).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (targets >= 0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        found.append(pipe.step_global(batch, targets, attention_mask=padding(6)).loss)
    state = pipe.full_state_dict()
    pipe.close()
    weights = {name: p for name, p in reference.named_parameters() if name in state}
    return expected, found, max((float((state[n] - p).abs().max()) for n, p in weights.items()), default=0.0)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@volume.parametrize("tied", [False, True])
def test_an_hf_like_model_trains_on_unequal_rows(tied: bool, run_ranks: RunRanks) -> None:
    for expected, found, difference in run_ranks(train_on_ranks, 3, tied, timeout=120):
        assert found == pytest.approx(expected, abs=1e-12)
        assert difference < 1e-10


# -- refusals ------------------------------------------------------------------------------


class Odd(nn.Module):
    """Does one thing that cannot be cut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.counter: Tensor
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: Tensor, bias: Tensor | None = None, table: Any = None) -> Any:
        h = self.first(x)
        match self.kind:
            case "data":
                h = h * 2 if h.sum() > 0 else h
            case "transposed":
                return self.second(h.transpose(0, 1)).transpose(0, 1)
            case "pooled":
                mean = h.mean(0)
                return self.second(h) + mean
            case "twice":
                h = self.second(h)
            case "weights":
                return self.second(h) + self.first.weight.sum()
            case "borrowed":
                return self.second(h) @ self.first.weight[:, :4]
            case "count":
                h = h + self.counter
                h = self.second(h)
                self.counter += 1
                return h
            case "kwarg":
                assert bias is not None
                bias += 1
                h = h + bias
            case "dict":
                return {"out": self.second(h)}
            case "branch":
                return self.second(h) + x if x.shape[0] == 1 else self.second(h)
        out = self.second(h)
        return out if bias is None else out + bias


ODD_PLAN = plan_over(["first"], ["second"])


def odd_parts(kind: str) -> list[ModelPart]:
    return partition(Odd(kind), ODD_PLAN, split="export")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("data", "GuardOnDataDependentSymNode|DataDependent"),
        ("transposed", r"'transpose.*', which enters ministage 1 \(second\), is \[5, 2, 4\] for 2 rows"),
        ("pooled", r"'mean.*', which enters ministage 1 \(second\), is \[5, 4\] for 2 rows"),
        ("twice", "the first module of a ministage is called more than once"),
    ],
)
def test_what_export_cannot_cut_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"torch.export cannot cut this model: .*{reason}.*split=") as info:
        trace(odd_parts(kind), ODD_PLAN, torch.zeros(3, 5, 4))
    assert "\n" not in str(info.value)


def test_a_parameter_used_in_two_ministages_crosses_or_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ministage 1 \(second\) uses 'first.weight', which the plan gives"
    ):
        trace(odd_parts("borrowed"), ODD_PLAN, torch.zeros(3, 5, 4))


def test_a_keyword_argument_changed_in_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="changes a keyword argument in place"):
        trace(odd_parts("kwarg"), ODD_PLAN, torch.zeros(3, 5, 4), bias=torch.zeros(3, 5, 4))


def test_a_model_that_returns_no_tensor_needs_unpack() -> None:
    with pytest.raises(ConfigError, match="returns a dict; pass unpack="):
        trace(odd_parts("dict"), ODD_PLAN, torch.zeros(3, 5, 4))
    parts = partition(HFForCausalLM(), hf_plan(HFConfig(), 2), unpack=logits_of, split="export")
    trace(parts, hf_plan(HFConfig(), 2), tokens(2))
    parts = partition(HFForCausalLM(), hf_plan(HFConfig(), 2), split="export")
    with pytest.raises(ConfigError, match=r"returns a loss computed inside the model.*unpack="):
        trace(parts, hf_plan(HFConfig(), 2), tokens(2), labels=tokens(2))


def test_arguments_may_not_change_after_the_graphs_are_made() -> None:
    parts = odd_parts("")
    x = torch.zeros(3, 5, 4)
    trace(parts, ODD_PLAN, x, bias=Broadcast(torch.ones(4)))
    run_chain(parts, x, bias=torch.ones(4))
    with pytest.raises(ConfigError, match=r"bias= is \(5, 4\), and is \(4,\) in the first step"):
        run_chain(parts, x, bias=torch.ones(5, 4))
    with pytest.raises(ConfigError, match="bias= is left out, and is"):
        run_chain(parts, x)


def test_other_inputs_bind_anew() -> None:
    model = Odd("")
    parts = partition(model, ODD_PLAN, split="export")
    for length in (5, 7):
        x = torch.randn(3, length, 4)
        trace(parts, ODD_PLAN, x)
        with torch.no_grad():
            assert torch.equal(run_chain(parts, x), model(x))


def test_a_row_count_for_which_other_values_cross_is_refused() -> None:
    parts = odd_parts("branch")
    trace(parts, ODD_PLAN, torch.zeros(3, 5, 4))
    run_chain(parts, torch.zeros(5, 5, 4))
    with pytest.raises(ConfigError, match=r"2 tensors enter ministage 1 \(second\) with 1 rows, and 1 with"):
        run_chain(parts, torch.zeros(1, 5, 4))


def test_nested_broadcast_arguments() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor, tables: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
            return self.second(self.first(x) * tables[0]) + tables[1]["shift"]  # type: ignore[no-any-return]

    model = Tables()
    parts = partition(model, ODD_PLAN, split="export")
    tables = (torch.randn(4), {"shift": torch.randn(5, 1)})
    x = torch.randn(3, 5, 4)
    trace(parts, ODD_PLAN, x, tables=Broadcast(tables))
    with torch.no_grad():
        assert torch.equal(run_chain(parts, x, tables=tables), model(x, tables))


def test_a_buffer_that_changes_belongs_to_one_ministage() -> None:
    with pytest.raises(ConfigError, match="changes a buffer that several ministages use"):
        trace(odd_parts("count"), ODD_PLAN, torch.zeros(3, 5, 4))
