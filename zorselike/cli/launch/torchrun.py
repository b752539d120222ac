"""The torchrun command of each node, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from zorselike.cli.launch.job import PORT, Job
from zorselike.plan.plan import Device


def list_commands(job: Job) -> list[str]:
    """A command for each node, then notes as comments."""
    nodes = job.devices_of
    first = next(iter(nodes))
    lines = [
        f"{_write_environment(node, devices)} {_write_torchrun(len(devices), len(nodes), first)} "
        f"{job.write_program()}"
        for node, devices in nodes.items()
    ]
    notes = job.list_notes()
    if len(nodes) > 1:
        meeting = (
            f"run one command on each node, in any order; all nodes must reach {first} by that name, and "
            f"each needs {job.path}"
        )
        notes.insert(0, meeting)
    return [*lines, *(f"# {note}" for note in notes)]


def _write_environment(node: str, devices: Sequence[Device]) -> str:
    """Variables that identify the processes and hide GPUs that the plan does not use."""
    local = sorted(device.local_rank for device in devices)
    words = [f"ZORSELIKE_NODE={quote(node)}"]
    if local != list(range(len(local))):
        listed = ",".join(map(str, local))
        words = [f"CUDA_VISIBLE_DEVICES={listed}", f"ZORSELIKE_LOCAL_RANKS={listed}", *words]
    return " ".join(words)


def _write_torchrun(num_processes: int, num_nodes: int, first: str) -> str:
    meeting = quote(f"{first}:{PORT}")
    where = (
        "--standalone"
        if num_nodes == 1
        else f"--nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint {meeting} --rdzv-id train"
    )
    return f"torchrun {where} --nproc-per-node {num_processes}"
