"""Processes that have joined fail together from then on, and not only once a pipeline has its own alarm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch

from zorselike.errors import USER_ERRORS
from zorselike.runtime._compat import default_store
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.processes.processes import Processes, join_processes

_TOLD_S = 1.0
"""So long who leaves waits until the others know that it has not failed."""


@contextmanager
def join_watched(device: torch.device, *, timeout: timedelta) -> Iterator[Processes]:
    """As `join_processes`; while data are read, devices measured and models built, the end of one process
    ends all, within seconds and with its reason.

    What users can mend all raise alike, and each says it. Who takes long is not taken for lost.
    """
    with join_processes(device, timeout=timeout) as processes:
        store = default_store()
        alarm = Alarm(processes.rank, processes.size, store, silence_s=None, start_silence_s=None)
        try:
            yield replace(processes, alarm=alarm)
        except Exception as error:
            if not isinstance(error, USER_ERRORS):
                alarm.fail(error)
            raise
        finally:
            alarm.abandon(wait_s=_TOLD_S)
