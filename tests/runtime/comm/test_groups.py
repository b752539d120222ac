"""How a pipeline's groups end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from zorselike.runtime.comm import ranks
from zorselike.runtime.comm.ranks import Groups, Ranks


def test_two_threads_abort_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that frees the other, and that one as it leaves."""
    groups, calls = Groups(Ranks(0, (0,))), []
    begun, may_end = threading.Event(), threading.Event()

    def abort(doomed: list[Any], *, deadline_s: float) -> bool:
        calls.append(list(doomed))
        assert groups.is_aborted
        begun.set()
        return may_end.wait(10.0)

    monkeypatch.setattr(ranks, "abort_groups", abort)
    monkeypatch.setattr(ranks, "has_nccl", lambda group: group == "nccl")
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda group: None)
    groups._made = ["gloo", "nccl"]  # type: ignore[list-item]
    frees = threading.Thread(target=groups.abort)
    frees.start()
    assert begun.wait(10.0)
    threading.Timer(0.2, may_end.set).start()
    assert groups.abandon() and may_end.is_set()
    frees.join()
    assert calls == [["nccl"]] and not groups._made


def test_where_nothing_is_aborted_what_is_computed_counts() -> None:
    groups = Groups(Ranks(0, (0,)))
    assert groups.abort() and not groups.is_aborted
