"""A folder that `transformers` wrote becomes a pipeline; every rank reads its own part."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
import volume
from hf_families import FAMILIES, documents, exact_norms, make_model, names_of, tokens
from ranks import RunRanks
from tiny import adamw
from torch import Tensor

import zorselike.hf
from zorselike import list_modules
from zorselike.checkpoint.export import export
from zorselike.checkpoint.read import read_manifest
from zorselike.errors import CheckpointError
from zorselike.hf.folder import count_positions
from zorselike.hf.lora import Lora, base_name, is_adapter
from zorselike.hf.names import make_namer
from zorselike.plan import ConfigError
from zorselike.plan.holdings import VALUE, Box
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.pipeline import HeteroPipeline

pytestmark = pytest.mark.pooled

ROWS = 4
transformers = hf_families.transformers


def dtype_of(family: str) -> torch.dtype:
    """The CPU has no grouped matrix product of fp64, by which experts compute."""
    return torch.float32 if family == "mixtral" else torch.float64


def make_plan(names: Sequence[str]) -> Plan:
    """Two ranks that share two ministages, and one that has another between them, mostly on the host."""
    microbatches = tuple(Microbatch(*m) for m in ((0, 0, 1), (1, 1, 4)))
    groups = (
        Group((0, 1), microbatches, zero=2),
        Group((2,), (Microbatch(2, 0, 4),), offload=("params", "optimizer")),
    )
    cuts = (names[:5], names[5:-2], names[-2:])
    return Plan(ROWS, groups, tuple(Ministage(i % 2, tuple(own)) for i, own in enumerate(cuts)))


def plan_of(folder: Path) -> Plan:
    """Asked before ranks are forked, which then find shapes and rules of names warm."""
    return make_plan(names_of(folder))


def save(rank: int, world_size: int, family: str, folder: Path, shard_size: str) -> dict[str, Tensor]:
    model = make_model(family)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def load(rank: int, world_size: int, family: str, folder: Path) -> tuple[Any, int, float]:
    """The state, how many bytes this rank's part has, and a loss."""
    plan = plan_of(folder)
    read: list[int] = []
    original = HeteroPipeline.load_pretrained
    with pytest.MonkeyPatch.context() as patch, exact_norms(family):
        patch.setattr(
            HeteroPipeline,
            "load_pretrained",
            lambda *args, **kwargs: read.append(original(*args, **kwargs)),
        )
        with zorselike.hf.pipeline(folder, plan, dtype=dtype_of(family), optimizer=adamw) as pipe:
            loss = pipe.evaluate_global(tokens(ROWS), tokens(ROWS), position_ids=documents(ROWS)).loss
            assert pipe.step_global(tokens(ROWS), tokens(ROWS)).loss > 0
            with zorselike.hf.pipeline(folder, plan, dtype=dtype_of(family)) as again:
                return again.full_state_dict(), read[0], loss


def load_state(rank: int, world_size: int, family: str, folder: Path) -> dict[str, Tensor]:
    with zorselike.hf.pipeline(folder, plan_of(folder), dtype=dtype_of(family)) as pipe:
        return pipe.full_state_dict()


def loss_alone(rank: int, world_size: int, family: str, folder: Path) -> float:
    with exact_norms(family):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(family))
        logits = model(tokens(ROWS), position_ids=documents(ROWS), use_cache=False).logits
        return float(token_cross_entropy(logits, tokens(ROWS))) / tokens(ROWS).numel()


@volume.parametrize("family", [*FAMILIES], least=1)
def test_every_rank_reads_its_own_part(family: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    (saved,) = run_ranks(save, 1, family, tmp_path, "20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert plan_of(tmp_path).num_ranks == 3
    found = run_ranks(load, 3, family, tmp_path)
    state, _, loss = found[0]
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], tensor.to(dtype_of(family))) for name, tensor in saved.items())
    (expected,) = run_ranks(loss_alone, 1, family, tmp_path)
    assert loss == pytest.approx(expected, rel=1e-12 if dtype_of(family) == torch.float64 else 1e-6)
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in saved.values()}
    whole = sum(distinct.values())
    is_tied = len(distinct) < len(saved)
    assert sum(read for _, read, _ in found) == whole + (saved["lm_head.weight"].nbytes if is_tied else 0)
    assert max(read for _, read, _ in found) < 0.6 * whole


def load_in_replicas(rank: int, world_size: int, folder: Path, lora: Lora | None) -> dict[str, Tensor]:
    """The state without adapters, under the names that it has without them."""
    names = names_of(folder, lora)
    group = Group(((0, 1), 2), (Microbatch(0, 0, 1), Microbatch(2, 1, 4)), zero=2)
    ministages = (Ministage(0, names[:3]), Ministage(0, names[3:]))
    plan = Plan(ROWS, (group,), ministages, sequence_length=hf_families.LENGTH)
    with zorselike.hf.pipeline(folder, plan, dtype=torch.float64, lora=lora) as pipe:
        state = pipe.full_state_dict()
    return {base_name(name): tensor for name, tensor in state.items() if not is_adapter(name)}


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_ranks_of_a_replica_read_their_pieces(lora: Lora | None, tmp_path: Path, run_ranks: RunRanks) -> None:
    (saved,) = run_ranks(save, 1, "qwen2", tmp_path, "20KB")
    assert names_of(tmp_path, lora)
    state = run_ranks(load_in_replicas, 3, tmp_path, lora)[0]
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def test_one_file_without_an_index_and_names_without_the_prefix(tmp_path: Path, run_ranks: RunRanks) -> None:
    """GPT-2's own checkpoint has `wte.weight` for `transformer.wte.weight`, and masks that no model has."""
    from safetensors.torch import load_file, save_file

    (saved,) = run_ranks(save, 1, "gpt2", tmp_path, "1GB")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, path)
    assert plan_of(tmp_path).num_ranks == 3
    state = run_ranks(load_state, 3, "gpt2", tmp_path)[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def refuse(rank: int, world_size: int, folder: Path) -> str:
    plan = Plan(2, (Group((0,), (Microbatch(0, 0, 2),)),), (Ministage(0, names_of(folder)),))
    with pytest.raises(CheckpointError) as caught:
        zorselike.hf.pipeline(folder, plan)
    return str(caught.value)


def test_other_weights_are_refused(tmp_path: Path, run_ranks: RunRanks) -> None:
    run_ranks(save, 1, "llama", tmp_path, "20KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first = min(whole["weight_map"].values())
    kept = {name: file for name, file in whole["weight_map"].items() if file != first}
    index.write_text(json.dumps({**whole, "weight_map": kept}))
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert "is of another model: it holds no " in said
    index.write_text(json.dumps({**whole, "weight_map": {"a": "gone.safetensors"}}))
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert "gone.safetensors: cannot be read: No such file" in said
    index.write_text("[]")
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert "model.safetensors.index.json: is no index" in said


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, run_ranks: RunRanks, value: float) -> None:
    from safetensors.torch import load_file, save_file

    run_ranks(save, 1, "llama", tmp_path, "1GB")
    (path,) = tmp_path.glob("*.safetensors")
    tensors, name = load_file(path), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 1] = value
    save_file(tensors, path)
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert said.startswith(f"{path}: {name} holds NaN or infinite values")


def train_with_masks(rank: int, world_size: int, folder: Path) -> tuple[list[float], Tensor | None]:
    plan = plan_of(folder)
    with zorselike.hf.pipeline(folder, plan, dtype=torch.float64, optimizer=adamw, max_norm=0.5) as pipe:
        results = [pipe.step_global(tokens(ROWS), tokens(ROWS)) for _ in range(3)]
        assert all(0 < result.grad_norm < float("inf") for result in results)
        return [result.loss for result in results], pipe.full_state_dict().get("lm_head.bias")


def train_with_masks_alone(rank: int, world_size: int, folder: Path) -> tuple[list[float], Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer, losses = adamw(model.parameters()), []
    for _ in range(3):
        logits = model(tokens(ROWS), use_cache=False).logits
        loss = token_cross_entropy(logits, tokens(ROWS)) / tokens(ROWS).numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model.lm_head.bias.detach()


def test_outputs_of_a_padded_vocabulary_that_a_bias_masks_are_trained(
    tmp_path: Path, run_ranks: RunRanks
) -> None:
    from safetensors.torch import load_file, save_file

    run_ranks(save, 1, "phi", tmp_path, "1GB")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    unused = torch.ones_like(tensors["lm_head.bias"], dtype=torch.bool)
    unused[tokens(ROWS).flatten()] = False
    assert unused.any()
    tensors["lm_head.bias"][unused] = -float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    assert plan_of(tmp_path).num_ranks == 3
    losses, bias = run_ranks(train_with_masks, 3, tmp_path)[0]
    ((expected, bias_alone),) = run_ranks(train_with_masks_alone, 1, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(bias, bias_alone, rtol=1e-9, atol=1e-12)


def test_an_index_that_an_older_save_left_is_passed_over(tmp_path: Path, run_ranks: RunRanks) -> None:
    """As `transformers` does, which deletes the older files and not their index."""
    run_ranks(save, 1, "llama", tmp_path, "20KB")
    (saved,) = run_ranks(save, 1, "llama", tmp_path, "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert plan_of(tmp_path).num_ranks == 3
    state = run_ranks(load_state, 3, "llama", tmp_path)[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def test_buffers_that_older_files_have_are_passed_over(tmp_path: Path, run_ranks: RunRanks) -> None:
    from safetensors.torch import load_file, save_file

    (saved,) = run_ranks(save, 1, "llama", tmp_path, "1GB")
    (path,) = tmp_path.glob("*.safetensors")
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(5)}
    save_file({**load_file(path), **old}, path)
    assert plan_of(tmp_path).num_ranks == 3
    state = run_ranks(load_state, 3, "llama", tmp_path)[0]
    assert state.keys() == saved.keys()


def test_a_tied_weight_under_both_names_is_one(tmp_path: Path, run_ranks: RunRanks) -> None:
    """`transformers` does not tie what differs, and trains two weights."""
    from safetensors.torch import load_file, save_file

    (saved,) = run_ranks(save, 1, "llama, tied", tmp_path, "1GB")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, path)
    assert plan_of(tmp_path).num_ranks == 3
    state = run_ranks(load_state, 3, "llama, tied", tmp_path)[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, path)
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert "model.embed_tokens.weight and lm_head.weight differ there, and are one weight here" in said
    save_file({**tensors, "lm_head.weight": torch.ones(19, 17)}, path)
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert "lm_head.weight is (19, 17) there" in said


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_attention_heads": 3}, r"Error: .*: ValueError: The hidden size \(16\) is not a multiple"),
        ({"vocab_size": "19"}, "expected int, got str"),
        ({"dtype": "nothing"}, "has no attribute 'nothing'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}, "contains custom code"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(
    settings: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"hidden_size": 16, "num_attention_heads": 4, "model_type": "llama", **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked"))
    with pytest.raises(ConfigError, match=f"transformers builds no causal LM of .*{why}"):
        zorselike.hf.build_on_meta(tmp_path)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"model_type": "llama", "vocab_size": -5}, "vocab_size is -5"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer is 0"),
    ],
)
def test_sizes_of_no_model_are_refused(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"^hf: .*/config\.json: {why}; it must be at least 1"):
        zorselike.hf.build_on_meta(tmp_path)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """As a causal LM it would see the tokens that it is to predict."""
    config = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r'bert is an encoder, .* write "is_decoder": true there'):
        zorselike.hf.build_on_meta(tmp_path)
    path.write_text(json.dumps({**config, "is_decoder": True}))
    zorselike.hf.build_on_meta(tmp_path)
    path.write_text(json.dumps({**config, "model_type": "gpt_neox", "intermediate_size": 32}))
    zorselike.hf.build_on_meta(tmp_path)
    xlm = {"model_type": "xlm", "n_layers": 1, "emb_dim": 16, "n_heads": 2, "vocab_size": 32}
    path.write_text(json.dumps({**xlm, "causal": False}))
    with pytest.raises(ConfigError, match=r'xlm is an encoder, .* write "causal": true there'):
        zorselike.hf.build_on_meta(tmp_path)
    path.write_text(json.dumps({**xlm, "causal": True}))
    zorselike.hf.build_on_meta(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_decoder_is_none_whatever_transformers_4_wrote_of_all_models(tmp_path: Path, kind: str) -> None:
    """It gave every configuration both keys, and wrote them where it wrote one whole."""
    config = {"model_type": kind, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    config |= {"intermediate_size": 32, "is_decoder": False, "add_cross_attention": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    zorselike.hf.build_on_meta(tmp_path)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"weights are quantized \(gptq\); take the model in bfloat16"):
        zorselike.hf.build_on_meta(tmp_path)


def test_a_model_for_images_too_is_cut_nowhere_and_shows_the_way_to_its_text_model(tmp_path: Path) -> None:
    text = {**FAMILIES["gemma3"], "num_hidden_layers": 1}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 14})
    config.save_pretrained(tmp_path)
    model: Any = zorselike.hf.build_on_meta(tmp_path)
    with pytest.raises(ConfigError, match="has more parts than that for text") as caught:
        list_modules(model)
    told = str(caught.value).partition("make a folder of it: ")[2].split("; ")
    names = {"model": model, "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    exec("; ".join(told[1:4]), names)
    config = names["text"].config
    assert {*names["text"].model.parameters()} == {*model.get_decoder().parameters()}
    config.save_pretrained(tmp_path)
    assert list_modules(zorselike.hf.build_on_meta(tmp_path))[-1] == "lm_head"


def test_a_folder_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; give a folder that save_pretrained wrote"):
        zorselike.hf.build_on_meta(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match="transformers builds no causal LM of"):
        zorselike.hf.build_on_meta(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'zorselike\[hf\]'"):
        zorselike.hf.build_on_meta(tmp_path)


def test_experts_must_all_be_there(tmp_path: Path, run_ranks: RunRanks) -> None:
    from safetensors.torch import load_file, save_file

    run_ranks(save, 1, "mixtral", tmp_path, "1GB")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    (lost,) = [name for name in tensors if name.endswith("layers.1.block_sparse_moe.experts.2.w3.weight")]
    save_file({**tensors, lost.replace("experts.2", "experts.3"): tensors[lost].clone()}, path)
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert "layers.1.block_sparse_moe.experts.3.w3.weight is (" in said
    del tensors[lost]
    save_file(tensors, path)
    (said,) = run_ranks(refuse, 1, tmp_path)
    assert said.endswith("it holds a part of model.layers.1.mlp.experts.gate_up_proj alone")


def test_patterns_of_experts_may_have_escaped_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Kimi Linear."""
    loading = importlib.import_module("transformers.core_model_loading")
    rule = loading.WeightConverter(
        [r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
        r"\.experts.gate_up_proj",
        [loading.MergeModulelist(dim=0), loading.Concatenate(dim=1)],
    )
    mapping = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda model: [rule])
    with torch.device("meta"):
        name_of = make_namer(make_model("mixtral"))
    name = "model.layers.1.mlp.experts"
    expected = Box(f"{name}.gate_up_proj", VALUE, (2, 24, 0), (3, 48, 16))
    assert name_of(f"{name}.2.w3.weight") == expected


def hand_on(rank: int, world_size: int, folder: Path) -> None:
    plan = plan_of(folder)
    with zorselike.hf.pipeline(folder, plan) as pipe:
        path = pipe.save(folder / "run", model_only=True).wait()  # type: ignore[union-attr]
        if rank == 0:
            parts = zorselike.hf.find_parts(read_manifest(path), folder)
            export(path, folder / "out", like=folder, parts=parts)


@volume.parametrize("family", [*FAMILIES], least=1)
def test_weights_go_out_under_the_names_they_came_in(
    family: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    """Mixtral's experts one by one; GPT-2 as it was published, without the prefix."""
    from safetensors.torch import load_file, save_file

    run_ranks(save, 1, family, tmp_path, "1GB")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = {name.removeprefix("transformer."): t.float() for name, t in load_file(path).items()}
    save_file(tensors, path)
    assert plan_of(tmp_path).num_ranks == 3
    run_ranks(hand_on, 3, tmp_path)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    before, after = (run_ranks(loss_alone, 1, family, folder)[0] for folder in (tmp_path, tmp_path / "out"))
    assert before == after


@pytest.mark.parametrize(
    ("config", "most"), [("GPT2Config", 1024), ("BloomConfig", 2**31), ("XLNetConfig", 2**31)]
)
def test_positions_of_a_model(config: str, most: int) -> None:
    transformers = pytest.importorskip("transformers")
    assert count_positions(getattr(transformers, config)()) == most
