"""`--launch`: the torchrun command of each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from zorselike.plan.plan import Device, Plan

_PORT = 29500
_CPU = "CPU"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A job to be started with a plan."""

    path: str
    """Path of the plan."""
    dtype: str
    defer_updates: bool
    model: tuple[str, ...]
    """Options that name the model to the trainer; empty if a recipe or script must name it."""


def list_commands(plan: Plan, launch: Launch) -> list[str]:
    """A command for each node, then notes as comments; the plan must name its devices."""
    nodes: dict[str, list[Device]] = {}
    for device in sorted(plan.devices, key=lambda device: device.rank):
        nodes.setdefault(device.node, []).append(device)
    first = next(iter(nodes))
    lines = [
        f"{_write_environment(node, devices)} {_write_torchrun(len(devices), len(nodes), first)} "
        f"{_write_program(plan, launch, devices)}"
        for node, devices in nodes.items()
    ]
    return [*lines, *_list_notes(nodes, launch)]


def _write_environment(node: str, devices: Sequence[Device]) -> str:
    """Variables that identify the processes and hide GPUs that the plan does not use."""
    local = sorted(device.local_rank for device in devices)
    words = [f"ZORSELIKE_NODE={quote(node)}"]
    if local != list(range(len(local))):
        listed = ",".join(map(str, local))
        words = [f"CUDA_VISIBLE_DEVICES={listed}", f"ZORSELIKE_LOCAL_RANKS={listed}", *words]
    return " ".join(words)


def _write_torchrun(num_processes: int, num_nodes: int, first: str) -> str:
    where = (
        "--standalone"
        if num_nodes == 1
        else f"--nnodes {num_nodes} --rdzv-backend c10d --rdzv-endpoint {first}:{_PORT} --rdzv-id train"
    )
    return f"torchrun {where} --nproc-per-node {num_processes}"


def _write_program(plan: Plan, launch: Launch, devices: Sequence[Device]) -> str:
    words = ["-m zorselike.train"]
    words += map(quote, launch.model or ("--config", "RECIPE.toml"))
    words.append(f"--hetero.plan {quote(launch.path)}")
    if plan.sequence_length is not None:
        words.append(f"--training.seq_len {plan.sequence_length}")
    words.append(f"--training.mixed_precision_param {launch.dtype}")
    if all(device.type == _CPU for device in devices):
        words.append("--hetero.device cpu")
    if not launch.defer_updates:
        words.append("--hetero.clip ministage")
    return " ".join(words)


def _list_notes(nodes: dict[str, list[Device]], launch: Launch) -> list[str]:
    notes = []
    if len(nodes) > 1:
        notes.append(
            f"run one command on each node, in any order; all nodes must reach {next(iter(nodes))} by that "
            f"name, and each needs {launch.path}"
        )
    if not launch.model:
        notes.append("RECIPE.toml, or your own script in its place, names the model (README, Your model)")
    if not launch.defer_updates:
        notes.append(
            "clip = ministage updates each ministage at once, as the plan assumes; to clip by the norm of "
            "all gradients plan with --defer-updates"
        )
    return [f"# {note}" for note in notes]
