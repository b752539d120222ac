"""Workloads of models that are only watched, against what their configs and other tools say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_like import HFConfig, HFForCausalLM, hf_modules, logits_of
from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.models import Decoder, build_model, get_config
from zorselike.models.workload import make_workload
from zorselike.plan.workload import Workload
from zorselike.profiler.workload.model_layers import find_layers
from zorselike.profiler.workload.module_workload import measure_workload
from zorselike.runtime.loss import token_cross_entropy

SEQUENCE = 128


def build(family: str, flavor: str, **overrides: Any) -> Decoder:
    with torch.device("meta"):
        return build_model(family, flavor, **overrides)


def tokens(rows: int, length: int = SEQUENCE) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.int64, device="meta")


def cross_entropy(logits: Tensor) -> Tensor:
    return token_cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))


# -- our own models --------------------------------------------------------------------------

OURS = [
    ("llama", "debug", "float32", {}),
    ("llama", "debug", "bfloat16", {"tie_embeddings": True}),
    ("llama", "7b", "bfloat16", {}),
    ("gpt", "debug", "float32", {}),
    ("gpt", "350m", "bfloat16", {"tie_embeddings": False}),
]


@pytest.mark.parametrize(("family", "flavor", "dtype", "overrides"), OURS)
def test_our_models_are_as_their_configs_say(
    family: str, flavor: str, dtype: str, overrides: dict[str, Any]
) -> None:
    config = get_config(family, flavor, **overrides)
    model = build(family, flavor, **overrides)
    measured = measure_workload(model, tokens(2), dtype=dtype, name="x", loss_fn=cross_entropy)
    made = make_workload(config, sequence_length=SEQUENCE, dtype=dtype, model="x")
    assert (measured.layers, measured.ties) == (made.layers, made.ties)
    assert (measured.sequence_length, measured.num_parameters) == (SEQUENCE, made.num_parameters)
    for name, kind in made.kinds.items():
        found = measured.kinds[name]
        assert found.num_parameters == kind.num_parameters
        assert found.num_borrowed == kind.num_borrowed
        assert found.input_elements_per_row == kind.input_elements_per_row
        assert found.output_elements_per_row == kind.output_elements_per_row
    # Watched are matrix products; the formula also counts what multiplies in norms and adds as a bias.
    assert flops_of(measured, "layer") == flops_of(made, "layer") - 2 * SEQUENCE * count_vectors(model)
    assert flops_of(measured, "head") == flops_of(made, "head")
    assert flops_of(measured, "norm") == flops_of(measured, "embedding") == 0


def test_layers_are_in_the_order_in_which_they_run() -> None:
    model = build("llama", "debug")
    expected = measure_workload(model, tokens(2), dtype="float32", name="x", loss_fn=cross_entropy)
    model._modules["layers"] = model._modules.pop("layers")  # Registered behind norm and head.
    model._modules["tok_embeddings"] = model._modules.pop("tok_embeddings")
    assert find_layers(model) != tuple(name for name, _ in expected.layers)
    assert measure_workload(model, tokens(2), dtype="float32", name="x", loss_fn=cross_entropy) == expected


class Borrowing(nn.Linear):
    """Calls another layer, which is not registered in it."""

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return other(super().forward(x))  # type: ignore[no-any-return]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = Borrowing(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x, self.inner)  # type: ignore[no-any-return]


def test_a_layer_that_another_alone_calls_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not call inner; leave it out"):
        measure_workload(Nested(), torch.zeros(2, 4), dtype="float32", modules=["outer", "inner"])


def flops_of(workload: Workload, kind: str) -> float:
    return workload.kinds[kind].forward_flops_per_row


def count_vectors(model: Decoder) -> int:
    return sum(p.numel() for p in model.layers["0"].parameters() if p.dim() == 1)


@pytest.mark.parametrize(("family", "flavor", "dtype", "overrides"), OURS)
def test_what_is_kept_is_what_is_counted_by_hand(
    family: str, flavor: str, dtype: str, overrides: dict[str, Any]
) -> None:
    """Beside `models/activation_bytes.py`, which follows Korthikanti et al. tensor by tensor."""
    config = get_config(family, flavor, **overrides)
    model = build(family, flavor, **overrides)
    measured = measure_workload(model, tokens(2), dtype=dtype, loss_fn=cross_entropy)
    made = make_workload(config, sequence_length=SEQUENCE, dtype=dtype, model="x")
    for name in ("embedding", "layer", "norm"):
        expected = made.kinds[name].activation_bytes_per_row
        assert measured.kinds[name].activation_bytes_per_row == pytest.approx(expected, rel=0.05), name
    # Logits in half precision are kept by nobody; their fp32 copy's logarithms are.
    head, counted = (w.kinds["head"].activation_bytes_per_row for w in (measured, made))
    assert head == pytest.approx(counted, rel=0.05)
    working = measured.kinds["layer"].working_bytes_per_row
    assert 0.6 <= working / made.kinds["layer"].working_bytes_per_row <= 1.1


def test_rows_make_no_difference() -> None:
    model = build("gpt", "debug")
    one, four = (measure_workload(model, tokens(rows), dtype="float32") for rows in (1, 4))
    assert one == four


# -- other models ----------------------------------------------------------------------------


def make_mlp(*widths: int) -> list[nn.Module]:
    with torch.device("meta"):
        return [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]


def test_a_sequential_is_its_children() -> None:
    model = nn.Sequential(*make_mlp(6, 8, 8, 8), nn.Linear(8, 3, device="meta"))
    workload = measure_workload(model, torch.zeros(5, 6, device="meta"), dtype="float32")
    assert workload.layers == (("0", "Sequential"), ("1", "layer"), ("2", "layer"), ("3", "head"))
    assert (workload.model, workload.sequence_length) == ("Sequential", 1)
    layer = workload.kinds["layer"]
    assert (layer.num_parameters, layer.forward_flops_per_row) == (8 * 8 + 8, 2 * 8 * 8)
    assert (layer.input_elements_per_row, layer.output_elements_per_row) == (8, 8)
    # The linear layer keeps its input, which is the output that the ReLU before it keeps.
    assert layer.activation_bytes_per_row == 8 * 4
    # Gradients of what enters, of what the linear layer returns and of what leaves.
    assert layer.working_bytes_per_row == 3 * 8 * 4
    assert workload.kinds["Sequential"].input_elements_per_row == 0


def test_layers_are_found_in_nested_lists() -> None:
    with torch.device("meta"):
        model = HFForCausalLM(HFConfig())
    assert list(find_layers(model)) == hf_modules(HFConfig())
    inner = nn.Sequential(nn.Embedding(7, 8), nn.Sequential(*make_mlp(8, 8, 8)), nn.Linear(8, 7))
    assert find_layers(inner) == ("0", "1.0", "1.1", "2")


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_like_those_of_hugging_face(tied: bool) -> None:
    with torch.device("meta"):
        model = HFForCausalLM(HFConfig(tie_word_embeddings=tied))
    workload = measure_workload(
        model,
        tokens(2, 12),
        dtype="bfloat16",
        kwargs={"attention_mask": tokens(2, 12)},
        loss_fn=lambda output: cross_entropy(logits_of(output)),
    )
    assert [kind for _, kind in workload.layers] == ["embedding", *["layer"] * 3, "norm", "head"]
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    layer = workload.kinds["layer"]
    assert layer.input_elements_per_row == layer.output_elements_per_row == 12 * 16
    projections = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 24
    assert layer.forward_flops_per_row == 12 * (2 * projections + 4 * 12 * 16)
    assert bool(workload.ties) == tied
    assert workload.kinds["head"].num_borrowed == (19 * 16 if tied else 0)
    assert workload.kinds["head"].activation_bytes_per_row > 12 * 19 * 4


class WithToken(nn.Module):
    """A parameter of its own, layers of two kinds, a forward that computes around them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)] + [nn.Linear(8, 8, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.token
        for block in self.blocks:
            x = F.gelu(block(x))
        return x


def test_what_lies_around_the_layers_is_counted_to_them() -> None:
    with torch.device("meta"):
        model = WithToken()
    workload = measure_workload(model, torch.zeros(2, 8, device="meta"), dtype="float32")
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    assert workload.kind_of["blocks.0"].num_parameters == 8 * 8 + 8 + 8
    assert [kind for _, kind in workload.layers] == ["Linear", "Linear 2", "head"]
    # What GELU keeps is computed after the layer: its input counts to the layer before.
    assert workload.kind_of["blocks.2"].activation_bytes_per_row == 2 * 8 * 4


class AsksForValues(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if x.gt(0).any() else x)  # type: ignore[no-any-return]


def test_a_forward_may_ask_for_values() -> None:
    layers = [nn.Linear(8, 8) for _ in range(2)]
    asked, plain = (
        measure_workload(kind(*layers), torch.zeros(2, 8), dtype="float32", name="x", modules=["0", "1"])
        for kind in (AsksForValues, nn.Sequential)
    )
    assert asked.layers == plain.layers and asked.kinds == plain.kinds


def test_frozen_weights_have_half_a_backward() -> None:
    model = nn.Sequential(*make_mlp(8, 8, 8, 8))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    workload = measure_workload(model, torch.zeros(2, 8, device="meta"), dtype="float32")
    frozen, trained = workload.kind_of["1"], workload.kind_of["0"]
    assert (frozen.trainable, trained.trainable) == (0, 72)
    assert frozen.backward_flops == frozen.forward_flops_per_row
    assert trained.backward_flops == 2 * trained.forward_flops_per_row
    # A frozen linear layer needs its input for nothing; the ReLU keeps its result.
    assert frozen.input_elements_per_row == 8


class WithMask(nn.Module):
    """Passes on what carries no gradient beside what does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor] | torch.Tensor) -> Any:
        rows, mask = given if isinstance(given, tuple) else (given, given[:, :3] * 2)
        return self.linear(rows) + mask.sum(), mask


def test_what_carries_no_gradient_goes_over_a_boundary_one_way() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(WithMask() for _ in range(3)))
    workload = measure_workload(model, torch.zeros(2, 8, device="meta"), dtype="float32")
    kind = workload.kind_of["1"]
    assert (kind.input_elements_per_row, kind.gradient_elements) == (8 + 3, 8)


def test_a_weight_that_two_layers_share_is_counted_once() -> None:
    model = nn.Sequential(*make_mlp(8, 8, 8, 8))
    model[2][0].weight = model[0][0].weight
    workload = measure_workload(model, torch.zeros(2, 8, device="meta"), dtype="float32")
    assert workload.num_parameters == 3 * 72 - 64
    assert workload.ties == (("0", "2"),)
    assert (workload.kind_of["2"].num_parameters, workload.kind_of["2"].num_borrowed) == (8, 64)


def test_the_model_stays_as_it_is() -> None:
    model = build("llama", "debug")
    before = {name: id(p) for name, p in model.named_parameters()}
    measure_workload(model, tokens(1), dtype="bfloat16")
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# -- what is refused -------------------------------------------------------------------------


class Asks(nn.Module):
    """Looks at the contents of what enters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.numpy().sum() > 0 else x  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "settings", "told"),
    [
        (Asks(), {}, "Asks does not run on the example inputs without memory"),
        (nn.ReLU(), {}, "ReLU has no modules with parameters; name its layers by modules="),
        (nn.Sequential(nn.Linear(3, 3)), {}, "does not run on the example inputs"),
        (nn.Sequential(*make_mlp(8, 8, 8)), {"dtype": "fp8"}, "there is no dtype 'fp8'"),
        (nn.Sequential(*make_mlp(8, 8, 8)), {"modules": ["0"]}, "'1.0.weight' is in none of modules="),
        (
            nn.Sequential(*make_mlp(8, 8, 8)),
            {"modules": ["0", "5"]},
            "modules= has 5, which the model",
        ),
        (nn.Sequential(*make_mlp(8, 8, 8)), {"modules": ["0", "0.0", "1"]}, "0 and 0.0 within it"),
        (nn.Sequential(*make_mlp(8, 8, 8)), {"modules": ["0", "1", "1"]}, "1 more than once"),
    ],
)
def test_what_cannot_be_watched_is_refused(model: nn.Module, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        measure_workload(model, torch.zeros(2, 8), **{"dtype": "float32", **settings})


def test_inputs_without_rows_are_refused() -> None:
    model = nn.Sequential(*make_mlp(8, 8, 8))
    for inputs in (torch.zeros(()), torch.zeros(0, 8), []):
        with pytest.raises(ConfigError, match="the example inputs have no rows"):
            measure_workload(model, inputs, dtype="float32")
