"""The processes that measure: those that a command has joined, or those of a job that goes on afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from zorselike.errors import ConfigError
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.processes.processes import Processes

_LONGEST_S = 86_400


def read_timeout(seconds: float) -> timedelta:
    """A command's `--timeout`; raises `ConfigError` for one that is none."""
    if not 0 < seconds <= _LONGEST_S:
        raise ConfigError(f"--timeout is {seconds:g}; give seconds, above 0 and at most {_LONGEST_S}")
    return timedelta(seconds=seconds)


@contextmanager
def measure_in_job(processes: Processes) -> Iterator[Processes]:
    """The processes of a job with groups that are there only inside, to measure with; collective.

    Afterwards these groups are gone, with their connections and what their library held of the device, and
    so is what was allocated inside; random numbers go on where they were. Raises `ClusterError` where a
    device has no name in the catalogue.
    """
    rank, device, _ = processes.rank, processes.device, processes.types
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # The default group's own communicators would stay on the devices.
        everyone = dist.new_group()
        alone = dist.new_group([rank], use_local_synchronization=True)
        assert isinstance(everyone, ProcessGroup) and isinstance(alone, ProcessGroup)
        has_ended_well = False
        try:
            yield replace(processes, everyone=everyone, alone=alone)
            has_ended_well = True
        finally:
            # After a failure, others may be waiting for what never comes.
            if has_ended_well or processes.size == 1:
                for group in (everyone, alone):
                    dist.destroy_process_group(group)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
