"""Questions to the planner about one or two machines with a few unlike cards, where memory is short."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from tools.bench.budgets import GIGABIT, Question
from zorselike.cli.assumed_profile import assume_profile
from zorselike.cli.model_choice import choose_dtype, parse_model
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.problem import PlanProblem


class Desk(NamedTuple):
    """One machine, its cards joined by the host's bus."""

    cards: tuple[str, ...]
    host_gb_per_s: float
    host_gib: int = 64


_DESKS = {
    "3090 + 3070": (Desk(("RTX3090", "RTX3070"), 12),),
    "3070 + 3060": (Desk(("RTX3070", "RTX3060"), 12),),
    "4060 + 3060": (Desk(("RTX4060", "RTX3060"), 8, 32),),
    "4090 + 3090": (Desk(("RTX4090", "RTX3090"), 24, 128),),
    "3090 + 2 x 3070": (Desk(("RTX3090", "RTX3070", "RTX3070"), 12),),
    "5090 + 4070 + 3060": (Desk(("RTX5090", "RTX4070", "RTX3060"), 24, 96),),
    "4090 + 3080 | 3090": (Desk(("RTX4090", "RTX3080"), 24), Desk(("RTX3090",), 12)),
    "4 x 3060 | 4090": (Desk(("RTX3060",) * 4, 6), Desk(("RTX4090",), 24)),
}
_ASKED = (
    ("3090 + 3070", "llama 1b", 2048, 32),
    ("3090 + 3070", "gpt 2.7b", 1024, 32),
    ("3070 + 3060", "gpt 2.7b", 1024, 16),
    ("4060 + 3060", "llama 1b", 2048, 16),
    ("4090 + 3090", "llama 3b", 4096, 16),
    ("4090 + 3090", "llama 8b", 2048, 32),
    ("3090 + 2 x 3070", "llama 3b", 2048, 32),
    ("5090 + 4070 + 3060", "llama 3b", 2048, 32),
    ("4090 + 3080 | 3090", "llama 3b", 2048, 64),
    ("4 x 3060 | 4090", "llama 3b", 2048, 64),
)
"""Machines, model, tokens of a row and rows of a step."""


def list_desk_questions() -> list[Question]:
    """Ten, of 2 to 5 cards."""
    return [
        Question(f"{desks}, {model}", partial(_make, desks, model, *batch)) for desks, model, *batch in _ASKED
    ]


def _make(desks: str, model: str, sequence_length: int, global_batch: int) -> PlanProblem:
    nodes = tuple(
        Node(
            name=f"desk-{number}",
            devices=desk.cards,
            fabric=Link(6e9, 15e-6) if len(desk.cards) > 1 else None,
            nic=Link(10 * GIGABIT),
            host_link=Link(desk.host_gb_per_s * 1e9),
            host_memory_bytes=desk.host_gib * 2**30,
        )
        for number, desk in enumerate(_DESKS[desks])
    )
    dtype = choose_dtype({card for node in nodes for card in node.devices})
    workload = parse_model(model).measure(sequence_length=sequence_length, dtype=dtype)
    return PlanProblem(
        workload=workload,
        cluster=Cluster(nodes=nodes),
        profile=assume_profile(workload),
        global_batch=global_batch,
    )
