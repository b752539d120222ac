"""What is made of data files is there whole or not at all, whoever else makes it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from zorselike.errors import ConfigError
from zorselike.train.data.cache import make_once, name_of


def write_folder(path: Path) -> None:
    path.mkdir()
    (path / "content").write_text("mine")


def test_it_is_made_once(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "x.rows"
    for _ in range(2):
        assert (make_once(target, write_folder) / "content").read_text() == "mine"
    assert {file.name for file in target.parent.iterdir()} == {"x.rows", "x.rows.lock"}


def test_what_is_there_is_taken_where_nothing_can_be_written(tmp_path: Path) -> None:
    target = tmp_path / "x.rows"
    make_once(target, write_folder)
    lock = tmp_path / "x.rows.lock"
    lock.unlink()
    lock.mkdir()  # No file can be opened there for writing, by root neither.
    assert (make_once(target, write_folder) / "content").read_text() == "mine"


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    def write_half(path: Path) -> None:
        write_folder(path)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(
        target=make_once, args=(tmp_path / "x.rows", write_half)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 2
    make_once(tmp_path / "x.rows", write_folder)
    assert {file.name for file in tmp_path.iterdir()} == {"x.rows", "x.rows.lock"}


def test_another_machine_may_be_first(tmp_path: Path) -> None:
    target = tmp_path / "x.rows"

    def write_both(path: Path) -> None:
        write_folder(path)
        target.mkdir()
        (target / "content").write_text("theirs")

    assert (make_once(target, write_both) / "content").read_text() == "theirs"
    assert {file.name for file in tmp_path.iterdir()} == {"x.rows", "x.rows.lock"}


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write_half(path: Path) -> None:
        write_folder(path)
        raise OSError("disk full")

    with pytest.raises(ConfigError, match=r"\[job\] dump_folder: nothing can be written into .*: disk full"):
        make_once(tmp_path / "x.rows", write_half)
    assert {file.name for file in tmp_path.iterdir()} == {"x.rows.lock"}

    def read_first(path: Path) -> None:
        Path("/no/such/data.txt").read_text()

    with pytest.raises(ConfigError, match=r"^/no/such/data\.txt: No such file"):
        make_once(tmp_path / "x.rows", read_first)


def test_a_name_changes_with_the_files(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("a")
    names = [name_of([file], "x"), name_of([file], "x"), name_of([file], "y")]
    file.write_text("ab")
    names.append(name_of([file], "x"))
    assert names[0] == names[1] and len(set(names)) == 3
