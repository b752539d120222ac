"""The same LoRA job on two unequal cards: by a plan of ours, and as people do it today."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import get_balanced_memory, infer_auto_device_map
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zorselike import HeteroPipeline, Plan
from zorselike.cli import main as cli
from zorselike.hf import Lora, build_on_meta, load_weights

from ..bench.forked import RankTimes, Timing, run_forked, time_steps
from .cards import RANK, Card, Pair, Seconds, list_seconds
from .folders import Shape, write_folder

OURS, SPLIT, ONE_CARD, EVEN = (
    "zorselike",
    "split, one card at a time",
    "the faster card alone",
    "even data parallel",
)
SMALL_HIDDEN, SMALL_VOCABULARY, TOKENS = 64, 256, 32
NUM_STEPS = 2
_WEIGHT_BYTES = 2
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Contest:
    """Seconds of a step on one pair of cards, by contestant; None: does not fit."""

    pair: str
    step_s: Mapping[str, float | None]
    split: str
    """How layers were split over the cards."""
    plan: str
    """In a line."""

    def over(self, *names: str) -> float:
        """The fastest of others over ours."""
        ours, others = self.step_s[OURS], [s for name in names if (s := self.step_s[name]) is not None]
        assert ours is not None
        return min(others) / ours


def hold_contest(pair: Pair, scratch: Path, alone_s: float) -> Contest:
    """All contestants after each other, on layers that sleep; `alone_s`: a step of the faster card."""
    small = Shape(SMALL_HIDDEN, pair.num_layers, SMALL_VOCABULARY)
    run_forked(write_folder, 1, small, scratch / "small")
    (prepared,) = run_forked(_prepare, 1, pair, scratch, alone_s)
    plan, seconds, placed, num_bytes = prepared
    even_fits = num_bytes < min(pair.memory_gib) * 2**30
    alone_fits = num_bytes < pair.memory_gib[0] * 2**30
    job = (pair, seconds, scratch / "small")
    found: dict[str, float | None] = {
        OURS: _run(_be_ours, 2, *job, plan),
        SPLIT: _run(_be_split, 1, *job, placed),
        ONE_CARD: _run(_be_split, 1, *job, dict.fromkeys(placed, 0)) if alone_fits else None,
        EVEN: _run(_be_even, 2, *job) if even_fits else None,
    }
    counts = [sum(card == number and "layers" in name for name, card in placed.items()) for number in (0, 1)]
    return Contest(pair.name, found, f"{counts[0]} and {counts[1]} layers", _describe(plan))


def _describe(plan: Plan) -> str:
    groups = []
    for number, group in enumerate(plan.groups):
        modules = [name for one in plan.ministages if one.group == number for name in one.modules]
        kinds = {device.rank: device.type for device in plan.devices}
        cards = ", ".join(kinds[rank] for rank in group.flat_ranks)
        groups.append(f"{cards} has {sum('layers' in name for name in modules)} layers, ZeRO {group.zero}")
    return "; ".join(groups)


def _run(rank_fn: Callable[..., RankTimes], world_size: int, *args: object) -> float:
    return Timing.of(run_forked(rank_fn, world_size, *args)).median_s


def _prepare(
    rank: int, pair: Pair, scratch: Path, alone_s: float
) -> tuple[Plan, list[dict[str, Seconds]], dict[str, int], int]:
    """The planner's plan, the scaled seconds, which card `device_map = "auto"` puts each module on, and the
    bytes of the weights."""
    folder = scratch / "large"
    Shape(pair.hidden, pair.num_layers).config.save_pretrained(folder)
    (scratch / "cluster.toml").write_text(pair.cluster)
    plan_file = scratch / "plan.toml"
    arguments = ["plan", "--cluster", str(scratch / "cluster.toml"), "--hf", str(folder)]
    arguments += ["--lora-rank", str(RANK), "--seq-len", str(pair.sequence), "--global-batch", str(pair.rows)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = cli([*arguments, "--budget", "20s", "--output", str(plan_file)])
    assert code == 0, said.getvalue()
    seconds = list_seconds(pair, folder)
    whole_s = pair.rows * sum(map(sum, seconds[0].values()))
    scale = alone_s / whole_s
    scaled = [{name: (f * scale, b * scale) for name, (f, b) in own.items()} for own in seconds]
    model: Any = build_on_meta(folder, dtype=torch.bfloat16)
    memory = {number: int(gib * 2**30) for number, gib in enumerate(pair.memory_gib)}
    settings = {"no_split_module_classes": list(model._no_split_modules), "dtype": torch.bfloat16}
    balanced = get_balanced_memory(model, memory, **settings)
    device_map = infer_auto_device_map(model, balanced, **settings)
    placed = {name: _find_card(name, device_map) for name in scaled[0]}
    return Plan.load(plan_file), scaled, placed, sum(p.numel() * _WEIGHT_BYTES for p in model.parameters())


def _find_card(name: str, device_map: Mapping[str, Any]) -> int:
    """A module's card: that of the longest name in the map that begins its own."""
    known = [key for key in device_map if not key or name == key or name.startswith(f"{key}.")]
    return int(device_map[max(known, key=len)])


def _batch(pair: Pair, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(TOKENS + 1) + torch.tensor(rows)[:, None]
    tokens %= SMALL_VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def _be_ours(
    rank: int, pair: Pair, seconds: Sequence[Mapping[str, Seconds]], folder: Path, plan: Plan
) -> RankTimes:
    card = Card()
    model = build_on_meta(folder, lora=Lora(RANK))
    (place,) = (device for device in plan.devices if device.rank == rank)
    own = seconds[place.local_rank]
    card.attach(model, own, [*own])
    anywhere = replace(plan, devices=())  # This is not the node that it was made for.
    with HeteroPipeline(model, anywhere, skip_init=True, device="cpu", silence_s=_PATIENCE_S) as pipe:
        load_weights(pipe, model, folder)
        inputs = _batch(pair, pipe.input_rows)[0] if pipe.input_rows else None
        targets = _batch(pair, pipe.target_rows)[1] if pipe.target_rows else None

        def step() -> None:
            pipe.step(inputs, targets)

        return time_steps(step, card, NUM_STEPS)


def _be_split(
    rank: int,
    pair: Pair,
    seconds: Sequence[Mapping[str, Seconds]],
    folder: Path,
    placed: Mapping[str, int],
) -> RankTimes:
    """One process, whose cards wait for each other: layers one after another, wherever they are."""
    card, model = Card(), _load(folder)
    for number, own in enumerate(seconds):
        card.attach(model, own, [name for name in own if placed[name] == number])
    return time_steps(_step_of(model, _batch(pair, range(pair.rows))), card, NUM_STEPS)


def _be_even(rank: int, pair: Pair, seconds: Sequence[Mapping[str, Seconds]], folder: Path) -> RankTimes:
    """As many rows for one card as for the other."""
    card, model = Card(), _load(folder)
    card.attach(model, seconds[rank], [*seconds[rank]])
    half = pair.rows // 2
    rows = range(rank * half, (rank + 1) * half)
    return time_steps(_step_of(DistributedDataParallel(model), _batch(pair, rows)), card, NUM_STEPS)


def _load(folder: Path) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    base: Any = adapted.base_model.model
    return base.train()


def _step_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    inputs, targets = batch

    def step() -> None:
        logits = model(inputs).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
