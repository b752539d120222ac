"""From a folder to a pipeline: seconds beside those of reading its files, and memory of the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from zorselike import HeteroPipeline
from zorselike.hf import build_on_meta, load_weights

from ..bench.host import forget_files, read_peak, reset_peak
from .folders import Shape, uneven_plan

NUM_RANKS = 3
_PATIENCE_S = 120.0
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Loading:
    """As one rank saw it; the times are those of all ranks."""

    part_bytes: int
    """Of the weights that the rank holds."""
    peak_bytes: int | None
    """Above what there was before the pipeline was made; None where the system does not say."""
    make_s: float
    """To make the pipeline, without weights."""
    first_s: float
    """To load for the first time."""
    load_s: tuple[float, ...]
    read_s: tuple[float, ...]
    """To read as many bytes on each rank, without putting them anywhere."""

    @property
    def excess_mib(self) -> float | None:
        return None if self.peak_bytes is None else (self.peak_bytes - self.part_bytes) / 2**20


def load_folder(rank: int, shape: Shape, folder: Path, num_rounds: int) -> Loading:
    """Of one rank, on a folder of this shape; every load and read finds nothing in memory."""
    model = build_on_meta(folder)
    before = reset_peak()
    begin_s = time.monotonic()
    # Beside other work a rank is late before it is lost.
    with HeteroPipeline(model, uneven_plan(shape), skip_init=True, silence_s=_PATIENCE_S) as pipe:
        make_s = time.monotonic() - begin_s
        load = partial(load_weights, pipe, model, folder)
        first_s = _time(rank, folder, load)
        peak = read_peak()
        parts = [part for named in pipe._assembly.state.ministages.values() for part in named.parts()]
        part_bytes = sum(part.held.num_elements * part.dtype.itemsize for part in parts)
        all_bytes: list[int] = [0] * NUM_RANKS
        dist.all_gather_object(all_bytes, part_bytes)
        starts = list(itertools.accumulate(all_bytes, initial=0))
        read = partial(_read_bytes, folder, starts[rank], starts[rank + 1])
        seconds: dict[str, list[float]] = {"load": [], "read": []}
        for number in range(num_rounds):
            for name, act in sorted({"load": load, "read": read}.items(), reverse=bool(number % 2)):
                seconds[name].append(_time(rank, folder, act))
    above = None if before is None or peak is None else peak - before
    return Loading(part_bytes, above, make_s, first_s, tuple(seconds["load"]), tuple(seconds["read"]))


def _time(rank: int, folder: Path, act: Callable[[], object]) -> float:
    if rank == 0:
        forget_files(folder)
    dist.barrier()
    begin_s = time.monotonic()
    act()
    dist.barrier()
    return time.monotonic() - begin_s


def _read_bytes(folder: Path, start: int, stop: int) -> None:
    """Reads a range of a folder's safetensors files, laid end to end."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        if start < size and stop > 0:
            with path.open("rb", buffering=0) as file:
                file.seek(max(0, start))
                left = min(size, stop) - max(0, start)
                while left > 0 and (num_read := file.readinto(buffer[: min(left, _CHUNK_BYTES)])):
                    left -= num_read
        start, stop = start - size, stop - size


@dataclass(frozen=True)
class FirstStep:
    """Of one rank with layers so small that they cost nothing."""

    make_s: float
    first_s: float
    second_s: float

    @property
    def extra_s(self) -> float:
        """What there is before the second step."""
        return self.make_s + self.first_s - self.second_s


def step_first(rank: int, shape: Shape, folder: Path) -> FirstStep:
    """From a folder to the second step."""
    model = build_on_meta(folder)  # Where transformers is imported.
    dist.barrier()
    begin_s = time.monotonic()
    with HeteroPipeline(model, uneven_plan(shape), skip_init=True, silence_s=_PATIENCE_S) as pipe:
        load_weights(pipe, model, folder)
        made_s = time.monotonic()
        seconds = []
        for _ in range(2):
            rows = torch.randint(shape.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
            begun_s = time.monotonic()
            _ = pipe.step_global(rows[:, :-1], rows[:, 1:]).loss
            seconds.append(time.monotonic() - begun_s)
    return FirstStep(made_s - begin_s, *seconds)
