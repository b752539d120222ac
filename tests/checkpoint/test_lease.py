"""The lease of a folder of checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from zorselike.checkpoint import lease as leases
from zorselike.checkpoint.folder import remove_partials
from zorselike.checkpoint.lease import EXPIRES_S, Lease
from zorselike.errors import CheckpointError


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_second_writer_is_told_who_holds_it(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "new")
    lease.check()
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* saves into this folder.*delete"):
        Lease(tmp_path / "new")
    lease.check()
    lease.release()
    assert list((tmp_path / "new").iterdir()) == []
    Lease(tmp_path / "new").release()


def test_one_that_was_deleted_with_its_folder_is_taken_again(tmp_path: Path) -> None:
    """No save of that run succeeded from then on: "an unknown process" was said to hold it."""
    lease = Lease(tmp_path / "new", job="this")
    assert not lease.keep()
    lease.path.unlink()
    lease.path.parent.rmdir()
    assert lease.keep() and not lease.keep()
    assert json.loads(lease.path.read_text())["job"] == "this"
    lease.path.unlink()
    other = Lease(tmp_path / "new")
    with pytest.raises(CheckpointError, match="no longer holds the lease"):
        lease.keep()
    lease.release()
    other.check()
    other.release()


def hold_in_child(folder: Path) -> int:
    """A process that takes the lease and stops; its number."""
    pid = os.fork()
    if pid == 0:
        Lease(folder)
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    return pid


def test_a_dead_process_s_lease_is_taken_over(tmp_path: Path) -> None:
    pid = hold_in_child(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=f"process {pid} on "):
            Lease(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # Ended, but its parent has not asked.
    Lease(tmp_path).release()
    os.waitpid(pid, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    change(lease.path, started="1")
    other = Lease(tmp_path)
    with pytest.raises(CheckpointError, match="no longer holds the lease"):
        lease.check()
    lease.release()
    other.check()
    other.release()


def test_rivals_take_a_lease_over_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Lease(tmp_path)
    change(dead.path, started="1")
    judge, seen = leases._is_gone, []

    def is_gone(*args: Any) -> bool:
        """What another process meets that comes at this moment."""
        folder = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        seen.append(args)
        return judge(*args)

    monkeypatch.setattr(leases, "_is_gone", is_gone)
    Lease(tmp_path).release()
    assert len(seen) == 1
    dead.release()


@pytest.mark.parametrize("values", [{"host": "elsewhere"}, {"machine": "another boot"}])
def test_another_machine_s_lease_lasts_until_it_expires(tmp_path: Path, values: dict[str, str]) -> None:
    lease = Lease(tmp_path)
    change(lease.path, **values, started="1")
    with pytest.raises(CheckpointError, match="saves into this folder"):
        Lease(tmp_path)
    expired = lease.path.stat().st_mtime - EXPIRES_S - 1
    os.utime(lease.path, (expired, expired))
    Lease(tmp_path).release()


def test_a_job_s_lease_passes_to_who_leads_it_next(tmp_path: Path) -> None:
    lease = Lease(tmp_path, job="mine")
    change(lease.path, host="elsewhere")
    for stranger in ("", "other"):
        with pytest.raises(CheckpointError, match="saves into this folder"):
            Lease(tmp_path, job=stranger)
    heir = Lease(tmp_path, job="mine")
    with pytest.raises(CheckpointError, match="no longer holds the lease"):
        lease.check()
    lease.release()
    heir.check()
    heir.release()


def test_a_lease_that_says_nothing_counts_until_it_expires(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text("")
    with pytest.raises(CheckpointError, match="an unknown process saves into this folder"):
        Lease(tmp_path)
    os.utime(path, (0, 0))
    Lease(tmp_path).release()


def test_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWS_S", 0.01)
    lease = Lease(tmp_path)
    os.utime(lease.path, (0, 0))
    for _ in range(1000):
        if lease.path.stat().st_mtime:
            break
        lease._ends.wait(0.01)
    else:
        pytest.fail("it is not renewed")
    lease.release()


def test_where_there_are_no_links_it_is_exclusive_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    lease = Lease(tmp_path)
    with pytest.raises(CheckpointError, match="saves into this folder"):
        Lease(tmp_path)
    lease.release()


def test_what_dead_processes_left_of_taking_it_goes(tmp_path: Path) -> None:
    (tmp_path / "lease.json.0a0a").write_text("{}")
    lease = Lease(tmp_path)
    remove_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lease.json"]
    lease.release()
