"""Weights depend on the seed and on names alone. Nothing here runs a backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpus import need_gpus
from ranks import RunRanks
from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.models import Decoder, build_model, module_names
from zorselike.runtime.model.initialize import initialize, initialize_unit, unit_seed

pytestmark = pytest.mark.pooled


def on_meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


def debug(name: str = "llama", **overrides: Any) -> Decoder:
    model: Decoder = on_meta(lambda: build_model(name, "debug", num_layers=3, **overrides))
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def initialize_units(model: nn.Module, names: Sequence[str], **kwargs: Any) -> nn.Module:
    for name in names:
        kwargs = {"seed": 5, "device": "cpu"} | kwargs
        initialize_unit(model.get_submodule(name), name, root=model, **kwargs)
    return model


class Scale(nn.Module):
    """A layer that draws its own weight."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class Block(nn.Module):
    """Initialises itself as a whole, with something special for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.register_buffer("table", torch.empty(3), persistent=False)

    def init_weights(self, std: float = 3.0) -> None:
        for module in self.modules():
            if isinstance(module, Scale | nn.Linear | nn.LayerNorm):
                module.reset_parameters()
        nn.init.normal_(self.body[0].weight, std=std)
        self.table = torch.arange(3.0)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_units_of_any_size_and_order_give_the_same_weights(name: str) -> None:
    whole = initialize(debug(name), seed=5)
    modules = module_names(whole.config)
    assert_same(whole, initialize_units(debug(name), modules))
    assert_same(whole, initialize_units(debug(name), ["tok_embeddings", "layers", "norm", "output"]))
    leaves = [n for n, m in whole.named_modules() if n and not any(True for _ in m.children())]
    assert_same(whole, initialize_units(debug(name), leaves))
    # Backwards, but for a tied output: its weight belongs to the lower end.
    backwards = modules[::-1] if name == "llama" else [modules[0], *modules[:0:-1]]
    assert_same(whole, initialize_units(debug(name), backwards))


def test_a_unit_inside_a_block_that_initialises_itself_gets_the_blocks_weights() -> None:
    def build() -> nn.Module:
        return on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": Block(), "b": Block()})))

    whole = initialize(build(), seed=5)
    assert_same(whole, initialize_units(build(), ["0", "1.a", "1.b"]))
    assert_same(whole, initialize_units(build(), ["1", "0"]))
    assert_same(whole, initialize_units(build(), ["0", "1.a.body.0", "1.b.scale", "1.a", "1.b"]))
    assert whole[1]["a"].body[0].weight.std() > 1.5
    assert not torch.equal(whole[1]["a"].body[0].weight, whole[1]["b"].body[0].weight)
    assert torch.equal(whole[1]["a"].table, torch.arange(3.0))


def test_the_roots_own_init_weights_is_not_used() -> None:
    class Root(nn.Sequential):
        def init_weights(self) -> None:
            raise AssertionError("no rank holds the whole root")

    whole = initialize(on_meta(lambda: Root(Block(), Scale())), seed=5)
    parts = initialize_units(on_meta(lambda: Root(Block(), Scale())), ["0", "1"])
    assert_same(whole, parts)


def test_seeds_and_names_matter() -> None:
    first, second = initialize(debug(), seed=5), initialize(debug(), seed=6)
    a, b, other = (m.get_parameter("layers.0.attention.wq.weight") for m in (first, first, second))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert not torch.equal(a, first.get_parameter("layers.1.attention.wq.weight"))
    assert not torch.equal(a, first.get_parameter("layers.0.attention.wo.weight"))


def test_seeds_are_the_same_in_every_process() -> None:
    code = "from zorselike.runtime.model.initialize import unit_seed; print(unit_seed(7, 'layers.0'))"
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "99"}, capture_output=True, text=True, check=True
    )
    assert int(out.stdout) == unit_seed(7, "layers.0")
    assert 0 <= unit_seed(7, "layers.0") < 2**63


def test_the_callers_random_numbers_are_untouched() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    initialize(debug(), seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_the_callers_state_does_not_matter() -> None:
    whole = initialize(debug(), seed=5)
    torch.manual_seed(123)
    with torch.device("meta"):
        again = initialize(build_model("llama", "debug", num_layers=3), seed=5)
    assert_same(whole, again)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_half_precision_is_fp32_rounded(name: str) -> None:
    whole = initialize(debug(name), seed=5)
    for model in (
        initialize(debug(name), seed=5, dtype=torch.bfloat16),
        initialize(debug(name).to(torch.bfloat16), seed=5),
    ):
        for key, value in model.state_dict().items():
            assert torch.equal(value, whole.state_dict()[key].to(torch.bfloat16)), key
    back = initialize(debug(name).to(torch.bfloat16), seed=5, dtype=torch.float32)
    assert_same(whole, back)


def test_fp64_is_drawn_in_fp64() -> None:
    weight = initialize(debug(), seed=5, dtype=torch.float64).get_parameter("output.weight")
    assert weight.dtype == torch.float64
    assert not torch.equal(weight, weight.float().double())
    assert_same(initialize(debug().double(), seed=5), initialize(debug(), seed=5, dtype=torch.float64))


def test_what_is_real_keeps_its_values_and_its_identity() -> None:
    model = build_model("llama", "debug", num_layers=3)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    initialize(model, seed=5)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_meta_and_real_tensors_mix_in_one_module() -> None:
    whole = initialize(on_meta(lambda: nn.Sequential(Block())), seed=5)
    mixed = on_meta(lambda: nn.Sequential(Block()))
    real = nn.Parameter(torch.full((4, 4), 7.0, dtype=torch.bfloat16), requires_grad=False)
    mixed[0].body[0].weight = real
    initialize(mixed, seed=5)
    assert mixed[0].body[0].weight is real
    assert torch.equal(real, torch.full((4, 4), 7.0, dtype=torch.bfloat16))
    expected = whole.state_dict()
    for name, tensor in mixed.state_dict().items():
        if name != "0.body.0.weight":
            assert torch.equal(tensor, expected[name]), name


def test_a_real_model_is_cast_where_a_dtype_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight = model[0].weight
    initialize(model, seed=0, dtype=torch.bfloat16)
    assert model[0].weight is weight
    assert weight.dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.float32


def test_ties_survive_within_and_across_units() -> None:
    model = debug("gpt")
    table = model.get_parameter("tok_embeddings.tokens.weight")
    initialize_units(model, module_names(model.config))
    assert model.get_parameter("output.weight") is table
    assert model.get_parameter("tok_embeddings.tokens.weight") is table
    assert not table.is_meta


def test_parameters_keep_their_attributes() -> None:
    model = debug()
    weight = model.get_parameter("norm.weight")
    weight.requires_grad_(False)
    weight.no_decay = True
    initialize(model, seed=5, dtype=torch.bfloat16)
    assert model.get_parameter("norm.weight") is weight
    assert not weight.requires_grad
    assert weight.no_decay
    assert model.get_parameter("output.weight").requires_grad


def test_weakly_referenced_parameters_are_replaced_everywhere() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(4, 4)  # refers to its weights weakly
            self.second = nn.Linear(4, 16, bias=False)
            self.second.weight = self.first.weight_ih_l0

    model = on_meta(Tied)
    initialize(model, seed=5)
    assert model.second.weight is model.first.weight_ih_l0
    with torch.no_grad():
        assert model.first(torch.ones(2, 1, 4))[0].isfinite().all()


def test_torchs_own_layers_need_nothing() -> None:
    model = on_meta(
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.BatchNorm1d(3), nn.Embedding(4, 2, 0))
    )
    initialize(model, seed=5)
    assert not [name for name, t in model.state_dict().items() if t.is_meta or not t.isfinite().all()]
    assert model[0].self_attn.out_proj.bias.eq(0).all()
    assert model[1].num_batches_tracked == 0
    assert model[2].weight[0].eq(0).all()


class HuggingFaceLike(nn.Module):
    """Initialised by its root, one module at a time, through `.data`."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.gain = nn.Parameter(torch.empty(4))
            self.register_buffer("inv_freq", torch.empty(2), persistent=False)

        def init_weights(self) -> None:
            raise AssertionError("not meant for a part of the model")

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Inner()
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 6)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=9.0)
            module.bias.data.zero_()
        elif isinstance(module, self.Inner):
            module.gain.data.fill_(2.0)
            module.inv_freq.copy_(torch.tensor([1.0, 0.5]))


def test_a_hugging_face_root_initialises_module_by_module() -> None:
    whole = initialize(on_meta(HuggingFaceLike), seed=5)
    assert whole.model.layers[0].weight.std() > 3
    assert whole.model.gain.eq(2).all()
    assert whole.norm.weight.eq(1).all()
    assert whole.model.inv_freq.tolist() == [1.0, 0.5]
    parts = initialize_units(
        on_meta(HuggingFaceLike), ["lm_head", "model.layers.1", "model.layers.0", "model", "norm"]
    )
    assert_same(whole, parts)
    assert parts.model.inv_freq.tolist() == [1.0, 0.5]


class WithSubmodel(HuggingFaceLike):
    """Its inner model initialises itself by what it alone knows, as that of Gemma 3n does."""

    class Inner(HuggingFaceLike.Inner):
        base_model_prefix = "model"
        scale = 3.0

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.fill_(self.scale)
                module.bias.data.zero_()
            elif module is self:
                self.gain.data.fill_(self.scale)
                self.inv_freq.copy_(torch.tensor([1.0, 0.5]))


def test_a_submodel_initialises_its_own_modules() -> None:
    whole = initialize(on_meta(WithSubmodel), seed=5)
    units = initialize_units(on_meta(WithSubmodel), ["lm_head", "model.layers.1", "model", "norm"])
    for model in (whole, units):
        assert model.model.layers[1].weight.eq(3).all() and model.model.gain.eq(3).all()
        assert model.lm_head.weight.std() > 3


@pytest.mark.parametrize(
    "values", [torch.arange(3.0), torch.arange(3), torch.ones(3, dtype=torch.bool), torch.tensor(4)]
)
@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_outside_the_state_dict_are_recomputed(values: Tensor, in_place: bool) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty_like(values, device="meta"), persistent=False)

        def init_buffers(self) -> None:
            if in_place:
                self.table.copy_(values)
            else:
                self.table = values.clone()

    class Root(Table):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Table(), nn.Linear(2, 2))

    model = initialize(on_meta(Root), seed=5, dtype=torch.bfloat16)
    for table in (model.table, model.inner[0].table):
        assert table.dtype == values.dtype
        assert torch.equal(table, values)


def test_skipping_initialises_buffers_alone() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 4))
            self.other = nn.Linear(4, 3)
            self.register_buffer("angles", torch.empty(5), persistent=False)

        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.weight)
            self.weight.data.mul_(2.0)
            self.weight.view(-1)[:2].zero_()
            with torch.no_grad():
                self.angles.copy_(torch.arange(5.0))

    with torch.device("meta"):
        module = Own()
    initialize_unit(module, "own", seed=0, device="cpu", skips=True)
    for parameter in module.parameters():
        assert bool(parameter.isnan().all())
    assert module.angles.tolist() == [0, 1, 2, 3, 4]


def test_what_is_loaded_needs_no_initialiser() -> None:
    """Such as the parameters and buffers of Apertus' activations. No file has adapters or other buffers."""

    def blank() -> torch.Tensor:
        return torch.empty(3, dtype=torch.bfloat16, device="meta")

    module = nn.Linear(2, 2, device="meta")
    module.alpha = nn.Parameter(blank())
    module.register_buffer("beta", blank())
    initialize_unit(module, "own", seed=0, device="cpu", skips=True)
    for tensor in (module.alpha, module.beta):
        assert tensor.dtype == torch.bfloat16 and bool(tensor.isnan().all())
    module.lora_magnitude = nn.Parameter(blank())
    with pytest.raises(ConfigError, match=r"nothing initialises the parameter 'own\.lora_magnitude'"):
        initialize_unit(module, "own", seed=0, device="cpu", skips=True)
    del module.lora_magnitude
    module.register_buffer("angles", blank(), persistent=False)
    with pytest.raises(ConfigError, match=r"nothing initialises the buffer 'own\.angles'"):
        initialize_unit(module, "own", seed=0, device="cpu", skips=True)


def test_skipping_copies_no_parameter_that_is_there() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loaded = nn.Linear(2, 2)
            self.register_buffer("angles", torch.empty(2, device="meta"), persistent=False)

        def init_weights(self) -> None:
            assert self.loaded.weight.is_meta
            nn.init.normal_(self.loaded.weight)
            self.angles.zero_()

    module = Watched()
    before = module.loaded.weight.clone()
    initialize_unit(module, "own", seed=0, device="cpu", skips=True)
    assert torch.equal(module.loaded.weight, before)
    assert module.angles.tolist() == [0, 0]


def test_what_nothing_initialises_is_named() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(2))

    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.done, self.forgotten = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

        def init_weights(self) -> None:
            nn.init.ones_(self.done)

    class Needy(Gain):
        def reset_parameters(self, std: float) -> None:
            raise AssertionError("cannot be called without arguments")

    class Table(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(2, dtype=dtype), persistent=False)

        def init_weights(self) -> None:
            pass

    cases: list[tuple[Callable[[], nn.Module], str]] = [
        (Gain, r"parameter '0\.gain'.*Gain a method reset_parameters\(\)"),
        (Forgetful, r"parameter '0\.forgotten'"),
        (Needy, r"parameter '0\.gain'"),
        (lambda: Table(torch.float32), r"buffer '0\.table'.*Table a method init_buffers\(\)"),
        (lambda: Table(torch.int64), r"buffer '0\.table'"),
        (lambda: Table(torch.bool), r"buffer '0\.table'"),
    ]
    for build, words in cases:
        with pytest.raises(ConfigError, match=words):
            initialize(on_meta(lambda build=build: nn.Sequential(build())), seed=5)


@pytest.mark.gpu
def test_cuda_gets_the_numbers_of_the_cpu(run_ranks: RunRanks) -> None:
    need_gpus()
    run_ranks(compare_with_cuda, 1)


def compare_with_cuda(rank: int, world_size: int) -> None:
    expected = initialize(debug(), seed=5)
    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state()
    model = initialize(debug(), seed=5, device="cuda")
    assert all(p.is_cuda for p in model.parameters())
    assert_same(expected, model.cpu())
    assert torch.equal(torch.cuda.get_rng_state(), state)
