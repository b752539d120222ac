"""Tensor-parallel replicas of equal degrees beside torch's own: `parallelize_module` and FSDP2.

    python tools/bench_tensor_parallel.py                        # full
    python tools/bench_tensor_parallel.py --rounds 1 --dim 64    # shows that it runs

Both train the same Llama from the same weights on the same rows, with sequence parallelism, in the same CPU
ranks, turn and turn about; torch's as TorchTitan sets it up: every layer, embedding and head cut, the loss
over cut logits, and where there are several replicas FSDP2 around it, gathered and reduced once a step.
Losses of the first steps must agree, so that both do the same work.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch is imported, here and in every rank forked from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

import torch
import torch._dynamo  # FSDP2 imports it: here once, and not in every rank.
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tools.bench.forked import run_forked
from tools.report import Figure, conclude, make_parser, positive
from zorselike import HeteroPipeline, initialize
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

TARGET_RATIO = 0.97
LEARNING_RATE = 1e-3
_SETTINGS = ((1, 2), (2, 2), (1, 4))
"""Numbers of replicas, and their degree."""
_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Job:
    """What both train."""

    num_replicas: int
    degree: int
    dim: int
    num_rounds: int
    num_layers: int = 4
    length: int = 256
    rows: int = 4
    """Of a replica, one at a time."""
    num_steps: int = 3
    """Of a round."""

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * self.degree

    def model(self) -> Llama:
        config = LlamaConfig(
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=8,
            num_kv_heads=8,
            ffn_hidden=self.dim * 11 // 4,
            vocab_size=1024,
            max_seq_len=self.length,
        )
        with torch.device("meta"):
            return Llama(config)

    def plan(self) -> Plan:
        replicas = [
            tuple(range(first, first + self.degree)) for first in range(0, self.num_ranks, self.degree)
        ]
        microbatches = [
            Microbatch(replica[0], number * self.rows + row, number * self.rows + row + 1)
            for row in range(self.rows)
            for number, replica in enumerate(replicas)
        ]
        names = ("tok_embeddings", *(f"layers.{i}" for i in range(self.num_layers)), "norm", "output")
        group = Group(tuple(replicas), tuple(microbatches), zero=2)
        rows = self.num_replicas * self.rows
        return Plan(rows, (group,), (Ministage(0, names),), sequence_length=self.length).validate()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Of all replicas."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_replicas * self.rows, self.length)
        return torch.randint(1024, shape, generator=generator), torch.randint(
            1024, shape, generator=generator
        )


@dataclass(frozen=True)
class Times:
    """Seconds of a step, by round, of the slowest rank."""

    ours: tuple[float, ...]
    torchs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Torch's time over ours: above 1 we are faster."""
        return statistics.median(b / a for a, b in zip(self.ours, self.torchs, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; the exit status says whether the target was met."""
    parser = make_parser(__doc__)
    parser.add_argument("--dim", type=positive, default=512, help="width of the model (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=9, help="of three steps of each (%(default)s)")
    options = parser.parse_args(arguments)
    figures = []
    for num_replicas, degree in _SETTINGS:
        job = Job(num_replicas, degree, options.dim, options.rounds)
        ranks = run_forked(run, job.num_ranks, job)
        times = Times(*(tuple(map(max, zip(*own, strict=True))) for own in zip(*ranks, strict=True)))
        name = f"{num_replicas} x degree {degree}"
        print(
            f"{name}: {statistics.median(times.ours):.3f} s a step, torch's "
            f"{statistics.median(times.torchs):.3f} s",
            flush=True,
        )
        figures.append(Figure(f"torch_over_ours, {name}", times.ratio, TARGET_RATIO))
    return conclude(options.json, figures)


def run(rank: int, job: Job) -> tuple[list[float], list[float]]:
    """Seconds of steps of both, by round."""
    steps = (make_ours(job), make_torchs(rank, job))
    losses = [[step() for _ in range(2)] for step in steps]
    for ours, theirs in zip(*losses, strict=True):
        if abs(ours - theirs) > _TOLERANCE * abs(theirs):
            raise RuntimeError(f"losses differ: {losses}")
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(job.num_rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(job.num_steps):
                steps[which]()
            seconds[which].append((time.perf_counter() - began) / job.num_steps)
    return seconds


def make_ours(job: Job) -> Callable[[], float]:
    """A step of `HeteroPipeline`, which gives its loss."""
    pipe = HeteroPipeline(job.model(), job.plan(), optimizer=_make_optimizer, seed=0, device="cpu")
    inputs, targets = job.batch()

    def step() -> float:
        return pipe.step_global(inputs, targets).loss

    return step


def make_torchs(rank: int, job: Job) -> Callable[[], float]:
    """The same of torch's parallelisms."""
    mesh = init_device_mesh("cpu", (job.num_replicas, job.degree), mesh_dim_names=("dp", "tp"))
    model: Any = initialize(job.model(), seed=0)  # Torch adds methods.
    parallelize_module(model, mesh["tp"], _list_styles(model))
    is_sharded = job.num_replicas > 1
    if is_sharded:
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    optimizer = _make_optimizer(list(model.named_parameters()))
    inputs, targets = job.batch()
    first = rank // job.degree * job.rows
    count = targets.numel()

    def step() -> float:
        total = torch.zeros(())
        for row in range(job.rows):
            own = slice(first + row, first + row + 1)
            if is_sharded:
                model.set_requires_gradient_sync(row == job.rows - 1)
                model.set_is_last_backward(row == job.rows - 1)
            with loss_parallel():
                logits = model(inputs[own]).flatten(0, 1)
                loss: Any = F.cross_entropy(logits, targets[own].flatten(), reduction="sum") / count
                loss.backward()
            total += loss.detach().full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if is_sharded:
            dist.all_reduce(total, group=mesh.get_group("dp"))
        return float(total)

    return step


def _list_styles(model: Llama) -> dict[str, ParallelStyle]:
    """As TorchTitan has them for this model."""
    styles: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for name in model.layers:
        layer = f"layers.{name}"
        styles |= {f"{layer}.{norm}": SequenceParallel() for norm in ("attention_norm", "ffn_norm")}
        styles |= {f"{layer}.{block}": whole for block in ("attention", "feed_forward")}
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        styles |= {f"{layer}.{linear}": ColwiseParallel() for linear in columns}
        rows = ("attention.wo", "feed_forward.w2")
        styles |= {f"{layer}.{linear}": RowwiseParallel(output_layouts=Shard(1)) for linear in rows}
    return styles


def _make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=LEARNING_RATE)


if __name__ == "__main__":
    sys.exit(main())
