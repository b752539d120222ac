"""A small Llama, plans for it, and what a run of it comes to: what the parts about exactness train."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from zorselike import HeteroPipeline, initialize
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.models.registry import module_names
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.schedule.actions import Action

ROWS = 8
_adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Training:
    """What is trained, and for how long."""

    dtype: torch.dtype | None = None
    """In which layers compute; None: the model's own."""
    is_double: bool = False
    """Whether the model is in fp64, so that runs in another order of sums are equal to 1e-10."""
    dim: int = 256
    num_layers: int = 6
    sequence: int = 128
    num_steps: int = 4
    max_norm: float | None = None

    def model(self) -> Llama:
        config = LlamaConfig(
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden=3 * self.dim,
            vocab_size=512,
            max_seq_len=self.sequence,
        )
        with torch.device("meta"):
            model = Llama(config)
        return model.double() if self.is_double else model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(512, (2, ROWS, self.sequence), generator=generator)
        return inputs, targets

    def names(self) -> list[str]:
        return list(module_names(self.model().config))


TINY = Training(dim=32, num_layers=2, sequence=8, num_steps=3)
"""For a CPU."""


def cut(training: Training, num_ministages: int, num_groups: int = 1) -> tuple[Ministage, ...]:
    """The model in ministages of about equally many modules, dealt to the groups in turn."""
    names = training.names()
    cuts = [i * len(names) // num_ministages for i in range(num_ministages + 1)]
    return tuple(Ministage(i % num_groups, tuple(names[a:b])) for i, (a, b) in enumerate(pairwise(cuts)))


def one_group(
    training: Training,
    *,
    ranks: int = 1,
    zero: int = 2,
    offload: tuple[str, ...] = (),
    num_ministages: int = 4,
) -> Plan:
    """All ranks in one group; with several ranks the first has most rows."""
    if ranks == 1:
        rows = tuple(Microbatch(0, start, start + 2) for start in range(0, ROWS, 2))
    else:
        others = [Microbatch(rank, rank - 1, rank) for rank in range(1, ranks)]
        own = [Microbatch(0, start, min(start + 2, ROWS)) for start in range(ranks - 1, ROWS, 2)]
        rows = (*others, *own)
    group = Group(tuple(range(ranks)), rows, zero=zero, offload=offload, recompute="layer")
    return Plan(ROWS, (group,), cut(training, num_ministages))


def in_line(
    training: Training, sizes: Sequence[int], *, zero: int = 2, offload: tuple[str, ...] = ()
) -> Plan:
    """Groups of so many ranks, each visited twice, so that edges of the pipeline form a cycle."""
    groups, first = [], 0
    for size in sizes:
        ranks = tuple(range(first, first + size))
        starts = [i * ROWS // (2 * size) for i in range(2 * size + 1)]
        rows = tuple(Microbatch(ranks[i % size], a, b) for i, (a, b) in enumerate(pairwise(starts)))
        groups.append(Group(ranks, rows, zero=zero, offload=offload, recompute="layer"))
        first += size
    return Plan(ROWS, tuple(groups), cut(training, 2 * len(sizes), len(sizes)))


def name_devices(plan: Plan, kinds: Sequence[str]) -> Plan:
    """The plan for processes of this machine that drive what `kinds` say, by rank."""
    node = os.environ.get("ZORSELIKE_NODE") or os.uname().nodename
    return replace(plan, devices=tuple(Device(rank, node, rank, kind) for rank, kind in enumerate(kinds)))


@dataclass(frozen=True)
class Outcome:
    """All that a run shows of itself."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]
    """Whole, on the plan's first rank."""
    moments: tuple[str, ...] = ()
    """A digest of each of this rank's optimizer tensors."""
    peak_bytes: int = 0
    """Most that was allocated on the GPU after two steps."""

    def differs_from(self, other: Outcome) -> str:
        """The first thing that is not equal, bit for bit; empty if all is."""
        for name in ("losses", "norms"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} {ours}, not {theirs}"
        for name, weight in other.weights.items():
            if not torch.equal(self.weights[name], weight):
                return f"weight {name}"
        return "" if self.moments == other.moments else "optimizer state"

    def misses(self, other: Outcome, *, tolerance: float = 1e-10) -> str:
        """The first thing that differs by more than round-off of fp64; empty if nothing does."""
        for step, (ours, theirs) in enumerate(zip(self.losses, other.losses, strict=True)):
            if not abs(ours - theirs) <= tolerance * abs(theirs):
                return f"loss of step {step}: {ours!r}, not {theirs!r}"
        for name, weight in other.weights.items():
            largest = float(weight.abs().max())
            difference = float((self.weights[name] - weight).abs().max()) / max(largest, 1e-30)
            if not difference <= tolerance:
                return f"weight {name} by {difference:.1e} of its largest"
        return ""


def train(
    training: Training,
    plan: Plan,
    device: torch.device,
    *,
    entering: Callable[[Action], None] | None = None,
    around_step: Callable[[int, HeteroPipeline], AbstractContextManager[None]] | None = None,
) -> Outcome:
    """A run on this rank; `entering` is told every action before it runs, and each step runs inside
    `around_step`."""
    is_cuda = device.type == "cuda"
    pipe = HeteroPipeline(
        training.model(),
        plan,
        optimizer=_adamw,
        param_dtype=training.dtype,
        max_norm=training.max_norm,
        device=device,
    )
    results = []
    with pipe.watching(entering, lambda _: None) if entering else nullcontext():
        for step in range(training.num_steps):
            if is_cuda and step == 2:  # From now on every buffer exists.
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            with around_step(step, pipe) if around_step else nullcontext():
                results.append(pipe.step_global(*training.batch(step)))
        losses, norms = tuple(r.loss for r in results), tuple(r.grad_norm for r in results)
    if is_cuda:
        torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else 0
    weights = pipe.full_state_dict()
    with pipe.loaded():
        moments = tuple(
            digest(local_tensor(value))
            for _, optimizer in sorted(pipe.optimizers.items())
            for state in optimizer.state.values()
            for value in state.values()
        )
    pipe.close()
    return Outcome(losses, norms, weights, moments, peak_bytes)


def train_alone(training: Training) -> Outcome:
    """The reference: one CPU, the whole batch, plain torch."""
    model = initialize(training.model(), seed=0)
    optimizer = _adamw(model.parameters())
    losses, norms = [], []
    for step in range(training.num_steps):
        inputs, targets = training.batch(step)
        loss = token_cross_entropy(model(inputs), targets) / targets.numel()
        torch.autograd.backward(loss)
        limit = float("inf") if training.max_norm is None else training.max_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return Outcome(tuple(losses), tuple(norms), {n: t.detach() for n, t in model.state_dict().items()})


def digest(tensor: Tensor) -> str:
    """Equal for equal bits."""
    # A copy: memory that numpy has seen cannot be given back.
    whole = tensor.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]


def device_of(kind: str, index: int = 0) -> torch.device:
    """This process's device, made the current one."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def be_deterministic() -> None:
    """Equal runs are equal bit for bit; before anything else touches CUDA in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Filling what is allocated would hide reads of what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
