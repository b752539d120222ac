"""Where a run's numbers go beside its log: a CSV file, TensorBoard events, wandb; all by the same names."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from zorselike.errors import ConfigError
from zorselike.text.wording import first_line
from zorselike.train.config.config import Config

logger = logging.getLogger("zorselike")

VALIDATION_LOSS = "validation_metrics/loss"

ELASTIC = (
    "elastic/generation",
    "elastic/num_ranks",
    "elastic/num_lost",
    "elastic/num_left",
    "elastic/num_arrived",
    "elastic/steps_lost",
    "elastic/pause(s)",
)
"""Of the step from which a job goes on when its members or its plan have changed."""

Values = Mapping[str, float]


class Writer(Protocol):
    """Takes numbers of a step by name; steps never go back, and one may come again with further numbers."""

    def write(self, step: int, values: Values) -> None:
        """Errors are for the caller to judge: numbers are worth less than the run."""

    def close(self) -> None:
        """Flushes and ends."""


class CsvWriter:
    """One line a step; the columns are the names of all numbers so far, and `later`."""

    def __init__(self, path: Path, *, later: Sequence[str] = (), after: int | None = None) -> None:
        """`after`: goes on with a file that is there, after the row of this step; what follows that is cut
        off. Unless given, the file begins anew."""
        self._path = path
        header, rows = (b"", []) if after is None else _read_rows(path, up_to=after)
        # Unbuffered: for who watches, and for a run that is killed.
        self._file = path.open("r+b" if rows else "wb", buffering=0)
        self._later = later
        self._columns = header.decode().rstrip().split(",") if rows else []
        self._row: dict[str, float | str] = {}
        self._row_start = self._end = 0
        """Where the newest row begins (the first one with the header), and ends: what comes after that was
        not written whole."""
        if rows:
            values = zip(self._columns, rows[-1].decode().rstrip().split(","), strict=True)
            self._row = {name: value for name, value in values if value} | {
                "step": int(rows[-1].split(b",")[0])
            }
            self._end = len(header) + sum(map(len, rows))
            self._row_start = self._end - len(rows[-1]) if len(rows) > 1 else 0
            self._file.truncate(self._end)

    @property
    def row(self) -> Mapping[str, float | str]:
        """The newest."""
        return self._row

    def write(self, step: int, values: Values) -> None:
        names = dict.fromkeys(["step", *values, *self._later])
        if new := [name for name in names if name not in self._columns]:
            self._add_columns(new)
        if self._row.get("step") != step:
            self._row, self._row_start = {"step": step}, self._end
        self._row |= values
        lines = [] if self._row_start else [",".join(self._columns)]
        lines.append(",".join(str(self._row.get(name, "")) for name in self._columns))
        content = "".join(f"{line}\n" for line in lines).encode()
        self._file.seek(self._row_start)
        self._file.truncate()
        if self._file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._end = self._row_start + len(content)

    def close(self) -> None:
        self._file.close()

    def _add_columns(self, names: Sequence[str]) -> None:
        """Rows that are there leave them empty: after a resumption a validation may come before the first
        step that is logged. The file is there whole, the old one or the new one."""
        columns = [*self._columns, *names]
        if self._end:
            _, *rows = self._path.read_bytes()[: self._end].splitlines()
            ends = b"," * len(names) + b"\n"
            lines = [",".join(columns).encode() + b"\n", *(row + ends for row in rows)]
            partial = self._path.with_name(f"{self._path.name}.partial")
            partial.write_bytes(b"".join(lines))
            partial.replace(self._path)
            self._file.close()
            self._file = self._path.open("r+b", buffering=0)
            self._end = sum(map(len, lines))
            self._row_start = self._end - len(lines[-1]) if len(rows) > 1 else 0
        self._columns = columns


def _read_rows(path: Path, *, up_to: int) -> tuple[bytes, list[bytes]]:
    """Header and rows of a file of `CsvWriter`, up to a step's; nothing where there is none."""
    try:
        header, *rows = path.read_bytes().splitlines(keepends=True) or [b""]
    except FileNotFoundError:
        return b"", []
    whole = (row for row in rows if row.endswith(b"\n") and row.count(b",") == header.count(b","))
    return header, [*takewhile(lambda row: int(row.split(b",")[0]) <= up_to, whole)]


class TensorBoardWriter:
    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        """`after`: what was written of later steps counts no more."""
        from torch.utils.tensorboard import SummaryWriter

        purged = None if after is None else after + 1
        self._events = SummaryWriter(str(folder), max_queue=1000, purge_step=purged)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


class WandbWriter:
    """A run of Weights & Biases, named by TorchTitan's variables `WANDB_PROJECT`, `WANDB_TEAM` and
    `WANDB_RUN_NAME`; all others that wandb knows count too (`WANDB_MODE=offline`)."""

    def __init__(self, config: Config, *, folder: Path, goes_on: bool = False) -> None:
        """`goes_on`: another process of this job may have begun it."""
        import wandb

        try:
            self._run = wandb.init(
                entity=os.environ.get("WANDB_TEAM"),
                project=os.environ.get("WANDB_PROJECT", "zorselike"),
                name=os.environ.get("WANDB_RUN_NAME", folder.name),
                notes=config.job.description or None,
                dir=str(folder),
                config=asdict(config),
                **({"id": folder.name, "resume": "allow"} if goes_on else {}),
            )
        except Exception as error:  # Its errors have no common class.
            raise ConfigError(
                f"[metrics] enable_wandb: wandb does not start: {first_line(error)}; log in by "
                "`wandb login`, or set WANDB_MODE=offline"
            ) from error

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check_writers(config: Config) -> None:
    """Raises `ConfigError` for a package that is missing, before anything starts."""
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        raise ConfigError(
            "[metrics] enable_wandb needs the package wandb, which is not installed: "
            "pip install 'zorselike[wandb]'"
        )


def open_writers(
    config: Config, *, folder: Path, rank: int, launcher_rank: int, after: int | None = None
) -> list[Writer]:
    """What this process writes: rank 0 of the launcher everything, others events if they are asked for.
    `after`: what is there up to this step goes on, whoever wrote it; files that cannot be opened, as a disk
    that is away now, are then left out with a warning.

    Raises:
        ConfigError: wandb does not start, or there can be no folder for events, without `after`.
        OSError: Another file cannot be opened, without `after`.
    """
    settings, writers = config.metrics, list[Writer]()
    if launcher_rank == 0:
        later = [VALIDATION_LOSS] * config.validation.enable + [*ELASTIC] * config.elastic.enable
        with _leaving_out("metrics.csv", leaves_out=after is not None):
            writers.append(CsvWriter(folder / "metrics.csv", later=later, after=after))
    if settings.enable_tensorboard and (launcher_rank == 0 or settings.save_for_all_ranks):
        events = folder / settings.save_tb_folder
        own = events / f"rank_{rank}" if settings.save_for_all_ranks else events
        try:
            with _leaving_out("TensorBoard", leaves_out=after is not None):
                writers.append(TensorBoardWriter(own, after=after))
        except OSError as error:
            raise ConfigError(f"[metrics] save_tb_folder: {own}: {error.strerror}") from error
    if settings.enable_wandb and launcher_rank == 0:
        writers.append(WandbWriter(config, folder=folder, goes_on=config.elastic.enable))
    return writers


@contextmanager
def _leaving_out(what: str, *, leaves_out: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not leaves_out:
            raise
        logger.warning("no numbers go to %s until ranks change again: %s", what, error)
