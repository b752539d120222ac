"""Max-min fair shares of capacities, kept up to date while flows come and go.

Shares are max-min fair if each flow either has its own most, or passes a full capacity on which nobody
has more. There is one such allocation, so flows that pass the same capacities and have the same most have
the same share: they are one *kind*, and are only counted. An update may look only at the kinds whose share
can change: those that meet the one that comes or goes on a full capacity, those that they meet on full
ones, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

SLACK = 1e-9
"""Share of a capacity by which it may miss being full, against round-off."""
TINY = 1e-12
"""Share of a capacity by which round-off may exceed it."""


class FlowShares:
    """Bytes per second of the flows of every kind.

    Flows that come and go at one time are settled together, once the time goes on.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        """`capacities`: bytes per second of each; may be infinite."""
        self._capacities = tuple(capacities)
        self._full = [capacity * (1 - SLACK) for capacity in capacities]
        self._limit = [capacity * (1 + TINY) for capacity in capacities]
        self._used = [0.0] * len(self._capacities)
        self._members: list[set[int]] = [set() for _ in capacities]
        """By capacity: kinds with flows on it."""
        self._kinds: dict[tuple[tuple[int, ...], float], int] = {}
        self._ways: list[tuple[int, ...]] = []
        self._most: list[float] = []
        self._counts: list[int] = []
        """By kind: flows in progress."""
        self.rates: list[float] = []
        """By kind: of each of its flows, once all is settled."""
        self.unsettled: set[int] = set()
        """Capacities that are to be shared anew."""

    def find_kind(self, capacities: Iterable[int], max_rate: float) -> int:
        """The number of a kind of flows."""
        way = tuple(c for c in dict.fromkeys(capacities) if self._capacities[c] < math.inf)
        most = min([max_rate, *(self._capacities[c] for c in way)])
        kind = self._kinds.setdefault((way, most), len(self._kinds))
        if kind == len(self._ways):
            self._ways.append(way)
            self._most.append(most)
            self._counts.append(0)
            self.rates.append(0.0)
        return kind

    def add(self, kind: int) -> None:
        """A flow begins."""
        counts, used = self._counts, self._used
        if not counts[kind]:
            self.rates[kind] = self._most[kind]
            for c in self._ways[kind]:
                self._members[c].add(kind)
        counts[kind] += 1
        rate = self.rates[kind]
        for c in self._ways[kind]:
            used[c] += rate
            if used[c] > self._limit[c]:
                self.unsettled.add(c)

    def remove(self, kind: int) -> None:
        """A flow ends."""
        self._counts[kind] -= 1
        is_last = not self._counts[kind]
        rate, used = self.rates[kind], self._used
        for c in self._ways[kind]:
            members = self._members[c]
            if is_last:
                members.remove(kind)
            if not members:
                used[c] = 0.0
                self.unsettled.discard(c)
                continue
            if used[c] >= self._full[c]:
                self.unsettled.add(c)
            used[c] -= rate

    def settle(self) -> list[int]:
        """Shares all that is unsettled; returns the kinds with other rates than before."""
        before: dict[int, float] = {}
        rates, most = self.rates, self._most
        while self.unsettled:
            capacity = self.unsettled.pop()
            members = self._members[capacity]
            is_over = self._used[capacity] > self._limit[capacity]
            if not is_over and all(rates[kind] == most[kind] for kind in members):
                continue
            for kind, rate in self._share(capacity).items():
                if rate != rates[kind]:
                    before.setdefault(kind, rates[kind])
                    rates[kind] = rate
        return [kind for kind, rate in before.items() if rates[kind] != rate]

    def _share(self, capacity: int) -> dict[int, float]:
        """Rates of the kinds on a capacity and of all that these drag along."""
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
                for c in self._ways[kind]:
                    left[c] += use
                    growing[c] += count
            found = self._fill(kinds, left, growing)
            crowded = [c for c in passed if left[c] <= SLACK * capacities[c] and not members[c] <= kinds]
        for c in passed:
            used[c] = capacities[c] - left[c]
        return found

    def _gather(self, capacities: list[int], kinds: set[int], passed: set[int]) -> None:
        """Adds to `kinds` those on the capacities and all whom they meet on full ones, and to `passed` all
        capacities of these; `capacities` is used up."""
        members, used, full, unsettled = self._members, self._used, self._full, self.unsettled
        while capacities:
            capacity = capacities.pop()
            unsettled.discard(capacity)
            for kind in members[capacity] - kinds:
                kinds.add(kind)
                for c in self._ways[kind]:
                    if c not in passed:
                        passed.add(c)
                        if used[c] >= full[c] or c in unsettled:
                            capacities.append(c)

    def _fill(self, kinds: Set[int], rest: dict[int, float], growing: dict[int, int]) -> dict[int, float]:
        """Progressive filling: all rates grow alike until a capacity is full or a flow has its most.

        Args:
            rest: of each capacity what these kinds may have; used up.
            growing: of each capacity how many of their flows it carries; used up.
        """
        most, counts, ways = self._most, self._counts, self._ways
        by_most = sorted(kinds, key=most.__getitem__, reverse=True)
        rates: dict[int, float] = {}
        while len(rates) < len(kinds):
            level, tightest = math.inf, -1
            for c, count in growing.items():
                if rest[c] < level * count:
                    level, tightest = max(rest[c], 0.0) / count, c
            settled = []
            # All at once: whoever has its most below the level only raises that of the others.
            while by_most and (most[by_most[-1]] <= level or by_most[-1] in rates):
                kind = by_most.pop()
                if kind not in rates:
                    settled.append(kind)
            if not settled:
                settled = [kind for kind in self._members[tightest] if kind in kinds and kind not in rates]
            for kind in settled:
                count = counts[kind]
                rate = rates[kind] = min(most[kind], level)
                for c in ways[kind]:
                    rest[c] -= rate * count
                    growing[c] -= count
                    if not growing[c]:
                        del growing[c]
        return rates
