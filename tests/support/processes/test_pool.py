"""Ranks that stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from ranks import RankError


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()


def meet(rank: int, world_size: int, number: int) -> tuple[int, int, str]:
    found = torch.tensor(rank + number)
    dist.all_reduce(found)
    before = os.environ.get("OF_AN_EARLIER_ONE", "")
    os.environ["OF_AN_EARLIER_ONE"] = str(number)
    return os.getpid(), int(found), before + os.environ["WORLD_SIZE"]


def end(rank: int, world_size: int, how: str) -> Any:
    if rank == 1 and how == "raises":
        raise KeyError("a sample")
    if rank == 1 and how == "exits":
        os._exit(3)
    if how == "waits":
        dist.barrier() if rank else os.read(os.pipe()[0], 1)


def patch(rank: int, world_size: int) -> None:
    dist.all_reduce = dist.barrier  # type: ignore[assignment]


def test_what_stays_patched_is_an_error(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"patch leaves torch\.distributed patched: \['all_reduce'\]"):
        pool.run(patch, 1)


def test_more_ranks_than_there_are(pool: Pool) -> None:
    assert [found for _, found, _ in pool.run(meet, 4, 0)] == [6] * 4


def test_what_cannot_be_sent_is_inherited(pool: Pool) -> None:
    (first, *_), *_ = pool.run(meet, 1, 0)
    assert first not in pool.run(lambda rank, _: os.getpid(), 2)


def test_they_are_the_same_and_their_groups_others(pool: Pool) -> None:
    (first, three, _), *_ = pool.run(meet, 3, 10)
    (again, two, after), *_ = pool.run(meet, 2, 20)
    assert first == again
    assert (three, two) == (33, 41)
    assert after == "2"


@pytest.mark.parametrize(
    ("how", "error", "why"),
    [("raises", KeyError, "a sample"), ("exits", RankError, "rank 1"), ("waits", RankError, "did not end")],
)
def test_after_a_failure_they_are_others(pool: Pool, how: str, error: type[Exception], why: str) -> None:
    (first, *_), *_ = pool.run(meet, 2, 0)
    with pytest.raises(error, match=why):
        pool.run(end, 2, how, timeout=1)
    (other, found, _), *_ = pool.run(meet, 2, 0)
    assert other != first and found == 1
