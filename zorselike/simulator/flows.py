"""Max-min fair shares of capacities, kept up to date while flows come and go.

Shares are max-min fair if each flow either has its own most, or passes a full capacity on which nobody
has more. There is one such allocation, so an update may look only at the flows whose share can change:
those that meet the one that comes or goes on a full capacity, those that they meet on full ones, and
so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SLACK = 1e-9
"""Share of a capacity by which it may miss being full, against round-off."""
TINY = 1e-12
"""Share of a capacity by which round-off may exceed it."""


class FlowShares:
    """Bytes per second of every flow in progress.

    Flows that come and go at one time are settled together, once the time goes on.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        """`capacities`: bytes per second of each."""
        self._capacities = tuple(capacities)
        self._full = [capacity * (1 - SLACK) for capacity in capacities]
        self._members: list[set[int]] = [set() for _ in capacities]
        self._used = [0.0] * len(self._capacities)
        self._ways: dict[int, tuple[int, ...]] = {}
        self._most: dict[int, float] = {}
        self.unsettled: set[int] = set()
        """Capacities that are to be shared anew."""
        self.rates: dict[int, float] = {}
        """By flow; 0 for one that came to a crowded capacity, until all is settled."""

    def add(self, flow: int, capacities: tuple[int, ...], max_rate: float) -> None:
        """A flow begins."""
        used, members = self._used, self._members
        crowded = []
        for c in capacities:
            if used[c] + max_rate > self._full[c]:
                if members[c]:
                    crowded.append(c)
                else:
                    max_rate = min(max_rate, self._capacities[c])
        self._ways[flow] = capacities
        self._most[flow] = max_rate
        for c in capacities:
            members[c].add(flow)
        if crowded:
            self.rates[flow] = 0.0
            self.unsettled.update(crowded)
        else:
            self.rates[flow] = max_rate
            for c in capacities:
                used[c] += max_rate

    def remove(self, flow: int) -> None:
        """A flow ends."""
        rate = self.rates.pop(flow)
        del self._most[flow]
        for c in self._ways.pop(flow):
            others = self._members[c]
            others.remove(flow)
            if not others:
                self._used[c] = 0.0
                self.unsettled.discard(c)
                continue
            if self._used[c] >= self._full[c]:
                self.unsettled.add(c)
            self._used[c] -= rate

    def settle(self) -> list[int]:
        """Shares all that is unsettled; returns the flows with other rates than before.

        One capacity after the other: each leaves all flows with a bottleneck but those that wait for the
        ones still to come.
        """
        before: dict[int, float] = {}
        members, capacities, rates = self._members, self._capacities, self.rates
        while self.unsettled:
            tightest = min(self.unsettled, key=lambda c: (capacities[c] / len(members[c]), c))
            self.unsettled.remove(tightest)
            found = self._share_equally(tightest)
            if found is None:
                found = self._share_among(list(members[tightest]))
            for flow, rate in found.items():
                if rate != rates[flow]:
                    before.setdefault(flow, rates[flow])
                    rates[flow] = rate
        return [flow for flow, rate in before.items() if rates[flow] != rate]

    def _share_equally(self, capacity: int) -> dict[int, float] | None:
        """Rates if the capacity is all that binds its flows and nobody else is concerned, which is so most
        times; None if it is not."""
        members, capacities, used = self._members, self._capacities, self._used
        flows = members[capacity]
        share = capacities[capacity] / len(flows)
        most, rates = self._most, self.rates
        after: dict[int, float] = {}
        for flow in flows:
            if most[flow] < share:
                return None
            gain = share - rates[flow]
            for c in self._ways[flow]:
                after[c] = after.get(c, used[c]) + gain
        for c, use in after.items():
            if use > capacities[c] * (1 + TINY):
                return None
            if (use > self._full[c] or used[c] >= self._full[c]) and not members[c] <= flows:
                return None
        for c, use in after.items():
            used[c] = use
            if c in self.unsettled and members[c] <= flows:
                self.unsettled.remove(c)
        used[capacity] = capacities[capacity]
        return dict.fromkeys(flows, share)

    def _share_among(self, flows: list[int]) -> dict[int, float]:
        """Rates of `flows` and of all that these drag along."""
        ways, rates, used = self._ways, self.rates, self._used
        while True:
            rest: dict[int, float] = {}
            passing: dict[int, list[int]] = {}
            for flow in flows:
                rate = rates[flow]
                for c in ways[flow]:
                    if c in rest:
                        rest[c] += rate
                        passing[c].append(flow)
                    else:
                        rest[c] = self._capacities[c] - used[c] + rate
                        passing[c] = [flow]
            left = dict(rest)
            found = _fill(flows, ways, left, passing, self._most)
            dragged: set[int] = set()
            for c, own in passing.items():
                is_full = left[c] <= SLACK * self._capacities[c] or used[c] >= self._full[c]
                if is_full and len(own) < len(self._members[c]):
                    dragged |= self._members[c]
            if dragged.issubset(flows):
                break
            flows = list(dragged.union(flows))
        for c in passing:
            used[c] = self._capacities[c] - left[c]
        return found


def _fill(
    flows: Sequence[int],
    ways: Mapping[int, tuple[int, ...]],
    rest: dict[int, float],
    passing: Mapping[int, Sequence[int]],
    most: Mapping[int, float],
) -> dict[int, float]:
    """Progressive filling: all rates grow alike until a capacity is full or a flow has its most.

    Args:
        rest: of each capacity what these flows may have; used up.
        passing: of each capacity which of the flows it carries.
    """
    growing = {c: len(own) for c, own in passing.items()}
    by_most = sorted(flows, key=most.__getitem__, reverse=True)
    rates: dict[int, float] = {}
    settled: Sequence[int]
    while len(rates) < len(flows):
        while by_most[-1] in rates:
            by_most.pop()
        level, settled = most[by_most[-1]], by_most[-1:]
        for c, count in growing.items():
            if count and rest[c] < level * count:
                level, settled = max(rest[c], 0.0) / count, passing[c]
        for flow in settled:
            if flow not in rates:
                rates[flow] = level
                for c in ways[flow]:
                    rest[c] -= level
                    growing[c] -= 1
    return rates
