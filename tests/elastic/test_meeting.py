"""Meetings in real processes and threads, over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import volume
from ranks import RunRanks, free_port
from trivial_member import TrivialWorker

from zorselike.elastic.contract import Generation, GenerationOver, Json, Request
from zorselike.elastic.meeting import Meeting, make_member
from zorselike.elastic.meeting.asking import NobodyThere, ask
from zorselike.elastic.meeting.environment import from_environment, listen
from zorselike.elastic.meeting.links import MAX_STRANGERS, prove
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.round import Settings
from zorselike.errors import ClusterError, ConfigError

TOKEN = "only ours"
SETTINGS = Settings(silence_s=20.0, arrivals_s=0.05)
LIMIT_S = 30.0


class Member:
    """A meeting and its worker; trains on a thread of its own where it is told to."""

    def __init__(self, contact: int = 0, *, found: int | None = None, **options: Any) -> None:
        listener = listen("127.0.0.1", 0)
        me = make_member("127.0.0.1", listener.getsockname()[1], "here", 0, "cpu", 0)
        self.worker = TrivialWorker()
        self.meeting = Meeting(
            self.worker,
            me,
            listener,
            options.pop("token", TOKEN),
            num_founding=found,
            contact=[("127.0.0.1", contact)] if contact else [],
            settings=options.pop("settings", SETTINGS),
            **options,
        )
        self.port = me.port
        self.generations: list[Generation] = []
        self.error: BaseException | None = None
        self.step = 0
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        try:
            while True:
                generation = self.meeting.next_generation()
                try:
                    self.meeting.formed()
                    self.meeting.filled()
                    self.step = max(self.step, generation.decision["step"], generation.after_step or 0)
                    self.generations.append(generation)
                    while not self.ends.wait(0.005):
                        self.step += 1
                        self.worker.step = self.step
                        if self.meeting.step_done(self.step):
                            break
                except GenerationOver:
                    pass
                if self.ends.is_set():
                    return
        except BaseException as error:
            self.error = error

    def runs(self, num: int) -> bool:
        return bool(self.generations) and len(self.generations[-1].ranks) == num


def count_files() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def await_that(happens: Any) -> None:
    until = time.monotonic() + LIMIT_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    found: list[Member] = []
    yield found
    for member in found:
        member.ends.set()
        member.meeting.close()
        member.thread.join(LIMIT_S)


def start(members: list[Member], num: int) -> None:
    members.append(Member(found=num))
    members += [Member(members[0].port) for _ in range(num - 1)]
    await_that(lambda: all(member.runs(num) for member in members))


def test_members_come_and_go_at_the_same_step_on_all(members: list[Member]) -> None:
    start(members, 3)
    first = members[0].generations[0]
    assert first.reason == "start" and first.after_step is None
    assert all(member.generations == [first] for member in members)
    arrival = Member(members[2].port)  # It is told who leads.
    members.append(arrival)
    await_that(lambda: all(member.runs(4) for member in members))
    second = arrival.generations[0]
    assert second.reason == "arrival" and second.after_step is not None
    assert all(member.generations == [first, second] for member in members[:3])
    members[0].meeting.leave()  # The leader itself.
    await_that(lambda: all(member.runs(3) for member in members[1:]))
    third = arrival.generations[-1]
    assert third.reason == "notice" and [member.id for member in third.leaving] == [members[0].meeting.id]
    members[0].thread.join(LIMIT_S)
    assert isinstance(members[0].error, ClusterError) and "has left the job" in str(members[0].error)
    assert not any(member.worker.is_over.is_set() for member in members)  # Nothing was torn down too early.


def test_a_store_of_each_generation_is_there_for_its_ranks(members: list[Member]) -> None:
    import torch.distributed as dist

    start(members, 2)
    generation = members[0].generations[0]
    assert store_ports(members[0]) == {generation.port} and not store_ports(members[1])
    store = dist.TCPStore(generation.host, generation.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set("key", "value")
    members[1].meeting.request_change()
    await_that(lambda: len(members[1].generations) == 2)
    await_that(lambda: store_ports(members[0]) == {members[1].generations[-1].port})


def store_ports(member: Member) -> set[int]:
    """At which it keeps stores of generations."""
    return {int(store.port) for store in list(member.meeting._stores.values())}


def test_a_failed_member_stays_and_the_same_failure_again_ends_the_job(members: list[Member]) -> None:
    start(members, 3)
    requests: list[Request] = []
    decide = members[0].worker.decide
    members[0].worker.decide = lambda request: requests.append(request) or decide(request)  # type: ignore[method-assign, func-returns-value]
    members[1].meeting.fail(MemoryError("of the device\n"), step=5)
    await_that(lambda: all(len(member.generations) == 2 for member in members))
    assert requests[-1].reason == "loss" and not requests[-1].lost
    assert requests[-1].failed == {members[1].meeting.id: "MemoryError: of the device"}
    assert all(member.worker.is_over.is_set() for member in members)
    members[1].meeting.fail(MemoryError("of the device"), step=5)
    await_that(lambda: all(member.error is not None for member in members))
    assert {str(member.error) for member in members} == {
        "here local rank 0 failed twice at step 5: MemoryError: of the device"
    }


def test_a_decision_that_cannot_be_made_ends_the_job_with_its_reason(members: list[Member]) -> None:
    def decide(request: Request) -> tuple[tuple[str, ...], Json]:
        raise ClusterError("no two cards of this kind are left")

    start(members, 2)
    members[0].worker.decide = decide  # type: ignore[method-assign]
    members[1].meeting.request_change()
    await_that(lambda: all(member.error is not None for member in members))
    assert {str(member.error) for member in members} == {"no two cards of this kind are left"}


def test_a_file_is_a_notice(members: list[Member], tmp_path: Any) -> None:
    start(members, 2)
    members.append(Member(members[0].port, notice_file=tmp_path / "leave"))
    await_that(lambda: all(member.runs(3) for member in members))
    (tmp_path / "leave").touch()
    await_that(lambda: members[0].runs(2) and members[2].error is not None)


def test_who_joins_with_another_token_or_where_nobody_is_says_so(members: list[Member]) -> None:
    start(members, 1)
    settings = Settings(start_limit_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for member in (
        Member(members[0].port, token="another", settings=settings),
        Member(port, settings=settings),
    ):
        await_that(lambda member=member: member.error is not None)
        assert "nobody with this job's token answers at 127.0.0.1:" in str(member.error)
    assert members[0].runs(1)


def lose_members(rank: int, world_size: int, port: int, killed: tuple[int, ...]) -> list[list[str]]:
    environment = {"ZORSELIKE_JOB_TOKEN": TOKEN, "LOCAL_RANK": str(rank), "ZORSELIKE_NODE": f"n{rank}"}
    address = f"127.0.0.1:{port}"
    if rank == 0:
        environment |= {"ZORSELIKE_FOUND": address, "ZORSELIKE_MEMBERS": str(world_size)}
    else:
        environment["ZORSELIKE_JOIN"] = address
    worker = TrivialWorker()
    meeting = from_environment(
        worker, device_type="cpu", memory_bytes=0, settings=SETTINGS, environment=environment
    )
    seen: list[list[str]] = []
    while True:
        generation = meeting.next_generation()
        try:
            meeting.formed()
            meeting.filled()
            seen.append([member.node for member in generation.members])
            if len(seen[-1]) == world_size - len(killed):
                meeting.close()
                return seen
            for step in range(10_000):
                if rank in killed and step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.005)
                meeting.step_done(step)
        except GenerationOver:
            assert worker.is_over.wait(LIMIT_S)


@pytest.mark.parametrize("killed", [(2,), (0,), (0, 1)])
def test_killed_members_are_gone_on_without(killed: tuple[int, ...], run_ranks: RunRanks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    exits = run_ranks(lose_members, 4, port, killed, init=False, allow_exit=True, timeout=60)
    for rank, end in enumerate(exits):
        if rank in killed:
            assert end.code == -signal.SIGKILL
        else:
            assert end.code == 0, end.stderr
            assert sorted(end.value[0]) == ["n0", "n1", "n2", "n3"]
            assert sorted(end.value[-1]) == [f"n{other}" for other in range(4) if other not in killed]


def sleep_through_the_end(rank: int, world_size: int, folder: Path) -> list[str]:
    """The second of two is stopped; the first goes on alone, and is killed before the second is woken, by a
    third process that is no member."""
    port, alone, sleeper, awake = (folder / name for name in ("port", "alone", "sleeper", "awake"))
    if rank == 2:
        await_that(alone.exists)
        time.sleep(0.5)
        os.kill(int(sleeper.read_text()), signal.SIGCONT)
        await_that(awake.exists)
        return []
    await_that(lambda: rank == 0 or port.exists())
    settings = Settings(silence_s=1.0, arrivals_s=0.05)
    member = Member(int(port.read_text()) if rank else 0, found=None if rank else 2, settings=settings)
    if rank == 0:
        (folder / "new").write_text(str(member.port))
        (folder / "new").rename(port)
    await_that(lambda: member.runs(2))
    if rank == 0:
        await_that(lambda: member.runs(1))
        alone.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    sleeper.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    await_that(lambda: member.error is not None)
    awake.touch()
    member.meeting.close()
    return [str(member.error), *(str(len(each.ranks)) for each in member.generations)]


def test_who_slept_while_the_others_went_on_and_died_does_not_go_on_alone(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    exits = run_ranks(sleep_through_the_end, 3, tmp_path, init=False, allow_exit=True, timeout=60)
    assert exits[1].code == 0, exits[1].stderr
    error, *generations = exits[1].value
    assert "this side ends, so that never two go on" in error
    assert generations == ["2"]


def test_who_has_slept_knows_it_before_what_it_reads_then(members: list[Member]) -> None:
    """Else it hears of the others' end, and believes that none of them went on before."""
    start(members, 1)
    meeting, heard = members[0].meeting, []
    handle, poll = meeting._machine.handle, meeting._links.poll

    def note(event: e.Event) -> list[e.Effect]:
        heard.append(type(event))
        return handle(event)

    def wake(waits_s: float) -> None:
        meeting._links.poll = poll  # type: ignore[method-assign]
        meeting._polled_s -= SETTINGS.silence_s
        meeting._events.append(e.Dead(msg.Gone("somebody")))

    meeting._machine.handle = note  # type: ignore[method-assign]
    meeting._links.poll = wake  # type: ignore[method-assign]
    await_that(lambda: e.Dead in heard and e.Slept in heard)
    assert heard.index(e.Slept) < heard.index(e.Dead)


def links_in_a_fork(rank: int, world_size: int) -> tuple[bool, bool]:
    member = Member(found=1)
    await_that(lambda: member.runs(1))
    listener = member.meeting._links._listener
    number = os.fstat(listener.fileno()).st_ino
    reads, writes = os.pipe()
    if os.fork() == 0:
        held = {entry.stat().st_ino for entry in Path("/dev/fd").iterdir() if entry.exists()}
        os.write(writes, b"1" if number in held else b"0")
        os._exit(0)
    os.wait()
    is_held = os.read(reads, 1) == b"1"
    is_there = listener.fileno() >= 0 and bool(ask("127.0.0.1", member.port, TOKEN, {"ask": "status"}))
    member.ends.set()
    member.meeting.close()
    return is_held, is_there


def test_a_forked_child_does_not_keep_its_parent_s_links(run_ranks: RunRanks) -> None:
    """Else loaders of data would let a dead member seem to live."""
    assert run_ranks(links_in_a_fork, 1, init=False, timeout=60) == [(False, True)]


# -- strangers ---------------------------------------------------------------------------------


def test_no_stranger_ends_anything(members: list[Member]) -> None:
    """Random bytes, huge lines, half messages, wrong tokens, deep nesting, and many connections at once."""
    start(members, 2)
    rng = random.Random(0)
    address = ("127.0.0.1", members[0].port)
    num_files = count_files()
    attacks = [
        rng.randbytes(3000),
        b"\n" * 100,
        b'{"nonce": 1}\n',
        b'{"nonce": "a", "proof": "\xc3\xa9", "member": {}}\n',
        b'{"proof": null, "nonce": null, "ask": "status"}\n',
        b"[" * 4000 + b"\n",
        b'{"kind": "end", "number": 99, "reason": "x"}\n',
        b"x" * 100_000,
        b'{"half": ',
    ]
    for attack in attacks:
        with socket.create_connection(address) as stranger, pytest.raises(OSError):
            stranger.settimeout(0.3)
            stranger.sendall(attack)
            while stranger.recv(1 << 16):  # The challenge; then it is ended, or nothing comes any more.
                pass
            raise ConnectionError
    strangers = [socket.create_connection(address) for _ in range(4 * MAX_STRANGERS)]
    assert ask(*address, TOKEN, {"ask": "status"})["status"]["generation"] == 1
    assert count_files() < num_files + 5 * MAX_STRANGERS + 20
    for stranger in strangers:
        stranger.close()
    with pytest.raises(ClusterError, match="refuses the token"):
        ask(*address, "wrong", {"ask": "status"})
    await_that(lambda: count_files() < num_files + 10)
    steps = [member.step for member in members]
    await_that(lambda: all(member.step > step + 3 for member, step in zip(members, steps, strict=True)))
    assert all(len(member.generations) == 1 and member.error is None for member in members)


def make_attack(rng: random.Random, challenge: str) -> bytes:
    """Nearly what a member would say, and much that none would."""
    nonce = f"{rng.getrandbits(64):016x}"
    proof = prove(rng.choice([TOKEN, "another"]), rng.choice(["caller", "listener"]), challenge, nonce)
    if rng.random() < 0.5 or proof == prove(TOKEN, "caller", challenge, nonce):
        proof = proof[:-1] + "g"
    hello: Any = {"nonce": nonce, "proof": proof, "member": {"id": "x", "number": 0}, "ask": "leave"}
    for key in [key for key in hello if rng.random() < 0.3]:
        hello[key] = rng.choice([None, 1e400, [], {}, "\ud800", -1, {"a": [[]] * 50}, True])
    whole = json.dumps(hello).encode() + b"\n"
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(1, 5000))
        case 1:  # Some bytes of it are others.
            changed = bytearray(whole)
            for _ in range(rng.randint(1, 8)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
        case 2:
            return whole[: rng.randrange(len(whole))]
        case 3:
            return whole * rng.randint(2, 40)
        case 4:
            return json.dumps(hello).encode() + b" " * rng.randrange(100_000)
    return whole


@volume.parametrize("seed", range(20), share=10)
def test_whatever_strangers_say_ends_nothing(seed: int, members: list[Member]) -> None:
    """None of it has a proof of the token."""
    start(members, 2)
    rng = random.Random(seed)
    num_files = count_files()
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", rng.choice(members).port)) as stranger:
            stranger.settimeout(5.0)
            challenge = json.loads(stranger.makefile("rb").readline()).get("challenge")
            with contextlib.suppress(OSError):
                stranger.sendall(make_attack(rng, challenge))
                if rng.random() < 0.3:
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 16):
                        pass
    for member in members:
        status = ask("127.0.0.1", member.port, TOKEN, {"ask": "status"})["status"]
        assert status["generation"] == 1 and len(status["members"]) == 2
    steps = [member.step for member in members]
    await_that(lambda: all(member.step > step + 3 for member, step in zip(members, steps, strict=True)))
    await_that(lambda: count_files() < num_files + 10)
    assert all(len(member.generations) == 1 and member.error is None for member in members)


def test_a_listener_that_knows_no_token_is_told_none() -> None:
    """Who dials learns nothing that would let it in elsewhere: the token never travels."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        heard: list[bytes] = []

        def pretend() -> None:
            connection, _ = listener.accept()
            connection.sendall(b'{"challenge": "00"}\n')
            heard.append(connection.recv(1 << 16))
            connection.sendall(b'{"proof": "00", "status": {}}\n')
            connection.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ClusterError, match="no member of a job with this token"):
            ask("127.0.0.1", port, TOKEN, {"ask": "status"})
        thread.join()
    assert TOKEN.encode() not in heard[0]
    with pytest.raises(NobodyThere, match="no member of a job answers at"):
        ask("127.0.0.1", port, TOKEN, {"ask": "status"})


# -- the environment ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"ZORSELIKE_JOIN": "a:1"}, "ZORSELIKE_JOB_TOKEN is not set"),
        ({"ZORSELIKE_JOIN": "a", "ZORSELIKE_JOB_TOKEN": "t"}, "is 'a'; write it as HOST:PORT"),
        ({"ZORSELIKE_FOUND": "a:1", "ZORSELIKE_JOIN": "a:1", "ZORSELIKE_JOB_TOKEN": "t"}, "both set"),
        ({"ZORSELIKE_FOUND": "a:1", "ZORSELIKE_JOB_TOKEN": "t"}, "ZORSELIKE_MEMBERS must say"),
        (
            {"ZORSELIKE_FOUND": "no.host.invalid:1", "ZORSELIKE_MEMBERS": "1", "ZORSELIKE_JOB_TOKEN": "t"},
            "no address is known for 'no.host.invalid'",
        ),
        ({"ZORSELIKE_SILENCE_S": "never"}, "it must be seconds"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "nothing says where"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "4f"}
            | {"GROUP_WORLD_SIZE": "2"},
            "dynamic rendezvous",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
            | {"TORCHELASTIC_MAX_RESTARTS": "3"},
            "--max-restarts",
        ),
    ],
)
def test_what_the_environment_lacks_is_said(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_environment(TrivialWorker(), device_type="cpu", memory_bytes=0, environment=environment)


def test_who_takes_the_founder_s_place_is_found_where_that_was(members: list[Member]) -> None:
    port = free_port()
    members.append(Member(found=1))
    environment = {
        "ZORSELIKE_JOB_TOKEN": TOKEN,
        "ZORSELIKE_JOIN": f"127.0.0.1:{members[0].port}",
        "ZORSELIKE_AGAIN_AT": f"127.0.0.1:{port}",
    }

    def join() -> Meeting:
        return from_environment(TrivialWorker(), device_type="cpu", memory_bytes=1, environment=environment)

    with contextlib.closing(join()) as first, contextlib.closing(join()) as second:
        assert first.member.port == port
        assert second.member.port not in (0, port)  # It is taken: any other does.
        assert ask("127.0.0.1", port, TOKEN, {"ask": "status"})["status"]["id"] == first.id
