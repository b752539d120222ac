"""Rows of a step depend on seed and step alone, whatever the plan, the workers or the start."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Sequence
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RunRanks

from zorselike import ConfigError
from zorselike.train.config.config import DataLoader
from zorselike.train.data.corpus import Corpus
from zorselike.train.data.loader import RowLoader, StepDataset, _prepare_worker
from zorselike.train.data.row_order import permute, row_at

GLOBAL_BATCH = 6


@given(st.integers(1, 400), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(index, size=size, key=key) for index in range(size)) == list(range(size))


def test_every_epoch_holds_every_row_in_its_own_order() -> None:
    rows = [row_at(position, num_rows=50, seed=3) for position in range(150)]
    epochs = [rows[:50], rows[50:100], rows[100:]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert rows != [row_at(position, num_rows=50, seed=4) for position in range(150)]


def test_the_order_is_for_ever() -> None:
    """A run goes on with another version of everything; change this and it reads other rows."""
    order = [row_at(position, num_rows=10, seed=3) for position in range(12)]
    assert order == [2, 5, 7, 9, 4, 1, 6, 8, 0, 3, 5, 8]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "x.bin"
    np.arange(1, 1002, dtype="uint16").tofile(path)
    return Corpus([path], dtype="uint16", seq_len=10, vocab_size=2000, source="test")


def make_loader(
    corpus: Corpus, inputs: Sequence[int], targets: Sequence[int], *, workers: int = 0
) -> RowLoader:
    dataset = StepDataset(corpus, global_batch=GLOBAL_BATCH, seed=1, input_rows=inputs, target_rows=targets)
    return RowLoader(dataset, DataLoader(num_workers=workers))


def expected_row(corpus: Corpus, step: int, row: int) -> list[int]:
    position = row_at(step * GLOBAL_BATCH + row, num_rows=corpus.num_rows, seed=1)
    return list(range(position * 10 + 1, position * 10 + 12))


@pytest.mark.parametrize(("device", "pins"), [(None, False), ("cpu", False), ("cuda", True)])
def test_memory_is_pinned_for_gpus_alone(corpus: Corpus, device: str | None, pins: bool) -> None:
    dataset = StepDataset(corpus, global_batch=GLOBAL_BATCH, seed=1, input_rows=[0], target_rows=[0])
    settings = DataLoader(num_workers=0, pin_memory=True)
    loader = RowLoader(dataset, settings, device=None if device is None else torch.device(device))
    assert loader._build_loader().pin_memory == pins


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_those_of_the_global_batch(corpus: Corpus, workers: int) -> None:
    loader = make_loader(corpus, [0, 5], [1, 5, 2], workers=workers)
    for step, (inputs, targets, keywords) in enumerate(islice(iter(loader), 4)):
        assert inputs is not None and targets is not None
        assert inputs.dtype is torch.int64 and not keywords
        assert inputs.tolist() == [expected_row(corpus, step, row)[:-1] for row in (0, 5)]
        assert targets.tolist() == [expected_row(corpus, step, row)[1:] for row in (1, 5, 2)]
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_without_rows_get_none(corpus: Corpus, workers: int) -> None:
    loader = make_loader(corpus, [], [3], workers=workers)
    inputs, targets, _ = next(iter(loader))
    assert inputs is None
    assert targets is not None and targets.shape == (1, 10)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_after_the_rows_it_has_seen(corpus: Corpus, workers: int) -> None:
    """Under another plan, even with another global batch, no row comes twice and none is left out."""
    whole = make_loader(corpus, range(GLOBAL_BATCH), range(GLOBAL_BATCH))
    rows = torch.cat([known(inputs) for inputs, *_ in islice(iter(whole), 5)])
    smaller = StepDataset(
        corpus, global_batch=4, seed=1, input_rows=[3], target_rows=[0, 1], rows_before=3 * GLOBAL_BATCH
    )
    after = RowLoader(smaller, DataLoader(num_workers=workers))
    for step, (inputs, targets, _) in enumerate(islice(iter(after), 3)):
        first = 3 * GLOBAL_BATCH + 4 * step
        assert torch.equal(known(inputs)[0], rows[first + 3])
        assert torch.equal(known(targets)[:, :-1], rows[first : first + 2, 1:])
    for loader in (whole, after):
        loader.close()


def known(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_rows_raise_their_own_error(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "x.bin"
    np.full(100, 7, dtype="uint16").tofile(path)
    corpus = Corpus([path], dtype="uint16", seq_len=10, vocab_size=5, source="test")
    with pytest.raises(ConfigError, match=r"x\.bin: token 7"):
        next(iter(make_loader(corpus, [0], [], workers=workers)))


def test_workers_outlive_signals_to_the_job_and_end_with_the_loader(corpus: Corpus) -> None:
    loader = make_loader(corpus, [0], [0], workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = active_children()
    assert worker.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    list(islice(batches, 10))
    assert worker.is_alive()
    loader.close()
    assert not active_children()


def be_killed_with_a_worker(rank: int, world_size: int, corpus: Corpus) -> None:
    loader = make_loader(corpus, [0], [0], workers=1)
    next(iter(loader))
    (worker,) = active_children()
    print(f"worker {worker.pid}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_ends_with_its_killed_rank(run_ranks: RunRanks, corpus: Corpus) -> None:
    (ended,) = run_ranks(be_killed_with_a_worker, 1, corpus, init=False, allow_exit=True)
    assert ended.code == -signal.SIGKILL
    worker = int(ended.stdout.split()[1])
    deadline = time.monotonic() + 30
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def collect_in_a_worker(rank: int, world_size: int) -> bool:
    """Whether what was garbage before is still there once a worker has looked for garbage."""

    class Circle:
        def __init__(self) -> None:
            self.own = self

    is_there = weakref.ref(Circle())
    _prepare_worker(0)
    gc.collect()
    return is_there() is not None


def test_a_worker_leaves_garbage_of_its_rank_alone(run_ranks: RunRanks) -> None:
    """Of a process group it would wait for threads that were not forked."""
    assert run_ranks(collect_in_a_worker, 1) == [True]
