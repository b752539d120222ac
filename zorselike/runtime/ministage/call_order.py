"""Layers are called once each, in one order: a rank that leaves one out must not meet the others in
another layer's gather."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from zorselike.errors import ConfigError
from zorselike.runtime.ministage.unit import Unit


class CallOrder:
    """Watches the calls of units that own parameters, forward by forward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [unit for unit in units if unit.owns_parameters]
        self._next = 0
        for position, unit in enumerate(self._units):
            unit.module.register_forward_pre_hook(partial(self._check, position), prepend=True)

    def begin(self) -> None:
        """Starts a forward."""
        self._next = 0

    def end(self) -> None:
        """Ends it; raises `ConfigError` if the last units were left out."""
        if self._next < len(self._units):
            raise self._out_of_order(len(self._units))

    def _check(self, position: int, *_: Any) -> None:
        if position != self._next:
            raise self._out_of_order(position)
        self._next += 1

    def _out_of_order(self, called: int) -> ConfigError:
        due = self._next
        what = f"left out '{self._units[due].name}'" if due < called else "called a layer twice"
        return ConfigError(
            f"a forward {what}; zero = 3 gathers layer by layer, so each must be called once for every "
            "microbatch, in one order: set zero = 2 for this group"
        )
