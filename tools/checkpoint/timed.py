"""Pipelines whose checkpoints are timed, on two CPU ranks, and what they cost in memory and bytes read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.models import module_names
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime import arguments
from zorselike.runtime.ministage.named_state import Part
from zorselike.runtime.state.load import Loader

from ..bench.host import read_peak, reset_peak

NUM_RANKS = 2
_HEAD_DIM = 64
_PATIENCE_S = 120.0
_STATE_BYTES = 12
"""Of a parameter: its fp32 value and two moments."""


@dataclass(frozen=True)
class Subject:
    """A Llama of about so much state, and its batch."""

    megabytes: int
    num_layers: int
    num_rows: int
    sequence: int

    @property
    def config(self) -> LlamaConfig:
        # A layer has 13 dim^2 parameters, embeddings and output 5 dim^2 each.
        dim = (self.megabytes * 1e6 / _STATE_BYTES / (13 * self.num_layers + 10)) ** 0.5
        num_heads = max(1, round(dim / _HEAD_DIM))
        return LlamaConfig(
            dim=num_heads * _HEAD_DIM,
            num_layers=self.num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            ffn_hidden=3 * num_heads * _HEAD_DIM,
            vocab_size=5 * num_heads * _HEAD_DIM,
            max_seq_len=self.sequence,
        )

    def sharded_plan(self) -> Plan:
        """Both ranks in one group, so that each has half of every tensor."""
        half = self.num_rows // 2
        rows = [Microbatch(0, r, r + 1) for r in range(half)]
        rows += [Microbatch(1, r, r + 1) for r in range(half, self.num_rows)]
        return self._plan((Group((0, 1), tuple(rows)),), [0, 0, 0])

    def staged_plan(self) -> Plan:
        """Each rank a group, with two ministages."""
        groups = [Group((n,), tuple(Microbatch(n, r, r + 1) for r in range(self.num_rows))) for n in (0, 1)]
        return self._plan(tuple(groups), [0, 1, 0, 1])

    def _plan(self, groups: tuple[Group, ...], group_of: list[int]) -> Plan:
        names, count = module_names(self.config), len(group_of)
        cuts = [len(names) * i // count for i in range(count + 1)]
        ministages = tuple(
            Ministage(group, tuple(names[cuts[i] : cuts[i + 1]])) for i, group in enumerate(group_of)
        )
        return Plan(self.num_rows, groups, ministages, sequence_length=self.sequence)

    def build(self, plan: Plan) -> HeteroPipeline:
        """A pipeline that has taken one step, so that there are moments."""
        with torch.device("meta"):
            model = Llama(self.config)
        # Beside other work a rank is late before it is lost.
        with patch.object(arguments, "find_patience", lambda processes: _PATIENCE_S):
            pipe = HeteroPipeline(
                model, plan, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4, foreach=False)
            )
        self.step(pipe)
        return pipe

    def step(self, pipe: HeteroPipeline) -> None:
        generator = torch.Generator().manual_seed(pipe.num_steps)
        shape = (self.num_rows, self.sequence + 1)
        rows = torch.randint(self.config.vocab_size, shape, generator=generator)
        pipe.step_global(rows[:, :-1], rows[:, 1:])


def parts_of(pipe: HeteroPipeline) -> dict[int, list[Part]]:
    """What this rank holds of each of its ministages."""
    return {i: named.parts() for i, named in pipe._assembly.state.ministages.items()}


def num_bytes_of(parts: list[Part]) -> int:
    return sum(part.held.num_elements * part.dtype.itemsize for part in parts)


@torch.no_grad()
def erase(tensors: list[Tensor]) -> None:
    """Makes sure that what is found there later was loaded."""
    for tensor in tensors:
        tensor.zero_()


# -- what a load costs -----------------------------------------------------------------------


@dataclass(frozen=True)
class LoadCost:
    """Of one rank, loading what another plan saved."""

    read_bytes: int
    box_bytes: int
    num_slices: int
    """In which its boxes lie."""
    peak_bytes: int | None
    """Of memory above what was there before; None where the system does not say."""
    ministage_bytes: int
    """State of its largest ministage."""

    @property
    def excess_mib(self) -> float:
        """Read beside what was wanted, a slice."""
        return (self.read_bytes - self.box_bytes) / self.num_slices / 2**20

    @property
    def peak_ministages(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / self.ministage_bytes


def load_counting(pipe: HeteroPipeline, folder: Path) -> LoadCost:
    """Loads the newest checkpoint of a folder; collective."""
    parts = parts_of(pipe)
    boxes = [part.held for own in parts.values() for part in own]
    sizes = [num_bytes_of(own) for own in parts.values()]
    del parts  # They would keep what is replaced.
    with _catching_loaders() as loaders:
        before = reset_peak()
        pipe.load(folder)
        peak = read_peak()
    manifest = loaders[-1].manifest
    num_slices = sum(
        record.box.intersect(box) is not None
        for box in boxes
        for _, record in manifest.slices_of(box.name, box.kind)
    )
    return LoadCost(
        loaders[-1].num_bytes_read,
        sum(sizes),
        num_slices,
        None if before is None or peak is None else peak - before,
        max(sizes),
    )


@contextmanager
def _catching_loaders() -> Iterator[list[Loader]]:
    loaders: list[Loader] = []
    load = Loader.load

    def catch(self: Loader) -> None:
        loaders.append(self)
        load(self)

    with patch.object(Loader, "load", catch):
        yield loaders
