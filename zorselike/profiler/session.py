"""One `zorselike profile`: what is measured, how long it will take, and the two files that it leaves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.errors import ClusterError, FileError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Node
from zorselike.profiler.largest_batch.search import count_rows
from zorselike.profiler.layers.in_step import estimate_in_step_s
from zorselike.profiler.layers.timing import WARMUPS, LayerBench
from zorselike.profiler.machine.device_memory import CudaMemory, DeviceMemory, HostMemory
from zorselike.profiler.machine.found_cluster import list_machines, make_cluster
from zorselike.profiler.machine.link_timing import choose_pairs
from zorselike.profiler.tasks import (
    COLLECTIVES,
    LARGEST_BATCH,
    PROGRAM,
    Job,
    Task,
    devices_by_node,
    make_tasks,
    run_tasks,
    save_once,
)
from zorselike.runtime.processes.processes import Processes
from zorselike.text.files import check_writable
from zorselike.text.wording import count, list_few

_SECONDS_OF_OTHERS = 2.0
"""Roughly what links, updates and copies take each."""
_SECONDS_OF_COLLECTIVES = 5.0
_SECONDS_OF_PROGRAM = 10.0
"""Of which most go to building pipelines."""


def measure(
    job: Job, processes: Processes, *, path: Path, cluster_path: Path, memory_bytes: int | None
) -> Profile:
    """Measures what the file does not have yet, and writes profile and cluster; collective.

    Args:
        path: of the profile, which is continued if it is there.
        cluster_path: of the cluster, which is kept if it is there and has these nodes.
        memory_bytes: as if devices had no more.

    Raises:
        ProfileError: The file there is of something else, or one of the two cannot be written.
        ClusterError: A rank failed, or the cluster there is another.
    """
    memory = make_memory(processes, memory_bytes)
    processes.from_first(lambda: _check_writable(job, path, cluster_path))
    before = open_profile(job, processes, path)
    keeps_cluster = _keeps_cluster(job, processes, cluster_path)
    tasks = make_tasks(job, processes, memory)
    missing = [task for task in tasks if job.again or not task.is_known(before)]
    _tell(processes, _describe_start(tasks, missing, path))
    if missing and (seconds := estimate_seconds(job, processes, memory, missing, before)) is not None:
        _tell(processes, f"this takes about {show_seconds(seconds)}, less where few rows fit")
    profile = run_tasks(missing, before, processes, path)
    unknown = [task.name for task in missing if not task.is_known(profile)]
    if PROGRAM in unknown:
        _tell(
            processes,
            "the program itself was not measured: its layers take more than a hidden state, or do not fit",
        )
    unfit = [name for name in unknown if name != PROGRAM]
    if unfit:
        _tell(processes, f"not even one row fits, so nothing is known of: {'; '.join(unfit)}")
    save_once(processes, profile, path)
    if keeps_cluster:
        return profile
    if unjoined := _list_unjoined(processes, profile):
        _tell(
            processes,
            f"{cluster_path} is not written: nothing was measured of what connects the devices of "
            f"{list_few(unjoined, 'node')}; give --only links too, or write it by hand",
        )
    else:
        save_once(processes, found_cluster(processes, profile), cluster_path)
    return profile


def make_memory(processes: Processes, limit_bytes: int | None) -> DeviceMemory:
    """The memory that this rank may use."""
    if processes.device.type == "cuda":
        return CudaMemory(processes.device, limit_bytes)
    on_node = processes.nodes[processes.node]
    return HostMemory(limit_bytes, num_sharing=len(on_node))


def open_profile(job: Job, processes: Processes, path: Path) -> Profile:
    """What rank 0 has in the file, or an empty profile; the same on every rank, as are its errors."""

    def read() -> Profile:
        new = Profile(model=job.workload.model, workload_fingerprint=job.workload.fingerprint)
        if not path.exists():
            return new
        try:
            return Profile.load(path).merge(new)
        except ProfileError as error:
            raise ProfileError(
                f"{error}; {path} can only be continued for the same model, dtype and length: give another "
                "file by --output, or remove it"
            ) from None

    return processes.from_first(read)


def found_cluster(processes: Processes, profile: Profile) -> Cluster:
    """The machines that run here, with what the profile has of their links."""
    nodes = []
    for name, ranks in processes.nodes.items():
        infos = sorted((processes.infos[rank] for rank in ranks), key=lambda info: info.local_rank)
        num_sharing = 1 if any(info.device == "cuda" for info in infos) else len(infos)
        nodes.append(
            Node(
                name=name,
                devices=tuple(processes.types[info.rank] for info in infos),
                memory_bytes=tuple(info.memory_bytes // num_sharing for info in infos),
                host_memory_bytes=min(info.host_room_bytes for info in infos),
            )
        )
    return make_cluster(
        nodes,
        host_links=profile.host_links,
        links=profile.links,
        stands_for=choose_pairs(devices_by_node(processes)),
    )


def estimate_seconds(
    job: Job, processes: Processes, memory: DeviceMemory, tasks: Sequence[Task], known: Profile
) -> float | None:
    """About how long the tasks take, from one row of one layer, on the slowest rank; collective. None if
    not even that fits anywhere. `known`: what was measured before."""

    def time_row() -> float:
        """Of the typical layer; 0 where it does not fit."""
        bench = LayerBench(job, job.typical, device=processes.device, memory=memory)
        result = bench.try_rows(1, repeats=1)
        return result.forward_s + result.backward_s

    everyone = processes.gather_or_raise(time_row)
    if not any(everyone):
        return None
    own = everyone[processes.rank]
    flops = {
        name: kind.forward_flops_per_row + kind.backward_flops for name, kind in job.workload.kinds.items()
    }
    reference = flops[job.typical.kind]
    model = sum(flops[kind] for _, kind in job.workload.layers)
    # 1 + 2 + 4 + ... rows, and a bisection of as much again.
    rows = 2 * job.most_rows * (WARMUPS + job.repeats)
    rows_s = {probe.kind: own * flops[probe.kind] / reference for probe in job.probes}
    seconds = {probe.kind: rows * rows_s[probe.kind] for probe in job.probes}
    if processes.device.type == "cpu":
        seconds = {
            kind: alone_s + estimate_in_step_s(rows_s[kind], job.most_rows, job.repeats)
            for kind, alone_s in seconds.items()
        }
    rows = count_rows(
        job,
        processes,
        memory,
        recompute=job.recompute_of_batches,
        kept_bytes=LayerTimeModel(known, job.workload).kept_bytes,
        stages=job.stages,
    )
    seconds[LARGEST_BATCH] = rows * own * model / reference
    seconds[COLLECTIVES] = _SECONDS_OF_COLLECTIVES
    seconds[PROGRAM] = _SECONDS_OF_PROGRAM
    total = sum(seconds.get(task.name.split(",")[0], _SECONDS_OF_OTHERS) for task in tasks)
    return max(processes.gather(total))


def _list_unjoined(processes: Processes, profile: Profile) -> list[str]:
    """Nodes with several devices, of whose links nothing is known."""
    known = {entry.between for entry in profile.links}
    pairs = choose_pairs(devices_by_node(processes)).items()
    return [a for pair, alike in pairs if not known & {pair, *alike} for a, b in alike if a == b]


def _check_writable(job: Job, path: Path, cluster_path: Path) -> None:
    """Of the cluster file only where none is there to be kept."""
    for each in (path, cluster_path) if job.again or not os.path.exists(cluster_path) else (path,):  # noqa: PTH110
        try:
            check_writable(each)
        except FileError as error:
            raise ProfileError(f"{each}: {error}") from None


def _keeps_cluster(job: Job, processes: Processes, path: Path) -> bool:
    """Whether the cluster file that is there stays, with what people wrote into it."""

    def check() -> bool:
        if job.again or not path.exists():
            return False
        here = devices_by_node(processes)
        mend = "give another file by --cluster, or --again to write it anew"
        try:
            known = {node.name: node.devices for node in Cluster.load(path).nodes}
        except ClusterError as error:
            raise ClusterError(f"{error}; {mend}") from None
        if known != here:
            raise ClusterError(
                f"{path}: is of other nodes or devices than run here ({list_machines(known)}; here "
                f"{list_machines(here)}); {mend}"
            )
        return True

    return processes.from_first(check)


def _describe_start(tasks: Sequence[Task], missing: Sequence[Task], path: Path) -> str:
    known = len(tasks) - len(missing)
    if not missing:
        return f"{path} has everything already"
    if known:
        return f"{path} has {count(known, 'measurement')} already, {len(missing)} more to go"
    return f"{count(len(missing), 'measurement')}, into {path}"


def _tell(processes: Processes, text: str) -> None:
    if processes.rank == 0:
        print(text, flush=True)


def show_seconds(seconds: float) -> str:
    """`40 s`, `12 min`, `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
