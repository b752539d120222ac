"""Signals end a run at a step boundary, together; a second one at once, even in a blocking wait."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks

from zorselike.train import stop
from zorselike.train.stop import SignalWatch, StopVote


def world() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def signal_after(seconds: float, *numbers: int) -> None:
    """Sends signals to this process, so many seconds apart."""

    def send() -> None:
        for number in numbers:
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def run_until_stopped(rank: int, world_size: int) -> tuple[int, int]:
    watch = SignalWatch()
    vote = StopVote(watch, world())
    if rank == 1:
        signal_after(0.2, signal.SIGTERM)
    step = number = 0
    while not number and step < 1000:
        step += 1
        vote.open()
        time.sleep(0.02 if rank else 0.03)
        number = vote.close()
    watch.close()
    return step, number


def test_all_ranks_stop_at_the_same_step(run_ranks: RunRanks) -> None:
    stops = run_ranks(run_until_stopped, 3)
    assert len(set(stops)) == 1
    step, number = stops[0]
    assert number == signal.SIGTERM
    assert 0 < step < 100


def receive_one(rank: int, world_size: int) -> None:
    watch = SignalWatch()
    os.kill(os.getpid(), signal.SIGINT)
    while not watch.received:
        time.sleep(0.01)
    watch.close()


def test_the_first_of_a_node_tells_of_a_signal(run_ranks: RunRanks) -> None:
    first, second = run_ranks(receive_one, 2, init=False, allow_exit=True)
    assert first.stderr.count("SIGINT, stopping after this step") == 1
    assert not second.stderr


def wait_for_a_peer(rank: int, world_size: int, echo_s: float) -> None:
    stop._ECHO_S = echo_s
    group = world()
    SignalWatch()
    if rank == 0:
        signal_after(0.2, signal.SIGINT, signal.SIGTERM)
        dist.barrier(group)  # Where no Python handler runs; nobody else comes.
    dist.recv(torch.zeros(1), src=0)  # Until that rank is gone.


def test_the_second_signal_ends_at_once_even_in_gloo(run_ranks: RunRanks) -> None:
    first = run_ranks(wait_for_a_peer, 2, 0.0, allow_exit=True)[0]
    assert first.code == 128 + signal.SIGTERM
    assert "SIGINT, stopping after this step" in first.stderr
    assert "SIGTERM again" in first.stderr


def count_echoes(rank: int, world_size: int) -> int:
    watch = SignalWatch()
    signal_after(0.05, signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)
    time.sleep(0.4)
    watch.close()
    return watch.received


def test_a_signal_that_the_launcher_passes_on_counts_once(run_ranks: RunRanks) -> None:
    assert run_ranks(count_echoes, 1) == [signal.SIGTERM]


def test_closing_gives_the_handlers_back() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it.
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    watch = SignalWatch()
    assert signal.getsignal(signal.SIGINT) is not before[0]
    watch.close()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
