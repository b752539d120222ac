"""Adapters go into a model as `peft` puts them, and what they cannot be put into is refused."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hf_families
import numpy as np
import pytest
import torch
from ranks import RunRanks

from zorselike import initialize, list_modules
from zorselike.errors import ConfigError
from zorselike.hf.adapters import check_same_adapters
from zorselike.hf.lora import Lora, add_lora, describe_adapter, is_adapter, lora_layers
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.assembly import compile_plan

pytestmark = pytest.mark.pooled

peft = pytest.importorskip("peft")
transformers = hf_families.transformers


def make_model(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return hf_families.make_model(name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_only_adapters_train_and_names_stay(name: str) -> None:
    model = make_model(name).bfloat16()
    modules, number = list_modules(model), sum(p.numel() for p in model.parameters())
    add_lora(model, Lora(rank=2))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert list_modules(model) == modules
    assert trained and all(
        is_adapter(n) and p.dtype == torch.float32 and p.is_meta for n, p in trained.items()
    )
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16} and sum(p.numel() for p in frozen) == number


def test_adapters_begin_as_peft_begins_them(run_ranks: RunRanks) -> None:
    """Also where the rest is drawn as the model's family does it."""
    (state,) = run_ranks(initialise, 1)
    a, b = (next(t for n, t in state.items() if letter in n) for letter in ("lora_A", "lora_B"))
    assert 0.2 < a.abs().max() <= 0.25 and not b.any()  # At most 1 / sqrt(16).
    assert state["model.layers.0.mlp.up_proj.base_layer.weight"].std() == pytest.approx(0.02, rel=0.2)


def initialise(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = make_model("llama")
    add_lora(model, Lora(rank=4))
    model = initialize(model, seed=1)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "name, targets, words",
    [
        ("llama", ("embed_tokens",), "is of class Embedding"),
        (
            "llama",
            ("nothing",),
            "^lora: target_modules: no module of the model is called 'nothing'; its linear layers are",
        ),
        ("llama", ("q_projj", "v_proj"), "called 'q_projj'; .*; did you mean 'q_proj'"),
        ("llama, tied", ("lm_head",), "shares its weight with model.embed_tokens.weight"),
        ("mixtral", ("w1", "w2", "w3"), "no module of the model is called 'w1'"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_targets_that_are_no_linear_layers_are_refused(
    name: str, targets: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        add_lora(make_model(name), Lora(rank=2, target_modules=targets))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"rank": "x"}, "rank is 'x'; it is a whole number"),
        ({"rank": 2, "alpha": "x"}, "alpha is 'x'; it is a finite number"),
        ({"rank": 2, "dropout": "x"}, "dropout is 'x'; it is a number"),
        ({"rank": 2, "target_modules": "q_proj"}, "target_modules is 'q_proj'; it is names of linear layers"),
        ({"rank": 2, "target_modules": (3,)}, "target_modules is .*; it is names of linear layers"),
    ],
)
def test_what_is_no_number_of_an_adapter_is_refused(numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^lora: {words}"):
        Lora(**numbers)


def test_a_folder_in_place_of_settings_is_refused() -> None:
    """It ended in an AttributeError."""
    folder: Any = "adapters"
    with pytest.raises(ConfigError, match=r"^lora: it is 'adapters'; give .*Lora\(rank.* by load_adapters"):
        add_lora(make_model("llama"), folder)


def test_shared_experts_are_left_out_by_default() -> None:
    """`peft` takes the names of their layers for those of all experts."""
    config = transformers.Glm4MoeConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
    )
    with torch.device("meta"):
        model = transformers.Glm4MoeForCausalLM(config)
    add_lora(model, Lora(rank=2))
    found = {name.rpartition(".")[2] for name in lora_layers(model)}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_routers_that_are_linear_layers_are_left_out_by_default() -> None:
    """What they give is no product to which an adapter could add."""
    config = transformers.Llama4TextConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=8,
        intermediate_size_mlp=24,
        num_hidden_layers=2,
        num_local_experts=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
    )
    with torch.device("meta"):
        model, other = (transformers.Llama4ForCausalLM(config) for _ in range(2))
    add_lora(model, Lora(rank=2))
    assert not any("router" in name for name in lora_layers(model))
    assert len(list_modules(model)) == 5
    with pytest.raises(ConfigError, match=r"feed_forward.router' is of class Llama4Router; name linear"):
        add_lora(other, Lora(rank=2, target_modules=("q_proj", "router")))


def test_adapters_of_parameters_are_refused_before_the_first_step() -> None:
    model = make_model("mixtral")
    config = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
    peft.inject_adapter_in_model(config, model)
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, tuple(list_modules(model))),))
    with pytest.raises(ConfigError, match=r"experts' has an adapter of a parameter \(peft's target_param"):
        compile_plan(model, plan)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_of_two_kinds_are_refused() -> None:
    """`peft` notes for all of them at once whether weights are transposed, and a merge goes by that."""
    with torch.device("meta"):
        model = hf_families.make_model("gpt2", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"c_proj' is transposed and that of 'lm_head' is not"):
        add_lora(model, Lora(rank=2, target_modules=("attn.c_proj", "lm_head")))


def test_numbers_may_be_of_numpy(tmp_path: Path) -> None:
    """Such as those of a sweep: a checkpoint's description of the adapter is JSON, which has none of them."""
    model = make_model("llama")
    add_lora(model, Lora(np.int64(2), alpha=np.float32(4.5), dropout=np.float32(0.5)))
    described = json.loads(json.dumps(describe_adapter(model, tmp_path)))
    assert (described["r"], described["lora_alpha"], described["lora_dropout"]) == (2, 4.5, 0.5)


def test_alpha_is_what_was_asked_for(tmp_path: Path) -> None:
    """16 / 49 * 49 is a little less than 16, and 16 is what peft wrote."""
    model = make_model("llama")
    add_lora(model, Lora(rank=49, alpha=16.0))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 49, "lora_alpha": 16}')
    check_same_adapters(model, tmp_path)


@pytest.mark.parametrize(
    "setting",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"alora_invocation_tokens": [1]}],
)
def test_adapters_that_compute_otherwise_are_refused(setting: dict[str, object], tmp_path: Path) -> None:
    model = make_model("llama")
    add_lora(model, Lora(rank=2, alpha=4.0))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": "gaussian"}))
    check_same_adapters(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **setting}))
    with pytest.raises(ConfigError, match=f"asks for {next(iter(setting))}"):
        check_same_adapters(model, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("null", "adapter_config.json: the file is None; .* give a folder that peft wrote"),
        ("{", "adapter_config.json: is not JSON: .*; give a folder that peft wrote"),
        ('{"peft_type": "LORA", "r": "2", "lora_alpha": 4}', "rank '2' and alpha 4, and these have 2 and 4"),
    ],
)
def test_wrong_settings_of_adapters_are_shown_as_they_are(content: str, message: str, tmp_path: Path) -> None:
    model = make_model("llama")
    add_lora(model, Lora(rank=2, alpha=4.0))
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        check_same_adapters(model, tmp_path)


@pytest.mark.parametrize(("family", "has_biases"), [("llama", False), ("qwen2", True)])
def test_trained_biases_are_refused_where_there_are_any(
    family: str, has_biases: bool, tmp_path: Path
) -> None:
    model = make_model(family)
    add_lora(model, Lora(rank=2, alpha=4.0))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "all"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match='asks for bias = "all"') if has_biases else nullcontext():
        check_same_adapters(model, tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 0},
        {"rank": 1.5},
        {"rank": 2, "alpha": 0.0},
        {"rank": 2, "alpha": math.inf},
        {"rank": 2, "dropout": 1.0},
    ],
)
def test_numbers_of_no_adapter_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="lora: "):
        Lora(**bad)  # type: ignore[arg-type]
