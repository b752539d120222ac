"""In which order a rank gives things back whose others may be gone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from zorselike.runtime.leaving import leave_alone


def test_threads_end_after_groups_and_before_memory() -> None:
    """A thread that waits for a GPU waits until what NCCL runs there has ended; memory is what it reads."""
    calls: list[str] = []
    everything = mock.MagicMock()
    assembly = everything.assembly
    assembly.device = torch.device("cpu")

    def note(name: str) -> Any:
        return lambda *args, **kwargs: calls.append(name) or True

    everything.connections.shut.side_effect = note("connections")
    assembly.groups.abandon.side_effect = note("groups")
    everything.checkpoints.abandon.side_effect = note("checkpoints")
    assembly.resources.memory.pool.close.side_effect = note("memory")
    leave_alone(
        assembly,
        everything.checkpoints,
        everything.totals,
        everything.alarm,
        everything.connections,
        beside=note("beside"),
    )
    assert calls == ["connections", "groups", "checkpoints", "beside", "memory"]
