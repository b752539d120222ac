"""What processes say of themselves, and what is refused, on machines nobody has here."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RunRanks

from zorselike.errors import ClusterError, ConfigError, PlanError
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan
from zorselike.runtime.processes.world import (
    ProcessInfo,
    check_world,
    describe_process,
    gather_world,
    is_device_type,
    runs_on,
)

NEW_ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
OLD_ARCHITECTURES = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")

A100 = ProcessInfo(
    rank=0,
    node="a",
    local_rank=0,
    device="cuda",
    device_name="NVIDIA A100-SXM4-80GB",
    num_gpus=2,
    architecture="sm_80",
    compiled_architectures=NEW_ARCHITECTURES,
    memory_bytes=85_000_000_000,
    torch="2.13.0+cu128",
    cuda="12.8",
    nccl="2.29.3",
    python="3.12.1",
    zorselike="0.1.0",
)
V100 = replace(
    A100,
    node="b",
    device_name="Tesla V100-SXM2-16GB",
    architecture="sm_70",
    compiled_architectures=OLD_ARCHITECTURES,
    memory_bytes=16_900_000_000,
    torch="2.13.0+cu126",
    cuda="12.6",
)
CPU = ProcessInfo(rank=0, node="c", local_rank=0, torch="2.13.0+cpu", zorselike="0.1.0")


def _cluster(*nodes: ProcessInfo) -> list[ProcessInfo]:
    """Two processes on each node, numbered in order."""
    return [
        replace(node, rank=2 * n + local_rank, local_rank=local_rank)
        for n, node in enumerate(nodes)
        for local_rank in range(2)
    ]


def _plan(num_ranks: int, **types: str) -> Plan:
    """A data-parallel plan; `types`: of both devices of each node, in order of ranks."""
    ranks = tuple(range(num_ranks))
    devices = [
        (node, local_rank, type_of_device) for node, type_of_device in types.items() for local_rank in (0, 1)
    ]
    return Plan(
        global_batch=num_ranks,
        groups=(Group(ranks, tuple(Microbatch(rank, rank, rank + 1) for rank in ranks)),),
        ministages=(Ministage(0, ("model",)),),
        devices=tuple(Device(rank, *place) for rank, place in enumerate(devices)),
    )


def test_a_mixed_cluster_with_a_fitting_build_on_each_node_passes() -> None:
    assert check_world(_cluster(A100, V100)) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_processes_get_the_ranks_of_the_plan_in_any_launch_order() -> None:
    plan = _plan(4, b="V100", a="A100-80GB")
    assert check_world(_cluster(A100, V100), plan) == {0: 2, 1: 3, 2: 0, 3: 1}


@pytest.mark.parametrize("plan", [_plan(4), _plan(4, a="A100", b="A100")])
def test_a_plan_for_other_ranks_names_both_counts(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"the plan is for 4 ranks, 3 processes run"):
        check_world(_cluster(A100, V100)[:3], plan)


def test_an_odd_torch_is_named_with_its_node() -> None:
    odd = replace(V100, torch="2.11.0+cu126")
    with pytest.raises(ClusterError) as refused:
        check_world(_cluster(A100, odd, replace(A100, node="d")))
    assert str(refused.value) == (
        "torch must be the same everywhere: 2.11.0 on node b (ranks 2 and 3), but 2.13.0 on node a "
        "(ranks 0 and 1) and node d (ranks 4 and 5); install torch 2.13.0 on node b"
    )


def test_of_two_nodes_the_older_is_the_odd_one() -> None:
    for nodes in ((A100, replace(V100, torch="2.9.1")), (replace(V100, torch="2.9.1"), A100)):
        with pytest.raises(ClusterError, match=r"install torch 2\.13\.0 on node b"):
            check_world(_cluster(*nodes))


def test_an_odd_nccl_is_named_and_matters_on_gpus_only() -> None:
    with pytest.raises(ClusterError, match=r"NCCL .* 2\.21\.5 on node b .* install NCCL 2\.29\.3 on node b"):
        check_world(_cluster(A100, replace(V100, nccl="2.21.5")))
    check_world(_cluster(replace(CPU, nccl="2.21.5"), replace(CPU, node="d", nccl="")))


def test_cards_of_two_makers_are_no_job() -> None:
    """NCCL, which joins those of one, and RCCL, which joins those of the other, do not join each other."""
    amd = replace(
        V100,
        device_name="AMD Instinct MI210",
        architecture="gfx90a",
        compiled_architectures=("gfx90a:sramecc+:xnack-", "gfx942"),
        torch="2.13.0+rocm6.4",
        nccl="2.26.6",
    )
    check_world(_cluster(amd, replace(amd, node="c")))
    with pytest.raises(ClusterError, match=r"only for gfx90a.* install a build .* that has gfx1010 there$"):
        check_world(_cluster(amd, replace(amd, node="c", architecture="gfx1010")))
    with pytest.raises(ClusterError) as refused:
        check_world(_cluster(A100, amd))
    assert str(refused.value) == (
        "node a has NVIDIA's GPUs, node b AMD's, which no library joins: start a job on each kind by itself"
    )


def test_an_odd_zorselike_is_named() -> None:
    with pytest.raises(ClusterError, match=r"zorselike must be the same .* 0\.0\.9 on node b"):
        check_world(_cluster(A100, replace(V100, zorselike="0.0.9")))


def test_a_gpu_too_old_for_the_wheel_gets_the_build_that_has_it() -> None:
    bad = replace(V100, torch="2.13.0+cu128", compiled_architectures=NEW_ARCHITECTURES)
    with pytest.raises(ClusterError) as refused:
        check_world(_cluster(A100, bad))
    message = str(refused.value)
    assert message.startswith(
        "torch 2.13.0+cu128 on node b (ranks 2 and 3) is not compiled for its Tesla V100-SXM2-16GB (sm_70), "
        "only for sm_75 sm_80"
    )
    assert "CUDA wheels from 12.8 on have no V100 (sm_70) and no P100 (sm_60)" in message
    assert "install the cu126 build of the same torch version (2.13.0) there" in message
    assert "http" not in message


def test_a_gpu_too_new_for_the_wheel_gets_a_newer_build() -> None:
    blackwell = replace(V100, device_name="NVIDIA RTX PRO 6000", architecture="sm_120")
    with pytest.raises(ClusterError, match="for a newer CUDA"):
        check_world(_cluster(A100, blackwell))


@pytest.mark.parametrize(
    ("architecture", "compiled", "runs"),
    [
        ("sm_86", ("sm_80",), True),
        ("sm_80", ("sm_86",), False),
        ("sm_90", ("sm_80", "sm_86"), False),
        ("sm_90", ("sm_80", "compute_80"), True),
        ("sm_90", ("sm_90a",), True),
        ("sm_100", ("sm_90a",), False),
        ("sm_103", ("sm_100a",), False),
        ("sm_103", ("sm_100f",), True),
        ("sm_120", ("sm_120",), True),
        ("sm_70", NEW_ARCHITECTURES, False),
        ("sm_70", OLD_ARCHITECTURES, True),
        ("sm_70", (), True),
        ("gfx90a", ("gfx906", "gfx90a:sramecc+"), True),
        ("gfx1100", ("gfx906", "gfx90a"), False),
    ],
)
def test_which_code_runs_on_which_gpu(architecture: str, compiled: tuple[str, ...], runs: bool) -> None:
    assert runs_on(architecture, compiled) is runs


@pytest.mark.parametrize(
    ("planned", "name", "is_it"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", True),
        ("A100-40GB", "NVIDIA A100-SXM4-80GB", False),
        ("H100-80GB", "NVIDIA H100 PCIe", True),
        ("A100", "NVIDIA A10", False),
        ("rtx3090", "NVIDIA GeForce RTX 3090", True),
        ("RTX 3090", "NVIDIA GeForce RTX 3090", True),
        ("RTX-4070", "NVIDIA GeForce RTX 4070 Ti SUPER", False),
        ("RTX-4070-Ti-SUPER", "NVIDIA GeForce RTX 4070 Ti SUPER", True),
        ("rtx4070ti", "NVIDIA GeForce RTX 4070 Ti", True),
        ("cuda", "Tesla T4", True),
        ("T4", "Tesla T4", True),
        ("cpu", "Tesla T4", False),
    ],
)
def test_which_device_a_plan_means(planned: str, name: str, is_it: bool) -> None:
    assert is_device_type(planned, replace(A100, device_name=name)) is is_it


def test_another_type_of_device_than_planned_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        check_world(_cluster(A100, V100), _plan(4, a="A100-80GB", b="A100-80GB"))
    assert (
        "plan rank 2 (node b, local rank 0) is 'A100-80GB' in the plan, 'Tesla V100-SXM2-16GB' runs"
        in str(refused.value)
    )


def test_cuda_where_torch_has_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"node c, where rank 2 runs, has no CUDA device: its torch 2\.13"):
        check_world(_cluster(A100, replace(CPU, device="cuda")))
    with pytest.raises(ConfigError, match="the plan names device type 'A100', but node c, where rank 0 runs"):
        check_world(_cluster(CPU), _plan(2, c="A100"))


def test_cuda_without_a_driver_is_refused() -> None:
    broken = replace(CPU, device="cuda", torch="2.13.0+cu128", cuda="12.8")
    with pytest.raises(ConfigError, match=r"CUDA 12\.8 of its torch 2\.13\.0\+cu128 finds no GPU or driver"):
        check_world(_cluster(broken))


def test_more_processes_than_gpus_are_refused() -> None:
    third = replace(A100, rank=2, local_rank=2, device_name="", architecture="")
    with pytest.raises(ConfigError, match="node a, where rank 2 runs, shows 2 GPUs to its local rank 2"):
        check_world([*_cluster(A100), third])


def test_a_node_that_fell_back_to_its_cpu_is_refused_unless_planned() -> None:
    with pytest.raises(ClusterError, match="ranks 2 and 3 on node c would compute on the CPU"):
        check_world(_cluster(A100, CPU))
    check_world(_cluster(A100, CPU), _plan(4, a="A100", c="cpu"))


def test_who_names_its_gpu_does_not_name_it_for_planned_cpus() -> None:
    plan = _plan(4, a="A100", c="cpu")
    for device in ("cuda", "cpu"):  # What `device=` is on either kind of rank.
        assert check_world(_cluster(A100, CPU), plan, device=device) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_information_travels_as_json_from_other_versions_too() -> None:
    assert ProcessInfo.from_json(A100.to_json()) == A100
    text = '{"rank": 3, "node": "z", "local_rank": 1, "colour": "blue"}'
    assert ProcessInfo.from_json(text) == ProcessInfo(3, "z", 1)


def _gather(rank: int, world_size: int, plan: Plan) -> tuple[list[ProcessInfo], str]:
    os.environ["ZORSELIKE_NODE"] = f"node{rank // 2}"
    os.environ["LOCAL_RANK"] = str(rank % 2)
    own = describe_process("cpu")
    if rank == 3:
        own = replace(own, torch="2.0.0")
    gather_world(replace(own, python="0"))  # A second time is told from the first.
    processes = gather_world(own)
    assert processes[rank] == own
    dist.barrier()
    message = ""
    try:
        check_world(processes, plan)
    except ClusterError as error:
        message = str(error)
    return processes, message


def test_all_ranks_raise_the_same_error(run_ranks: RunRanks) -> None:
    answers: list[tuple[list[ProcessInfo], str]] = run_ranks(_gather, 4, _plan(4))
    processes, message = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert [(process.node, process.local_rank) for process in processes] == [
        ("node0", 0),
        ("node0", 1),
        ("node1", 0),
        ("node1", 1),
    ]
    assert all(process.memory_bytes > 0 and process.python > "3.11" for process in processes)
    assert "torch must be the same everywhere: 2.0.0 on node node1 (rank 3)" in message


@pytest.mark.parametrize(
    "names",
    [
        ("LOCAL_RANK",),
        ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_the_local_rank_comes_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    assert describe_process("cpu", rank=5).local_rank == 5
    for name, value in zip(names, ("2", "5", "8"), strict=False):
        monkeypatch.setenv(name, value)
    assert describe_process("cpu", rank=5).local_rank == 2


def test_a_node_may_give_a_job_some_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are then other local ranks to the plan than to their launcher."""
    monkeypatch.setenv("ZORSELIKE_LOCAL_RANKS", "1, 3")
    found = []
    for local_rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        found.append(describe_process("cpu", rank=0).local_rank)
    assert found == [1, 3]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("1,b", "is '1,b'; write local ranks of the plan, such as 1,3"),
        ("1,1", "is '1,1'; write local ranks"),
        ("0,1", "this is process 2 of its node, counted from 0: start 2 processes there"),
    ],
)
def test_wrong_local_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, listed: str, message: str) -> None:
    monkeypatch.setenv("ZORSELIKE_LOCAL_RANKS", listed)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=re.escape(message)):
        describe_process("cpu", rank=0)


@pytest.mark.gpu
def test_a_gpu_describes_itself(run_ranks: RunRanks) -> None:
    (described,) = run_ranks(_describe_gpu, 1)
    assert described["device"] == "cuda"
    assert described["num_gpus"] > 0
    assert described["architecture"]
    assert described["nccl"]


def _describe_gpu(rank: int, world_size: int) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    info = describe_process("cuda")
    check_world([info])
    return vars(info)
