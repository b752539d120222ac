"""Who runs: every process's machine and software, gathered and checked before work starts.

Mixed clusters are set up node by node, so the nodes differ where they should not. The check is
a pure function of what all processes say, so every rank raises the same error.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from zorselike.cost.catalogue import match_device_name
from zorselike.errors import ClusterError, ConfigError, PlanError
from zorselike.plan.devices import Process, match_devices
from zorselike.plan.plan import Plan
from zorselike.runtime._compat import default_store
from zorselike.runtime.memory.host_room import find_host_memory, find_host_room
from zorselike.runtime.processes.identity import find_identity
from zorselike.text.units import GIB
from zorselike.text.wording import count, list_few
from zorselike.version import __version__

LOCAL_RANKS_VARIABLE = "ZORSELIKE_LOCAL_RANKS"
"""Environment variable for a node of which a job has only some devices (`CUDA_VISIBLE_DEVICES=1,3`): which
local ranks of the plan its processes are, in their order (`1,3`)."""

_MEMORY_TOLERANCE = 0.15
_OLDEST_IN_NEW_WHEELS = (7, 5)
"""CUDA wheels from 12.8 on hold no code for anything older."""


@dataclass(frozen=True)
class ProcessInfo:
    """One process: where it is, what it drives, what it runs. Travels as JSON."""

    rank: int
    node: str
    local_rank: int
    device: str = "cpu"
    """Kind of device that it computes on: `cpu` or `cuda`."""
    device_name: str = ""
    """The GPU's name as its driver gives it; empty without one."""
    gpu: str = ""
    """Unique identifier of the GPU; empty without one."""
    gpu_address: str = ""
    """The GPU's place on its node's bus, which slices of one (MIG) share."""
    num_processors: int = 0
    """Multiprocessors of the GPU."""
    num_gpus: int = 0
    """Number of GPUs that this process sees."""
    architecture: str = ""
    """Architecture of the GPU: `sm_70`, or `gfx90a`."""
    compiled_architectures: tuple[str, ...] = ()
    """Architectures for which this process's torch has code."""
    memory_bytes: int = 0
    """Memory of the GPU, or of the machine without one."""
    host_room_bytes: int = 0
    """Free host memory of the machine or the container."""
    host_room_limit: str = ""
    """What says so."""
    torch: str = ""
    """Version with its build: `2.13.0+cu126`."""
    cuda: str = ""
    """The CUDA (or ROCm) version torch was built with; empty for a CPU build."""
    nccl: str = ""
    blocks_launches: bool = False
    """Whether each kernel that is launched is waited for (`CUDA_LAUNCH_BLOCKING`)."""
    python: str = ""
    zorselike: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessInfo:
        """The inverse of `to_json`, also of another version of zorselike, which is checked later."""
        values = {key: value for key, value in json.loads(text).items() if key in _FIELDS}
        values["compiled_architectures"] = tuple(values.get("compiled_architectures", ()))
        return cls(**values)


_FIELDS = frozenset(field.name for field in fields(ProcessInfo))


def describe_process(device: torch.device | str, *, rank: int | None = None) -> ProcessInfo:
    """This process (of the default group), which means to compute on `device`.

    A device that is not there is no error here, but one of all ranks in `check_world`. Raises
    `ConfigError` where `ZORSELIKE_LOCAL_RANKS` or a launcher's variables are wrong.
    """
    device = torch.device(device)
    rank = dist.get_rank() if rank is None else rank
    identity = find_identity(rank=rank)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = identity.own_gpu(num_gpus) if device.index is None else device.index
    name, gpu, architecture, memory_bytes = "", "", "", find_host_memory()
    address, num_processors = "", 0
    if device.type == "cuda" and index < num_gpus:
        properties: Any = torch.cuda.get_device_properties(index)
        name, gpu, memory_bytes = properties.name, str(properties.uuid), properties.total_memory
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
        num_processors = properties.multi_processor_count
        architecture = (
            properties.gcnArchName.split(":")[0]
            if torch.version.hip
            else f"sm_{properties.major}{properties.minor}"
        )
    room = find_host_room()
    return ProcessInfo(
        rank=rank,
        node=identity.node,
        local_rank=_find_planned_local_rank(identity.local_rank),
        device=device.type,
        device_name=name,
        gpu=gpu,
        gpu_address=address,
        num_processors=num_processors,
        num_gpus=num_gpus,
        architecture=architecture,
        compiled_architectures=tuple(torch.cuda.get_arch_list()) if num_gpus else (),
        memory_bytes=memory_bytes,
        host_room_bytes=room.num_bytes,
        host_room_limit=room.limit,
        torch=str(torch.__version__),
        cuda=torch.version.cuda or torch.version.hip or "",
        nccl=_nccl_version() if num_gpus else "",
        blocks_launches=os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0",
        python=platform.python_version(),
        zorselike=__version__,
    )


def _find_planned_local_rank(local_rank: int) -> int:
    """What the plan calls the launcher's local rank."""
    text = os.environ.get(LOCAL_RANKS_VARIABLE)
    if not text:
        return local_rank
    listed = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in listed) or len({*listed}) < len(listed):
        raise ConfigError(f"{LOCAL_RANKS_VARIABLE} is '{text}'; write local ranks of the plan, such as 1,3")
    if local_rank >= len(listed):
        raise ConfigError(
            f"{LOCAL_RANKS_VARIABLE} is '{text}', but this is process {local_rank} of its node, counted from "
            f"0: start {count(len(listed), 'process')} there, or name more local ranks"
        )
    return int(listed[local_rank])


def gather_world(own: ProcessInfo) -> list[ProcessInfo]:
    """What every process of the default group says of itself, by rank; collective.

    Goes through the group's store and not through the group: NCCL of different versions hangs,
    which is what is to be found out.
    """
    store = default_store()
    generation = store.add(f"zorselike/world/gathered/{own.rank}", 1)
    store.set(f"zorselike/world/{generation}/{own.rank}", own.to_json())
    return [
        ProcessInfo.from_json(store.get(f"zorselike/world/{generation}/{rank}"))
        for rank in range(dist.get_world_size())
    ]


def check_world(
    processes: Sequence[ProcessInfo], plan: Plan | None = None, *, device: str | None = None
) -> dict[int, int]:
    """The plan's rank for each process's rank, once all of them can run the plan together.

    Args:
        processes: all of them, as `gather_world` gives them.
        plan: what is to run; without one the processes are only compared with each other.
        device: `cuda` or `cpu`, if the caller has named it for all of them.

    Raises:
        PlanError: The plan is for other processes: their number, nodes or types of device.
        ConfigError: CUDA is asked for, by the plan or otherwise, where there is none.
        ClusterError: The nodes' software or devices do not fit together.
    """
    rank_of, mistakes = _examine(processes, plan, device)
    for mistake in mistakes:
        raise mistake
    return rank_of


def find_mistakes(
    processes: Sequence[ProcessInfo], plan: Plan | None = None, *, device: str | None = None
) -> list[ValueError]:
    """Everything for which `check_world` would raise, one error of each kind."""
    return _examine(processes, plan, device)[1]


def _examine(
    processes: Sequence[ProcessInfo], plan: Plan | None, device: str | None
) -> tuple[dict[int, int], list[ValueError]]:
    """The plan's rank for each process's rank, and all mistakes."""
    processes = sorted(processes, key=lambda process: process.rank)
    rank_of = {process.rank: process.rank for process in processes}
    if plan is not None:
        # Types are compared here: a driver's names for its GPUs are not those that people use.
        places = [Process(process.node, process.local_rank, "", process.rank) for process in processes]
        try:
            rank_of = match_devices(plan, places)
        except (PlanError, ClusterError) as error:
            return {}, [error]
    types = _planned_types(plan, rank_of)
    on_gpu = [process for process in processes if process.device == "cuda"]
    found = [
        _find_missing_cuda(processes, types, device),
        _find_difference(processes, "zorselike", lambda process: process.zorselike),
        _find_difference(processes, "torch", lambda process: base_version(process.torch)),
        _find_not_compiled(processes),
        _find_fallen(processes, types),
        _find_other_types(processes, types, rank_of),
        _find_two_makers(on_gpu) or _find_difference(on_gpu, "NCCL", lambda process: process.nccl),
    ]
    return rank_of, [mistake for mistake in found if mistake is not None]


def runs_on(architecture: str, compiled: Sequence[str]) -> bool:
    """Whether code compiled for `compiled` (as `torch.cuda.get_arch_list` says) runs on a GPU.

    Binaries run on the same major architecture from their minor one on, those with a suffix
    (`sm_90a`) on their own only; PTX (`compute_90`) runs on anything newer.
    """
    device = _parse_architecture(architecture)
    if device is None or not compiled:  # ROCm, or nothing is known.
        return not compiled or architecture in {entry.split(":")[0] for entry in compiled}
    for entry in compiled:
        code = _parse_architecture(entry)
        if code is None:
            continue
        if entry.startswith("compute_"):
            if device >= code:
                return True
        elif entry[-1].isdigit() or entry[-1] == "f":
            if device[0] == code[0] and device[1] >= code[1]:
                return True
        elif device == code:
            return True
    return False


def is_device_type(planned: str, process: ProcessInfo) -> bool:
    """Whether a plan's device type (`A100-80`, `rtx3090`, `cuda`, `cpu`) means a process's device.

    It is the catalogue's name of it; or every word of it is in the GPU's name, joined or not, or is the size
    of its memory, and then a `Ti` or `SUPER` that only one side has makes another card.
    """
    wanted = planned.casefold()
    if process.device == "cpu" or wanted == "cpu":
        return wanted == process.device
    known = match_device_name(process.device_name, process.memory_bytes)
    if wanted in ("cuda", "gpu") or (known is not None and wanted == known.casefold()):
        return True
    name = _words(process.device_name)
    joined = {"".join(name[i:j]) for i in range(len(name)) for j in range(i + 1, len(name) + 1)}
    words = _words(wanted)
    if {"ti", "super"} & set(name) - set(re.findall(r"ti\b|super", wanted)):
        return False
    return all(word in joined or _is_memory_size(word, process.memory_bytes) for word in words)


def device_type(info: ProcessInfo) -> str:
    """The catalogue's name of what a process computes on; raises `ClusterError` if it has none."""
    name = "cpu" if info.device == "cpu" else info.device_name
    found = match_device_name(name, info.memory_bytes)
    if found is None:
        raise ClusterError(
            f"node {info.node}: the device catalogue has no '{name}' with "
            f"{info.memory_bytes / GIB:.1f} GiB; measure on a card that it knows, or add it to "
            "zorselike/cost/catalogue.py"
        )
    return found


def _planned_types(plan: Plan | None, rank_of: Mapping[int, int]) -> dict[int, str]:
    """The device type that the plan names for each process's rank, if any."""
    if plan is None:
        return {}
    type_of = {device.rank: device.type for device in plan.devices if device.type}
    return {process: type_of[rank] for process, rank in rank_of.items() if rank in type_of}


def _find_missing_cuda(
    processes: Sequence[ProcessInfo], types: Mapping[int, str], device: str | None
) -> ValueError | None:
    for process in processes:
        planned = types.get(process.rank, "")
        from_plan = bool(planned) and planned.casefold() != "cpu"
        # In a job of GPUs and CPUs each rank names its own device, and the plan says which are CPUs.
        asked = None if planned.casefold() == "cpu" else device
        if not from_plan and "cuda" not in (process.device, asked):
            continue
        where = f"node {process.node}, where rank {process.rank} runs,"
        source = f"the plan names device type {planned!r}" if from_plan else "device 'cuda' is asked for"
        if not process.num_gpus:
            why = (
                f"CUDA {process.cuda} of its torch {process.torch} finds no GPU or driver"
                if process.cuda
                else f"its torch {process.torch} is a build without CUDA"
            )
            return ConfigError(
                f"{source}, but {where} has no CUDA device: {why}; "
                "mend that node, or use device 'cpu' and a plan without GPU types"
            )
        if process.device == "cuda" and not process.device_name:
            return ConfigError(
                f"{source}, but {where} shows {count(process.num_gpus, 'GPU')} to its local rank "
                f"{process.local_rank}; start at most {count(process.num_gpus, 'process')} there"
            )
    return None


def _find_difference(
    processes: Sequence[ProcessInfo], what: str, version_of: Callable[[ProcessInfo], str]
) -> ValueError | None:
    """The error for processes that differ in a version; it names the nodes that are in the minority."""
    ranks_of: dict[str, dict[str, list[int]]] = {}
    """By version and node."""
    for process in processes:
        ranks_of.setdefault(version_of(process), {}).setdefault(process.node, []).append(process.rank)
    if len(ranks_of) < 2:
        return None
    # The most nodes, then the newest: what the odd ones should have.
    right = max(ranks_of, key=lambda version: (len(ranks_of[version]), _version_key(version)))
    listed = {
        version: f"{version or 'none'} on "
        + list_few([f"node {node} ({list_few(ranks, 'rank')})" for node, ranks in nodes.items()])
        for version, nodes in ranks_of.items()
    }
    odd = sorted(ranks_of.keys() - {right})
    nodes = list_few(sorted({node for version in odd for node in ranks_of[version]}), "node")
    return ClusterError(
        f"{what} must be the same everywhere: {', '.join(listed[version] for version in odd)}, but "
        f"{listed[right]}; install {what} {right} on {nodes}"
    )


def _find_two_makers(on_gpu: Sequence[ProcessInfo]) -> ValueError | None:
    amd = sorted({process.node for process in on_gpu if process.architecture.startswith("gfx")})
    nvidia = sorted({process.node for process in on_gpu if process.architecture.startswith("sm_")})
    if not (amd and nvidia):
        return None
    return ClusterError(
        f"{list_few(nvidia, 'node')} {'have' if len(nvidia) > 1 else 'has'} NVIDIA's GPUs, "
        f"{list_few(amd, 'node')} AMD's, which no library joins: start a job on each kind by itself"
    )


def _find_not_compiled(processes: Sequence[ProcessInfo]) -> ValueError | None:
    for process in processes:
        if not process.architecture or runs_on(process.architecture, process.compiled_architectures):
            continue
        there = [other.rank for other in processes if other.node == process.node]
        version = base_version(process.torch)
        capability = _parse_architecture(process.architecture)
        if capability is None:
            mend = (
                f"install a build of the same torch version ({version}) that has {process.architecture} there"
            )
        elif capability < _OLDEST_IN_NEW_WHEELS:
            mend = (
                "CUDA wheels from 12.8 on have no V100 (sm_70) and no P100 (sm_60): install the cu126 "
                f"build of the same torch version ({version}) there"
            )
        else:
            mend = f"install a build of the same torch version ({version}) for a newer CUDA there"
        return ClusterError(
            f"torch {process.torch} on node {process.node} ({list_few(there, 'rank')}) is not compiled "
            f"for its {process.device_name} ({process.architecture}), only for "
            f"{' '.join(process.compiled_architectures)}; {mend}"
        )
    return None


def _find_fallen(processes: Sequence[ProcessInfo], types: Mapping[int, str]) -> ValueError | None:
    """A node that fell back to its CPU, because its driver is broken, say, would slow down all."""
    fallen = [
        process
        for process in processes
        if process.device == "cpu" and types.get(process.rank, "").casefold() != "cpu"
    ]
    if fallen and any(process.device == "cuda" for process in processes):
        nodes = sorted({process.node for process in fallen})
        ranks = [process.rank for process in fallen]
        return ClusterError(
            f"{list_few(ranks, 'rank')} on {list_few(nodes, 'node')} would compute on the CPU while others "
            'have GPUs; mend CUDA there, leave the node out, or give those ranks type = "cpu" in the '
            "plan's [[devices]]"
        )
    return None


def _find_other_types(
    processes: Sequence[ProcessInfo], types: Mapping[int, str], rank_of: Mapping[int, int]
) -> ValueError | None:
    differences = [
        f"plan rank {rank_of[process.rank]} (node {process.node}, local rank {process.local_rank}) is "
        f"{types[process.rank]!r} in the plan, {process.device_name or process.device!r} runs"
        for process in processes
        if process.rank in types and not is_device_type(types[process.rank], process)
    ]
    if differences:
        return PlanError(
            f"the plan does not match what runs: {'; '.join(differences)}. "
            "Start on the devices that [[devices]] of the plan names, or plan for these"
        )
    return None


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", text.casefold()) if word]


def _is_memory_size(word: str, memory_bytes: int) -> bool:
    match = re.fullmatch(r"(\d+)(gb|gib|g)", word)
    if match is None:
        return False
    return abs(memory_bytes / (int(match[1]) * 1e9) - 1) < _MEMORY_TOLERANCE


def _parse_architecture(text: str) -> tuple[int, int] | None:
    """Major and minor of `sm_86`, `sm_90a` or `compute_120`."""
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", text)
    return None if match is None else (int(match[1]), int(match[2]))


def base_version(version: str) -> str:
    """`2.13.0` for `2.13.0+cu126`: builds for different CUDA versions work together."""
    return version.split("+")[0]


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _nccl_version() -> str:
    if not dist.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
