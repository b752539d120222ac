"""What processes of a launcher say in its store before they join: that they are here and of which kind, or
why they have ended before. Without it each would wait for the others until its limit."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from zorselike.errors import ClusterError, ConfigError
from zorselike.runtime.processes.identity import Identity
from zorselike.text.wording import list_few

if TYPE_CHECKING:  # A nanny, which needs the names of the environment alone, does without torch.
    from zorselike.runtime._compat import Store

_POLL_S = 0.1
_LINGER_S = 1.0
"""The process that keeps the store, or whose end makes its launcher end it, lets the others read so long."""
_AWAITED_S = 20.0
"""So long it waits before that for those that are still being started."""

_has_arrived = False


def arrive(store: Store, identity: Identity, *, is_elastic: bool, timeout: timedelta) -> None:
    """Waits until all have come; collective. `store`: the launcher's, without a prefix.

    Raises:
        ConfigError: On every process alike, where some have `[elastic] enable` and others not.
        ClusterError: One has ended before, or some do not come in time.
    """
    global _has_arrived
    store.set(_key(identity.rank), f"{'true' if is_elastic else 'false'}\n{identity.node}")
    _has_arrived = True
    keys, until_s = _list_keys(identity), time.monotonic() + timeout.total_seconds()
    while not store.check(keys) or store.check([_key("ended")]):
        if store.check([_key("ended")]):
            said = store.get(_key("ended")).decode()
            _let_others_read(store, identity)
            raise ClusterError(said)
        if time.monotonic() > until_s:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise ClusterError(
                f"rank {identity.rank} on node {identity.node} could not join the others: of {identity.size} "
                f"ranks, {list_few(missing, 'rank')} did not come within {timeout.total_seconds():g} s; "
                "start all nodes, each with the same address and port, and look at what the others print"
            )
        time.sleep(_POLL_S)
    kinds = [value.decode().split("\n", 1) for value in store.multi_get(keys)]
    first, first_node = kinds[0]
    for rank, (value, node) in enumerate(kinds):
        if value != first:
            time.sleep(_LINGER_S)
            raise ConfigError(
                f"[elastic] enable is {value} in process {rank} (node {node}) and {first} in process 0 (node "
                f"{first_node}): start every node with the same recipe and the same options"
            )


def say_ended(store: Store, identity: Identity, error: BaseException) -> None:
    """Tells the processes that wait for this one, or will, why it does not come; the first that says so
    counts. Does nothing where one of its rank has come, in whose place it was started."""
    if store.check([_key(identity.rank)]):
        return
    said = str(error) or type(error).__name__
    store.compare_set(
        _key("ended"), "", f"rank {identity.rank} on node {identity.node} ended before it joined: {said}"
    )
    store.set(_key(identity.rank), "ended")
    _let_others_read(store, identity)


def has_arrived() -> bool:
    """Whether this process has said that it is here: the others hear of its end in other ways."""
    return _has_arrived


def has_agent_store() -> bool:
    """Whether torchrun's agent on the first node keeps the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _let_others_read(store: Store, identity: Identity) -> None:
    ends_store = os.environ.get("GROUP_RANK", "0") == "0" if has_agent_store() else identity.rank == 0
    until_s = time.monotonic() + _AWAITED_S
    with suppress(RuntimeError):  # Who keeps it has ended.
        while ends_store and time.monotonic() < until_s and not store.check(_list_keys(identity)):
            time.sleep(_POLL_S)
    time.sleep(_LINGER_S)


def _list_keys(identity: Identity) -> list[str]:
    return [_key(rank) for rank in range(identity.size)]


def _key(name: object) -> str:
    """Of this attempt of torchrun, whose store may be that of an earlier one."""
    return f"zorselike/arrival/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
