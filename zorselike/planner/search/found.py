"""What was found by estimate, and which of it is to be simulated next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from math import inf, log2
from statistics import fmean
from typing import NamedTuple

from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.search.evaluator import EstimatedCandidate

MANY_ACTIONS, WORTH_OF_HALF = 20_000, 0.02
"""Beyond so many actions a candidate with half of them is simulated first if it takes no longer than by this
share."""
SHORT_S, WORTH_OF_LONG, WORTH_WAITING = 1.0, 0.2, 1.5
"""Before anything is simulated, one with half the nominal seconds comes first if it takes no longer than by
this share, beyond so many seconds and up to so many times the best estimate: nothing can be returned until
the first is done, and what takes longer than all of a budget is not begun after it."""
WORTH_OF_ANOTHER = 0.02
"""By this share better must be what is simulated of the same devices again, before the first of others:
estimates of different devices, and of bounds on microbatches in flight and none, err in different ways."""
WORTH_OF_MODES = 0.05
"""The same where only modes differ and the estimate is the same: so is mostly what is simulated."""

_LEAST = 1e-30
Kind = tuple[tuple[int, ...], int, bool]
"""The devices of a candidate, the largest tensor-parallel degree, and whether it bounds microbatches in
flight."""


class _Entry(NamedTuple):
    """Ordered by what is wrong with the candidate, and what is wanted little of it, more for many actions."""

    excess: float
    weighed: float
    number: int


class FoundCandidates:
    """Candidates that were estimated, each once, and a queue of them for each kind."""

    def __init__(self, node_kinds: Sequence[Hashable]) -> None:
        """`node_kinds`: by device, what its node has in common with others."""
        self._node_kinds = node_kinds
        self._errors: dict[Hashable, list[float]] = {}
        """What simulations found, by the estimates, of candidates on devices of the same kinds."""
        self._descriptions: dict[CandidatePlan, Hashable] = {}
        """What errors go by: asked for again whenever something is to be chosen."""
        self._estimated: list[EstimatedCandidate] = []
        self._numbers: dict[CandidatePlan, int] = {}
        self._queues: dict[Kind, list[_Entry]] = {}
        self._num_taken: dict[Kind, int] = {}
        self._num_alike: dict[Hashable, int] = {}
        """By what a candidate is but for its modes, and its estimate."""
        self.best: EstimatedCandidate | None = None

    def __len__(self) -> int:
        return len(self._estimated)

    def keep(self, estimated: EstimatedCandidate) -> None:
        """Queues it, if it is new."""
        candidate = estimated.candidate
        if candidate in self._numbers:
            return
        self._numbers[candidate] = len(self._estimated)
        if self.best is None or estimated.score < self.best.score:
            self.best = estimated
        queue = self._queues.setdefault(_describe_kind(candidate), [])
        shape = _describe_shape(estimated)
        num_alike = self._num_alike[shape] = self._num_alike.get(shape, -1) + 1
        weighed = _weigh(estimated) * (1 + WORTH_OF_MODES * num_alike)
        entry = _Entry(estimated.score.excess, weighed, len(self._estimated))
        self._estimated.append(estimated)
        heapq.heappush(queue, entry)

    # -- what estimates are worth ------------------------------------------------------------

    def learn(self, estimated: EstimatedCandidate, wanted: float) -> None:
        """From what a simulation found in place of an estimate."""
        error = wanted / max(estimated.score.wanted, _LEAST)
        self._errors.setdefault(self._describe(estimated), []).append(error)

    def expect(self, estimated: EstimatedCandidate) -> float:
        """What is wanted little of, as simulations of plans on devices of these kinds have come out: between
        regions estimates err most."""
        errors = self._errors.get(self._describe(estimated))
        return estimated.score.wanted * (fmean(errors) if errors else 1.0)

    def _describe(self, estimated: EstimatedCandidate) -> Hashable:
        candidate = estimated.candidate
        if candidate not in self._descriptions:
            kinds = frozenset(self._node_kinds[device] for own in candidate.groups for device in own.devices)
            self._descriptions[candidate] = kinds, candidate.degree, candidate.bounds_in_flight
        return self._descriptions[candidate]

    # -- what comes next ---------------------------------------------------------------------

    def peek(self, most: float = inf) -> EstimatedCandidate | None:
        """What is to be simulated next, of what is expected to take `most` at most."""
        kind = self._find_next(most)
        return None if kind is None else self._estimated[self._queues[kind][0].number]

    def peek_first(self, nominal_of: Callable[[CandidatePlan], float]) -> EstimatedCandidate | None:
        """What is to be simulated before all others; `nominal_of`: nominal seconds of a simulation."""
        next_one = self.peek()
        if next_one is None or nominal_of(next_one.candidate) <= SHORT_S:
            return next_one

        def weigh(estimated: EstimatedCandidate) -> float:
            doublings = log2(max(1.0, nominal_of(estimated.candidate) / SHORT_S))
            return estimated.score.wanted * (1 + WORTH_OF_LONG * doublings)

        most = WORTH_WAITING * next_one.score.wanted
        near = (own for own in self._estimated if own.score.excess == next_one.score.excess)
        return min((own for own in near if own.score.wanted <= most), key=weigh)

    def take(self, estimated: EstimatedCandidate) -> None:
        """Takes it out of its queue."""
        kind = _describe_kind(estimated.candidate)
        queue, number = self._queues[kind], self._numbers[estimated.candidate]
        if queue[0].number == number:
            heapq.heappop(queue)
        else:
            queue.remove(next(entry for entry in queue if entry.number == number))
            heapq.heapify(queue)
        self._num_taken[kind] = self._num_taken.get(kind, 0) + 1

    def _find_next(self, most: float) -> Kind | None:
        promises: list[tuple[float, float, int, Kind]] = []
        for kind, queue in self._queues.items():
            if not queue:
                continue
            excess, weighed, number = queue[0]
            estimated = self._estimated[number]
            expected = self.expect(estimated)
            if expected <= most:
                error = expected / max(estimated.score.wanted, _LEAST)
                worth = error * weighed * (1 + WORTH_OF_ANOTHER * self._num_taken.get(kind, 0))
                promises.append((excess, worth, number, kind))
        return min(promises)[-1] if promises else None


def _describe_kind(candidate: CandidatePlan) -> Kind:
    devices = tuple(sorted(device for group in candidate.groups for device in group.devices))
    return devices, candidate.degree, candidate.bounds_in_flight


def _describe_shape(estimated: EstimatedCandidate) -> Hashable:
    """All but its modes."""
    candidate = estimated.candidate
    groups = tuple(
        (group.devices, group.degrees, group.sizes, group.max_in_flight) for group in candidate.groups
    )
    return groups, candidate.owners, candidate.ends, f"{estimated.score.wanted:.6g}"


def _weigh(estimated: EstimatedCandidate) -> float:
    doublings = max(0.0, log2(max(1, estimated.candidate.num_actions) / MANY_ACTIONS))
    return estimated.score.wanted * (1 + WORTH_OF_HALF * doublings)
