"""Max-min fair shares of capacities, kept up to date while flows come and go.

Rates are max-min fair if each flow either has its own maximal rate, or passes a full capacity on which no
flow has more. There is one such allocation, so flows over the same capacities with the same maximal rate have
the same rate: they are one *kind*, and are only counted. An update looks only at the kinds whose rate can
change: those that share a full capacity with the one that comes or goes, those that share one with these, and
so on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set

SLACK = 1e-9
"""A capacity is full when less than this share of it is unused (against round-off)."""
TINY = 1e-12
"""Share of a capacity by which round-off may overshoot it."""


_Path = tuple[tuple[int, int], ...]
"""Capacities, and how many times a flow passes each."""


class FlowShares:
    """Bytes per second of the flows of every kind.

    Flows that start and end at the same time are settled together, before time advances.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        """`capacities`: bytes per second of each; may be infinite."""
        self._capacities = tuple(capacities)
        self._full = [capacity * (1 - SLACK) for capacity in capacities]
        self._limit = [capacity * (1 + TINY) for capacity in capacities]
        self._used = [0.0] * len(self._capacities)
        self._members: list[set[int]] = [set() for _ in capacities]
        """Kinds with flows on each capacity."""
        self._kinds: dict[tuple[_Path, float], int] = {}
        self._paths: list[_Path] = []
        self._max_rates: list[float] = []
        self._counts: list[int] = []
        """Number of flows of each kind in progress."""
        self.rates: list[float] = []
        """Rate of each flow of a kind, once all is settled."""
        self.unsettled: set[int] = set()
        """Capacities to be shared anew."""

    def find_kind(self, capacities: Iterable[int], max_rate: float) -> int:
        """Index of a kind of flows; they pass a capacity as many times as it is given."""
        path = tuple((c, n) for c, n in Counter(capacities).items() if self._capacities[c] < math.inf)
        max_rate = min([max_rate, *(self._capacities[c] / n for c, n in path)])
        kind = self._kinds.setdefault((path, max_rate), len(self._kinds))
        if kind == len(self._paths):
            self._paths.append(path)
            self._max_rates.append(max_rate)
            self._counts.append(0)
            self.rates.append(0.0)
        return kind

    def add(self, kind: int) -> None:
        """A flow begins."""
        counts, used = self._counts, self._used
        if not counts[kind]:
            self.rates[kind] = self._max_rates[kind]
            for c, _ in self._paths[kind]:
                self._members[c].add(kind)
        counts[kind] += 1
        rate = self.rates[kind]
        for c, n in self._paths[kind]:
            used[c] += n * rate
            if used[c] > self._limit[c]:
                self.unsettled.add(c)

    def remove(self, kind: int) -> None:
        """A flow ends."""
        self._counts[kind] -= 1
        is_last = not self._counts[kind]
        rate, used = self.rates[kind], self._used
        for c, n in self._paths[kind]:
            members = self._members[c]
            if is_last:
                members.remove(kind)
            if not members:
                used[c] = 0.0
                self.unsettled.discard(c)
                continue
            if used[c] >= self._full[c]:
                self.unsettled.add(c)
            used[c] -= n * rate

    def settle(self) -> list[int]:
        """Shares all unsettled capacities; returns the kinds whose rates changed."""
        before: dict[int, float] = {}
        rates, max_rates = self.rates, self._max_rates
        while self.unsettled:
            capacity = self.unsettled.pop()
            members = self._members[capacity]
            is_over = self._used[capacity] > self._limit[capacity]
            if not is_over and all(rates[kind] == max_rates[kind] for kind in members):
                continue
            for kind, rate in self._share(capacity).items():
                if rate != rates[kind]:
                    before.setdefault(kind, rates[kind])
                    rates[kind] = rate
        return [kind for kind, rate in before.items() if rates[kind] != rate]

    def _share(self, capacity: int) -> dict[int, float]:
        """New rates of the kinds on a capacity and of all kinds that these affect."""
        capacities, used, members = self._capacities, self._used, self._members
        kinds: set[int] = set()
        passed: set[int] = set()
        crowded = [capacity]
        while crowded:
            self._gather(crowded, kinds, passed)
            left = {c: capacities[c] - used[c] for c in passed}
            growing = dict.fromkeys(passed, 0)
            for kind in kinds:
                count = self._counts[kind]
                use = count * self.rates[kind]
                for c, n in self._paths[kind]:
                    left[c] += n * use
                    growing[c] += n * count
            found = self._fill(kinds, left, growing)
            crowded = [c for c in passed if left[c] <= SLACK * capacities[c] and not members[c] <= kinds]
        for c in passed:
            used[c] = capacities[c] - left[c]
        return found

    def _gather(self, capacities: list[int], kinds: set[int], passed: set[int]) -> None:
        """Adds to `kinds` those on the capacities and all that share a full one with them, and to `passed`
        all capacities of these; empties `capacities`."""
        members, used, full, unsettled = self._members, self._used, self._full, self.unsettled
        while capacities:
            capacity = capacities.pop()
            unsettled.discard(capacity)
            for kind in members[capacity] - kinds:
                kinds.add(kind)
                for c, _ in self._paths[kind]:
                    if c not in passed:
                        passed.add(c)
                        if used[c] >= full[c] or c in unsettled:
                            capacities.append(c)

    def _fill(self, kinds: Set[int], rest: dict[int, float], growing: dict[int, int]) -> dict[int, float]:
        """Progressive filling: all rates grow together until a capacity is full or a flow has its maximum.

        Args:
            rest: bytes per second of each capacity left for these kinds; consumed.
            growing: how many times their flows pass each capacity; consumed.
        """
        max_rates, counts, paths = self._max_rates, self._counts, self._paths
        by_max_rate = sorted(kinds, key=max_rates.__getitem__, reverse=True)
        rates: dict[int, float] = {}
        while len(rates) < len(kinds):
            level, tightest = math.inf, -1
            for c, count in growing.items():
                if rest[c] < level * count:
                    level, tightest = max(rest[c], 0.0) / count, c
            settled = []
            # All at once: a flow with a maximum below the level only raises the level of the others.
            while by_max_rate and (max_rates[by_max_rate[-1]] <= level or by_max_rate[-1] in rates):
                kind = by_max_rate.pop()
                if kind not in rates:
                    settled.append(kind)
            if not settled:
                settled = [kind for kind in self._members[tightest] if kind in kinds and kind not in rates]
            for kind in settled:
                count = counts[kind]
                rate = rates[kind] = min(max_rates[kind], level)
                for c, n in paths[kind]:
                    rest[c] -= n * rate * count
                    growing[c] -= n * count
                    if not growing[c]:
                        del growing[c]
        return rates
