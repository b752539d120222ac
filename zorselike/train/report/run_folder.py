"""The folder of a run: its merged configuration, plan, log and events."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zorselike.plan.plan import Plan
from zorselike.train.config.config import Config
from zorselike.train.config.file import dump_config
from zorselike.train.report.colors import PlainFormatter

logger = logging.getLogger("zorselike")


def create_run_folder(
    config: Config, plan: Plan, *, recipe: Path | None, beside_plan: Mapping[str, str]
) -> Path:
    """Creates `<dump_folder>/<recipe>-<time>` with `config.toml`, `plan.toml` and the files of `beside_plan`;
    for rank 0.

    `python -m zorselike.train --config <folder>/config.toml` repeats the run.
    """
    folder = _make_new(
        Path(config.job.dump_folder), f"{recipe.stem if recipe else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    for name, text in beside_plan.items():
        (folder / name).write_text(text, encoding="utf-8")
    plan.save(folder / "plan.toml")
    effective = replace(
        config,
        hetero=replace(config.hetero, plan="plan.toml"),
        training=replace(config.training, dataset_path=_absolute(config.training.dataset_path)),
        model=replace(config.model, hf_assets_path=_absolute(config.model.hf_assets_path)),
    )
    comment = f"The merged configuration of a run of {recipe or 'the command line'}, plan {plan.fingerprint}."
    (folder / "config.toml").write_text(dump_config(effective, comment=comment), encoding="utf-8")
    return folder


def log_into(folder: Path) -> None:
    """Also writes the log of rank 0 into `log.txt`."""
    handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(PlainFormatter("%(asctime)s - %(levelname)s - %(message)s"))
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
