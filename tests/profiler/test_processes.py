"""The processes that measure together: what they are called, and how a failure of one is told."""

from __future__ import annotations

from typing import Any

import pytest
from profiled import join
from ranks import RunRanks, free_port

from zorselike.errors import ClusterError
from zorselike.runtime.processes.device import find_device
from zorselike.runtime.processes.world import ProcessInfo, device_type

GIB = 2**30


def test_devices_have_the_catalogues_names() -> None:
    gpu = ProcessInfo(
        0, "a", 0, device="cuda", device_name="NVIDIA A100-SXM4-40GB", memory_bytes=int(39.4 * GIB)
    )
    assert device_type(gpu) == "A100-40"
    assert device_type(ProcessInfo(0, "a", 0, device="cpu", memory_bytes=GIB)) == "CPU"


def test_a_device_without_a_name_is_an_error_that_names_the_node() -> None:
    odd = ProcessInfo(0, "shed", 0, device="cuda", device_name="NVIDIA Toaster", memory_bytes=GIB)
    with pytest.raises(ClusterError, match=r"node shed: the device catalogue has no 'NVIDIA Toaster'"):
        device_type(odd)


def test_the_cpu_is_always_there() -> None:
    assert find_device("cpu", without_gpu="").type == "cpu"


def describe(rank: int, size: int, port: int) -> Any:
    with join(port, node=["a", "b", "a2"][rank]) as processes:
        first = processes.represents(of=lambda other: processes.infos[other].node[0])
        return processes.nodes, processes.type, processes.share(rank), first


def test_ranks_know_each_other(run_ranks: RunRanks) -> None:
    found = run_ranks(describe, 3, free_port(), init=False)
    nodes = {"a": [0], "b": [1], "a2": [2]}
    assert found == [(nodes, "CPU", 0, True), (nodes, "CPU", 0, True), (nodes, "CPU", 0, False)]


def fail_somewhere(rank: int, size: int, port: int, error: Exception) -> str:
    def work() -> int:
        if rank == 1:
            raise error
        return rank

    with join(port) as processes:
        with pytest.raises(ClusterError) as raised:
            processes.gather_or_raise(work)
        assert processes.gather_or_raise(lambda: rank) == list(range(size))  # And they go on.
        return str(raised.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("no disk"), "rank 1 (node "),
        (ClusterError("node x: mend it"), "node x: mend it"),  # It says by itself where it is from.
    ],
)
def test_what_one_rank_raises_all_raise(run_ranks: RunRanks, error: Exception, words: str) -> None:
    said = run_ranks(fail_somewhere, 2, free_port(), error, init=False)
    assert said[0] == said[1] and said[0].startswith(words) and str(error) in said[0]
