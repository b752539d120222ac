"""What ranks that load do together: who cannot go on, and what each has found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zorselike.errors import CheckpointError
from zorselike.runtime.state.pipeline_state import PipelineState
from zorselike.text.wording import first_line


def gather_by_rank(state: PipelineState, value: Any) -> list[Any]:
    """By rank of the plan, on every rank. Collective."""
    values: list[Any] = [None] * state.ranks.world_size
    dist.all_gather_object(values, (state.ranks.rank, value), group=state.control)
    return [own for _, own in sorted(values, key=lambda entry: entry[0])]


def do_together(state: PipelineState, path: Path, work: Callable[[], object]) -> None:
    """Does it on every rank. Collective.

    Raises:
        CheckpointError: On every rank alike: on some rank there was one, or an `OSError`.
    """
    own = None
    try:
        work()
    except CheckpointError as error:
        own = str(error)
    except OSError as error:
        own = f"{error.filename or path}: {error.strerror or first_line(error)}"
    errors = [error for error in gather_by_rank(state, own) if error is not None]
    if errors:
        raise CheckpointError(own or errors[0])
