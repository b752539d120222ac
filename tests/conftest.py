"""Fixtures that every package's tests share."""

from __future__ import annotations

import pytest
import ranks
import torch

torch.set_num_threads(1)  # a child forked after OpenMP made its threads hangs where it uses them


@pytest.fixture
def run_ranks() -> ranks.RunRanks:
    """`run_ranks(fn, world_size, *args, timeout=120)`; see `tests/ranks.py`."""
    return ranks.run_ranks
