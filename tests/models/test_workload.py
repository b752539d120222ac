"""Workloads of our own models: from the config what the built model has."""

from __future__ import annotations

import pytest
import torch

from zorselike.errors import ConfigError
from zorselike.models import build_model, flops_per_token, get_config, module_names
from zorselike.models.workload import make_workload
from zorselike.profiler.workload.pieces import count_pieces

FLAVORS = [("llama", "debug"), ("llama", "1b"), ("llama", "65b"), ("gpt", "350m"), ("gpt", "2.7b")]


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_parameters_are_those_of_the_model(family: str, flavor: str) -> None:
    config = get_config(family, flavor)
    workload = make_workload(config, sequence_length=512, dtype="bfloat16", model=f"{family} {flavor}")
    with torch.device("meta"):
        model = build_model(family, flavor)
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    assert [module for module, _ in workload.layers] == module_names(config)
    for module, kind in workload.kind_of.items():
        own = sum(p.numel() for p in model.get_submodule(module).parameters())
        assert kind.num_parameters + kind.num_borrowed == own, module


@pytest.mark.parametrize(
    ("family", "flavor", "pieces"), [("llama", "debug", 2), ("llama", "8b", 8), ("gpt", "350m", 1)]
)
def test_layers_can_be_cut_as_the_runtime_cuts_them(family: str, flavor: str, pieces: int) -> None:
    config = get_config(family, flavor)
    workload = make_workload(config, sequence_length=512, dtype="float32", model="x")
    with torch.device("meta"):
        model = build_model(family, flavor)
    assert workload.max_tensor_parallel == pieces == count_pieces(model, module_names(config))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_flops_are_those_of_a_training_step(family: str, flavor: str, recompute: bool) -> None:
    config = get_config(family, flavor)
    workload = make_workload(config, sequence_length=512, dtype="float32", model="x")
    expected = 512 * flops_per_token(config, 512, recompute=recompute)
    assert workload.flops_per_row(recompute=recompute) == expected


def test_published_sizes() -> None:
    """OPT-350M's layers, as Sailor's table has them: 12,596,224 parameters, 2048 x 1024 at a boundary."""
    workload = make_workload(get_config("gpt", "350m"), sequence_length=2048, dtype="float32", model="x")
    layer = workload.kinds["layer"]
    assert layer.num_parameters == 12_596_224
    assert layer.input_elements_per_row == layer.output_elements_per_row == 2_097_152
    assert sum(kind == "layer" for _, kind in workload.layers) == 24
    neo = make_workload(get_config("gpt", "2.7b"), sequence_length=2048, dtype="float32", model="x")
    assert 2.6e9 < neo.num_parameters < 2.7e9


def test_a_tied_head_borrows() -> None:
    tied = make_workload(get_config("llama", "1b"), sequence_length=64, dtype="bfloat16", model="x")
    assert tied.ties == (("tok_embeddings", "output"),)
    assert (tied.kinds["head"].num_parameters, tied.kinds["head"].num_borrowed) == (0, 128_256 * 2048)
    free = make_workload(get_config("llama", "8b"), sequence_length=64, dtype="bfloat16", model="x")
    assert free.ties == ()
    assert (free.kinds["head"].num_parameters, free.kinds["head"].num_borrowed) == (128_256 * 4096, 0)


def test_bytes_grow_with_the_sequence_and_the_dtype() -> None:
    config = get_config("llama", "debug")
    short, long = (
        make_workload(config, sequence_length=length, dtype="bfloat16", model="x").kinds["layer"]
        for length in (128, 256)
    )
    assert long.activation_bytes_per_row == 2 * short.activation_bytes_per_row > 0
    assert long.working_bytes_per_row == 2 * short.working_bytes_per_row > 0
    double = make_workload(config, sequence_length=128, dtype="float32", model="x").kinds["layer"]
    assert double.activation_bytes_per_row > 1.8 * short.activation_bytes_per_row


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sequence_length": 4096}, "rows of 4096 tokens do not fit max_seq_len = 2048 of llama 7b"),
        ({"sequence_length": 0}, "rows of 0 tokens"),
        ({"dtype": "fp8"}, "there is no dtype 'fp8'; choose one of float32, bfloat16, float16"),
    ],
)
def test_what_the_model_does_not_take_is_refused(changes: dict[str, object], told: str) -> None:
    settings = {"sequence_length": 64, "dtype": "bfloat16", "model": "llama 7b", **changes}
    with pytest.raises(ConfigError, match=told):
        make_workload(get_config("llama", "7b"), **settings)  # type: ignore[arg-type]
