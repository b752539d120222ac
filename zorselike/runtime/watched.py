"""Processes that have joined fail together from then on, and not only once a pipeline has its own alarm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch

from zorselike.errors import USER_ERRORS
from zorselike.runtime._compat import Store
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.processes import Processes, join_processes

_TOLD_S = 1.0
"""So long who leaves waits until the others know that it has not failed."""


@contextmanager
def join_watched(device: torch.device, *, timeout: timedelta) -> Iterator[Processes]:
    """As `join_processes`; from when all have come, while they connect, read data, measure devices and build
    models, the end of one process ends all, within seconds and with its reason.

    What users can mend all raise alike, and each says it. Who takes long is not taken for lost.
    """
    alarms: list[Alarm] = []

    def watch(store: Store) -> None:
        me = find_identity()
        alarms.append(Alarm(me.rank, me.size, store, silence_s=None, start_silence_s=None))

    try:
        with join_processes(device, timeout=timeout, on_arrival=watch) as processes:
            yield replace(processes, alarm=alarms[0]) if alarms else processes
    except Exception as error:
        if alarms and not isinstance(error, USER_ERRORS):
            alarms[0].fail(error)
        raise
    finally:
        for alarm in alarms:
            alarm.abandon(wait_s=_TOLD_S)
