"""Measuring inside a job: its processes are joined already, and go on as if nothing had been measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zorselike.profiler.processes import Processes, device_type
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.processes.world import ProcessInfo


@contextmanager
def measure_in_job(
    infos: Sequence[ProcessInfo], *, device: torch.device, control: ProcessGroup
) -> Iterator[Processes]:
    """The processes of the default group, with groups of their own to measure with; collective.

    Afterwards these groups are gone, with their connections and what their library held of the device, and
    so is what was allocated in between; random numbers go on where they were.

    Args:
        infos: of all processes, by rank.
        device: this one's.
        control: all of them, over Gloo, patient enough for the slowest measurement.

    Raises:
        ClusterError: A device has no name in the catalogue.
    """
    types = tuple(map(device_type, infos))
    rank, size = dist.get_rank(), len(infos)
    made: list[ProcessGroup] = []

    def make(ranks: list[int]) -> ProcessGroup | None:
        group = dist.new_group(ranks)
        if rank not in ranks:
            return None
        assert isinstance(group, ProcessGroup)
        made.append(group)
        return group

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # The default group's own communicators would stay on the devices.
        everyone = make(list(range(size)))
        alone = [make([other]) for other in range(size)][rank]  # Every rank makes every group.
        assert everyone is not None and alone is not None
        ended_well = False
        try:
            yield Processes(
                infos=tuple(infos),
                types=types,
                rank=rank,
                device=device,
                everyone=everyone,
                alone=alone,
                control=control,
            )
            ended_well = True
        finally:
            if ended_well or size == 1:  # After a failure, others may be waiting for what never comes.
                for group in made:
                    dist.destroy_process_group(group)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
