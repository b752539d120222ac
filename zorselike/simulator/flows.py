"""Max-min fair shares of capacities, kept up to date while flows come and go.

Shares are max-min fair if each flow either has its own most, or passes a full capacity on which nobody
has more. There is one such allocation, so an update may look only at the flows whose share can change:
those that meet the one that comes or goes on a full capacity, those that they meet on full ones, and
so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

SLACK = 1e-9
"""Share of a capacity by which it may miss being full, against round-off."""


class FlowShares:
    """Bytes per second of every flow in progress."""

    def __init__(self, capacities: Sequence[float]) -> None:
        """`capacities`: bytes per second of each."""
        self._capacities = tuple(capacities)
        self._full = [capacity * (1 - SLACK) for capacity in capacities]
        self._members: list[set[int]] = [set() for _ in capacities]
        self._used = [0.0] * len(self._capacities)
        self._ways: dict[int, tuple[int, ...]] = {}
        self._most: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        """By flow."""

    def add(self, flow: int, capacities: tuple[int, ...], max_rate: float) -> Sequence[int]:
        """A flow begins; returns the other flows whose rates change."""
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
        if not crowded:
            self.rates[flow] = max_rate
            for c in capacities:
                used[c] += max_rate
            return ()
        self.rates[flow] = 0.0
        return self._share_again(crowded, new=flow)

    def remove(self, flow: int) -> Sequence[int]:
        """A flow ends; returns the flows whose rates change."""
        rate = self.rates.pop(flow)
        del self._most[flow]
        relieved = []
        for c in self._ways.pop(flow):
            others = self._members[c]
            others.remove(flow)
            if not others:
                self._used[c] = 0.0
                continue
            if self._used[c] >= self._full[c]:
                relieved.append(c)
            self._used[c] -= rate
        return self._share_again(relieved) if relieved else ()

    def _share_again(self, changed: Sequence[int], *, new: int | None = None) -> list[int]:
        """Shares capacities anew; returns the flows with other rates than before, without the new one."""
        members, rates = self._members, self.rates
        first = members[changed[0]]
        alike = all(members[c] == first for c in changed[1:])
        found = self._share_equally(changed, first) if alike else None
        if found is None:
            found = self._share_among(list(set().union(*(members[c] for c in changed))))
        others = [flow for flow, rate in found.items() if rate != rates[flow] and flow != new]
        rates.update(found)
        return others

    def _share_equally(self, capacities: Sequence[int], flows: Set[int]) -> dict[int, float] | None:
        """What all flows of these capacities get if nothing else binds them; None if something does."""
        share = min([self._capacities[c] for c in capacities]) / len(flows)
        used, full, most = self._used, self._full, self._most
        more: dict[int, float] = {}
        for flow in flows:
            if most[flow] < share:
                return None
            gain = share - self.rates[flow]
            for c in self._ways[flow]:
                if c not in capacities:
                    if used[c] >= full[c]:
                        return None
                    more[c] = more.get(c, 0.0) + gain
        for c, gain in more.items():
            if used[c] + gain > full[c]:
                return None
        for c, gain in more.items():
            used[c] += gain
        for c in capacities:
            used[c] = share * len(flows)
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
