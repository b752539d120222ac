"""Whether all processes of a launcher are of an elastic job, or none: the two kinds find each other in
different ways, and each would wait for the other until its limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from zorselike.errors import ClusterError, ConfigError
from zorselike.runtime.processes.identity import Identity
from zorselike.text.wording import list_few

if TYPE_CHECKING:  # A nanny, which needs the names of the environment alone, does without torch.
    from zorselike.runtime._compat import Store

_KEY = "zorselike/elastic enabled/"
_LINGER_S = 1.0
"""The process that keeps the store, or whose end makes its launcher end it, lets the others read so long."""


def check_same_kind(store: Store, identity: Identity, *, is_elastic: bool, timeout: timedelta) -> None:
    """Raises `ConfigError`, on every process alike, where some have `[elastic] enable` and others not, and
    `ClusterError` where some do not come in time; collective. `store`: the launcher's, without a prefix."""
    keys = [f"{_KEY}{rank}" for rank in range(identity.size)]
    store.set(keys[identity.rank], f"{'true' if is_elastic else 'false'}\n{identity.node}")
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise name_missing(identity, missing, timeout) from None
    said = [value.decode().split("\n", 1) for value in store.multi_get(keys)]
    first, first_node = said[0]
    for rank, (value, node) in enumerate(said):
        if value != first:
            time.sleep(_LINGER_S)
            raise ConfigError(
                f"[elastic] enable is {value} in process {rank} (node {node}) and {first} in process 0 (node "
                f"{first_node}): start every node with the same recipe and the same options"
            )


def name_missing(identity: Identity, missing: Sequence[int], timeout: timedelta) -> ClusterError:
    """What is said where some ranks do not come in time."""
    return ClusterError(
        f"rank {identity.rank} on node {identity.node} could not join the others: of {identity.size} "
        f"ranks, {list_few(missing, 'rank')} did not come within {timeout.total_seconds():g} s; start "
        "all nodes, each with the same address and port, and look at what the missing ones print"
    )
