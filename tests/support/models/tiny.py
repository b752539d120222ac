"""Small models and batches for multi-rank tests, and a single process to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it: here once, before ranks are forked, and not in every rank.
import torch.distributed as dist
from torch import Tensor, nn

from zorselike import HeteroPipeline, initialize
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy

VOCABULARY = 13
SEQUENCE = 4
DIM = 8


class Layer(nn.Module):
    """Attention-free block with odd shapes, so that shards are ragged and some are empty; with `counts` it
    changes a buffer of its state in each forward that trains."""

    def __init__(self, dim: int = DIM, *, counts: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 7)
        self.down = nn.Linear(7, dim)
        self.seen: Tensor | None
        self.register_buffer("seen", torch.zeros(1) if counts else None)

    def init_buffers(self) -> None:
        if self.seen is not None:
            self.seen.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is not None and self.training:
            self.seen.add_(1)
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
        return x + self.down(torch.tanh(self.up(self.norm(mixed))))


class Decoder(nn.Module):
    """On TorchTitan's convention: missing parts are None."""

    def __init__(self, num_layers: int, *, tied: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): Layer(counts=counts) for i in range(num_layers)})
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def module_names(num_layers: int) -> list[str]:
    return ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "output"]


def over_model(plan: Plan, rng: random.Random) -> tuple[Plan, int]:
    """The plan with its ministages filled from a `Decoder` at random cuts; also its layer count."""
    count = plan.num_ministages
    num_layers = max(1, count - 3 + rng.randint(0, 3))
    names = module_names(num_layers)
    cuts = [0, *sorted(rng.sample(range(1, len(names)), count - 1)), len(names)]
    ministages = tuple(
        Ministage(m.group, tuple(names[cuts[i] : cuts[i + 1]])) for i, m in enumerate(plan.ministages)
    )
    return replace(plan, ministages=ministages), num_layers


def with_groups(plan: Plan, change: Callable[[Group], Group]) -> Plan:
    """The plan with every group changed."""
    return replace(plan, groups=tuple(change(group) for group in plan.groups))


def adamw(named_parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named_parameters, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One training run: the same in a single process and over a plan."""

    plan: Plan
    num_layers: int
    seed: int = 0
    tied: bool = False
    max_norm: float | None = None
    evaluate_before: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    """Prefixes of names of parameters that do not train."""
    num_steps: int = 3
    counts: bool = False
    """Whether layers have a buffer that forwards change."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = Decoder(self.num_layers, tied=self.tied, counts=self.counts).double()
        for name, parameter in model.named_parameters():
            if name.startswith(self.frozen or ("-",)):
                parameter.requires_grad_(False)
        return model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets; a fifth of the targets are not counted."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        shape = (self.plan.global_batch, SEQUENCE)
        inputs = torch.randint(VOCABULARY, shape, generator=generator)
        targets = torch.randint(VOCABULARY, shape, generator=generator)
        ignored = torch.rand(shape, generator=generator) < 0.2
        ignored[0, 0] = False
        return inputs, targets.masked_fill(ignored, -100)


@dataclass(frozen=True)
class Outcome:
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    evaluations: tuple[float, ...]
    state: dict[str, Tensor]


def train_single(case: Case) -> Outcome:
    """The reference: one process, the whole batch, plain torch."""
    model = initialize(case.model(), seed=case.seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained = [p for _, p in named]
    optimizer = case.optimizer(named)
    losses, norms, evaluations = [], [], []
    for step in range(case.num_steps):
        inputs, targets = case.batch(step)
        num_targets = int((targets != -100).sum())
        if step in case.evaluate_before:
            with torch.no_grad():
                evaluations.append(float(token_cross_entropy(model(inputs), targets)) / num_targets)
        loss = token_cross_entropy(model(inputs), targets) / num_targets
        loss.backward()
        limit = float("inf") if case.max_norm is None else case.max_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, limit)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Outcome(tuple(losses), tuple(norms), tuple(evaluations), state)


def train_planned(case: Case) -> Outcome:
    """The same run through the pipeline; the state is on rank 0."""
    pipe = HeteroPipeline(
        case.model(), case.plan, optimizer=case.optimizer, max_norm=case.max_norm, seed=case.seed
    )
    results, evaluations = [], []
    for step in range(case.num_steps):
        inputs, targets = case.batch(step)
        if step in case.evaluate_before:
            evaluations.append(pipe.evaluate_global(inputs, targets))
        results.append(pipe.step_global(inputs, targets))
    outcome = Outcome(
        tuple(result.loss for result in results),
        tuple(result.grad_norm for result in results),
        tuple(result.loss for result in evaluations),
        pipe.full_state_dict(),
    )
    pipe.close()
    return outcome


def train_all_single(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    return [train_single(case) for case in cases]


def train_all_planned(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    return [train_planned(case) for case in cases]


def assert_same(found: Outcome, expected: Outcome, case: Case) -> None:
    """Weights to 1e-10 of the tensor's largest, losses and norms to 1e-12."""
    for kind in ("losses", "norms", "evaluations"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert len(ours) == len(theirs)
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert abs(a - b) <= 1e-12 * max(1.0, abs(b)), f"{kind} of step {step}: {a} against {b}; {case}"
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        difference = (found.state[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-30)
        assert difference <= 1e-10, f"{name} differs by {difference:.1e}; {case}"


def warm_up() -> None:
    """Fills what torch keeps of shapes, modules and meshes it has seen, for ranks that are forked afterwards.

    Groups that communicate nothing.
    """
    names = module_names(2)
    ministages = (Ministage(0, tuple(names[:2])), Ministage(0, tuple(names[2:])))
    plan = Plan(2, (Group((0,), (Microbatch(0, 0, 1), Microbatch(0, 1, 2))),), ministages)
    case = Case(plan, 2)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    pipe = HeteroPipeline(case.model(), plan, optimizer=adamw, device="cpu")
    pipe.evaluate_global(*case.batch(0))
    pipe.step_global(*case.batch(0))
    pipe.close()
    dist.destroy_process_group()
