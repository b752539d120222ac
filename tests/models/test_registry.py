"""Models by name: what is there, and what a misspelt name is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zorselike.errors import ConfigError
from zorselike.models import build_model, flavors, get_config, model_names, module_names


def test_every_flavor_that_recipes_name_exists() -> None:
    assert model_names() == ("llama", "gpt")
    assert set(flavors("llama")) == {"debug", "1b", "3b", "8b", "7b", "13b", "33b", "65b"}
    assert {"debug", "124m"} <= set(flavors("gpt"))


def test_module_names_are_in_model_order_and_exist() -> None:
    with torch.device("meta"):
        model = build_model("llama", "debug", num_layers=2)
    names = module_names(model.config)
    assert names == ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    for name in names:
        model.get_submodule(name)


def test_overrides_replace_fields() -> None:
    config = get_config("gpt", "debug", vocab_size=300, bias=False)
    assert config.vocab_size == 300
    with torch.device("meta"):
        model = build_model("gpt", "debug", vocab_size=300, bias=False)
    assert model.config == config
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize(
    ("name", "flavor", "overrides", "words"),
    [
        ("lama", "debug", {}, "no model 'lama': did you mean 'llama'"),
        ("bert", "debug", {}, "choose one of llama, gpt"),
        ("llama", "8B", {}, "no flavor '8B': did you mean '8b'"),
        ("llama", "debgu", {}, "did you mean 'debug'"),
        ("gpt", "debug", {"num_layer": 3}, "no setting 'num_layer': did you mean 'num_layers'"),
        ("gpt", "debug", {"num_kv_heads": 2}, "no setting 'num_kv_heads'"),
        ("llama", "debug", {"num_layers": 0}, "num_layers = 0"),
        ("llama", "debug", {"num_layers": 10**9}, "num_layers = 1000000000 must be at most"),
        ("llama", "debug", {"num_layers": 1e3}, "num_layers = 1000.0 must be an integer"),
        ("llama", "debug", {"rope_theta": -1}, "rope_theta = -1 must be above 0"),
        ("llama", "debug", {"rope_theta": float("inf")}, "rope_theta = inf must be finite"),
        ("gpt", "debug", {"norm_eps": float("nan")}, "norm_eps = nan must be finite"),
        ("gpt", "debug", {"norm_eps": -1.0}, "norm_eps = -1.0 must not be negative"),
        ("gpt", "debug", {"bias": 2}, "bias = 2 must be True or False"),
        ("llama", "debug", {"num_heads": 5}, "num_heads = 5"),
        ("llama", "debug", {"num_kv_heads": 3}, "num_kv_heads = 3"),
        ("llama", "debug", {"dim": 12, "num_heads": 4}, "is odd"),
    ],
)
def test_a_wrong_name_or_number_is_refused(
    name: str, flavor: str, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=r"^model: ") as caught:
        get_config(name, flavor, **overrides)
    assert words in str(caught.value)
