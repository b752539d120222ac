"""A nanny: it survives its worker, says that it died, starts another, and gives up in time."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trivial_member import TrivialWorker

from zorselike.elastic.contract import Json
from zorselike.elastic.meeting import Meeting, environment, make_member
from zorselike.elastic.meeting import nanny as nannies
from zorselike.elastic.meeting.asking import NobodyListens, NobodyThere, ask
from zorselike.elastic.meeting.environment import from_environment, listen
from zorselike.elastic.meeting.nanny import Nanny, describe_end
from zorselike.errors import ClusterError, ConfigError

TOKEN = "token"
LIVES = """
import json, os, signal, sys, time
fd = int(os.environ["ZORSELIKE_NANNY_FD"])
def say(**word): os.write(fd, json.dumps(word).encode() + b"\\n")
say(id=str(os.getpid()), last=7)
with open(sys.argv[1], "a") as file:
    print(os.getpid(), os.environ.get("ZORSELIKE_JOIN"), os.environ.get("ZORSELIKE_FOUND"),
          os.environ.get("ZORSELIKE_AGAIN_AT"), file=file)
"""


class Reached:
    """A member that answers a nanny; keeps its words."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1", 0)
        me = make_member("127.0.0.1", listener.getsockname()[1], "here", 0, "cpu", 0)
        self.words: list[Json] = []
        self.address = f"127.0.0.1:{me.port}"
        self.meeting = Meeting(TrivialWorker(), me, listener, TOKEN, num_founding=2)
        answer = self.meeting._links._ask

        def keep(message: Json) -> Json:
            self.words.append(message)
            return answer(message)

        self.meeting._links._ask = keep


@pytest.fixture
def reached() -> Iterator[Reached]:
    member = Reached()
    yield member
    member.meeting.close()


def make(reached: Reached | None, tmp_path: Path, script: str, **environment: str) -> Nanny:
    if reached is not None:
        environment["ZORSELIKE_JOIN"] = reached.address
    command = [sys.executable, "-I", "-S", "-c", LIVES + script, str(tmp_path / "starts")]
    return Nanny(command, {"ZORSELIKE_JOB_TOKEN": TOKEN, **environment})


def starts(tmp_path: Path) -> list[list[str]]:
    path = tmp_path / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_worker_that_dies_is_told_of_and_replaced(
    reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nannies, "_FIRST_WAIT_S", 0.0)
    script = f"""
say(members=[["127.0.0.1", 1], {json.dumps(reached.address.split(":"))}])
if not os.path.exists(sys.argv[1] + ".once"):
    open(sys.argv[1] + ".once", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert make(None, tmp_path, script, ZORSELIKE_FOUND="a:1", ZORSELIKE_MEMBERS="2").run() == 0
    first, second = starts(tmp_path)
    assert first[1:] == ["None", "a:1", "None"]
    assert second[1:] == [f"{reached.address},127.0.0.1:1", "None", "a:1"]
    assert [(word["id"], word["last"]) for word in reached.words] == [(first[0], 7)]


def test_workers_that_die_at_their_start_are_given_up(
    reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nannies, "_FIRST_WAIT_S", 0.0)
    assert make(reached, tmp_path, "sys.exit(3)").run() == 3
    assert len(starts(tmp_path)) == 3
    assert "3 workers one after the other ended within 60 s of their start, the last exited with code 3" in (
        capfd.readouterr().err
    )


@pytest.mark.parametrize(
    "script, code",
    [
        ("sys.exit(0)", 0),
        ('say(over="the job has ended", may_return=False); sys.exit(1)', 1),
        ("sys.exit(4)", 4),  # Nobody can be reached: the job is no more.
    ],
)
def test_no_other_worker_is_started_for_one_that_is_done(tmp_path: Path, script: str, code: int) -> None:
    assert make(None, tmp_path, script).run() == code
    assert len(starts(tmp_path)) == 1


def test_a_recipe_that_is_wrong_is_not_tried_again(reached: Reached, tmp_path: Path) -> None:
    assert make(reached, tmp_path, "sys.exit(2)").run() == 2
    assert len(starts(tmp_path)) == 1


def test_a_founder_that_never_founds_its_job_is_told_from_one_of_a_job_that_goes_on(tmp_path: Path) -> None:
    unfounded = make(None, tmp_path, "say(last=-1); sys.exit(2)", ZORSELIKE_FOUND="a:1")
    assert unfounded.run() == nannies.UNFOUNDED
    assert make(None, tmp_path, "sys.exit(2)", ZORSELIKE_FOUND="a:1").run() == 2


def test_an_expelled_worker_comes_again(
    reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nannies, "_FIRST_WAIT_S", 0.0)
    script = """
if len(open(sys.argv[1]).readlines()) == 1:
    say(over="gone on without", may_return=True)
    sys.exit(1)
"""
    assert make(reached, tmp_path, script).run() == 0
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize("heals", [True, False])
def test_who_was_cut_off_comes_again_when_the_network_does(
    reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    script = """
if len(open(sys.argv[1]).readlines()) == 1:
    say(over="this side ends", may_return=True)
    sys.exit(2)
say(over="done")
"""
    num_asked = 0

    def ask_later(*args: Any, **options: Any) -> Json:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 4:
            raise NobodyThere("timed out")
        if not heals:
            raise NobodyListens("Connection refused")
        return ask(*args, **options)

    monkeypatch.setattr(nannies, "ask", ask_later)
    monkeypatch.setattr(nannies, "_FOLLOWS_S", 0.0)
    monkeypatch.setattr(nannies, "_FIRST_WAIT_S", 0.0)
    assert make(reached, tmp_path, script).run() == (0 if heals else 2)
    assert len(starts(tmp_path)) == (2 if heals else 1) and num_asked >= 4


def test_a_worker_that_comes_after_the_job_has_ended_says_so_by_its_code(
    reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nannies, "_FIRST_WAIT_S", 0.0)
    script = """
if len(open(sys.argv[1]).readlines()) == 2:
    say(stranded=True, over="nobody answers", may_return=False)
sys.exit(1)
"""
    assert make(reached, tmp_path, script).run() == nannies.LATE
    assert len(starts(tmp_path)) == 2


def test_who_comes_after_all_whom_it_knew_were_lost_finds_those_who_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that the job had ended, which went on with them. However often: no worker has failed."""
    ports = iter(range(1, 100))

    def answer(host: str, port: int, _: str, request: Json, **__: float) -> Json:
        if host == "there" and request["ask"] != "status":
            return {}
        if request["ask"] == "status":
            return {"status": {"members": [{"host": "there", "port": next(ports)}]}}
        raise ClusterError("it has ended")

    monkeypatch.setattr(nannies, "ask", answer)
    monkeypatch.setattr(nannies, "_FOLLOWS_S", 0.1)
    monkeypatch.setattr(nannies, "_FIRST_WAIT_S", 0.0)
    script = f"""
if len(open({str(tmp_path / "starts")!r}).readlines()) <= 3:
    time.sleep(0.5)
    os.write(fd, b'{{"stranded": true}}\\n')
    sys.exit(2)
"""
    command = [sys.executable, "-I", "-S", "-c", LIVES.replace("say(id", "0 and say(id") + script]
    environment = {"ZORSELIKE_JOB_TOKEN": TOKEN, "ZORSELIKE_JOIN": "gone:1", "ZORSELIKE_ANSWERED": "1"}
    assert Nanny([*command, str(tmp_path / "starts")], environment).run() == 0
    first, *others = [start[1] for start in starts(tmp_path)]
    assert first == "gone:1" and len(others) == 3 and all(other.startswith("there:") for other in others)


def test_who_comes_after_the_job_has_ended_learns_it_from_machines_at_which_nobody_listens() -> None:
    """And does not look for it for half a minute."""
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        ports = [each.getsockname()[1] for each in (first, second)]
    reads, writes = os.pipe()
    returns = {
        "ZORSELIKE_JOB_TOKEN": TOKEN,
        "ZORSELIKE_JOIN": ",".join(f"127.0.0.1:{port}" for port in ports),
        "ZORSELIKE_ANSWERED": "1",
        "ZORSELIKE_NANNY_FD": str(writes),
    }
    with pytest.raises(ClusterError, match="job has ended before this process had a part in it"):
        from_environment(TrivialWorker(), device_type="cpu", memory_bytes=1, environment=returns)
    os.close(writes)
    assert json.loads(os.read(reads, 100)) == {"stranded": True}
    os.close(reads)


def test_who_finds_nobody_where_a_launcher_s_founder_was_learns_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited ten minutes: that one had said where it listens, and ended before the others came."""
    with listen("127.0.0.1", 0) as listener:
        where = {"host": "127.0.0.1", "port": listener.getsockname()[1], "token": TOKEN}
    store, arrival = (
        SimpleNamespace(get=lambda _: json.dumps(where)),
        SimpleNamespace(arrive=lambda **_: None),
    )
    monkeypatch.setattr(environment, "_open_store", lambda *_: store)
    monkeypatch.setattr(environment, "Arrival", lambda *_: arrival)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    with pytest.raises(ClusterError, match="job has ended before this process had a part in it"):
        from_environment(TrivialWorker(), device_type="cpu", memory_bytes=1, environment=launched)


def test_a_worker_that_stands_still_is_killed(reached: Reached, tmp_path: Path) -> None:
    """Then it is certain that it is gone."""
    script = """
if len(open(sys.argv[1]).readlines()) == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    began_s = time.monotonic()
    assert make(reached, tmp_path, script, ZORSELIKE_SILENCE_S="1").run() == 0
    assert len(starts(tmp_path)) == 2 and time.monotonic() > began_s + 0.8
    assert reached.words[0]["last"] == 7


def test_a_worker_that_runs_and_says_nothing_has_more_time(
    reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in a call that keeps Python's lock; a kernel would say if it were stopped."""
    monkeypatch.setattr(nannies, "HELD_S", 2.0)
    script = """
if len(open(sys.argv[1]).readlines()) == 1:
    time.sleep(60)
"""
    began_s = time.monotonic()
    assert make(reached, tmp_path, script, ZORSELIKE_SILENCE_S="0.5").run() == 0
    assert len(starts(tmp_path)) == 2 and time.monotonic() > began_s + 1.6


def leave_when(is_ready: Callable[[], bool], nanny: Nanny) -> list[int]:
    """The exit code of a nanny that is told to leave then."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(nanny.run()))
    thread.start()
    while not is_ready():
        time.sleep(0.01)
    nanny.leave()
    thread.join(30)
    return codes


def test_a_nanny_that_is_told_to_leave_passes_it_on_and_starts_no_other(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
open(sys.argv[1] + ".ready", "w").close()
time.sleep(60)
"""
    nanny = make(None, tmp_path, script)
    assert leave_when((tmp_path / "starts.ready").exists, nanny) == [5] and len(starts(tmp_path)) == 1


def test_a_worker_that_is_to_leave_while_it_starts_does_not_end_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """
say(last=-1)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(60)
"""
    nanny = make(None, tmp_path, script)
    assert leave_when((tmp_path / "starts.ready").exists, nanny) == [128 + signal.SIGTERM]
    assert "worker was ended by SIGTERM before it had a part in its job" in capsys.readouterr().err


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
def test_who_is_to_leave_in_the_place_of_a_lost_worker_before_it_has_a_part_has_not_failed(
    reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """While another worker is being started, or waits to be: the job may end in order meanwhile."""
    monkeypatch.setattr(nannies, "_FIRST_WAIT_S", wait_s)
    script = """
if len(open(sys.argv[1]).readlines()) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
say(last=-1)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(60)
"""
    nanny = make(reached, tmp_path, script)
    is_ready = (lambda: bool(reached.words)) if wait_s else (tmp_path / "starts.ready").exists
    assert leave_when(is_ready, nanny) == [nannies.LATE] and len(starts(tmp_path)) == (1 if wait_s else 2)


def test_who_has_lost_its_nanny_leaves(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    reads, writes = os.pipe()
    listener = listen("127.0.0.1", 0)
    me = make_member("127.0.0.1", listener.getsockname()[1], "here", 0, "cpu", 0)
    meeting = Meeting(TrivialWorker(), me, listener, TOKEN, num_founding=2, nanny_fd=writes)
    try:
        assert os.read(reads, 1 << 12)
        assert not told.is_set()
        os.close(reads)
        assert told.wait(30) and "nanny has ended without a word; it leaves" in caplog.text
    finally:
        meeting.close()
        os.close(writes)
        signal.signal(signal.SIGTERM, before)


def test_what_cannot_be_started_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot start /no/such/program"):
        Nanny(["/no/such/program"], {}).run()
    with pytest.raises(ConfigError, match="ZORSELIKE_SILENCE_S is 'soon'; it must be seconds"):
        Nanny(["/no/such/program"], {"ZORSELIKE_SILENCE_S": "soon"})
    assert describe_end(128 + signal.SIGKILL) == "was ended by SIGKILL"


def test_a_nanny_needs_no_torch() -> None:
    import subprocess

    code = "import sys, zorselike.elastic.meeting.nanny as n; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
