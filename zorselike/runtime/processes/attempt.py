"""Each attempt of a job by keys of its own: torchrun's agent keeps one store for all that it starts anew
(`--max-restarts`, nodes that join), in which the addresses of those that have ended still stand."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from zorselike.runtime._compat import Store
from zorselike.runtime.processes.identity import Identity
from zorselike.runtime.processes.same_kind import name_missing

_KEY = "zorselike/attempt/"
_POLL_S = 0.01


def open_attempt(store: Store, identity: Identity, *, timeout: timedelta) -> Store:
    """The part of a kept store that only those see who have been started together; collective.

    Nodes count restarts differently, so rank 0 makes up a name and tells it whoever asks, by words that no
    other attempt uses, until all have heard it. Raises `ClusterError` where some do not come in time.
    """
    if identity.rank == 0:
        name = secrets.token_hex(8)
        _tell_all(store, name, identity, timeout)
    else:
        question = secrets.token_hex(8)
        store.set(f"{_KEY}asked/{identity.rank}", question)
        answer = f"{_KEY}answer/{question}"
        try:
            store.wait([answer], timeout)
        except RuntimeError:
            raise name_missing(identity, [0], timeout) from None
        name = store.get(answer).decode()
        store.set(f"{_KEY}{name}/{identity.rank}", "")
    return dist.PrefixStore(f"{_KEY}{name}", store)  # type: ignore[attr-defined, no-any-return]


def _tell_all(store: Store, name: str, identity: Identity, timeout: timedelta) -> None:
    deadline_s = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, identity.size))
    answered: dict[int, bytes] = {}
    while missing := [rank for rank in missing if not store.check([f"{_KEY}{name}/{rank}"])]:
        if time.monotonic() > deadline_s:
            raise name_missing(identity, missing, timeout)
        for rank in missing:
            asked = f"{_KEY}asked/{rank}"
            if store.check([asked]) and (question := store.get(asked)) != answered.get(rank):
                answered[rank] = question
                store.set(f"{_KEY}answer/{question.decode()}", name)
        time.sleep(_POLL_S)
