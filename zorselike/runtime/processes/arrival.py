"""How processes of a launcher find each other in its store, before they join: which attempt they are of, that
they are here and of which kind, or why they have ended before.

torchrun's agent keeps one store for all that it starts anew (`--max-restarts`, nodes that join), in which the
addresses of those that have ended still stand, and nodes count restarts differently. So rank 0 makes up a
name for the attempt and tells it whoever asks, by words that no other attempt uses.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from zorselike.errors import ClusterError, ConfigError
from zorselike.runtime.processes.identity import Identity
from zorselike.text.wording import list_few

if TYPE_CHECKING:
    from zorselike.runtime._compat import Store

_KEY = "zorselike/attempt/"
_LATEST = f"{_KEY}latest"
_ENDED = "ended"
_POLL_S = 0.05
_LINGER_S = 1.0
"""The process that keeps the store, or whose end makes its launcher end it, lets the others read so long."""
_AWAITED_S = 20.0
"""So long it waits before that for those that are still being started."""

_arrived_process = 0
"""Its number: one that was forked later has not."""


def has_arrived() -> bool:
    """Whether this process has said that it is here: the others hear of its end in other ways."""
    return _arrived_process == os.getpid()


def has_agent_store() -> bool:
    """Whether torchrun's agent on the first node keeps the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Arrival:
    """One process's part in an attempt, until all have come; each method is collective."""

    def __init__(self, whole: Store, identity: Identity, timeout: timedelta) -> None:
        """`whole`: the launcher's store, without a prefix. Raises `ClusterError` where rank 0 does not come
        in time."""
        self._whole, self._identity, self._timeout = whole, identity, timeout
        self._until_s = time.monotonic() + timeout.total_seconds()
        self._answered: dict[int, bytes] = {}
        """By rank, its last question."""
        self._begin()

    def arrive(self, *, is_elastic: bool) -> None:
        """Waits until all have come.

        Raises:
            ConfigError: On every process alike, where some have `[elastic] enable` and others not.
            ClusterError: One has ended before, or some do not come in time.
        """
        global _arrived_process
        kind = f"{'true' if is_elastic else 'false'}\n{self._identity.node}"
        self.store.set(str(self._identity.rank), kind)
        _arrived_process = os.getpid()
        while True:
            have_all_come = self._have_all_come()
            if self.store.check([_ENDED]):  # Asked after that: who ends says why before it counts as come.
                reason = self.store.get(_ENDED).decode()
                self._let_others_read()
                raise ClusterError(reason)
            if have_all_come:
                break
            if time.monotonic() > self._until_s:
                raise self._name_missing([rank for rank in self._ranks if not self.store.check([str(rank)])])
            time.sleep(_POLL_S)
            if self._is_over():
                self._begin()
                self.store.set(str(self._identity.rank), kind)
        kinds = [value.decode().split("\n", 1) for value in self.store.multi_get([*map(str, self._ranks)])]
        first, first_node = kinds[0]
        for rank, (value, node) in enumerate(kinds):
            if value != first:
                time.sleep(_LINGER_S)
                raise ConfigError(
                    f"[elastic] enable is {value} in process {rank} (node {node}) and {first} in process 0 "
                    f"(node {first_node}): start every node with the same recipe and the same options"
                )

    def say_ended(self, error: BaseException) -> None:
        """Tells the processes that wait for this one, or will, why it does not come; the first counts."""
        rank, node = self._identity.rank, self._identity.node
        reason = str(error) or type(error).__name__
        self.store.compare_set(_ENDED, "", f"rank {rank} on node {node} ended before it joined: {reason}")
        self.store.set(str(rank), _ENDED)
        self._let_others_read()

    @property
    def _ranks(self) -> range:
        return range(self._identity.size)

    def _begin(self) -> None:
        import torch.distributed as dist  # A nanny, which needs names of the environment alone, has no torch.

        self._name = secrets.token_hex(8) if self._identity.rank == 0 else self._ask()
        if self._identity.rank == 0:
            self._whole.set(_LATEST, self._name)
        self.store: Store = dist.PrefixStore(f"{_KEY}{self._name}", self._whole)  # type: ignore[attr-defined]
        """The part of it that only those see who are of this attempt."""

    def _is_over(self) -> bool:
        """Whether rank 0 has been started again, on its node alone, and waits for this process anew."""
        return self._identity.rank > 0 and self._whole.get(_LATEST).decode() != self._name

    def _ask(self) -> str:
        question = secrets.token_hex(8)
        self._whole.set(_asked(self._identity.rank), question)
        while not self._whole.check([_answer(question)]):
            if time.monotonic() > self._until_s:
                raise self._name_missing([0])
            time.sleep(_POLL_S)
        return self._whole.get(_answer(question)).decode()

    def _have_all_come(self) -> bool:
        """Whether all have; on rank 0 those that ask meanwhile hear the attempt's name."""
        for rank in self._ranks[1:] if self._identity.rank == 0 else ():
            if self._whole.check([_asked(rank)]):
                question = self._whole.get(_asked(rank))
                if question != self._answered.get(rank):
                    self._answered[rank] = question
                    self._whole.set(_answer(question.decode()), self._name)
        return bool(self.store.check([*map(str, self._ranks)]))

    def _let_others_read(self) -> None:
        is_beside_agent = has_agent_store() and os.environ.get("GROUP_RANK", "0") == "0"
        until_s = time.monotonic() + _AWAITED_S
        with suppress(RuntimeError):  # Who keeps the store has ended.
            while (is_beside_agent or self._identity.rank == 0) and time.monotonic() < until_s:
                if self._have_all_come():
                    break
                time.sleep(_POLL_S)
        time.sleep(_LINGER_S)

    def _name_missing(self, missing: Sequence[int]) -> ClusterError:
        return ClusterError(
            f"rank {self._identity.rank} on node {self._identity.node} could not join the others: of "
            f"{self._identity.size} ranks, {list_few(missing, 'rank')} did not come within "
            f"{self._timeout.total_seconds():g} s; start all nodes, each with the same address and port, and "
            "look at what the missing ones print"
        )


def _asked(rank: int) -> str:
    return f"{_KEY}asked/{rank}"


def _answer(question: str) -> str:
    return f"{_KEY}answer/{question}"
