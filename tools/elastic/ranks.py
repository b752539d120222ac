"""What one process of a job of faults does: trains a small model, and notes what it saw."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.elastic.contract import Control, Generation, Worker
from zorselike.elastic.deciding.decisions import Planner
from zorselike.elastic.held import Held
from zorselike.elastic.meeting import Meeting, make_member
from zorselike.elastic.meeting.environment import listen
from zorselike.elastic.membership.round import Settings
from zorselike.elastic.pipeline import ElasticPipeline
from zorselike.elastic.replicas import Replicas
from zorselike.elastic.running import Running
from zorselike.errors import CheckpointError
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

from .diary import Diary, Writer
from .injection import LINK, Fault, Injector
from .partition import enter_namespace

TOKEN = "token of a job on this machine"
HOST = "127.0.0.1"
VOCABULARY, LENGTH, DIM = 13, 4, 8


@dataclass(frozen=True)
class Job:
    """What is trained, and what is done to it."""

    plan: Plan
    num_layers: int
    num_steps: int
    faults: tuple[Fault, ...] = ()
    replaces: bool = False
    """Whether who is lost is replaced by a new process."""
    num_nodes: int = 2
    mirror_every: int | None = 1
    mirror_share: float = 0.1
    """Of the time, where `mirror_every` is None."""
    tied: bool = True
    max_norm: float | None = None
    param_dtype: torch.dtype | None = None
    silence_s: float = 4.0
    plans: tuple[tuple[int, Plan], ...] = ()
    """Plans that the job changes to, after so many steps."""
    seed: int = 0
    patience_s: float = 100.0
    """A job in which nothing has happened for so long hangs."""
    num_spares: int = 0
    slows: tuple[int, int, float] | None = None
    """A member whose layers take so many seconds longer after so many steps: it, the steps, the seconds."""
    planner: Planner | None = None
    """Waited for after each step, so that what follows does not depend on its speed."""
    hosts: tuple[str, ...] = ()
    """Addresses of two nodes, in network namespaces of their own (`partition`); all on this machine's if
    empty."""
    first_alone: bool = False
    """Whether of three members the first, who leads, has a node for itself, or the last."""
    saves_at: tuple[int, ...] = ()
    """Steps after which a checkpoint is saved, apart from those in whose save something happens."""

    def make_model(self) -> nn.Module:
        return build_model(self)

    def make_options(self) -> dict[str, Any]:
        """What a pipeline trains it with."""
        dtype = self.param_dtype
        return {
            "optimizer": make_optimizer,
            "max_norm": self.max_norm,
            "param_dtype": dtype,
            "seed": self.seed,
        }

    def make_rows(self, rows_seen: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the global batch after so many rows."""
        return read_rows(self, rows_seen)

    def place_of(self, member: int) -> tuple[int, int]:
        """Node and local rank of a process."""
        node = (member + self.first_alone) // 2 % 2 if self.hosts else member % self.num_nodes
        return node, member // self.num_nodes

    def host_of(self, member: int) -> str:
        return self.hosts[self.place_of(member)[0]] if self.hosts else HOST

    def enter_node(self, member: int) -> None:
        """In a process of its own, before anything else."""
        if self.hosts:
            enter_namespace(self.place_of(member)[0])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LINK if self.hosts else "lo")


@dataclass
class Report:
    """What one process that has come to its end has seen, beside its diary."""

    member: int
    diary: Diary = field(default_factory=Diary)
    """Read by who has started it."""
    saved: list[int] = field(default_factory=list)
    """Steps of which this rank has seen a checkpoint."""
    usage: list[tuple[int, int, int]] = field(default_factory=list)
    """Open files, threads and MiB in memory, as each generation's first step is done."""
    summaries: list[str] = field(default_factory=list)
    """What was decided for each."""
    plans: list[str] = field(default_factory=list)
    """What was run in each, as TOML."""
    estimated_s: list[float | None] = field(default_factory=list)
    """Time of a step of each, where a planner has found it."""
    num_steps: int = 0
    num_lost: int = 0
    switch_s: float = 0.0
    """What a change of plan is taken to cost."""
    interval: int = 1
    """Steps from one mirror to the next, at the end."""
    at_most_lost: int = 0
    """Steps that a loss would undo, at the most that was ever said."""
    num_retries: int = 0
    error: str | None = None


class Layer(nn.Module):
    """Of odd shapes, so that shards are ragged and some are empty."""

    waits_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.waits_s)
        return x + self.down(torch.tanh(self.up(self.norm(x.cumsum(1)))))


class Model(nn.Module):
    """On TorchTitan's convention: missing parts are None."""

    def __init__(self, num_layers: int, *, tied: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(num_layers)})
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


def build_model(job: Job) -> nn.Module:
    """On the meta device, in fp64 unless it computes in less. With tensor-parallel replicas one with heads,
    which they cut."""
    with torch.device("meta"):
        model = Llama(_with_heads(job)) if job.plan.has_replicas else Model(job.num_layers, tied=job.tied)
        return model.double() if job.param_dtype is None else model


def _with_heads(job: Job) -> LlamaConfig:
    """Of widths that few degrees divide."""
    return LlamaConfig(
        dim=16,
        num_layers=job.num_layers,
        num_heads=8,
        num_kv_heads=4,
        ffn_hidden=13,
        vocab_size=VOCABULARY,
        max_seq_len=32,
        tie_embeddings=job.tied,
    )


def read_rows(job: Job, rows_seen: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the global batch after so many rows."""
    generator = torch.Generator().manual_seed(1000 * job.seed + rows_seen)
    shape = (job.plan.global_batch, job.plan.sequence_length or LENGTH)
    inputs = torch.randint(VOCABULARY, shape, generator=generator)
    return inputs, torch.randint(VOCABULARY, shape, generator=generator)


def make_optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def train_alone(job: Job) -> list[float]:
    """The losses of the run to which nothing happens, of one process."""
    rows = tuple(Microbatch(0, row, row + 1) for row in range(job.plan.global_batch))
    modules = [name for ministage in job.plan.ministages for name in ministage.modules]
    plan = Plan(job.plan.global_batch, (Group((0,), rows),), (Ministage(0, tuple(modules)),))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    pipe = HeteroPipeline(job.make_model(), plan, **job.make_options())
    schedulers = pipe.lr_schedulers(make_scheduler)
    losses = []
    for _ in range(job.num_steps):
        losses.append(pipe.step_global(*job.make_rows(pipe.rows_seen)).loss)
        schedulers.step()
    pipe.close()
    dist.destroy_process_group()
    return losses


def train(job: Job, member: int, folder: Path, port: int, contact: Sequence[int]) -> Report:
    """One process's whole part."""
    report = Report(member)
    number, local_rank = job.place_of(member)
    node = f"node{number}"
    os.environ.update(ZORSELIKE_NODE=node)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    host = job.host_of(member)
    lease = Lease(folder)
    listener = listen(host, 0 if contact else port)
    written = folder / f"new-port{member}"
    written.write_text(str(listener.getsockname()[1]))
    written.rename(folder / f"port{member}")

    def meet(worker: Worker) -> Control:
        return Meeting(
            worker,
            make_member(host, listener.getsockname()[1], node, local_rank, "cpu", 2**34),
            listener,
            TOKEN,
            num_founding=None if contact else job.plan.num_ranks + job.num_spares,
            contact=[(job.host_of(0), other) for other in contact],
            settings=Settings(silence_s=job.silence_s),
            holds_lease=None if job.hosts else lambda: lease.is_held(pipe.generation),
        )

    pipe = ElasticPipeline(
        job.make_model,
        job.plan,
        meeting=meet,
        planner=job.planner,
        device="cpu",
        silence_s=job.silence_s,
        mirror_every=job.mirror_every,
        mirror_share=job.mirror_share,
        replan_on_drift=job.slows is not None,
        **job.make_options(),
    )
    threading.Thread(target=describe_when_asked, args=(pipe, folder), daemon=True).start()
    note_sums(job, folder / f"sums{member}")
    writer = Writer(folder / f"diary{member}", member, pipe._control.id)
    keep_diary(pipe, writer, lease)
    signal.signal(signal.SIGTERM, lambda *_: pipe.leave())
    injector = Injector(pipe, job.faults, folder)
    schedulers = pipe.lr_schedulers(make_scheduler)
    generation = 0
    plans = dict(job.plans)
    while pipe.wait() and pipe.num_steps < job.num_steps:
        step = pipe.num_steps
        if (injector.arm_save() or step in job.saves_at) and not save(pipe, folder / "saved", report):
            continue
        if step in plans and pipe.plan != plans[step]:
            pipe.change_plan(plans.pop(step))
        if job.slows is not None and job.slows[0] == member and step >= job.slows[1]:
            Layer.waits_s = job.slows[2]
        injector.arm()
        result = pipe.step_global(*job.make_rows(pipe.rows_seen))
        if not result.is_done:
            continue
        writer.lose(pipe.num_steps - 1, result.loss)
        report.at_most_lost = max(report.at_most_lost, pipe.at_most_lost)
        report.interval = max(1, pipe.at_most_lost)
        if (ahead := pipe.worker.leader.contingencies) is not None:
            ahead.wait(60)
        schedulers.step()
        if result.generation != generation:
            generation = result.generation
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            usage = len(list(Path("/dev/fd").iterdir())), threading.active_count(), resident >> 20
            report.usage.append(usage)
            report.summaries.append(pipe.summary)
            report.plans.append(pipe.plan.format())
            report.estimated_s.append(pipe.plan.estimates.iteration_s)
    report.switch_s = pipe.worker.leader.switch_s
    report.num_steps, report.num_lost, report.num_retries = (
        pipe.num_steps,
        pipe.num_lost,
        pipe.num_failed_starts,
    )
    pipe.close()
    return report


def save(pipe: ElasticPipeline, folder: Path, report: Report) -> bool:
    """Whether there is nothing to be seen to before the next step."""
    generation = pipe.generation
    try:
        done = pipe.save(folder)
    except CheckpointError as error:  # One rank's own failure: it is told, and training goes on.
        print(f"not saved: {error}", flush=True)
        return True
    if done is not None and done.path is not None:
        report.saved.append(pipe.num_steps)
    return pipe.generation == generation


class Lease:
    """Of a folder of checkpoints on a disk that all processes see: of whoever began the newest generation."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lease"

    def pass_on(self, generation: int) -> None:
        """To a generation that runs; each of its ranks says so."""
        new = self._path.with_name(f"new-lease{os.getpid()}")
        new.write_text(str(generation))
        if generation > self._newest():
            new.replace(self._path)

    def is_held(self, generation: int) -> bool:
        """Whether no later generation has begun than this one."""
        return self._newest() <= generation

    def _newest(self) -> int:
        return int(self._path.read_text()) if self._path.exists() else 0


def keep_diary(pipe: ElasticPipeline, writer: Writer, lease: Lease) -> None:
    """Has it noted when generations are handed over, formed and run, and when a step is done, with its
    mirrors: what follows may be a planned change."""
    control, form = pipe._control, Running.form
    hand_over, fill, end_step = control.next_generation, control.filled, control.step_done

    def next_generation() -> Generation:
        generation = hand_over()
        writer.enter(generation)
        return generation

    def filled() -> None:
        fill()
        lease.pass_on(pipe.generation)
        writer.run(pipe.generation)

    def step_done(step: int) -> bool:
        writer.finish(step, pipe.generation)
        return end_step(step)

    def form_in_time(running: Running, *arguments: Any) -> None:
        began_s = time.monotonic()
        form(running, *arguments)
        writer.form(running.number, time.monotonic() - began_s)

    control.next_generation, control.filled, control.step_done = next_generation, filled, step_done  # type: ignore[method-assign]
    Running.form = form_in_time  # type: ignore[method-assign, assignment]


def note_sums(job: Job, path: Path) -> None:
    """Has a sum over all bits of each state that this rank copies written to a file: of which generation and
    step, of which of how many ranks, and the sum. Those of all ranks together are the same for any plan."""
    inner = Replicas._take_own

    def take_own(self: Replicas, step: int, facts: Any) -> None:
        inner(self, step, facts)
        held = next(held for held in reversed(self.held) if held.origin.rank == self._rank)
        with path.open("a") as file:
            file.write(json.dumps([*held.origin, sum_bits(held)]) + "\n")

    Replicas._take_own = take_own  # type: ignore[method-assign]


def sum_bits(held: Held) -> int:
    """Of every element, a number made of its bits, its tensor's name and its place in it; added up, modulo
    2^64."""
    total = 0
    for saved, values in held.tensors():
        box = saved.box
        name = box.name.replace("output.weight", "tok_embeddings.weight")  # May be tied.
        place = torch.zeros((), dtype=torch.int64)
        for start, stop, size in zip(box.starts, box.stops, saved.shape, strict=True):
            place = place.unsqueeze(-1) * size + torch.arange(start, stop)
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        mixed = values.reshape(place.shape).contiguous().view(kind).long() * 0x9E3779B97F4A7C1 + place
        mixed = (mixed ^ (mixed >> 29)) * (zlib.crc32(f"{name} {box.kind}".encode()) | 1)
        total += int((mixed ^ (mixed >> 31)).sum())
    return total % (1 << 64)


def describe_when_asked(pipe: ElasticPipeline, folder: Path) -> None:
    """What membership knows, once the job has hung."""
    while not (folder / "describe").exists():
        time.sleep(1.0)
    print(json.dumps(pipe._control.describe(), indent=1), flush=True)  # type: ignore[attr-defined]
