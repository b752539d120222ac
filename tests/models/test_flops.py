"""Counts against those published, and against the modules themselves on the meta device."""

from __future__ import annotations

import pytest
import torch

from zorselike.models import (
    build_model,
    flavors,
    flops_per_token,
    forward_flops_by_module,
    get_config,
    model_names,
    module_names,
    num_parameters,
    parameters_by_module,
)

EVERY_MODEL = [(name, flavor) for name in model_names() for flavor in flavors(name)]

PUBLISHED = {
    ("llama", "7b"): 6_738_415_616,
    ("llama", "13b"): 13_015_864_320,
    ("llama", "33b"): 32_528_943_616,
    ("llama", "65b"): 65_285_660_672,
    ("llama", "8b"): 8_030_261_248,
    ("llama", "1b"): 1_235_814_400,
    ("llama", "3b"): 3_212_749_824,
    ("gpt", "124m"): 124_439_808,
}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_counts_are_those_published(name: str, flavor: str) -> None:
    assert num_parameters(get_config(name, flavor)) == PUBLISHED[name, flavor]


def test_the_33b_has_60_layers() -> None:
    assert get_config("llama", "33b").num_layers == 60


@pytest.mark.parametrize(("name", "flavor"), EVERY_MODEL)
def test_counts_are_those_of_the_modules(name: str, flavor: str) -> None:
    with torch.device("meta"):
        model = build_model(name, flavor)
    assert all(p.is_meta for p in model.parameters())
    counts = parameters_by_module(model.config)
    assert list(counts) == module_names(model.config)
    tied = model.config.tie_embeddings
    for module, count in counts.items():
        if module != "output" or not tied:
            assert sum(p.numel() for p in model.get_submodule(module).parameters()) == count, module
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)


@pytest.mark.parametrize("overrides", [{"bias": False}, {"tie_embeddings": False}])
def test_counts_follow_options(overrides: dict[str, bool]) -> None:
    with torch.device("meta"):
        model = build_model("gpt", "debug", **overrides)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)


def test_flops_are_6_n_and_attention() -> None:
    config = get_config("llama", "7b")
    n = num_parameters(config) - 32_000 * 4096
    assert flops_per_token(config, 2048) == 6 * n + 12 * 32 * 4096 * 2048


def test_a_tied_output_costs_what_an_untied_one_does() -> None:
    tied, untied = (get_config("llama", "1b", tie_embeddings=tied) for tied in (True, False))
    assert flops_per_token(tied, 128) == flops_per_token(untied, 128)


def test_recomputation_adds_the_forward_of_the_layers() -> None:
    config = get_config("gpt", "debug")
    forward = forward_flops_by_module(config, 64)
    assert list(forward) == module_names(config)
    layers = sum(flops for name, flops in forward.items() if name.startswith("layers."))
    assert flops_per_token(config, 64) == 3 * sum(forward.values())
    assert flops_per_token(config, 64, recompute=True) == 3 * sum(forward.values()) + layers


@pytest.mark.parametrize(("name", "seq_len"), [("llama", 32), ("gpt", 32)])
def test_flops_agree_with_the_matrix_products_that_run(name: str, seq_len: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    # Norms and biases multiply too, but are no matrix products: leave room for them only.
    with torch.device("meta"):
        model = build_model(name, "debug")
        tokens = torch.zeros(2, seq_len, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    counted = counter.get_total_flops() / tokens.numel()
    assert sum(forward_flops_by_module(model.config, seq_len).values()) == pytest.approx(counted, rel=0.02)
