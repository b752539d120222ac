"""What is run on pretended GPUs: small training runs through every way that differs on a card.

Imported in started ranks only (rank.py), but for `SCENES`, which `run.py` lists: torch is imported late.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from zorselike.plan.plan import OFFLOAD_KINDS, Device, Group, Microbatch, Ministage, Plan

if TYPE_CHECKING:
    from tiny import Case
    from torch import Tensor

    from zorselike import HeteroPipeline

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
    most: int = 1 << 20
    loses_last: bool = False
    """The last rank ends itself in a step."""
    makes_groups: bool = False
    """The process group is not there when it begins."""


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


def build(case: Case, **settings: Any) -> HeteroPipeline:
    import torch

    from zorselike import HeteroPipeline

    settings = {
        "max_norm": case.max_norm,
        "device": torch.device("cuda", torch.cuda.current_device()),
    } | settings
    note("ended")
    pipe = HeteroPipeline(case.model().float(), case.plan, **settings)
    note("built")
    return pipe


def train(case: Case, folder: Path | None, *, on_card: bool = False, **settings: Any) -> None:
    """Three steps with evaluations, of which those after the first must not wait for the card, unless it has
    the batches (`on_card`), whose targets are counted there; then what waits anyway: reports, and with a
    folder saving, loading and going on."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    pipe = build(case, **settings)
    results = []
    for step in range(3):
        inputs, targets = case.batch(step)
        if on_card:
            inputs, targets = inputs.to(device), targets.to(device)
        note(f"step{step}")
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


def _one_group(dtype: str = "float32", **settings: Any) -> Callable[[int, Path], None]:
    return lambda ranks, folder: _train_tiny(plan_one_group(ranks, **settings), folder, dtype)


def _two_groups(dtype: str = "float32", **settings: Any) -> Callable[[int, Path], None]:
    return lambda ranks, folder: _train_tiny(plan_two_groups(ranks, **settings), folder, dtype, tied=True)


def _line(ranks: int, folder: Path) -> None:
    _train_tiny(plan_line(ranks), folder)


def _train_tiny(
    plan: Plan, folder: Path | None, dtype: str = "float32", *, tied: bool = False, **settings: Any
) -> None:
    import torch
    from tiny import Case

    case = Case(plan, LAYERS, max_norm=0.1, tied=tied, counts=not tied)
    param_dtype = None if dtype == "float32" else getattr(torch, dtype)
    train(case, folder, param_dtype=param_dtype, **settings)


def _replica(ranks: int, folder: Path) -> None:
    from replica_cases import ReplicaCase

    names = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output")
    rows = (Microbatch(0, 0, 2), Microbatch(0 if ranks == 2 else 2, 2, 4))
    group = Group(((0, 1), *range(2, ranks)), rows)
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
    """Sequences of four lengths in a row; of the last one all rows are one in memory."""
    from tiny import Case

    plan = plan_two_groups(ranks) if ranks > 1 else plan_one_group(1)
    pipe = build(case := Case(plan, LAYERS), dynamic_shapes=True)
    for step, length in enumerate((4, 3, 4, 6)):
        pipe.step_global(*(t.repeat(1, 2)[:, :length].contiguous() for t in case.batch(step)))
    inputs, targets = (
        t[:1].expand(len(rows), -1)
        for t, rows in zip(case.batch(0), (pipe.input_rows, pipe.target_rows), strict=True)
    )
    pipe.step(inputs, targets)
    pipe.close()


def _autocast(ranks: int, folder: Path) -> None:
    import torch

    with torch.autocast("cuda", torch.bfloat16):
        _train_tiny(plan_one_group(ranks, recompute="layer"), folder)


def _compiled(ranks: int, folder: Path) -> None:
    """Each layer is compiled, and computed again; all is offloaded."""
    plan = plan_one_group(ranks, offload=OFFLOAD_KINDS, recompute="layer")
    _train_tiny(plan, folder, "bfloat16", compile=True)


def _defaults(ranks: int, folder: Path) -> None:
    """New tensors are on the card and in bf16, if nothing is said."""
    import torch
    from tiny import Case

    case = Case(plan_one_group(ranks, offload=OFFLOAD_KINDS), LAYERS)
    batches = [case.batch(step) for step in range(6)]
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    with mock.patch.object(Case, "batch", lambda case, step: batches[step]):
        train(case, folder)


def _thread(ranks: int, folder: Path) -> None:
    """Calls come from a thread, which begins with the first card as its current one."""
    from tiny import Case

    case = Case(plan_one_group(ranks, offload=OFFLOAD_KINDS), LAYERS, max_norm=0.1)
    pipe = build(case)

    def use() -> None:
        str((pipe.step_global(*case.batch(0)), pipe.busy_s))
        saved = pipe.save(folder)
        assert saved is not None
        pipe.load(saved.wait())
        with pipe.loaded():
            pass
        pipe.full_state_dict()
        pipe.close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(use).result()


def _optimizers(ranks: int, folder: Path) -> None:
    """Every form of AdamW, each offloaded and clipped by ministages, and two others."""
    from tiny import Case
    from torch.optim import SGD, AdamW, NAdam

    forms = [
        partial(AdamW, fused=True),
        partial(AdamW, foreach=True),
        partial(AdamW, capturable=True),
        partial(AdamW, amsgrad=True),
        partial(AdamW, foreach=False),
    ]
    for optimizer in (*forms, partial(SGD, lr=0.1, momentum=0.9), NAdam):
        case = Case(plan_one_group(ranks, offload=OFFLOAD_KINDS), LAYERS, max_norm=0.1)
        pipe = build(case, optimizer=optimizer, clip="ministage")
        for step in range(2):
            pipe.step_global(*case.batch(step))
        pipe.close()


def _broken_off(ranks: int, folder: Path) -> None:
    """The loss of the third microbatch raises; the next step is as if nothing had been."""
    from tiny import Case

    from zorselike.runtime.loss import token_cross_entropy

    count = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == 9:
            raise ArithmeticError
        return token_cross_entropy(outputs, targets)

    for offload in ((), OFFLOAD_KINDS):
        count = 0
        pipe = build(case := Case(plan_one_group(1, offload=offload), LAYERS), loss_fn=loss)
        with suppress(ArithmeticError):
            for step in range(4):
                pipe.step_global(*case.batch(step))
        assert count == 9 and not pipe.is_broken, (count, pipe.is_broken)
        pipe.step_global(*case.batch(step))
        pipe.close()


def _unlocked(ranks: int, folder: Path) -> None:
    """The driver locks no memory for the copies of a checkpoint, which then is saved without; training goes
    on."""
    from tiny import Case

    pipe = build(case := Case(plan_one_group(ranks), LAYERS))
    pipe.step_global(*case.batch(0))
    ctypes.CDLL(None).pretended_lock_no_more()
    saving = pipe.save(folder, wait=False)
    pipe.step_global(*case.batch(1))
    assert saving is not None
    saving.wait()
    pipe.close()


def _other_plan(ranks: int, folder: Path) -> None:
    """What one plan's ranks save, another's load; and it comes out as weights."""
    import torch.distributed as dist
    from tiny import Case

    from zorselike.checkpoint.export import export

    last = plan_one_group(1, zero=3) if ranks == 1 else plan_two_groups(ranks)
    for plan in (plan_one_group(ranks, offload=OFFLOAD_KINDS), last):
        pipe = build(case := Case(plan, LAYERS))
        note("ended")
        if plan is last:
            pipe.load(folder / "saved")
        pipe.step_global(*case.batch(0))
        saved = pipe.save(folder / "saved")
        pipe.close()
    assert saved is not None
    if dist.get_rank() == 0:
        export(saved.wait(), folder / "weights")


def _lora(ranks: int, folder: Path) -> None:
    """Adapters of a Hugging Face folder learn from packed documents and from padded rows."""
    import torch
    import torch.distributed as dist
    from hf_families import documents, make_model, masks, tokens

    import zorselike.hf
    from zorselike import list_modules
    from zorselike.checkpoint.adapters import export_adapters

    base, lora = folder / "base", zorselike.hf.Lora(rank=3)
    if dist.get_rank() == 0:
        model: Any = make_model("llama")
        model.float().save_pretrained(base)
    dist.all_reduce(torch.zeros(1))  # Over Gloo, which waits.
    names = list_modules(zorselike.hf.build_on_meta(base, lora=lora))
    groups = tuple(
        Group((rank,), (Microbatch(rank, 0, 2), Microbatch(rank, 2, 4)), offload=OFFLOAD_KINDS)
        for rank in range(min(ranks, 2))
    )
    cuts = (names[:3], names[3:5], names[5:])
    plan = Plan(4, groups, tuple(Ministage(i % len(groups), tuple(cut)) for i, cut in enumerate(cuts)))
    device = torch.device("cuda", torch.cuda.current_device())
    pipe = zorselike.hf.pipeline(base, plan, lora=lora, device=device, param_dtype=torch.bfloat16)
    note("built")
    rows = [{"position_ids": documents(4)}, {"attention_mask": masks(4, left=False)}]
    for step in range(4):
        torch.cuda.set_sync_debug_mode("warn" if step > 1 else "default")
        pipe.step_global(tokens(4), tokens(4), **rows[step % 2])
        torch.cuda.set_sync_debug_mode("default")
    note("ended")
    saved = pipe.save(folder / "saved")
    pipe.close()
    assert saved is not None
    if dist.get_rank() == 0:
        export_adapters(saved.wait(), folder / "adapters")


def _mixed(ranks: int, folder: Path) -> None:
    """The first rank computes on the CPU, the others on cards."""
    import torch
    import torch.distributed as dist

    types = ("cpu", *["cuda"] * (ranks - 1))
    devices = tuple(Device(rank, socket.gethostname(), rank, kind) for rank, kind in enumerate(types))
    device = "cpu" if dist.get_rank() == 0 else torch.device("cuda", torch.cuda.current_device())
    _train_tiny(replace(plan_two_groups(ranks), devices=devices), folder, device=device)


def _elastic(ranks: int, folder: Path) -> None:
    """The last rank ends in its third step; the others go on with what they have of its state."""
    import torch
    from tiny import Case

    from zorselike import ElasticPipeline
    from zorselike.elastic.meeting.environment import FOUND, JOIN, MEMBERS, TOKEN, from_environment

    case, rank = (
        Case(plan_one_group(ranks, offload=OFFLOAD_KINDS), LAYERS, max_norm=0.1),
        int(os.environ["RANK"]),
    )
    address = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    mine = (
        {TOKEN: "scene", FOUND: address, MEMBERS: str(ranks)}
        if rank == 0
        else {TOKEN: "scene", JOIN: address}
    )
    meet = partial(
        from_environment, device_type="cuda", memory_bytes=1 << 36, environment={**os.environ, **mine}
    )
    device = torch.device("cuda", torch.cuda.current_device())
    pipe = ElasticPipeline(lambda: case.model().float(), case.plan, meeting=meet, device=device, max_norm=0.1)
    while pipe.wait() and pipe.num_steps < 5:
        if rank == ranks - 1 and pipe.num_steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.step_global(*case.batch(pipe.num_steps))
    assert pipe.plan.num_ranks == ranks - 1
    pipe.close()


def _profile(ranks: int, folder: Path) -> None:
    from zorselike.cli.profile import ProfileCommand

    folder.mkdir(exist_ok=True)
    ProfileCommand(
        seq_len=16,
        most_rows=2,
        repeats=1,
        zero=(2,),
        largest_message="1MiB",
        output=str(folder / "profile.json"),
        cluster=str(folder / "cluster.toml"),
    ).run()


def _trainer(ranks: int, folder: Path) -> None:
    """The training program with validation, checkpoints and torch.compile off."""
    from zorselike.train.__main__ import main

    recipe = Path(__file__).parents[2] / "recipes" / "debug_cpu.toml"
    own = Path(tempfile.mkdtemp())
    names = ("tok_embeddings", *(f"layers.{i}" for i in range(6)), "norm", "output")
    groups = tuple(Group((rank,), (Microbatch(rank, 0, 2), Microbatch(rank, 2, 4))) for rank in range(ranks))
    cuts = [i * len(names) // (2 * ranks) for i in range(2 * ranks + 1)]
    stages = tuple(Ministage(i % ranks, names[a:b]) for i, (a, b) in enumerate(pairwise(cuts)))
    Plan(4, groups, stages).save(own / "plan.toml")
    given = {
        "hetero.plan": own / "plan.toml",
        "hetero.device": "cuda",
        "training.steps": 4,
        "job.dump_folder": folder,
    }
    sys.argv = ["train", "--config", str(recipe), *(f"--{key}={value}" for key, value in given.items())]
    assert main() == 0


SCENES = {
    "zero0": Scene("one group, ZeRO 0", _one_group(zero=0)),
    "zero1": Scene("one group, ZeRO 1", _one_group(zero=1)),
    "zero2": Scene("one group, ZeRO 2", _one_group(zero=2)),
    "zero3": Scene("one group, ZeRO 3", _one_group(zero=3)),
    "offload": Scene("one group, everything offloaded, bf16", _one_group("bfloat16", offload=OFFLOAD_KINDS)),
    "offload-params": Scene(
        "one group, ZeRO 3, parameters offloaded, layers computed again",
        _one_group(zero=3, offload=("params",), recompute="layer"),
    ),
    "fp16": Scene("one group, fp16 with a loss scale", _one_group("float16")),
    "autocast": Scene("layers computed again under torch.autocast", _autocast),
    "compiled": Scene("layers compiled and computed again, everything offloaded, bf16", _compiled),
    "defaults": Scene("torch's default device is the card, its default dtype bf16", _defaults),
    "optimizers": Scene("forms of AdamW, SGD, NAdam; clipped by ministages", _optimizers),
    "broken-off": Scene("a step raises, and the next ones go on", _broken_off, most=1),
    "unlocked": Scene("the driver locks no memory for checkpoints", _unlocked),
    "other-plan": Scene("checkpoints loaded under other plans, and exported", _other_plan),
    "lora": Scene("adapters of a Hugging Face folder, documents, padding (zorselike[hf])", _lora),
    "profile": Scene("zorselike profile", _profile, makes_groups=True),
    "train": Scene("the training program", _trainer, makes_groups=True),
    "loss": Scene("batches on the card, a loss that writes into outputs", _loss),
    "dynamic": Scene("dynamic shapes", _dynamic),
    "two-groups": Scene("two groups in turns, tied weights", _two_groups(), 2),
    "two-groups-offload": Scene(
        "two groups in turns, everything offloaded, bf16", _two_groups("bfloat16", offload=OFFLOAD_KINDS), 2
    ),
    "line": Scene("a group of one ministage for each rank", _line, 2),
    "replica": Scene("a tensor-parallel replica of two ranks, beside it the others", _replica, 2),
    "thread": Scene("everything offloaded, calls from another thread", _thread, 2),
    "mixed": Scene("a rank on the CPU beside others on cards", _mixed, 2),
    "elastic": Scene("a rank is lost, the others go on", _elastic, 2, loses_last=True, makes_groups=True),
}
