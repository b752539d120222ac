"""Text files that people edit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zorselike.errors import FileError
from zorselike.text.files import check_writable, write_text


def test_a_read_only_disk_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # As Linux does, whether there is such a file or not.
    with pytest.raises(FileError, match="cannot be written: Read-only file system"):
        write_text(tmp_path / "plan.toml", "text")


def test_what_is_no_file_is_written_into_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_what_is_printed_to_keeps_what_is_printed(tmp_path: Path) -> None:
    write = (
        "from zorselike.text.files import write_text; print(1); write_text('/dev/stdout', 'two\\n'); print(3)"
    )
    with (tmp_path / "printed").open("w") as output:
        subprocess.run([sys.executable, "-c", write], stdout=output, check=True)
    assert (tmp_path / "printed").read_text() == "1\ntwo\n3\n"


def test_a_folder_that_cannot_be_written_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plan.toml", os.devnull):
        check_writable(tmp_path / name)
    (tmp_path / "link").symlink_to("elsewhere/plan.toml")
    (tmp_path / "elsewhere").mkdir()
    read_only = {tmp_path / "elsewhere"}  # To root no permission says no.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) not in read_only and Path(path).exists())
    check_writable(tmp_path / "plan.toml")
    for name in ("elsewhere/plan.toml", "link"):
        with pytest.raises(FileError, match="cannot be written there; name another file"):
            check_writable(tmp_path / name)
    with pytest.raises(FileError, match="cannot be written: File name too long; name another file"):
        check_writable(tmp_path / ("a" * 300))
