"""The store by which the processes of a launcher find each other."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from zorselike.errors import ConfigError
from zorselike.runtime._compat import Store
from zorselike.runtime.processes.arrival import Arrival, has_agent_store, has_arrived
from zorselike.runtime.processes.identity import Identity, find_identity

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Of these ports a Slurm job takes one by its number, where nothing else is said."""
_LAST_PORT = 65_535
_REACHED_WITHIN = timedelta(seconds=20)
"""A process that ends before it joins looks so long for the others' store."""
_LOOK_S = 0.5


def open_store(identity: Identity, timeout: timedelta) -> Store:
    """torchrun's own, where its agent keeps one; else one that rank 0 keeps. Without a prefix."""
    if identity.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if has_agent_store():
        store: Store = next(dist.rendezvous("env://", timeout=timeout))[0]  # type: ignore[attr-defined]
        # torch 2.11 has a prefix for each attempt, by a count that may differ between nodes.
        return store.underlying_store if isinstance(store, dist.PrefixStore) else store  # type: ignore[attr-defined]
    address, port = _find_meeting_point(identity)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        identity.size,
        is_master=identity.rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # Who does not come is named later.
        multi_tenant=True,
    )


def tell_others(error: BaseException) -> None:
    """Where this process ends before it has joined, processes of other nodes end as well, with its reason;
    those of its node are ended by torchrun."""
    identity = find_identity()
    if identity.source == "torchrun" and identity.size == identity.local_size:
        return
    if identity.size > 1 and not has_arrived() and _is_kept(identity):
        Arrival(open_store(identity, _REACHED_WITHIN), identity, _REACHED_WITHIN).say_ended(error)


def _is_kept(identity: Identity) -> bool:
    """Whether there is a store, by now or soon; torch would say on the screen that there is none."""
    if has_agent_store() or identity.rank == 0:
        return True
    until_s = time.monotonic() + _REACHED_WITHIN.total_seconds()
    while time.monotonic() < until_s:
        with suppress(OSError), socket.create_connection(_find_meeting_point(identity), timeout=1):
            return True
        time.sleep(_LOOK_S)
    return False


def _find_meeting_point(identity: Identity) -> tuple[str, int]:
    """Address and port of rank 0: what `MASTER_ADDR` and `MASTER_PORT` say, else the first node of a Slurm
    step (or of a heterogeneous job) and a port made of its job's number."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    job = os.environ.get("SLURM_JOB_ID", "")
    # `gpu[03-05,9],cpu1`: the first name, with the first of its numbers.
    # In a heterogeneous job rank 0 is on the first node of the first component, wherever its name sorts.
    nodes = os.environ.get("SLURM_JOB_NODELIST_HET_GROUP_0") or os.environ.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if identity.source == "Slurm" and first is not None and job.isdecimal():
        address = address or "".join(filter(None, first.groups()))
        port = port or str(_FIRST_PORT + int(job) % _NUM_PORTS)
    mend = "set MASTER_ADDR to the first node's name and MASTER_PORT to a free port there, the same for all"
    if not address or not port:
        raise ConfigError(
            f"{identity.source} started {identity.size} processes, and nothing says where they meet: {mend}"
        )
    if not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise ConfigError(f"MASTER_PORT is '{port}', which is no port (1 to {_LAST_PORT}): {mend}")
    return address, int(port)
