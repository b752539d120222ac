"""Paths and progress that the commands for checkpoints share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from zorselike.checkpoint.folder import locate
from zorselike.checkpoint.layout import step_of
from zorselike.checkpoint.verify import OnBytes

CheckpointPath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]


def find_checkpoint(path: str) -> Path:
    """The folder of one step; says on standard error which newer ones were passed over."""
    return find_newest_of(path)[0]


def find_newest_of(path: str) -> tuple[Path, list[Path]]:
    """As `find_checkpoint`, with the newer ones that were committed and are no longer complete."""
    found, skipped = locate(Path(path))
    for one in skipped:
        print(f"passed over {one.reason}", file=sys.stderr)
    return found, [one.path for one in skipped if step_of(one.path.name) is not None]


@contextmanager
def show_bytes_done(what: str, total: int) -> Iterator[OnBytes]:
    """A bar on standard error, if that is a terminal; removed afterwards."""
    with tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        disable=None,
        leave=False,
        dynamic_ncols=True,
    ) as bar:
        yield bar.update
