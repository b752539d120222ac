"""Who and where a process is, under every launcher; and two ranks that plain `srun` starts."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import debug_llama
import pytest
import torch
from ranks import RunRanks

from zorselike.errors import ConfigError
from zorselike.runtime.processes.device import find_device
from zorselike.runtime.processes.identity import RANK_ALONE, Identity, find_identity
from zorselike.runtime.processes.launcher_store import _find_meeting_point
from zorselike.runtime.processes.world import describe_process
from zorselike.train.__main__ import main

ROOT = Path(__file__).parents[3]
NODE = {"ZORSELIKE_NODE": "desk"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PALS = {
    "PALS_RANKID": "5",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PALS_LOCAL_RANKID": "1",
    "PMI_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
STEP = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "1"}
BATCH = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "3(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2,3",
}
"""As Slurm 22.05 sets it for nodes a and c in one component, b in the other."""
NAMES = ("TORCHELASTIC_RUN_ID", *TORCHRUN, *OPEN_MPI, *PALS, *HYDRA, *SLURM, *STEP, *HETEROGENEOUS)


@pytest.mark.parametrize(
    ("variables", "source", "local_size"),
    [
        (TORCHRUN, "torchrun", 4),
        (OPEN_MPI, "Open MPI", 4),
        (PALS, "PALS", 4),
        (HYDRA, "Hydra", 4),
        (SLURM | STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "Slurm", None),  # srun --mpi=pmi2
        (SLURM, "Slurm", None),
        (SLURM | STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "Slurm", 4),
        # A heterogeneous job: the variable without STEP counts the tasks of one component only.
        (SLURM | STEP | {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "Slurm", 3),
        # There nodes are numbered component by component, while the step lists them by name.
        (SLURM | STEP | HETEROGENEOUS, "Slurm", 3),
        (SLURM | STEP | HETEROGENEOUS | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_HET_SIZE": "1"}, "Slurm", None),
    ],
)
def test_each_launcher_says_it_in_its_own_variables(
    variables: dict[str, str], source: str, local_size: int | None
) -> None:
    assert find_identity(variables | NODE) == Identity(5, 8, 1, local_size, "desk", source)


@pytest.mark.parametrize("under", [OPEN_MPI, PALS, HYDRA, SLURM | STEP])
def test_torchrun_counts_under_another_launcher(under: dict[str, str]) -> None:
    outer = {name: "0" if "SIZE" not in name and "NTASKS" not in name else "1" for name in under}
    assert find_identity(outer | TORCHRUN | NODE) == Identity(5, 8, 1, 4, "desk", "torchrun")


def test_mpirun_counts_under_slurm() -> None:
    assert find_identity(BATCH | STEP | OPEN_MPI).source == "Open MPI"
    assert find_identity(BATCH | STEP | HYDRA).source == "Hydra"


@pytest.mark.parametrize("started", [{}, BATCH, BATCH | {"SLURM_STEP_ID": str(0xFFFF_FFFA)}])
def test_a_process_by_itself(started: dict[str, str]) -> None:
    """A batch script or an interactive shell of Slurm's is no task of a step."""
    assert find_identity(started) == Identity(0, 1, 0, None, socket.gethostname(), "")
    assert find_identity(started, rank=3).local_rank == 3
    assert find_identity(started | {"LOCAL_RANK": "2"}, rank=3).local_rank == 2


@pytest.mark.parametrize("other", [OPEN_MPI, PALS, HYDRA, SLURM])
def test_a_script_may_set_rank_and_world_size_from_its_launchers(other: dict[str, str]) -> None:
    assert find_identity({"RANK": "5", "WORLD_SIZE": "8"} | other).local_rank == 1


@pytest.mark.parametrize("other", [{}, SLURM])  # Slurm speaks of another rank.
def test_rank_and_world_size_are_enough_where_no_gpu_is_to_be_chosen(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    """As in a pod of one process, or a script that sets the two by hand."""
    variables = {"RANK": "1", "WORLD_SIZE": "4"} | other
    assert find_identity(variables) == Identity(1, 4, 0, None, socket.gethostname(), RANK_ALONE)
    _pretend(monkeypatch, variables, 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert find_device("auto", without_gpu="") == torch.device("cuda", 0)
    _pretend(monkeypatch, variables, 2)
    with pytest.raises(ConfigError, match="not LOCAL_RANK, and this node has 2 GPUs"):
        find_device("auto", without_gpu="")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1", "LOCAL_RANK": "0"}, "RANK and LOCAL_RANK set in the environment, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE set in the environment, but not RANK and LOCAL_RANK: start all"),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "not SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
        (SLURM | {"SLURM_NTASKS": "5"}, "Slurm's environment variables contradict each other: rank 5 of 5"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "contradict each other: rank 5 of 8, local rank 4 of 4; unset"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "contradict each other: rank 5 of 8, local rank 1 of 9"),
        (SLURM | {"SLURM_LOCALID": "8"}, "contradict each other: rank 5 of 8, local rank 8; unset"),
        (PALS | {"PALS_RANKID": "x"}, "the environment variable PALS_RANKID is 'x'; it must be a whole"),
    ],
)
def test_incomplete_or_contradictory_variables_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_identity(variables)


@pytest.mark.parametrize(
    ("variables", "num_gpus", "index"),
    [
        (SLURM, 4, 1),
        (SLURM, 1, 0),  # --gpus-per-task=1: each task sees its own.
        (SLURM | TORCHRUN, 1, 0),  # Copied from Slurm's by the job script.
        (OPEN_MPI, 2, 1),
        (PALS, 2, 1),
        (TORCHRUN, 4, 1),
        ({"LOCAL_RANK": "3"}, 4, 3),
        ({}, 4, 2),  # The group's rank, where nobody says anything.
    ],
)
def test_each_rank_of_a_node_takes_its_own_card(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_gpus: int, index: int
) -> None:
    _pretend(monkeypatch, variables, num_gpus)
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    assert find_device("auto", without_gpu="", rank=2) == torch.device("cuda", index)
    assert made_current == [torch.device("cuda", index)]


@pytest.mark.parametrize(("variables", "num_gpus", "index"), [(SLURM, 4, 1), (SLURM, 1, 0), (TORCHRUN, 4, 1)])
def test_a_process_describes_the_card_that_it_would_take(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_gpus: int, index: int
) -> None:
    """`zorselike doctor` takes none, and says of it what training will find."""
    _pretend(monkeypatch, variables, num_gpus)
    asked: list[int] = []

    def describe(card: int) -> Any:
        asked.append(card)
        numbers = dict.fromkeys(("pci_domain_id", "pci_bus_id", "pci_device_id", "multi_processor_count"), 1)
        return SimpleNamespace(name="A100", uuid="u", total_memory=1, major=8, minor=0, **numbers)

    monkeypatch.setattr(torch.cuda, "get_device_properties", describe)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    assert describe_process("cuda", rank=0).device_name == "A100"
    assert asked == [index]


def test_more_processes_than_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, TORCHRUN, num_gpus=1)
    with pytest.raises(ConfigError, match="this is process 1 of its node, which has 1 GPUs"):
        find_device("cuda", without_gpu="")
    _pretend(
        monkeypatch, SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, num_gpus=1
    )  # By torchrun itself.
    with pytest.raises(ConfigError, match="this is process 1 of its node, which has 1 GPUs"):
        find_device("cuda", without_gpu="")


def _pretend(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_gpus: int) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],cpu1", "gpu03"), ("gpu7", "gpu7"), ("a,b", "a"), ("r[1-2]n4,x", "r1n4")],
)
def test_a_slurm_step_meets_on_its_first_node(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    identity = Identity(0, 2, 0, 1, "gpu03", "Slurm")
    with pytest.raises(ConfigError, match="Slurm started 2 processes, and nothing says where they meet"):
        _find_meeting_point(identity)
    for name, value in (STEP | {"SLURM_STEP_NODELIST": nodes}).items():
        monkeypatch.setenv(name, value)
    assert _find_meeting_point(identity) == (first, 23456)
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "z[2-3]")  # Where rank 0 of a heterogeneous job is.
    assert _find_meeting_point(identity) == ("z2", 23456)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert _find_meeting_point(identity) == ("10.0.0.1", 23456)
    for port in ("0", "65536", "x"):  # Such as a job's number after 5 digits.
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=rf"MASTER_PORT is '{port}', which is no port \(1 to 65535\)"):
            _find_meeting_point(identity)


@pytest.mark.parametrize("says_where", [True, False])
def test_plain_srun_trains(run_ranks: RunRanks, tmp_path: Path, says_where: bool) -> None:
    """Two ranks with Slurm's variables alone, through the product's entry."""
    debug_llama.warm_up()
    job = next(number for number in range(os.getpid() % 5000, 10_000) if _is_free(20_000 + number))
    plan = tmp_path / "two.plan.toml"
    plan.write_text(
        "version = 1\nglobal_batch = 4\n[[groups]]\nranks = [0, 1]\nshares = [[0, 2, 1], [1, 2, 2]]\n"
        "[[ministages]]\ngroup = 0\nmodules = ['tok_embeddings', 'layers.0', 'layers.1', 'layers.2', "
        "'layers.3', 'layers.4', 'layers.5', 'norm', 'output']\n"
        "[[devices]]\nrank = 0\nnode = 'desk'\nlocal_rank = 1\n"  # So a wrong local rank shows.
        "[[devices]]\nrank = 1\nnode = 'desk'\nlocal_rank = 0\n"
    )
    command = ["--config", str(ROOT / "recipes/debug_cpu.toml"), "--hetero.plan", str(plan)]
    command += ["--job.dump_folder", str(tmp_path / "out"), "--lr_scheduler.warmup_steps", "1"]
    command += ["--training.global_batch_size", "4", "--training.seq_len", "32", "--training.steps", "2"]
    environment = NODE | {"OMP_NUM_THREADS": "1"}
    if says_where:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + job)}
    else:
        environment |= {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    ends = run_ranks(_train_as_a_task, 2, command, environment, init=False, allow_exit=True)
    assert [end.code for end in ends] == [0, 0], ends
    assert " 2 of 2 steps" in ends[0].stdout and not ends[1].stdout
    assert "rank 1 on cpu" in ends[0].stdout  # Rank 1 of the plan is the first process: its local rank is 0.


def _train_as_a_task(rank: int, world_size: int, command: list[str], environment: dict[str, str]) -> None:
    """What plain `srun` does for one process."""
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(world_size)}
    os.environ.update(environment | task)
    sys.argv = ["train", *command]
    sys.exit(main())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
