"""Saves and loads of the same tensors by us and by torch.distributed.checkpoint, in turn."""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from zorselike import HeteroPipeline
from zorselike.checkpoint.layout import entry_name

from ..bench.host import forget_files
from .timed import NUM_RANKS, LoadCost, Subject, erase, load_counting, parts_of

OWN, NATIVE, SAFETENSORS = "zorselike", "DCP native", "DCP + safetensors"


@dataclass(frozen=True)
class Times:
    """Of one contestant, by repetition, of all ranks together."""

    save_s: tuple[float, ...]
    load_s: tuple[float, ...]


@dataclass(frozen=True)
class Contest:
    """As one rank saw it; the times are those of all ranks."""

    num_bytes: int
    """Of all ranks."""
    times: Mapping[str, Times]
    load_cost: LoadCost
    """Of loading what another plan saved."""

    def over(self, other: str, what: str) -> float:
        """Our speed over another's: the median of the repetitions' ratios."""
        ours, theirs = (getattr(self.times[name], what) for name in (OWN, other))
        return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def hold_contest(rank: int, subject: Subject, folder: Path, num_rounds: int) -> Contest:
    """Of one rank. `folder` holds, under `staged`, a checkpoint that another plan saved."""
    warnings.simplefilter("ignore")  # DCP's about how it is called.
    with subject.build(subject.sharded_plan()) as pipe:
        cost = load_counting(pipe, folder / "staged")
        tensors = _copy_tensors(pipe)
        saves = _list_saves(pipe, tensors)
        loads = _list_loads(pipe, tensors)
        expected = {name: tensor.to_local().clone() for name, tensor in tensors.items()}
        saved_s: dict[str, list[float]] = {name: [] for name in saves}
        loaded_s: dict[str, list[float]] = {name: [] for name in saves}
        for number in range(num_rounds + 1):
            names = list(saves)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                path = folder / f"{name.replace(' ', '-')}-{number}"
                times = (
                    _time(rank, path, saves[name]),
                    _time_load(rank, pipe, tensors, expected, name, path, loads[name]),
                )
                if rank == 0:
                    shutil.rmtree(path)
                if number:  # The first round warms up.
                    saved_s[name].append(times[0])
                    loaded_s[name].append(times[1])
        num_bytes = NUM_RANKS * sum(tensor.nbytes for tensor in expected.values())
    times_of = {name: Times(tuple(saved_s[name]), tuple(loaded_s[name])) for name in saves}
    return Contest(num_bytes, times_of, cost)


def _copy_tensors(pipe: HeteroPipeline) -> dict[str, DTensor]:
    """This rank's state as DCP wants it."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return {
        entry_name(part.held.name, part.held.kind): DTensor.from_local(
            part.locate().whole().clone(), mesh, [Shard(0)], run_check=False
        )
        for parts in parts_of(pipe).values()
        for part in parts
    }


def _list_saves(pipe: HeteroPipeline, tensors: dict[str, DTensor]) -> dict[str, Callable[[Path], object]]:
    return {
        OWN: pipe.save,
        NATIVE: lambda path: save(tensors, checkpoint_id=path),
        SAFETENSORS: lambda path: save(
            tensors, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True)
        ),
    }


def _list_loads(pipe: HeteroPipeline, tensors: dict[str, DTensor]) -> dict[str, Callable[[Path], object]]:
    return {
        OWN: pipe.load,
        NATIVE: lambda path: load(tensors, checkpoint_id=path),
        SAFETENSORS: lambda path: load(tensors, storage_reader=HuggingFaceStorageReader(str(path))),
    }


def _time(rank: int, path: Path, act: Callable[[Path], object]) -> float:
    if rank == 0:
        forget_files(path)
    dist.barrier()
    begin_s = time.monotonic()
    act(path)
    dist.barrier()
    return time.monotonic() - begin_s


def _time_load(
    rank: int,
    pipe: HeteroPipeline,
    tensors: Mapping[str, DTensor],
    expected: Mapping[str, Tensor],
    name: str,
    path: Path,
    load: Callable[[Path], object],
) -> float:
    """Of state that was zero before; raises if it is not what was saved."""

    def found() -> dict[str, Tensor]:
        if name != OWN:
            return {key: tensor.to_local() for key, tensor in tensors.items()}
        return {
            entry_name(part.held.name, part.held.kind): part.locate().whole()
            for parts in parts_of(pipe).values()
            for part in parts
        }

    erase(list(found().values()))
    seconds = _time(rank, path, load)
    loaded = found()
    for key, tensor in expected.items():
        if not torch.equal(loaded[key], tensor):
            raise AssertionError(f"{name} did not load {key} as it was saved")
    return seconds
