"""What is run on pretended GPUs: small training runs through every way that differs on a card.

Imported in started ranks only (rank.py), but for `SCENES`, which `run.py` lists: torch is imported late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan

if TYPE_CHECKING:
    from tiny import Case
    from torch import Tensor

LAYERS = 4
NAMES = ("tok_embeddings", *(f"layers.{i}" for i in range(LAYERS)), "norm", "output")
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:5], NAMES[5:])
SAVED = "saved"
"""In the folder of a scene, its checkpoints."""
ROWS = ((0, 2), (2, 3), (3, 6))


@dataclass(frozen=True)
class Scene:
    """`play(ranks, folder)` runs it on every rank; the folder is the same for all of them."""

    explained: str
    play: Callable[[int, Path], None]
    least: int = 1
    """Ranks."""


def plan_one_group(ranks: int, **settings: Any) -> Plan:
    """All ranks, the last one has one row of every six."""
    owners = (0, ranks - 1, 0)
    rows = tuple(Microbatch(owner, *span) for owner, span in zip(owners, ROWS, strict=True))
    ministages = tuple(Ministage(0, cut) for cut in CUTS)
    return Plan(6, (Group(tuple(range(ranks)), rows, **settings),), ministages)


def plan_two_groups(ranks: int, **settings: Any) -> Plan:
    """The first rank alone, and all others."""
    others = range(1, ranks)
    cuts = [i * 6 // len(others) for i in range(ranks)]
    rows = tuple(Microbatch(rank, cuts[i], cuts[i + 1]) for i, rank in enumerate(others))
    first = Group((0,), (Microbatch(0, 0, 4), Microbatch(0, 4, 6)), **settings)
    ministages = tuple(Ministage(i % 2, cut) for i, cut in enumerate(CUTS))
    return Plan(6, (first, Group(tuple(others), rows, **settings)), ministages)


def plan_line(ranks: int) -> Plan:
    """A group of one ministage for each rank; at most as many ranks as modules."""
    groups = tuple(Group((rank,), tuple(Microbatch(rank, *span) for span in ROWS)) for rank in range(ranks))
    cuts = [i * len(NAMES) // ranks for i in range(ranks + 1)]
    return Plan(6, groups, tuple(Ministage(i, NAMES[cuts[i] : cuts[i + 1]]) for i in range(ranks)))


def note(text: str) -> None:
    """Into the log of this rank; between `built` and `ended` no communicator may be made (order.py)."""
    ctypes.CDLL(None).pretended_note(text.encode())


def train(case: Case, folder: Path | None, *, on_card: bool = False, **settings: Any) -> None:
    """Three steps with evaluations, of which those after the first must not wait for the card, unless it has
    the batches (`on_card`), whose targets are counted there; then what waits anyway: reports, and with a
    folder saving, loading and going on."""
    import torch

    from zorselike import HeteroPipeline

    device = torch.device("cuda", torch.cuda.current_device())
    pipe = HeteroPipeline(case.model().float(), case.plan, max_norm=case.max_norm, device=device, **settings)
    note("built")
    results = []
    for step in range(3):
        inputs, targets = case.batch(step)
        if on_card:
            inputs, targets = inputs.to(device), targets.to(device)
        torch.cuda.set_sync_debug_mode("warn" if step and not on_card else "default")
        results += [pipe.step_global(inputs, targets), pipe.evaluate_global(inputs, targets)]
        torch.cuda.set_sync_debug_mode("default")
    note("ended")
    assert all(result.loss is not None for result in results)
    str(pipe.memory_report())
    if folder is not None:
        saving = pipe.save(folder, wait=False)
        pipe.step_global(*case.batch(3))
        assert saving is not None
        pipe.load(saving.wait())
        pipe.step_global(*case.batch(4))
    with pipe.loaded():
        pass
    pipe.full_state_dict()
    pipe.step_global(*case.batch(5))
    pipe.close()


def _one_group(bf16: bool = False, **settings: Any) -> Callable[[int, Path], None]:
    return lambda ranks, folder: _train_tiny(plan_one_group(ranks, **settings), folder, bf16=bf16)


def _two_groups(bf16: bool = False, **settings: Any) -> Callable[[int, Path], None]:
    return lambda ranks, folder: _train_tiny(plan_two_groups(ranks, **settings), folder, bf16=bf16, tied=True)


def _line(ranks: int, folder: Path) -> None:
    _train_tiny(plan_line(ranks), folder)


def _train_tiny(plan: Plan, folder: Path, *, bf16: bool = False, tied: bool = False) -> None:
    import torch
    from tiny import Case

    case = Case(plan, LAYERS, max_norm=0.1, tied=tied, counts=not tied)
    train(case, folder, param_dtype=torch.bfloat16 if bf16 else None)


def _replica(ranks: int, folder: Path) -> None:
    from replica_cases import ReplicaCase

    names = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output")
    group = Group((tuple(range(ranks)),), (Microbatch(0, 0, 2), Microbatch(0, 2, 4)))
    cuts = (names[:2], names[2:3], names[3:4], names[4:])
    plan = Plan(4, (group,), tuple(Ministage(0, cut) for cut in cuts), sequence_length=7)
    train(ReplicaCase(plan, 3, max_norm=0.1), folder)


def _loss(ranks: int, folder: Path) -> None:
    """Batches are on the card, and the loss writes into the outputs that it gets."""
    from tiny import Case
    from torch.nn.functional import cross_entropy

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        outputs[..., 10:] = -1.0
        flat = outputs.flatten(0, 1).float()
        return cross_entropy(flat, targets.flatten(), ignore_index=-100, reduction="sum")

    case = Case(plan_one_group(ranks), LAYERS)
    train(case, None, on_card=True, loss_fn=loss, count_fn=lambda targets: (targets != -100).sum())


def _dynamic(ranks: int, folder: Path) -> None:
    """Sequences of four lengths in a row."""
    import torch
    from tiny import Case

    from zorselike import HeteroPipeline

    case = Case(plan_two_groups(ranks) if ranks > 1 else plan_one_group(1), LAYERS)
    device = torch.device("cuda", torch.cuda.current_device())
    pipe = HeteroPipeline(case.model().float(), case.plan, dynamic_shapes=True, device=device)
    for step, length in enumerate((4, 3, 4, 6)):
        pipe.step_global(*(t.repeat(1, 2)[:, :length].contiguous() for t in case.batch(step)))
    pipe.close()


SCENES = {
    "zero0": Scene("one group, ZeRO 0", _one_group(zero=0)),
    "zero1": Scene("one group, ZeRO 1", _one_group(zero=1)),
    "zero2": Scene("one group, ZeRO 2", _one_group(zero=2)),
    "zero3": Scene("one group, ZeRO 3", _one_group(zero=3)),
    "offload": Scene("one group, everything offloaded, bf16", _one_group(True, offload=OFFLOAD_KINDS)),
    "offload-params": Scene(
        "one group, ZeRO 3, parameters offloaded, layers computed again",
        _one_group(zero=3, offload=("params",), recompute="layer"),
    ),
    "loss": Scene("batches on the card, a loss that writes into outputs", _loss),
    "dynamic": Scene("dynamic shapes", _dynamic),
    "two-groups": Scene("two groups in turns, tied weights", _two_groups(), 2),
    "two-groups-offload": Scene(
        "two groups in turns, everything offloaded, bf16", _two_groups(True, offload=OFFLOAD_KINDS), 2
    ),
    "line": Scene("a group of one ministage for each rank", _line, 2),
    "replica": Scene("one replica of all ranks", _replica, 2),
}
