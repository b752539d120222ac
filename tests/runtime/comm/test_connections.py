"""What frees a thread that waits in Gloo."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from tiny import Case, train_planned

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.comm.connections import Connections, end

_PIDFD_GETFD = 438
"""A system call's number, on every architecture."""


def list_peers(process: int) -> list[socket.socket]:
    """Connections of another process, stopped perhaps, as this one's own; none where the kernel refuses."""
    held, found = os.pidfd_open(process), []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        if not str(entry.readlink()).startswith("socket"):
            continue
        number = ctypes.CDLL(None).syscall(_PIDFD_GETFD, held, int(entry.name), 0)
        if number >= 0:
            found.append(socket.socket(fileno=number))
    return [each for each in found if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]


def gather_while_ended(rank: int, world_size: int, folder: Path) -> int:
    """Rank 0 stops in all-gathers; rank 1 takes part, so that all is on its way, and then rank 2 ends the
    connections of rank 0 and wakes it. Whether rank 0 is free soon; of rank 2 how many it has ended."""
    pair, number = dist.new_group([0, 1]), folder / "number"
    if rank == 2:
        while not number.exists():
            time.sleep(0.01)
        process = int(number.read_text())
        time.sleep(1.0)
        peers = [each for each in list_peers(process) if each.family == socket.AF_INET]
        for connection in peers:
            end(connection)
        os.kill(process, signal.SIGCONT)
        return len(peers)
    else:
        if rank == 1:
            while not number.exists():
                time.sleep(0.01)
            time.sleep(0.3)
        values = torch.ones(1000)
        works = [
            dist.all_gather([torch.ones(1000), torch.ones(1000)], values, group=pair, async_op=True)
            for _ in range(2)
        ]
        if rank == 0:
            time.sleep(0.1)
            (folder / "new").write_text(str(os.getpid()))
            (folder / "new").rename(number)
            os.kill(os.getpid(), signal.SIGSTOP)
            until = time.monotonic() + 10.0
            while not all(work.is_completed() for work in works) and time.monotonic() < until:
                time.sleep(0.01)
            is_free = all(work.is_completed() for work in works)
            (folder / "done").touch()
            return is_free
    while not (folder / "done").exists():
        time.sleep(0.01)
    return True


def test_who_is_about_to_send_as_connections_end_is_freed(run_ranks: RunRanks, tmp_path: Path) -> None:
    ends = run_ranks(gather_while_ended, 3, tmp_path, allow_exit=True, timeout=60)
    if not ends[2].value:
        pytest.skip("the kernel lets no process have another's connections")
    assert ends[0].value


def gather_while_left(rank: int, world_size: int, folder: Path, lets_go: bool) -> bool:
    """Rank 0 stops in an all-gather; rank 1 takes part, and leaves; then rank 0 wakes, and leaves too.
    Whether its all-gather has ended soon. `lets_go`: rank 1 has the other side hear of it at once."""
    connections = Connections()
    group, number = dist.new_group([0, 1]), folder / "number"
    if rank == 1:
        wait_for(number)
    work = dist.all_gather([torch.ones(1000), torch.ones(1000)], torch.ones(1000), group=group, async_op=True)
    if rank == 0:
        time.sleep(0.1)
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").rename(number)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)
        assert connections.shut() > 0
        until = time.monotonic() + 5.0
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        (folder / "done").touch()
        return bool(work.is_completed())
    time.sleep(0.3)
    assert connections.shut() > 0
    time.sleep(0.3)  # Until Gloo has closed its own.
    if lets_go:
        connections.let_go()
    os.kill(int(number.read_text()), signal.SIGCONT)
    wait_for(folder / "done")
    return True


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_who_is_about_to_send_to_one_that_has_left_is_freed(run_ranks: RunRanks, tmp_path: Path) -> None:
    ends = run_ranks(gather_while_left, 2, tmp_path, False, allow_exit=True, timeout=60)
    assert ends[0].value


def send_before_it_is_awaited(rank: int, world_size: int, num_bytes: int) -> bool:
    """Whether a send was over before its receive was posted."""
    store = dist.distributed_c10d._get_default_store()
    rows = torch.zeros(num_bytes, dtype=torch.uint8)
    if rank == 1:
        store.wait(["sent"])
        dist.recv(rows, 0)
        return False
    waits = threading.Thread(target=dist.isend(rows, 1).wait)
    waits.start()
    waits.join(0.2)
    is_over = not waits.is_alive()
    store.set("sent", "")
    waits.join()
    return is_over


@pytest.mark.parametrize("num_bytes", [1, 1 << 10, 1 << 16, 1 << 24])
def test_gloo_sends_nothing_before_its_receive_is_posted(run_ranks: RunRanks, num_bytes: int) -> None:
    """So that of nothing on a CPU the simulator says that it goes eagerly (`StepCosts.eager_bytes`)."""
    assert run_ranks(send_before_it_is_awaited, 2, num_bytes) == [False, False]


def train_with_few_files(rank: int, world_size: int) -> tuple[float, ...]:
    """Where the shell allows few open files, as most do for what a hundred ranks need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/dev/fd").iterdir()]) + 8, hard))
    rows = tuple(Microbatch(each, each, each + 1) for each in range(world_size))
    group = Group(tuple(range(world_size)), rows)
    plan = Plan(world_size, (group,), (Ministage(0, ("tok_embeddings", "layers.0", "norm", "output")),))
    return train_planned(Case(plan, 1, num_steps=1)).losses


def test_a_pipeline_takes_the_open_files_that_its_groups_need(run_ranks: RunRanks) -> None:
    assert len({*run_ranks(train_with_few_files, 4)}) == 1
