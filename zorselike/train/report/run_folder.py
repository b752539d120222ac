"""The folder of a run: its merged configuration, plan, log and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from logging.handlers import MemoryHandler
from pathlib import Path

from zorselike.plan.plan import Plan
from zorselike.runtime.processes.processes import Peers
from zorselike.train.config.config import Config
from zorselike.train.config.file import PATH_KEYS, dump_config
from zorselike.train.data.cache import writing
from zorselike.train.report.colors import PlainFormatter

logger = logging.getLogger("zorselike")


def open_run_folder(
    config: Config, plan: Plan, processes: Peers, *, recipe: Path | None, beside_plan: Mapping[str, str]
) -> Path:
    """The folder `<dump_folder>/<recipe>-<time>`, into which rank 0 writes `config.toml`, `plan.toml`, the
    files of `beside_plan` by name and, from now on, the log; other machines create it when they write
    something. Collective.

    `python -m zorselike.train --config <folder>/config.toml` repeats the run.
    """
    name = f"{recipe.stem if recipe else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"

    @writing(Path(config.job.dump_folder))
    def make() -> str:
        folder = _make_new(Path(config.job.dump_folder), name)
        for file, text in beside_plan.items():
            (folder / file).write_text(text, encoding="utf-8")
        plan.save(folder / "plan.toml")
        effective = config
        for section, key in PATH_KEYS:
            own = getattr(effective, section)
            changed = replace(own, **{key: _absolute(getattr(own, key))})
            effective = replace(effective, **{section: changed})
        effective = replace(effective, hetero=replace(effective.hetero, plan="plan.toml"))
        origin = recipe or "the command line"
        comment = f"The merged configuration of a run of {origin}, plan {plan.fingerprint}."
        (folder / "config.toml").write_text(dump_config(effective, comment=comment), encoding="utf-8")
        log_into(folder)
        return str(folder)

    return Path(processes.from_first(make))


def log_into(folder: Path) -> None:
    """This process's log goes there too, after what is there: also what it has said before."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(PlainFormatter("%(asctime)s - %(levelname)s - %(message)s"))
    for early in [own for own in logger.handlers if isinstance(own, MemoryHandler)]:
        early.setTarget(handler)
        early.flush()
        logger.removeHandler(early)
    logger.addHandler(handler)


def _make_new(parent: Path, name: str) -> Path:
    """Creates a new folder; runs that start within the same second are numbered."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
