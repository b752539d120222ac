"""What makes recoveries short and safe, without processes."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from trivial_member import TrivialWorker

import zorselike.elastic.running as elastic_running
from tools.elastic.faults import make_plan
from tools.elastic.ranks import Job, build_model
from zorselike.elastic.contract import Generation, GenerationOver, Member, Request
from zorselike.elastic.deciding.leader import Leader
from zorselike.elastic.drawing import Drawings, Options
from zorselike.elastic.meeting.environment import from_environment
from zorselike.elastic.running import Running
from zorselike.elastic.worker import ElasticWorker
from zorselike.errors import ClusterError, ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime import crossing
from zorselike.runtime._compat import default_store
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.alarm.failure import is_echo, reason_of
from zorselike.runtime.alarm.heartbeat import refuse_loopback
from zorselike.runtime.model.boundaries import StepInputs
from zorselike.runtime.model.partition import _Decoder
from zorselike.runtime.model.signature import Signature, TensorSpec
from zorselike.runtime.state.dtypes import dtype_name


def make_job() -> Job:
    plan, num_layers = make_plan(random.Random(7), (2, 2), offload=False)
    return Job(plan, num_layers, 1)


def make_members(count: int) -> tuple[Member, ...]:
    return tuple(
        Member(f"id{i}", i, "127.0.0.1", 0, f"node{i % 2}", i // 2, "cpu", 2**34) for i in range(count)
    )


def make_generation(number: int, plan: Plan) -> Generation:
    members = make_members(plan.num_ranks)
    ids = tuple(member.id for member in members)
    decision: dict[str, Any] = {
        "plan": plan.format(),
        "job": "",
        "base": plan.format(),
        "seats": list(ids),
        "slower": {},
        "exhausted": {},
    }
    return Generation(number, members, (), ids, "127.0.0.1", 1, "start", decision, None)


OPTIONS = Options(settings={"lr": "0.1"})


def make_worker(job: Job) -> ElasticWorker:
    drawings = Drawings(lambda: build_model(job), OPTIONS, torch.device("cpu"))
    return ElasticWorker(Leader(job.plan), drawings)


def test_a_generation_that_ends_as_it_is_handed_over_is_heard_of() -> None:
    job = make_job()
    worker = make_worker(job)
    old, new, next_one = (Running(make_generation(n, job.plan), "id0") for n in (3, 4, 5))
    worker.enter(old)
    worker.interrupt(4, ())  # Between `next_generation` and what follows in the thread that trains.
    assert old.is_over.is_set()
    worker.enter(new)
    assert new.is_over.is_set()
    worker.enter(next_one)
    assert not next_one.is_over.is_set()
    for running in (old, new, next_one):
        running.leave_alone()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (OPTIONS, ""),
        (replace(OPTIONS, silence_s=3.0), ""),
        (replace(OPTIONS, seed=3), "seed is 3 in this process, and 0 in the job that it has joined"),
        (replace(OPTIONS, max_norm=2.0), "max_norm is 2.0 in this process, and None in the job"),
        (replace(OPTIONS, settings={"lr": "0.2"}), "lr is 0.2 in this process, and 0.1 in the job"),
        (replace(OPTIONS, settings={}), "lr is None in this process, and 0.1 in the job"),
        (replace(OPTIONS, settings={**OPTIONS.settings, "wd": 1}), "wd is 1 in this process, and None in"),
    ],
)
def test_who_comes_with_other_arguments_says_so_and_nobody_else_fails(
    options: Options, expected: str
) -> None:
    job = make_job()
    members = make_members(job.plan.num_ranks)
    offers: dict[str, Any] = {member.id: {"step": 0, "has_state": False} for member in members}
    decided = make_worker(job).decide(Request("start", members, (), (), members, {}, offers, ()))
    assert decided is not None
    drawings = Drawings(lambda: build_model(job), options, torch.device("cpu"))
    other = ElasticWorker(Leader(job.plan), drawings).take_settings(decided[1])
    assert other.startswith(expected) and bool(other) == bool(expected)


def test_settings_that_are_no_strings_are_alike_after_they_have_travelled() -> None:
    job = make_job()
    settings: dict[Any, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "folder": Path("data"), 3: float("nan")}
    options = replace(OPTIONS, settings=settings)
    drawings = Drawings(lambda: build_model(job), options, torch.device("cpu"))
    travelled = json.loads(json.dumps({"settings": drawings.list_settings(), "computes_in": None}))
    assert not ElasticWorker(Leader(job.plan), drawings).take_settings(travelled)


def test_who_joins_computes_in_what_those_who_were_there_do() -> None:
    """Its card may have no bfloat16, and would choose float16 for itself."""
    job = make_job()
    members = make_members(job.plan.num_ranks)
    offers: dict[str, Any] = {member.id: {"step": 0, "has_state": False} for member in members}
    request = Request("start", members, (), (), members, {}, offers, ())

    def make(dtype: torch.dtype | None) -> tuple[ElasticWorker, Drawings]:
        drawings = Drawings(lambda: build_model(job), Options(param_dtype="auto"), torch.device("cpu"))
        drawings.compute_in(None if dtype is None else dtype_name(dtype))
        return ElasticWorker(Leader(job.plan), drawings), drawings

    for known in (torch.bfloat16, None):
        (there, _), (new, drawings) = make(known), make(None)
        decided = there.decide(request)
        assert decided is not None and not new.take_settings(decided[1])
        assert drawings.computes_in == (None if known is None else "BF16")


def form_after_failing(rank: int, world_size: int, folder: Path) -> int:
    """Rank 0 alone has begun to form a generation that ended meanwhile; both form the next one."""
    job = make_job()
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ended = replace(make_generation(1, job.plan), ranks=("id0", "id1"), port=store.port)
        running = Running(ended, "id0")
        threading.Timer(0.3, running.interrupt).start()
        with pytest.raises((RuntimeError, GenerationOver)):
            running.form("gloo", lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
        running.leave_alone()
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    both = replace(make_generation(2, job.plan), ranks=("id0", "id1"), port=int(port.read_text()))
    running = Running(both, f"id{rank}")
    threading.Timer(20.0, running.interrupt).start()  # Where they wait for each other by different names.
    running.form("gloo", lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.barrier()
    running.leave_together()
    return int(total)


def test_who_began_to_form_a_generation_forms_the_next_with_who_did_not(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(form_after_failing, 2, tmp_path, init=False) == [3, 3]


def build_without_the_other(rank: int, world_size: int, folder: Path) -> float:
    """Rank 1 is lost when the groups are there, before its alarm is; how long rank 0 then waits for it."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    generation = make_generation(1, make_job().plan)
    generation = replace(generation, ranks=("id0", "id1"), port=int(port.read_text()))
    running = Running(generation, f"id{rank}")
    lost_s = 0.0

    def interrupt() -> None:
        nonlocal lost_s
        lost_s = time.monotonic()
        running.interrupt()

    def build(on_loss: Any) -> Any:
        if rank == 0:
            threading.Timer(0.3, interrupt).start()
            Alarm(0, 2, default_store(), on_loss=on_loss)

    if rank == 0:
        with pytest.raises(RuntimeError):
            running.form("gloo", build, lambda _: None)
    else:
        running.form("gloo", build, lambda _: None)
    waited_s = time.monotonic() - lost_s
    running.leave_alone()
    return waited_s


def test_a_rank_that_is_lost_before_its_alarm_is_there_is_not_waited_for(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(build_without_the_other, 2, tmp_path, init=False)[0] < 10


def fill_after_the_others_left(rank: int, world_size: int, folder: Path) -> list[bool]:
    """Ranks 1 and 2 wait for rank 0, and leave; then rank 0 comes, and hears a moment later that it is alone.
    Which of two processes connects to the other is chance, so several times."""
    job, freed = make_job(), []
    for number in range(1, 6):
        port, left = folder / f"port{number}", folder / f"left{number}"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            (folder / "new").write_text(str(store.port))
            (folder / "new").rename(port)
            while len(list(folder.glob(f"{left.name}.*"))) < world_size - 1:
                time.sleep(0.01)
        while not port.exists():
            time.sleep(0.01)
        generation = replace(make_generation(number, job.plan), port=int(port.read_text()))
        running = Running(replace(generation, ranks=("id0", "id1", "id2")), f"id{rank}")
        running.rank = None
        running.form("gloo", lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
        threading.Timer(0.2, running.interrupt).start()

        def fill(running: Running = running) -> None:
            with suppress(RuntimeError):
                running.fill((), ())

        filling = threading.Thread(target=fill, daemon=True)
        filling.start()
        filling.join(10.0)
        freed.append(not filling.is_alive())
        running.leave_alone()
        (folder / f"{left.name}.{rank}").touch()
    return freed


def test_who_slept_until_the_others_had_left_does_not_wait_for_them(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(fill_after_the_others_left, 3, tmp_path, init=False) == [[True] * 5] * 3


def test_nobody_waits_for_the_store_of_a_leader_that_has_ended() -> None:
    job = make_job()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    running = Running(replace(make_generation(1, job.plan), port=port), "id0")
    threading.Timer(0.2, running.interrupt).start()
    with pytest.raises(GenerationOver):
        running.form("gloo", lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    running.leave_alone()
    # Torch still tries, on a thread of its own.
    assert any(thread.name == "elastic store" for thread in threading.enumerate())


class Whole:
    """Of a pipeline: that no step of it has failed, and what ends NCCL's kernels."""

    is_broken = False

    def __init__(self) -> None:
        self.aborted = threading.Event()
        groups = SimpleNamespace(abort=self.aborted.set)
        self.assembly = SimpleNamespace(groups=groups)


def test_an_error_of_a_lost_neighbour_is_not_the_callers_though_nothing_is_known_of_it_yet() -> None:
    """Outside of steps nothing marks a pipeline as broken: a save may hear by its own connections first."""
    running = Running(make_generation(1, make_job().plan), "id0")
    pipe = running.pipe = Whole()  # type: ignore[assignment]
    assert running.is_the_callers(ConfigError("the folder is not empty"))
    threading.Timer(0.2, running.interrupt).start()
    assert not running.is_the_callers(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"))
    assert pipe.aborted.wait(10.0)
    running.pipe = None
    running.leave_alone()


def leave_in_vain(rank: int, world_size: int, folder: Path) -> str:
    """Each rank's thread is somewhere else as its generation ends, for longer than it may take to leave."""
    elastic_running._STUCK_S, elastic_running._STUCK_IN_GLOO_S = (60.0, 0.5) if rank == 3 else (0.5, 60.0)
    running = Running(make_generation(1, make_job().plan), "id0")
    threading.Timer(0.2, running.interrupt).start()
    until = time.monotonic() + 3.0
    match rank:
        case 0:
            with running.inside():
                time.sleep(3.0)
        case 1:
            with running.inside():
                while time.monotonic() < until:
                    pass
        case 2:
            time.sleep(3.0)
        case 3:
            with running.inside():
                dist.recv(torch.zeros(1), 2)  # By a connection that was there before.
    return "has left"


def test_only_who_waits_in_vain_in_a_generation_that_is_over_ends(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    waits, computes, is_outside, calls_gloo = run_ranks(leave_in_vain, 4, tmp_path, allow_exit=True)
    for ended in (waits, calls_gloo):
        assert ended.code == 1 and "cannot be freed: it ends" in ended.last_line
    assert computes.value == is_outside.value == "has left"


class Remains:
    """Like a Gloo group that still runs something: does not end by itself."""

    def __init__(self, ended_in: list[str], may_end: threading.Event) -> None:
        self.ended_in, self.may_end = ended_in, may_end

    def abandon(self, *_: object, **__: object) -> None:
        """Has left."""

    def __del__(self) -> None:
        self.ended_in.append(threading.current_thread().name)
        self.may_end.wait()


def test_training_does_not_wait_for_what_is_left_of_a_generation() -> None:
    worker = make_worker(make_job())
    ended_in: list[str] = []
    may_end = threading.Event()
    running = Running(make_generation(1, make_job().plan), "id0")
    running.pipe = Remains(ended_in, may_end)  # type: ignore[assignment]
    running.leave_alone()
    worker.stash(running)
    worker.let_go()
    while not ended_in:
        time.sleep(0.001)
    may_end.set()
    assert ended_in == ["elastic remains"]


def test_the_end_of_a_store_is_an_echo() -> None:
    """What a member reads whose leader has ended, before it hears of that."""
    text = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"
    assert is_echo(reason_of(dist.DistNetworkError(text)))


def count_traces(rank: int, world_size: int, folder: Path) -> tuple[list[int], list[int]]:
    """How often models are tried out and traced: for a first plan, then for those that losses would bring."""
    tried, traced = [0], [0]
    try_tokens, trace_step = _Decoder.try_tokens, crossing.trace_step

    def try_once(decoder: Any) -> Any:
        tried[0] += 1
        return try_tokens(decoder)

    def trace_once(*arguments: Any, **options: Any) -> Any:
        traced[0] += 1
        return trace_step(*arguments, **options)

    _Decoder.try_tokens = try_once  # type: ignore[method-assign]
    crossing.trace_step = trace_once
    job = make_job()
    drawings = Drawings(lambda: build_model(job), Options(), torch.device("cpu"))
    drawings.step = StepInputs(Signature((TensorSpec((4,), torch.int64),)), {})
    leader = Leader(job.plan)
    leader.note(make_generation(1, job.plan))
    counts = []
    one_lost = list(leader.foresee())
    for plans in ([job.plan], one_lost, one_lost):
        for plan in plans:
            drawings.draw_ahead(plan)
        counts.append((tried[0], traced[0]))
    return [count for count, _ in counts], [count for _, count in counts]


def test_what_one_loss_brings_is_drawn_ahead_and_little_is_traced(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    ((tried, traced),) = run_ranks(count_traces, 1, tmp_path)
    # Who loses one rank of two keeps the ministages. Nodes 0 and 1 have one rank of each group.
    assert tried == [1, 1, 1]
    assert traced == [1, 1, 1]


def test_each_loss_is_foreseen_as_it_is_decided() -> None:
    job = make_job()
    leader = Leader(job.plan)
    leader.note(make_generation(1, job.plan))
    plans = list(leader.foresee())
    assert [plan.num_ranks for plan in plans] == [3, 3, 3, 3, 2, 2]
    assert len(set(plans)) == 3  # Of a group it matters how many are left, not who.
    assert all(len(plan.groups) == 2 for plan in plans)


@pytest.mark.parametrize("is_light", [True, False])
def test_only_models_without_values_are_kept_by_the_dozen(is_light: bool) -> None:
    job = make_job()
    leader = Leader(job.plan)
    leader.note(make_generation(1, job.plan))

    def build() -> torch.nn.Module:
        model = build_model(job)
        return model if is_light else model.to_empty(device="cpu")

    drawings = Drawings(build, Options(), torch.device("cpu"))
    for plan in (job.plan, *leader.foresee()):
        drawings.draw_ahead(plan)
    assert len(drawings._drawn) == (4 if is_light else 1)


@pytest.fixture
def loopback_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own name means a loopback address."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.mark.usefixtures("loopback_name")
def test_a_node_that_gloo_would_name_by_loopback_says_so_before_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = make_generation(1, make_job().plan)
    members = tuple(replace(own, host=f"10.0.0.{own.number}") for own in generation.members)
    running = Running(replace(generation, members=members, port=store.port), "id0")
    with pytest.raises(ClusterError, match=r"localhost, means .* GLOO_SOCKET_IFNAME"):
        running.form("gloo", lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    running.leave_alone()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    refuse_loopback()


@pytest.mark.usefixtures("loopback_name")
def test_who_would_join_another_node_by_loopback_is_refused_before() -> None:
    environment = {"ZORSELIKE_JOB_TOKEN": "ours", "ZORSELIKE_JOIN": "192.0.2.1:29600"}
    with pytest.raises(ClusterError, match=r"localhost, means .* GLOO_SOCKET_IFNAME"):
        from_environment(TrivialWorker(), device_type="cpu", memory_bytes=1, environment=environment)


ENDS_AT_ONCE = """
import time
from types import SimpleNamespace
from zorselike.elastic.worker import ElasticWorker

class Slow:
    def __del__(self):
        time.sleep(0.5)
        print("dropped", flush=True)

worker = ElasticWorker(None, None)
worker._graves.append((Slow(), SimpleNamespace(let_go=lambda: None)))
worker.let_go()
"""


ENDS_IN_A_MEETING = """
import threading, time
from zorselike.elastic.meeting import Meeting, make_member
from zorselike.elastic.meeting.environment import listen

class Draws:
    begins = threading.Event()
    def offer(self):
        return {}
    def decide(self, request):
        return tuple(request.offers), {}
    def prepare(self, ranks, decision):
        self.begins.set()
        time.sleep(0.5)
        print("drawn", flush=True)

listener = listen("127.0.0.1", 0)
me = make_member("127.0.0.1", listener.getsockname()[1], "here", 0, "cpu", 0)
Meeting(Draws(), me, listener, "token", num_founding=1)
Draws.begins.wait()
raise SystemExit(2)
"""


def test_a_process_that_ends_waits_for_what_it_does_for_a_meeting() -> None:
    """An error that all ranks have is the end of others to each, who met to go on without them: Python's end
    aborted the process where a thread drew a plan for that."""
    command = [sys.executable, "-c", ENDS_IN_A_MEETING]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "drawn\n"), ended.stderr


def test_a_process_that_ends_waits_until_the_remains_of_generations_are_dropped() -> None:
    # Python's end aborted the process where a thread was in the destructor of a process group.
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=True)
    assert ended.stdout == "dropped\n"
