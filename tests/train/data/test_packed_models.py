"""Packed documents train as each would in a row of its own, whatever the model and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import volume
from hf_families import FAMILIES, exact_norms, make_model, transformers
from hf_families import module_names as hf_names
from ranks import RunRanks
from tiny import adamw
from torch import Tensor, nn

from zorselike import ConfigError, HeteroPipeline, initialize
from zorselike.models import build_model, get_config, module_names
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy
from zorselike.train.data.example_rows import ExampleRows, write_rows
from zorselike.train.data.loader import StepDataset
from zorselike.train.data.packed_models import document_keywords
from zorselike.train.data.tokenizer import Encoded

pytestmark = pytest.mark.pooled

ROWS = 5
SEQ_LEN = 12
VOCABULARY = 19
NUM_STEPS = 3
SHAPE: dict[str, Any] = {"dim": 16, "num_heads": 4, "num_layers": 4, "vocab_size": VOCABULARY}
OURS = ("our llama", "our gpt")
MODELS = (*OURS, "llama", "qwen2", "gpt2")
"""Rotary and learned positions, tied heads, layers that see the newest tokens only."""


def make_rows(folder: Path) -> ExampleRows:
    """Rows of one to five documents, some padded."""
    numbers = np.random.default_rng(5)
    examples = []
    for length in (13, 3, 4, 2, 5, 9, 2, 2, 8, 3, 6, 7, 2, 4, 3, 12):
        is_answer = numbers.random(length) < 0.6
        is_answer[-1] = True
        examples.append(Encoded(numbers.integers(1, VOCABULARY, size=length), is_answer))
    write_rows(
        folder, examples, noun="test", dtype="uint8", seq_len=SEQ_LEN, packs=True, trains_on_input=False
    )
    return ExampleRows(folder, source="test")


def build(name: str) -> tuple[nn.Module, list[str]]:
    if name not in OURS:
        return make_model(name), list(hf_names(name))
    family = name.removeprefix("our ")
    flavor = "debug"
    with torch.device("meta"):
        model = build_model(family, flavor, **SHAPE).double()
    return initialize(model, seed=1), module_names(get_config(family, flavor, **SHAPE))


def make_plan(names: Sequence[str]) -> Plan:
    """Ranks that only feed, only compute, only compare; one without rows."""
    groups = (
        Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 5)), recompute="layer"),
        Group((1, 3), (Microbatch(1, 0, 1), Microbatch(1, 1, 5)), zero=2),
        Group((2,), (Microbatch(2, 0, 5),)),
    )
    first = names.index(next(name for name in names if name.endswith(".0")))
    cuts = (names[: first + 1], names[first + 1 : first + 3], names[first + 3 :])
    return Plan(ROWS, groups, tuple(Ministage(i, tuple(own)) for i, own in enumerate(cuts)))


def make_dataset(rows: ExampleRows, *wanted: Sequence[int], keywords: Sequence[str]) -> StepDataset:
    inputs, targets, computed = wanted
    return StepDataset(
        rows,
        global_batch=ROWS,
        seed=3,
        input_rows=inputs,
        target_rows=targets,
        keyword_rows=computed,
        keywords=keywords,
    )


def train_packed(
    rank: int, world_size: int, names: Sequence[str], rows: ExampleRows
) -> list[tuple[list[float], Any]]:
    outcomes = []
    for name in names:
        model, modules = build(name)
        keywords = document_keywords(model)
        with HeteroPipeline(model, make_plan(modules), optimizer=adamw) as pipe:
            dataset = make_dataset(rows, pipe.input_rows, pipe.target_rows, pipe.rows, keywords=keywords)
            losses = []
            for step in range(NUM_STEPS):
                inputs, targets, documents = dataset[step]
                losses.append(pipe.step(inputs, targets, **documents).loss)
            outcomes.append((losses, pipe.full_state_dict()))
    return outcomes


def train_apart(
    rank: int, world_size: int, names: Sequence[str], rows: ExampleRows
) -> list[tuple[list[float], Any]]:
    """One process, one forward a document, without any positions."""
    everything, outcomes = range(ROWS), []
    dataset = make_dataset(rows, everything, everything, everything, keywords=("position_ids",))
    for name in names:
        model, _ = build(name)
        optimizer, losses = adamw(list(model.parameters())), []
        for step in range(NUM_STEPS):
            inputs, targets, documents = dataset[step]
            loss_sum = torch.zeros((), dtype=torch.float64)
            for tokens, expected in split(inputs, targets, documents["position_ids"]):
                loss_sum = loss_sum + token_cross_entropy(logits_of(model, tokens), expected)
            loss = loss_sum / (targets != -100).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        outcomes.append((losses, {key: t.detach().clone() for key, t in model.state_dict().items()}))
    return outcomes


def split(inputs: Tensor, targets: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The documents of all rows, each as one row; without padding."""
    documents = []
    for row in range(len(inputs)):
        cuts = [*(positions[row] == 0).nonzero().flatten().tolist(), SEQ_LEN]
        for start, stop in pairwise(cuts):
            documents.append((inputs[row : row + 1, start:stop], targets[row : row + 1, start:stop]))
    return [each for each in documents if (each[1] != -100).any()]


@pytest.mark.nightly
def test_documents_train_as_if_alone(run_ranks: RunRanks, tmp_path: Path) -> None:
    names = volume.part(MODELS, least=2)
    rows = make_rows(tmp_path / "rows")
    assert ROWS < rows.num_rows < 16
    assert all(map(hf_names, set(names) - set(OURS)))  # Before ranks are forked.
    (expected,) = run_ranks(train_apart, 1, names, rows)
    found = run_ranks(train_packed, 4, names, rows)[0]
    for name, ours, theirs in zip(names, found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-12), name
        for key, tensor in theirs[1].items():
            assert (ours[1][key] - tensor).abs().max() <= 1e-10, f"{name} {key}"


def compare_logits(rank: int, world_size: int, rows: ExampleRows) -> dict[str, float]:
    """By family that may be packed, how far logits of packed documents are from those of each alone."""
    dataset = make_dataset(rows, range(ROWS), range(ROWS), range(ROWS), keywords=("position_ids",))
    inputs, _, documents = dataset[0]
    positions, found = documents["position_ids"], {}
    for name in FAMILIES:
        model = make_model(name)
        try:
            assert document_keywords(model) == ("position_ids",)
        except ConfigError:
            continue
        with exact_norms(name), torch.no_grad():
            packed = logits_of(model, inputs, position_ids=positions).flatten(0, 1)
            apart = [logits_of(model, tokens)[0] for tokens, _ in split(inputs, inputs, positions)]
        found[name] = float((packed - torch.cat(apart)).abs().max())
    return found


def test_families_keep_documents_apart_or_are_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    (found,) = run_ranks(compare_logits, 1, make_rows(tmp_path / "rows"))
    assert set(FAMILIES) - set(found) == {"opt"}
    # Gemma 2 takes its softmax in fp32, whatever it computes in.
    allowed = {name: 1e-6 if name == "gemma2" else 1e-12 for name in found}
    assert not {name: difference for name, difference in found.items() if difference > allowed[name]}


def logits_of(model: nn.Module, tokens: Tensor, **documents: Any) -> Tensor:
    if isinstance(model, transformers.PreTrainedModel):
        documents["use_cache"] = False
    output = model(tokens, **documents)
    logits: Tensor = getattr(output, "logits", output)
    return logits


REFUSED = {
    "takes no position_ids": {"model_type": "bloom", "hidden_size": 8, "n_layer": 1, "n_head": 2},
    "masks without regard to position_ids": FAMILIES["opt"],
    "carry a state": {
        "model_type": "lfm2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    },
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_would_mix_documents_is_refused(why: str) -> None:
    config = transformers.AutoConfig.for_model(**REFUSED[why])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"{why}.*; set packing = false"):
        document_keywords(model)


def test_a_model_with_adapters_is_known_by_its_own() -> None:
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert document_keywords(model) == ("position_ids",)


def test_documents_that_turn_each_others_positions_are_refused() -> None:
    """Phi 3 and Phi 4 mini rotate all rows that they compute at once by the longest document in them."""
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rotary |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0], "partial_rotary_factor": 1.0}
    config = transformers.AutoConfig.for_model(
        **{**FAMILIES["phi"], "model_type": "phi3"},
        rope_parameters=rotary,
        original_max_position_embeddings=8,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert document_keywords(model, 8) == ("position_ids",)
    with pytest.raises(ConfigError, match=r"\(longrope\) where a document is longer than 8 .* seq_len to 8"):
        document_keywords(model, 9)


def test_attention_that_knows_no_masks_is_refused() -> None:
    with torch.device("meta"):
        model: Any = make_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"attention by flash_attention_2, .*; set packing = false"):
        document_keywords(model)
