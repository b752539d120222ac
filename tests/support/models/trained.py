"""The training program on ranks, as a launcher starts it, and what its runs leave."""

from __future__ import annotations

import csv
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from ranks import RankExit, RunRanks, free_port

from zorselike.train import trainer as trainer  # Imported once, before ranks are forked.
from zorselike.train.__main__ import main

RECIPES = Path(__file__).parents[3] / "recipes"
SHORT = ("--training.seq_len", "32", "--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "1")


def start(
    rank: int,
    world_size: int,
    port: int,
    arguments: list[str],
    environment: list[dict[str, str]],
    signal_at: Path | None,
) -> None:
    """What torchrun does for one process."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(environment[rank] if environment else {})
    if signal_at is not None and rank == 2:
        threading.Thread(target=terminate_when, args=(signal_at,), daemon=True).start()
    sys.argv = ["train", *(argument.format(rank=rank) for argument in arguments)]
    sys.exit(main())


def terminate_when(folder: Path) -> None:
    """Sends SIGTERM to this process once a run has logged a step."""
    while not any("step:" in log.read_text() for log in folder.glob("*/log.txt")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def train(
    run_ranks: RunRanks,
    recipe: str,
    *arguments: str,
    folder: Path,
    num_ranks: int = 4,
    environment: list[dict[str, str]] | None = None,
    signal_at: Path | None = None,
) -> list[RankExit]:
    port = free_port()
    command = ["--config", str(RECIPES / recipe), "--job.dump_folder", str(folder), *arguments]
    return run_ranks(
        start, num_ranks, port, command, environment or [], signal_at, init=False, allow_exit=True
    )


def read_losses(folder: Path) -> list[tuple[int, float]]:
    (log,) = folder.glob("*/log.txt")
    return [
        (int(step), float(loss))
        for step, loss in re.findall(r"- step: +(\d+) +loss: +(\S+)", log.read_text())
    ]


def read_column(folder: Path, name: str) -> list[float]:
    """What a run's CSV file has by a name."""
    (path,) = folder.glob("*/metrics.csv")
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]
