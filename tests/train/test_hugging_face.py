"""A Hugging Face folder is trained by a recipe, under one plan and then another, and handed on as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
from ranks import RunRanks
from safetensors.torch import load_file
from trained import read_column, train

from zorselike.checkpoint.layout import model_folder, step_folder
from zorselike.cli import main as cli

LOSS = "loss_metrics/global_avg_loss"
CUTS = ((4, 7), (1, 7))
"""Where each plan's first ministage ends, and its last."""
NAMES = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head")
transformers = hf_families.transformers
peft = pytest.importorskip("peft")  # Imported once, and not by each rank.


def write_plan(path: Path, first: int, last: int) -> None:
    lines = ["version = 1", "global_batch = 4"]
    lines += [f"[[groups]]\nranks = [{rank}]\nshares = [[{rank}, 4, {rank + 1}]]" for rank in range(2)]
    for number, own in enumerate((NAMES[:first], NAMES[first:last])):
        lines.append(f"[[ministages]]\ngroup = {number}\nmodules = {json.dumps(own)}")
    path.write_text("\n".join(lines) + "\n")


def make_folder(rank: int, size: int, folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="10KB")


def loss_alone(rank: int, size: int, folder: Path) -> tuple[float, dict[str, Any]]:
    """Of a model that `from_pretrained` loads, over fixed tokens; and what it says of the loading."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokens = torch.arange(40)[None]
    return float(model(tokens, labels=tokens).loss), {key: list(value) for key, value in info.items()}


def test_a_folder_goes_in_and_a_folder_comes_out(run_ranks: RunRanks, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    run_ranks(make_folder, 1, model)
    losses, text = {}, tmp_path / "text.txt"
    text.write_text("the card one has and the card one had " * 99)
    for number, (cut, steps) in enumerate(((0, 3), (0, 2), (1, 3))):
        plan = tmp_path / f"{number}.plan.toml"
        write_plan(plan, *CUTS[cut])
        own = tmp_path / str(number)
        ends = train(
            run_ranks,
            "finetune_cpu.toml",
            *("--model.path", str(model), "--hetero.plan", str(plan), "--training.steps", str(steps)),
            *("--training.dataset_path", str(text), "--training.seq_len", "32"),
            *(
                "--lr_scheduler.total_steps",
                "4",
                "--lr_scheduler.warmup_steps",
                "1",
                "--metrics.log_freq",
                "1",
            ),
            *("--checkpoint.folder", "checkpoints" if number == 0 else "../checkpoints"),
            *(("--checkpoint.no-last_save_model_only",) if number == 1 else ()),
            folder=own,
            num_ranks=2,
        )
        assert [end.code for end in ends] == [0, 0], ends[0].stderr
        assert (f"begins with the weights of {model}" in ends[0].stdout) == (number < 2)
        losses[number] = read_column(own, LOSS)
    assert losses[1] == losses[0][:2]
    assert losses[2] == pytest.approx(losses[0][2:], rel=1e-5)
    whole, resumed = (tmp_path / name / model_folder(3) for name in ("0/checkpoints", "checkpoints"))
    ((loss, info),) = run_ranks(loss_alone, 1, resumed)
    assert not any(info.values())
    assert loss == pytest.approx(run_ranks(loss_alone, 1, whole)[0][0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert "lm_head.weight" not in load_file(resumed / "model.safetensors")
    assert json.loads((resumed / "config.json").read_text())["dtype"] == "float32"


def test_what_is_wrong_is_said_before_work_starts(run_ranks: RunRanks, tmp_path: Path) -> None:
    for arguments, why in (
        (("--model.path", str(tmp_path)), "has no config.json"),
        (("--model.name", "llama"), 'say name = "hf" too'),
        (("--model.path", ""), '[model] name = "hf" needs the folder'),
    ):
        ends = train(run_ranks, "finetune_cpu.toml", *arguments, folder=tmp_path / "out", num_ranks=1)
        assert ends[0].code == 2 and why in ends[0].stderr


# -- adapters ----------------------------------------------------------------------------------


def train_adapters(
    run_ranks: RunRanks, model: Path, folder: Path, cut: tuple[int, int], *arguments: str
) -> str:
    """What rank 0 printed."""
    folder.mkdir(exist_ok=True)
    write_plan(folder / "plan.toml", *cut)
    (folder / "text.txt").write_text("the card one has and the card one had " * 99)
    ends = train(
        run_ranks,
        "finetune_cpu.toml",
        *("--model.path", str(model), "--hetero.plan", str(folder / "plan.toml")),
        *("--training.dataset_path", str(folder / "text.txt"), "--training.seq_len", "32"),
        *("--lora.enable", "--lora.rank", "4", "--optimizer.lr", "0.01"),
        *("--lr_scheduler.total_steps", "4", "--lr_scheduler.warmup_steps", "1", "--metrics.log_freq", "1"),
        *("--checkpoint.folder", "../checkpoints", *arguments),
        folder=folder / "out",
        num_ranks=2,
    )
    assert [end.code for end in ends] == [0, 0], ends[0].stderr
    return ends[0].stdout


def load_adapters(rank: int, size: int, model: Path, adapters: Path | None) -> dict[str, torch.Tensor]:
    """The weights of a folder, into which `peft` has merged adapters."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    if adapters is not None:
        loaded = peft.PeftModel.from_pretrained(loaded, adapters).merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in loaded.state_dict().items()}


def test_adapters_are_trained_and_handed_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    model, whole, parts = (tmp_path / name for name in ("tiny", "whole", "parts"))
    run_ranks(make_folder, 1, model)
    said = train_adapters(run_ranks, model, whole, CUTS[0], "--training.steps", "2")
    assert "16,912 parameters, 3,968 of them trained (23.46%)" in said
    assert (whole / "checkpoints" / step_folder(2)).is_dir()
    adapters = whole / "checkpoints" / model_folder(2)
    assert sorted(p.name for p in adapters.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]

    one_step = ("--training.steps", "1", "--checkpoint.no-last_save_model_only")
    train_adapters(run_ranks, model, parts, CUTS[0], *one_step)
    said = train_adapters(run_ranks, model, parts, CUTS[1], "--training.steps", "2", "--lora.save_merged")
    assert f"begins with the weights of {model}" in said and "goes on from" in said
    checkpoints = parts / "checkpoints"
    (merged,) = run_ranks(load_adapters, 1, checkpoints / model_folder(2), None)
    (expected,) = run_ranks(load_adapters, 1, model, adapters)
    (begun,) = run_ranks(load_adapters, 1, model, None)
    for name, tensor in expected.items():
        assert torch.allclose(merged[name], tensor, rtol=1e-4, atol=1e-6)
        assert torch.equal(tensor, begun[name]) is ("_proj" not in name)

    # They may be in the folder of their model.
    shutil.copy(next(model.glob("*.safetensors")), adapters / "model.safetensors")
    begins = ("--lora.initial_load_path", str(adapters), "--training.steps", "1", "--optimizer.lr", "0")
    said = train_adapters(run_ranks, model, tmp_path / "next", CUTS[1], *begins)
    assert f"begins with the adapters of {adapters}" in said
    weights = (
        folder / "adapter_model.safetensors"
        for folder in (adapters, tmp_path / "next/checkpoints" / model_folder(1))
    )
    assert len({path.read_bytes() for path in weights}) == 1

    for options, name in (((), "adapters"), (("--merge",), "merged")):
        target = tmp_path / name
        arguments = ["checkpoint", "export", str(checkpoints), str(target), *options]
        assert cli([*arguments, "--max-shard-size", "1MB"]) == 2  # Which it would not heed.
        assert cli(arguments) == 0
    assert len(list((tmp_path / "merged").iterdir())) == len(list(model.iterdir()))
    for path in (checkpoints / model_folder(2)).iterdir():
        assert (tmp_path / "merged" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("--lora.rank", "4"), "there are no adapters without enable = true"),
        (("--lora.enable", "--lora.target_modules", "q_prj"), "'q_prj'"),
        (("--lora.enable", "--model.name", "llama", "--model.path", ""), 'say name = "hf"'),
        (("--model.path", "{adapters}"), "holds adapters of peft and no model"),
        (("--lora.enable", "--lora.initial_load_path", "{adapters}"), "have rank 4 and alpha 8, and these"),
        (("--lora.enable", "--model.path", "{bare}"), "holds no weights, beside which adapters train"),
        (("--lora.enable", "--model.path", "{bare}/gone"), "gone has no config.json"),
    ],
)
def test_what_is_wrong_with_adapters_is_said(
    arguments: tuple[str, ...], why: str, run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(make_folder, 1, tmp_path / "tiny")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((tmp_path / "tiny" / "config.json").read_bytes())
    named = (argument.format(adapters=adapters, bare=bare) for argument in arguments)
    given = (*("--model.path", str(tmp_path / "tiny")), *named)
    ends = train(run_ranks, "finetune_cpu.toml", *given, folder=tmp_path / "out", num_ranks=1)
    assert ends[0].code == 2 and why in ends[0].stderr
