"""Long copies that let others in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zorselike.runtime.memory import turns
from zorselike.runtime.memory.streams import Event, Stream


class Told(Stream):
    """Writes down what it is given."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    @contextmanager
    def use(self) -> Iterator[None]:
        self.log.append(f"{self.name} copies")
        yield

    def record(self) -> Event:
        self.log.append(f"after {self.name}")
        return Event()

    def wait(self, event: Event) -> None:
        self.log.append(f"{self.name} waits")


def copy(sizes: list[int]) -> list[str]:
    """What two streams are given for copies of so many bytes."""
    log: list[str] = []
    sources = [torch.arange(size).to(torch.uint8) for size in sizes]
    targets = [torch.full_like(source, 255) for source in sources]
    copies = zip(targets, sources, strict=True)
    turns.copy_in_turns(copies, Told("first", log), Told("second", log))
    assert all(map(torch.equal, targets, sources))
    return log


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 16))
def test_everything_is_copied_and_the_first_stream_is_last(sizes: list[int], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "PIECE_BYTES", piece)
        log = copy(sizes)
    assert log.count("first copies") + log.count("second copies") >= -(-sum(sizes) // piece)
    current = "first"
    for before, entry in zip(["", *log], log, strict=False):
        if entry.endswith("copies"):
            assert entry == f"{current} copies"
        elif entry.endswith("waits"):
            assert before == f"after {current}", "it waits for the one that had its turn"
            current = entry.removesuffix(" waits")
    assert current == "first"


def test_what_is_short_shares_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PIECE_BYTES", 8)
    assert copy([3, 3, 3]) == [
        "first copies",
        *["after first", "second waits", "second copies"],
        *["after second", "first waits"],
    ]
    assert copy([]) == []
