"""Who and where this process is, by the variables of what started it.

`RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` are torchrun's; where they are not set, those of
Open MPI, PALS (HPE Cray), Hydra (MPICH, Intel MPI) or Slurm's `srun` count, in this order: an MPI launcher
itself may run under Slurm.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from zorselike.errors import ConfigError

NODE_VARIABLE = "ZORSELIKE_NODE"
"""Environment variable that names this node in place of its hostname."""

RANK_ALONE = "RANK and WORLD_SIZE"
"""Source of an identity whose place on its node nobody says: a pod of one process, or a script that sets
these two by hand. Its local rank is taken for 0."""

_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that only torchrun sets."""

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Slurm's batch scripts and interactive shells are steps of numbers from here on, with one process each."""


@dataclass(frozen=True)
class Identity:
    """This process among those that were started together."""

    rank: int
    size: int
    local_rank: int
    """Its number on its node."""
    local_size: int | None
    """Number of processes on its node; None if unknown."""
    node: str
    source: str
    """Launcher whose variables say so; empty for a process that was started by itself."""

    def own_gpu(self, num_gpus: int) -> int:
        """Which of the GPUs that it sees is its own: that of its local rank, or, where Slurm or an MPI
        launcher shows each process one, that one."""
        is_shown_one = num_gpus == 1 and self.source not in ("", _TORCHRUN.name)
        return 0 if is_shown_one else self.local_rank


@dataclass(frozen=True)
class _Launcher:
    """The variables by which a launcher tells a process what it is; the first that is set counts."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_rank: str
    local_sizes: tuple[str, ...] = ()


_TORCHRUN = _Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",))
_SLURM = _Launcher(
    "Slurm",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),  # The former counts all components of a heterogeneous job.
    "SLURM_LOCALID",
)
_HYDRA = _Launcher("Hydra", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",))
_OTHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "PALS",
        "PALS_RANKID",
        ("PALS_SIZE", "PMI_SIZE"),
        "PALS_LOCAL_RANKID",
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _HYDRA,
    _SLURM,
)


def find_identity(environment: Mapping[str, str] = os.environ, *, rank: int | None = None) -> Identity:
    """What the launcher's variables say of this process; by itself it is rank 0 of 1.

    `rank`: this process's in a group that the caller has made without a launcher, which then is taken for
    its local rank. Raises `ConfigError` where a launcher's variables are incomplete or contradict each other.
    """
    node = environment.get(NODE_VARIABLE) or socket.gethostname()
    if _TORCHRUN.rank in environment or _TORCHRUN.sizes[0] in environment:
        return _check(_read_torchrun(environment, node))
    for launcher in _OTHERS:
        if _has_started(launcher, environment):
            return _check(_read(launcher, environment, node))
    local_rank = _number(environment, (_TORCHRUN.local_rank,))
    local_size = _number(environment, _TORCHRUN.local_sizes)
    source = "" if local_rank is None else _TORCHRUN.name
    return Identity(0, 1, (rank or 0) if local_rank is None else local_rank, local_size, node, source)


def _read(launcher: _Launcher, environment: Mapping[str, str], node: str) -> Identity:
    rank = _number(environment, (launcher.rank,))
    size = _number(environment, launcher.sizes)
    local_rank = _number(environment, (launcher.local_rank,))
    if rank is None or size is None or local_rank is None:
        names = {launcher.rank: rank, " or ".join(launcher.sizes): size, launcher.local_rank: local_rank}
        given = [name for name, value in names.items() if value is not None]
        missing = [name for name, value in names.items() if value is None]
        raise ConfigError(
            f"{' and '.join(given)} set in the environment, but not {' and '.join(missing)}: start all "
            "processes by torchrun, srun or mpirun, or set RANK, WORLD_SIZE and LOCAL_RANK (the process's "
            "number on its node, from 0) for each"
        )
    local_size = _number(environment, launcher.local_sizes)
    if launcher is _SLURM:
        local_size = _count_tasks_here(environment)
    return Identity(rank, size, local_rank, local_size, node, launcher.name)


def _read_torchrun(environment: Mapping[str, str], node: str) -> Identity:
    """Job scripts copy another launcher's numbers into these variables: then it is that one."""
    rank, size = _number(environment, (_TORCHRUN.rank,)), _number(environment, _TORCHRUN.sizes)
    local_rank = _number(environment, (_TORCHRUN.local_rank,))
    is_copied = _STARTED_BY_TORCHRUN not in environment and None not in (rank, size)
    for other in _OTHERS if is_copied else ():
        numbers = (_number(environment, (other.rank,)), _number(environment, other.sizes))
        if numbers == (rank, size) and local_rank in (None, _number(environment, (other.local_rank,))):
            return _read(other, environment, node)
    if local_rank is not None or rank is None or size is None:
        return _read(_TORCHRUN, environment, node)
    return Identity(rank, size, 0, _number(environment, _TORCHRUN.local_sizes), node, RANK_ALONE)


def _check(found: Identity) -> Identity:
    local_size = found.size if found.local_size is None else found.local_size
    if not (found.rank < found.size and found.local_rank < local_size <= found.size):
        here = "" if found.local_size is None else f" of {found.local_size}"
        raise ConfigError(
            f"{found.source}'s environment variables contradict each other: rank {found.rank} of "
            f"{found.size}, local rank {found.local_rank}{here}; unset what is left of another launcher, or "
            "start all processes by one"
        )
    return found


def _has_started(launcher: _Launcher, environment: Mapping[str, str]) -> bool:
    """Whether this process is one of a launcher's."""
    if launcher is _HYDRA and launcher.local_rank not in environment:
        return False  # Others speak PMI, too: `srun --mpi=pmi2`.
    return launcher.rank in environment and (launcher is not _SLURM or _is_task(environment))


def _is_task(environment: Mapping[str, str]) -> bool:
    """Whether `srun` started this process, and it is no batch script and no interactive shell."""
    if "SLURM_STEP_ID" not in environment:
        return "SLURM_JOB_ID" not in environment
    step = _number(environment, ("SLURM_STEP_ID",))
    return step is not None and step < _FIRST_SPECIAL_STEP


def _count_tasks_here(environment: Mapping[str, str]) -> int | None:
    """This node's entry of `2(x3),1`: two tasks on each of three nodes, one on the fourth.

    In a heterogeneous job nodes are numbered component by component, and the step lists them by name.
    """
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if num_components := _number(environment, ("SLURM_HET_SIZE",)):
        names = (f"SLURM_TASKS_PER_NODE_HET_GROUP_{number}" for number in range(num_components))
        listed = ",".join(environment.get(name, "") for name in names)
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    counts = [int(tasks) for tasks, times in runs for _ in range(int(times or 1))]
    if num_components and sum(counts) != _number(environment, _SLURM.sizes):
        return None  # A step of some components, or of other numbers than the job's.
    node = _number(environment, ("SLURM_NODEID",))
    return None if node is None or node >= len(counts) else counts[node]


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of these variables that is set."""
    for name in names:
        text = environment.get(name)
        if text is not None:
            if not text.isdecimal():
                raise ConfigError(f"the environment variable {name} is '{text}'; it must be a whole number")
            return int(text)
    return None
