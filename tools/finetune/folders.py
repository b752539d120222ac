"""Hugging Face folders to train, written by `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

HEAD_DIM = 64
SHARD = "500MB"


@dataclass(frozen=True)
class Shape:
    """A Llama with random weights."""

    hidden: int
    num_layers: int
    vocab_size: int = 32_000

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            intermediate_size=11 * self.hidden // 4,
            num_hidden_layers=self.num_layers,
            num_attention_heads=max(1, self.hidden // HEAD_DIM),
        )

    @property
    def modules(self) -> list[str]:
        layers = [f"model.layers.{i}" for i in range(self.num_layers)]
        return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def write_folder(rank: int, shape: Shape, folder: Path) -> int:
    """On a rank of its own, since its parent must not compute; returns the bytes of the weights."""
    torch.set_default_dtype(torch.float32)
    model = LlamaForCausalLM(shape.config)
    model.save_pretrained(folder, max_shard_size=SHARD)
    return sum(parameter.nbytes for parameter in model.parameters())


def uneven_plan(shape: Shape) -> Plan:
    """Two ranks in one group of two ministages, a third in a group with one between them."""
    names = shape.modules
    count = len(names)
    cuts = [0, count // 3, count // 3 + count // 4, count]
    groups = (Group((0, 1), (Microbatch(0, 0, 1), Microbatch(1, 1, 2))), Group((2,), (Microbatch(2, 0, 2),)))
    ministages = tuple(
        Ministage(group, tuple(names[cuts[i] : cuts[i + 1]])) for i, group in enumerate((0, 1, 0))
    )
    return Plan(2, groups, ministages)
