"""Models of Hugging Face as the profiler knows them, whole and with adapters that alone are trained."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import hf_families
import pytest
import torch
import volume
from profiled import join
from ranks import RunRanks, free_port
from torch import nn

from zorselike.cost.largest_batch import WholeModelStep
from zorselike.cost.purposes import Purpose
from zorselike.hf.lora import Lora, add_lora
from zorselike.plan.workload import Workload
from zorselike.profiler.largest_batch.search import StepTrials
from zorselike.profiler.layers.probes import (
    MeasuredModel,
    ProbeTensor,
    build_layer,
    find_probes,
    make_inputs,
)
from zorselike.profiler.layers.timing import LayerBench
from zorselike.profiler.machine.device_memory import HostMemory
from zorselike.profiler.workload.module_workload import measure_causal_lm
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.model.nested import leaves

pytest.importorskip("peft")
CPU = torch.device("cpu")
LENGTH = 6
LEDGER = (
    Purpose.GATHERED_PARAMETERS,
    Purpose.PARAMETER_SHARDS,
    Purpose.GRADIENT_SHARDS,
    Purpose.OPTIMIZER_STATE,
)


def make_model(family: str, rank: int | None, **changes: Any) -> nn.Module:
    """On meta; with adapters of that rank, if one is given."""
    with torch.device("meta"):
        model = hf_families.make_model(family, **changes).float()
    if rank is not None:
        add_lora(model, Lora(rank))
    return model


def measure(model: nn.Module, dtype: str = "float32") -> Workload:
    return measure_causal_lm(model, sequence_length=LENGTH, dtype=dtype, name="hf tiny")


def measured_model(model: nn.Module, dtype: str = "float32") -> MeasuredModel:
    return MeasuredModel(
        build=partial(copy.deepcopy, model),
        workload=measure(model, dtype),
        loss_fn=token_cross_entropy,
        num_tokens=hf_families.VOCABULARY,
        most_rows=4,
        repeats=1,
    )


# -- workloads -------------------------------------------------------------------------------


def test_only_adapters_are_counted_as_trained() -> None:
    whole, adapted = measure(make_model("llama, tied", None)), measure(make_model("llama, tied", 2))
    assert (whole.model, adapted.model) == ("hf tiny", "hf tiny lora 2")
    assert whole.num_trainable == whole.num_parameters
    assert adapted.num_parameters == whole.num_parameters + adapted.num_trainable
    assert adapted.describe_frozen().startswith(f"{adapted.num_trainable:,} of {adapted.num_parameters:,}")
    embedding, layer, head = (adapted.kinds[kind] for kind in ("embedding", "layer", "head"))
    assert (embedding.trains, layer.trains, head.trains) == (False, True, False)
    assert (head.num_borrowed, head.borrowed_trainable) == (embedding.num_parameters, 0)


def test_a_frozen_product_has_half_a_backward_and_keeps_no_input() -> None:
    whole, adapted = measure(make_model("llama", None)), measure(make_model("llama", 2))
    assert whole.kinds["layer"].backward_flops_per_row is None
    layer, head = adapted.kinds["layer"], adapted.kinds["head"]
    added = layer.forward_flops_per_row - whole.kinds["layer"].forward_flops_per_row
    # Attention, with two factors that carry gradients, and adapters twice the forward.
    hidden, heads = 16, 4 * LENGTH * 16 * LENGTH
    frozen = layer.forward_flops_per_row - added - heads
    assert frozen == 2 * LENGTH * (hidden * (16 + 8 + 8 + 16) + 3 * hidden * 24)
    assert layer.backward_flops == frozen + 2 * (added + heads)
    assert head.backward_flops == head.forward_flops_per_row
    assert head.activation_bytes_per_row < whole.kinds["head"].activation_bytes_per_row


def test_frozen_layers_before_the_first_that_trains_are_a_kind_of_their_own() -> None:
    model = make_model("llama", None)
    for name in ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.3"):
        model.get_submodule(name).requires_grad_(False)
    kind_of = measure(model).kind_of
    below, above = kind_of["model.layers.1"], kind_of["model.layers.3"]
    assert kind_of["model.layers.0"] is below is not above
    assert (below.backward_flops, below.activation_bytes_per_row) == (0, 0)
    assert above.backward_flops > above.forward_flops_per_row and above.activation_bytes_per_row


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_are_counted(dtype: str) -> None:
    model = make_model("mixtral", None)
    layer = measure(model, dtype).kinds["layer"]
    experts = 2 * LENGTH * 2 * 3 * 16 * 24  # Two of three compute each token.
    assert experts < layer.forward_flops_per_row < 2 * experts
    assert layer.backward_flops_per_row is None


def test_experts_keep_twice_as_much_in_float32() -> None:
    kept = {
        dtype: measure(make_model("mixtral", None), dtype).kinds["layer"].activation_bytes_per_row
        for dtype in ("bfloat16", "float32")
    }
    assert 1.5 * kept["bfloat16"] < kept["float32"] <= 2 * kept["bfloat16"]


# -- layers ----------------------------------------------------------------------------------


@volume.parametrize(
    ("rank", "family"),
    [*product([None, 2], ["llama", "gpt2", "opt", "gpt_neox", "mistral", "mixtral"])],
    least=2,
)
def test_layers_are_called_as_in_training(family: str, rank: int | None) -> None:
    model = make_model(family, rank)
    workload = measure(model)
    for probe in find_probes(partial(copy.deepcopy, model), workload):
        layer = build_layer(partial(copy.deepcopy, model), probe.module, dtype=torch.float32, device=CPU)
        inputs, kwargs = make_inputs(probe, 3, num_tokens=hf_families.VOCABULARY, device=CPU)
        layer(*inputs, **kwargs)
        given = [leaf for leaf in leaves([probe.inputs, probe.kwargs]) if isinstance(leaf, ProbeTensor)]
        if probe.kind == "layer":
            assert probe.carries_grad and probe.follows_itself
            # Without a window attention is causal by itself, and no mask is made.
            masks = [tensor for tensor in given if tensor.shape[-2:] == (LENGTH, LENGTH)]
            assert bool(masks) == (family == "mistral")
    assert all(parameter.is_meta for parameter in model.parameters())


def time_layers(rank: int, size: int, lora_rank: int) -> dict[str, tuple[float, ...]]:
    measured = measured_model(make_model("gpt2", lora_rank))
    found = {}
    for probe in find_probes(measured.build, measured.workload):
        result = LayerBench(measured, probe, device=CPU, memory=HostMemory()).try_rows(2, repeats=1)
        found[probe.kind] = result.forward_s, result.backward_s
    return found


def test_a_frozen_embedding_has_no_backward(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(time_layers, 1, 2, init=False)
    assert all(forward_s > 0 for forward_s, _ in found.values())
    assert [kind for kind, (_, backward_s) in found.items() if not backward_s] == [
        "embedding",
        "embedding 2",
    ]


# -- memory ----------------------------------------------------------------------------------


def hold(rank: int, size: int, port: int, family: str, dtype: str, lora_rank: int | None) -> list[Any]:
    """With two ZeRO stages, what a step of two ranks holds and what the memory model expects, in bytes."""
    measured = measured_model(make_model(family, lora_rank), dtype)
    found = []
    with join(port) as processes:
        for zero in (1, 3):
            trials = StepTrials(measured, processes, HostMemory(), zero=zero)
            result = trials(2)
            assert trials.step is not None
            held = {purpose: trials.step.ledger.peak(purpose, "device") for purpose in LEDGER}
            trials.close()
            expected = WholeModelStep(
                workload=measured.workload,
                device="CPU",
                zero=zero,
                num_ranks=size if zero else 1,
                recompute="none",
                kept_bytes={},
            )
            walk = expected.walk(2)
            kept = 2 * sum(kind.activation_bytes_per_row for kind in measured.workload.kind_of.values())
            found.append((held, dict(walk.device), result.kept_bytes, kept))
    return found


@volume.parametrize(
    ("family", "dtype", "lora_rank"),
    [("llama, tied", "bfloat16", 2), ("llama", "float32", 2), ("gpt2", "bfloat16", None)],
)
def test_memory_is_as_expected(run_ranks: RunRanks, family: str, dtype: str, lora_rank: int | None) -> None:
    for own in run_ranks(hold, 2, free_port(), family, dtype, lora_rank, init=False):
        for held, expected, kept, expected_kept in own:
            for purpose in LEDGER:
                # FSDP2 pads rows of parameters, which a workload does not know.
                assert held[purpose] == pytest.approx(expected[purpose], rel=0.05), purpose
            assert kept == pytest.approx(expected_kept, rel=0.05)
