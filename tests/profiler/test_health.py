"""What `zorselike doctor` finds, in machines that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zorselike.cost.profile import LinkTimes, Source
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan
from zorselike.profiler.machine.examine import examine, why_unreadable
from zorselike.profiler.machine.health import (
    Finding,
    Health,
    describe_links,
    describe_nodes,
    find_problems,
    find_slow_links,
)
from zorselike.profiler.machine.link_timing import all_pairs
from zorselike.runtime.processes.world import ProcessInfo

GIB = 2**30


def healthy(rank: int = 0, node: str = "a", **others: object) -> Health:
    info = ProcessInfo(
        rank=rank,
        node=node,
        local_rank=0,
        device="cuda",
        device_name="NVIDIA A100-SXM4-40GB",
        gpu=f"gpu-{rank}",
        num_gpus=1,
        architecture="sm_80",
        compiled_architectures=("sm_80", "sm_90"),
        memory_bytes=40 * GIB,
        host_room_bytes=200 * GIB,
        torch="2.13.0+cu128",
        cuda="12.8",
        nccl="2.27.3",
        python="3.11.9",
        zorselike="0.1.0",
    )
    return Health(
        info=info,
        has_bf16=True,
        interfaces=(("eth0", f"10.0.0.{rank + 1}"),),
        host_address=f"10.0.0.{rank + 1}",
        **others,  # type: ignore[arg-type]
    )


def ill(rank: int = 0, node: str = "a", **changes: object) -> Health:
    """One whose process differs."""
    health = healthy(rank, node)
    return replace(health, info=replace(health.info, **changes))  # type: ignore[arg-type]


def texts(findings: list[Finding], severity: str = "breaks") -> list[str]:
    return [finding.text for finding in findings if finding.severity == severity]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert find_problems([healthy(), healthy(1, "b")]) == []


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (ill(1, "b", torch="2.11.0+cu128"), ("torch must be the same", "node b", "install torch 2.13.0")),
        (ill(1, "b", zorselike="0.0.9"), ("zorselike must be the same", "node b", "install")),
        (ill(1, "b", nccl="2.21.5"), ("NCCL must be the same", "node b", "install")),
        (ill(1, "b", architecture="sm_70"), ("not compiled", "node b", "cu126")),
        (ill(1, "b", device="cpu", gpu="", architecture=""), ("compute on the CPU", "node b", "mend CUDA")),
        (ill(1, "b", device_name="", num_gpus=1), ("shows 1 GPU", "node b", "start at most")),
        (ill(1, "b", gpu="gpu-0"), ("have one", "start one process a GPU")),
        (replace(healthy(1, "b"), has_bf16=False), ("node b", "bfloat16", '"float16" or "auto"')),
        (replace(healthy(1, "b"), interfaces=(("lo", "127.0.0.1"),)), ("node b", "loopback", "connect it")),
        (replace(healthy(1, "b"), host_address="127.0.1.1"), ("node b", "127.0.1.1", "/etc/hosts")),
        (
            replace(healthy(1, "b"), named_interfaces=(("NCCL_SOCKET_IFNAME", "ib0"),)),
            ("node b", "NCCL_SOCKET_IFNAME is ib0", "eth0", "name one of these"),
        ),
        (
            replace(healthy(1, "b"), data=(("/data", "no such file or directory"),)),
            ("node b", "rank 1", "/data", "copy it there"),
        ),
    ],
)
def test_each_ill_is_named_with_its_node_and_its_mend(odd: Health, words: tuple[str, ...]) -> None:
    # Three nodes, so that the odd one is in the minority.
    found = texts(find_problems([healthy(), odd, healthy(2, "c")]))
    assert len(found) == 1 and all(word in found[0] for word in words), found


def test_each_process_speaks_of_its_own_card_s_numbers() -> None:
    """Whatever card the process has made its current one: the doctor makes none."""
    has_bf16 = {"sm_75": False, "sm_70": False, "sm_86": True, "sm_120": True, "gfx90a": True, "": True}
    for architecture, expected in has_bf16.items():
        assert examine(ill(architecture=architecture).info, data=()).has_bf16 is expected, architecture


def test_all_ills_are_listed_and_not_only_the_first() -> None:
    odd = replace(
        ill(1, "b", torch="2.11.0", zorselike="0.0.9", architecture="sm_70"),
        data=(("/data", "permission denied"),),
    )
    assert len(texts(find_problems([healthy(), odd, healthy(2, "c")]))) == 4


def test_memory_is_a_warning() -> None:
    scarce = replace(ill(host_room_bytes=GIB), locked_bytes=64 * 1024)
    found = texts(find_problems([scarce]), "warns")
    assert len(found) == 2 and all(text.startswith("node a") for text in found)
    assert "1.0 GiB of host memory are free" in found[0] and "ulimit -l" in found[1]
    assert "ZORSELIKE_HOST_MEMORY" in found[0]


def test_a_container_s_shared_memory_is_enough_for_the_gpus_of_its_node() -> None:
    small, enough = healthy(shared_bytes=64 * 2**20), healthy(1, shared_bytes=2**30)
    assert find_problems([small]) == find_problems([enough, replace(ill(2), shared_bytes=2**30)]) == []
    (text,) = texts(find_problems([small, healthy(1, shared_bytes=64 * 2**20)]), "warns")
    assert text.startswith("node a: /dev/shm holds 64 MiB") and "512 MiB (docker run --shm-size)" in text
    # Nobody on CPUs, and no node of one GPU, has any use for it.
    cpu = replace(ill(1, gpu="", device="cpu"), shared_bytes=64 * 2**20)
    assert texts(find_problems([cpu, replace(cpu, info=replace(cpu.info, rank=2))]), "warns") == []
    assert find_problems([small, healthy(1, "b", shared_bytes=64 * 2**20)]) == []


def test_interfaces_may_be_named_as_nccl_and_gloo_take_them() -> None:
    for value in ("eth", "eth0", "=eth0", "lo,eth0", "^docker0"):
        named = replace(healthy(), named_interfaces=(("NCCL_SOCKET_IFNAME", value),))
        assert find_problems([named, healthy(1, "b")]) == []
    lo = replace(
        healthy(),
        interfaces=(("lo", "127.0.0.1"), ("eth0", "10.0.0.1")),
        named_interfaces=(("GLOO_SOCKET_IFNAME", "lo"),),
    )
    assert find_problems([lo]) == []  # One node may talk to itself.
    (text,) = texts(find_problems([lo, healthy(1, "b")]))
    assert "GLOO_SOCKET_IFNAME is lo, but its interfaces are eth0" in text
    # A name that Gloo is told makes the host's own name unimportant.
    odd = replace(healthy(), host_address="127.0.1.1", named_interfaces=(("GLOO_SOCKET_IFNAME", "eth0"),))
    assert find_problems([odd, healthy(1, "b")]) == []


def test_half_precision_is_asked_of_those_that_are_to_compute_in_it() -> None:
    old = replace(healthy(), has_bf16=False)
    assert find_problems([old], dtype="float16") == find_problems([old], dtype="auto") == []


def test_a_plan_for_other_machines_is_found() -> None:
    group = Group(ranks=(0, 1), microbatches=(Microbatch(0, 0, 1), Microbatch(1, 1, 2)))
    devices = (Device(0, "a", 0), Device(1, "z", 0))
    plan = Plan(2, (group,), (Ministage(0, ("layers.0",)),), devices=devices).validate()
    (text,) = texts(find_problems([healthy(), healthy(1, "b")], plan=plan))
    assert "node z of the plan does not run" in text


# -- links -----------------------------------------------------------------------------------


def link(a: str, b: str, rate: float) -> LinkTimes:
    sizes = (2**16, 2**20, 2**24)
    return LinkTimes(
        between=(a, b),
        num_bytes=sizes,
        seconds=tuple(1e-5 + size / rate for size in sizes),
        source=Source("measured"),
    )


def test_a_node_whose_every_link_is_slow_is_named_itself() -> None:
    nodes = ["a", "b", "c", "d", "e"]
    links = [link(x, y, 1e8 if "c" in (x, y) else 3e9) for i, x in enumerate(nodes) for y in nodes[i + 1 :]]
    (finding,) = find_slow_links(links)
    assert finding.severity == "warns" and finding.text.startswith("node c: all its links")


def test_a_single_slow_pair_is_named() -> None:
    nodes = ["a", "b", "c", "d"]
    links = [
        link(x, y, 1e8 if (x, y) == ("b", "d") else 3e9) for i, x in enumerate(nodes) for y in nodes[i + 1 :]
    ]
    (finding,) = find_slow_links(links)
    assert finding.text.startswith("nodes b and d: 0.1 GB/s")
    assert find_slow_links([link("a", "b", 1e9), link("a", "a", 9e9)]) == []


def test_all_pairs_are_every_two_nodes_and_the_inside_of_those_with_several_ranks() -> None:
    assert all_pairs({"b": [0, 2], "a": [1], "c": [3]}) == [("a", "b"), ("a", "c"), ("b", "b"), ("b", "c")]


# -- what is shown ---------------------------------------------------------------------------


def test_tables_have_a_line_a_node_and_a_line_a_link() -> None:
    nodes = describe_nodes([healthy(), healthy(1), healthy(2, "b")]).splitlines()
    assert [line.split()[:2] for line in nodes] == [["node", "ranks"], ["a", "2"], ["b", "1"]]
    assert "NVIDIA A100-SXM4-40GB" in nodes[1] and "eth0 10.0.0.1" in nodes[1]
    links = describe_links([link("a", "b", 2e9), link("a", "a", 9e9)]).splitlines()
    assert links[1].split() == ["a", "-", "b", "2", "10"] and links[2].startswith("inside a")


def test_why_a_path_cannot_be_read(tmp_path: Path) -> None:
    assert why_unreadable(tmp_path / "none") == "no such file or directory"
    assert why_unreadable(tmp_path) == "the folder is empty"
    (tmp_path / "file").write_text("")
    assert why_unreadable(tmp_path) == why_unreadable(tmp_path / "file") == ""
