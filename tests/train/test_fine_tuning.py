"""Conversations train a Hugging Face model by a recipe; the data go on under another plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_families
import pytest
from conversations import save_tokenizer, turns, write_lines
from ranks import RunRanks
from trained import read_column, train

NAMES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
VOCABULARY = 260


def write_plan(path: Path, cut: int, rows: str) -> Path:
    groups = [f"[[groups]]\nranks = [{rank}]\nshares = [[{rank}, 4, {rows[rank]}]]" for rank in range(2)]
    cuts = [
        f"[[ministages]]\ngroup = {number}\nmodules = {json.dumps(own)}"
        for number, own in enumerate((NAMES[:cut], NAMES[cut:]))
    ]
    path.write_text("\n".join(["version = 1", "global_batch = 4", *groups, *cuts]))
    return path


def make_model(rank: int, world_size: int, folder: Path) -> None:
    changes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 64}
    model: Any = hf_families.make_model("llama", **changes)
    model.float().save_pretrained(folder)


def test_conversations_go_on_under_another_plan(run_ranks: RunRanks, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    run_ranks(make_model, 1, model)
    save_tokenizer(model)
    data = write_lines(
        tmp_path / "chats.jsonl", [turns("ab" * (i % 3), "ba" * (i % 5 + 1)) for i in range(60)]
    )
    common = [
        *("--model.path", str(model), "--training.dataset_path", str(data), "--training.seq_len", "64"),
        *("--training.steps", "3", "--lr_scheduler.warmup_steps", "1", "--optimizer.lr", "0.01"),
        *("--metrics.log_freq", "1", "--checkpoint.interval", "2"),
        *("--validation.enable", "--validation.dataset_path", str(data), "--validation.steps", "1"),
    ]
    runs = {
        "whole": ("--hetero.plan", str(write_plan(tmp_path / "a.toml", 2, "12"))),
        "later": (
            *("--hetero.plan", str(write_plan(tmp_path / "b.toml", 3, "31"))),
            *("--checkpoint.initial_load_path", str(tmp_path / "whole" / "checkpoint" / "step-00000002")),
            "--checkpoint.no-initial_load_model_only",
        ),
    }
    said = {}
    for name, arguments in runs.items():
        ends = train(run_ranks, "finetune_cpu.toml", *common, *arguments, folder=tmp_path / name, num_ranks=2)
        assert [end.code for end in ends] == [0, 0], ends[0].stderr
        said[name] = ends[0].stdout
    loss = "loss_metrics/global_avg_loss"
    whole, later = (read_column(tmp_path / name, loss) for name in runs)
    assert whole[2] < whole[0]
    assert later == pytest.approx(whole[2:], rel=1e-5)
    for name in runs:
        assert f"data: [training] dataset_path = {data}: 60 conversations, " in said[name]
        assert "[validation] dataset_path" in said[name]
    assert " data was " not in said["later"]
