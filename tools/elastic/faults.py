"""Jobs of random plans, and what is to happen to their ranks, and where."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch._dynamo  # FSDP2 imports it: here once, before ranks are forked.

from zorselike.plan.parts import Device
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan

from .injection import RECOVERY_PHASES, STEP_PHASES, Fault, FaultKind, Phase
from .jobs import Job

NUM_RANKS = 4
_ROWS = 6
_SPLITS = ((4,), (2, 2), (1, 3), (3, 1), (1, 2, 1), (2, 1, 1))
_STEPS_APART = 4
KINDS: tuple[FaultKind, ...] = ("kill", "stop", "pause", "raise", "exit", "term")
Cell = tuple[Phase, FaultKind, int]
"""Where, what, and to which rank."""


def make_plan(rng: random.Random, split: Sequence[int], *, offload: bool = True) -> tuple[Plan, int]:
    """A random plan over groups of these sizes, and the layers that it needs."""
    groups, first = [], 0
    for size in split:
        ranks = tuple(range(first, first + size))
        first += size
        rows = rng.choice((1, 2))
        microbatches = tuple(
            Microbatch(ranks[i % size], start, start + rows) for i, start in enumerate(range(0, _ROWS, rows))
        )
        zero = rng.choice((0, 1, 2, 3))
        kinds = tuple(kind for kind in OFFLOAD_KINDS if offload and rng.random() < 0.3)
        groups.append(Group(ranks, microbatches, zero=zero, offload=kinds))
    count = len(split) * rng.choice((1, 2))
    num_layers = count + 1
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "output"]
    cuts = [0, *sorted(rng.sample(range(1, len(names)), count - 1)), len(names)]
    ministages = tuple(Ministage(i % len(split), tuple(names[cuts[i] : cuts[i + 1]])) for i in range(count))
    return Plan(_ROWS, tuple(groups), ministages).validate(), num_layers


def list_cells(phases: Sequence[Phase] = (*RECOVERY_PHASES, *STEP_PHASES)) -> list[Cell]:
    """The whole matrix. What decides (`meet`, `plan`) is our own code without anything that waits: there no
    error is thrown (that a planner's ends the job with its reason is `tests/elastic/test_meeting`'s to
    show), and `plan` is the leader's alone."""
    return [
        (phase, kind, rank)
        for phase in phases
        for kind in KINDS
        for rank in (range(NUM_RANKS) if phase != "plan" else (0,))
        if not (kind == "raise" and phase in ("meet", "plan"))
    ]


def deal_cells(count: int, seed: int = 0, phases: Sequence[Phase] | None = None) -> Iterator[Cell]:
    """So many cells: whole matrices, each in another order."""
    rng = random.Random(seed)
    dealt = 0
    while dealt < count:
        cells = list_cells() if phases is None else list_cells(phases)
        rng.shuffle(cells)
        yield from cells[: count - dealt]
        dealt += len(cells)


def make_matrix_job(seed: int, cells: Sequence[Cell], *, silence_s: float = 4.0) -> Job:
    """A random job in which these happen, one after another. A recovery in which something happens begins
    with an error of another rank, which nobody is lost by: mirrors promise to make up for one loss at a
    time."""
    rng = random.Random(seed)
    plan, num_layers = make_plan(rng, rng.choice(_SPLITS))
    faults = []
    for i, (phase, kind, rank) in enumerate(cells):
        step = 2 + _STEPS_APART * i
        if phase in RECOVERY_PHASES:
            faults.append(Fault(step, rank + rng.randrange(1, NUM_RANKS), "raise", rng.random()))
        faults.append(Fault(step, rank, kind, rng.random(), phase))
    job = Job(
        plan,
        num_layers,
        3 + _STEPS_APART * len(cells),
        tuple(faults),
        replaces=True,
        tied=rng.random() < 0.5,
        max_norm=rng.choice((None, 0.5)),
        silence_s=silence_s,
        seed=seed,
        patience_s=180.0,
    )
    return replace(job, param_dtype=torch.bfloat16) if rng.random() < 0.2 else job


_DEGREES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((2, 1, 1),),
    ((2, 2),),
    ((3, 1),),
    ((4,),),
    ((2,), (1, 1)),
    ((1,), (2, 1)),
    ((4, 2),),
    ((3,), (2,)),
    ((2, 1), (2,)),
)
"""Of the replicas of each group."""


def make_replica_job(seed: int, *, num_faults: int = 2) -> Job:
    """A random job with tensor-parallel replicas, that lose ranks in any phase of a step. Who replaces them
    may be in another node than the others of a replica."""
    rng = random.Random(f"replicas {seed}")
    degrees = _DEGREES[seed % len(_DEGREES)]
    flat, num_layers = make_plan(rng, [sum(of_group) for of_group in degrees])
    groups = []
    for group, of_group in zip(flat.groups, degrees, strict=True):
        ends = [sum(of_group[: i + 1]) for i in range(len(of_group))]
        parts = [group.flat_ranks[end - degree : end] for end, degree in zip(ends, of_group, strict=True)]
        joined = replace(group, ranks=tuple(part if len(part) > 1 else part[0] for part in parts))
        booked = tuple(replace(m, rank=joined.replica_of(m.rank).first) for m in group.microbatches)
        groups.append(replace(joined, microbatches=booked))
    plan = replace(flat, groups=tuple(groups), sequence_length=rng.randint(4, 9)).validate()
    kinds: list[FaultKind] = [
        rng.choice(("kill", "kill", "exit", "raise", "term")) for _ in range(num_faults)
    ]
    faults = tuple(
        Fault(
            2 + _STEPS_APART * i, rng.randrange(plan.num_ranks), kind, rng.random(), rng.choice(STEP_PHASES)
        )
        for i, kind in enumerate(kinds)
    )
    largest = max(group.degree for group in plan.groups)
    return Job(
        plan,
        num_layers,
        3 + _STEPS_APART * num_faults,
        tuple(faults),
        replaces=rng.random() < 0.7,
        num_nodes=1 if largest > 2 else 2,
        tied=rng.random() < 0.5,
        max_norm=rng.choice((None, 0.5)),
        seed=seed,
        patience_s=180.0,
    )


def make_small(*faults: Fault, num_steps: int = 6, seed: int = 7, num_nodes: int = 2) -> Job:
    """Ranks 0 and 2 are of node 0, rank 1 of node 1; or each of its own."""
    plan, num_layers = make_plan(random.Random(seed), (2, 1), offload=False)
    devices = tuple(
        Device(rank, f"node{rank % num_nodes}", rank // num_nodes) for rank in range(plan.num_ranks)
    )
    return Job(replace(plan, devices=devices), num_layers, num_steps, faults, num_nodes=num_nodes)
