"""The folder of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from zorselike.errors import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.processes.processes import Peers
from zorselike.train.config.config import Checkpoint, Config, Hetero, Job, Lora, Model, Training, Validation
from zorselike.train.config.file import load_config
from zorselike.train.elastic.known import Alone
from zorselike.train.processes import agree_on_data, set_up_logging
from zorselike.train.report.run_folder import log_into, open_run_folder

PLAN = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, ("output",)),))


class First(Peers):
    """Rank 0, alone."""

    rank = 0

    def share(self, value: Any) -> Any:
        return value


def test_what_it_names_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever in a recipe is relative to something."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = Config(
        job=Job(dump_folder=str(tmp_path / "outputs")),
        hetero=Hetero(plan="x.plan.toml"),
        training=Training(dataset_path="data", global_batch_size=1),
        validation=Validation(enable=True, dataset_path="held_out"),
        model=Model(name="hf", path="../model"),
        lora=Lora(enable=True, initial_load_path="adapters"),
        checkpoint=Checkpoint(enable=True, initial_load_path="begun"),
    )
    folder = open_run_folder(config, PLAN, First(), recipe=None, beside_plan={})
    monkeypatch.chdir("/")
    found = load_config(folder / "config.toml")
    assert found.hetero.plan == str(folder / "plan.toml")
    here = tmp_path / "here"
    names = (found.training.dataset_path, found.validation.dataset_path, found.lora.initial_load_path)
    assert names == (str(here / "data"), str(here / "held_out"), str(here / "adapters"))
    assert Path(found.model.path).resolve() == tmp_path / "model"
    assert found.checkpoint.initial_load_path == str(here / "begun")


def test_where_nothing_can_be_written_is_said_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(job=Job(dump_folder=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"\[job\] dump_folder: nothing can be written into .*/file"):
        open_run_folder(config, PLAN, First(), recipe=None, beside_plan={})


def test_data_that_may_not_be_read_are_an_error_of_all_ranks() -> None:
    def read() -> int:
        raise PermissionError(13, "Permission denied", "/data/a.txt")

    with pytest.raises(ConfigError, match=r"^/data/a.txt: cannot be read: Permission denied$"):
        agree_on_data(Alone(), read, describe=str)


def test_the_log_has_what_was_said_before_there_was_a_folder(tmp_path: Path) -> None:
    logger = logging.getLogger("zorselike")
    before = list(logger.handlers), logger.level, logger.propagate
    try:
        set_up_logging(0)
        logger.warning("the validation data are the training data")
        log_into(tmp_path)
        logger.info("step 1")
        lines = (tmp_path / "log.txt").read_text().splitlines()
    finally:
        logger.handlers, logger.level, logger.propagate = before
    assert [line.split(" - ")[1:] for line in lines] == [
        ["WARNING", "the validation data are the training data"],
        ["INFO", "step 1"],
    ]
