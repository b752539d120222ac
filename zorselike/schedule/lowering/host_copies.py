"""Copies between device and host (Zorse 4.1.3 and 5.4).

A pass over a rank's list, for groups that offload. What is needed next is loaded while the current
ministage computes; what is not needed any more leaves at once:

- parameters: the shards of a ministage come for its gathers (and for an update that changes them in
  place) and leave after each. Those of the rank's first ministage stay, since the step ends and
  begins with it and nothing would hide the copies;
- optimizer state: comes before the ministage's backward, leaves after its update. Deferred updates
  load one ministage ahead, and their gradients wait on the host;
- activations: leave after each forward, come back one microbatch ahead of their backward. Those of the
  rank's first two backwards stay: they would have to come back at once. So do all whose backward is the
  next computation, as in the last ministage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise

from zorselike.schedule.actions import COMPUTE, SENDS, Action, Kind
from zorselike.schedule.lowering.phases import split_phases
from zorselike.schedule.spec import ScheduleSpec

KEPT_MICROBATCHES = 2
"""Microbatches of the rank's last ministage whose activations stay: one that computes, one loaded."""


def add_host_copies(spec: ScheduleSpec, rank: int, actions: list[Action]) -> list[Action]:
    """The rank's list with the copies that its group's `offload` asks for."""
    offload = spec.group_of_rank(rank).offload
    if not offload:
        return actions
    copies = _HostCopies(spec, rank, actions)
    if "params" in offload:
        copies.add_parameters()
    if "optimizer" in offload:
        copies.add_state()
    if "activations" in offload:
        copies.add_activations()
    return copies.insert()


class _HostCopies:
    """The copies to insert before and after each action of a list."""

    def __init__(self, spec: ScheduleSpec, rank: int, actions: Sequence[Action]) -> None:
        self._spec = spec
        self._actions = actions
        self._zero = spec.group_of_rank(rank).zero
        self._ministages = spec.plan.ministages_of_rank(rank)
        self._num_microbatches = len(spec.plan.microbatches_of_rank(rank))
        self._before: defaultdict[int, list[Action]] = defaultdict(list)
        self._after: defaultdict[int, list[Action]] = defaultdict(list)
        self._positions: defaultdict[tuple[Kind, int | None], list[int]] = defaultdict(list)
        for position, action in enumerate(actions):
            self._positions[action.kind, action.ministage].append(position)
        self._phases = self._find_phases()
        self._gathers = [p for p, action in enumerate(actions) if action.kind is Kind.UNSHARD]

    def insert(self) -> list[Action]:
        found: list[Action] = []
        for position, action in enumerate(self._actions):
            found += [*self._before.get(position, ()), action, *self._after.get(position, ())]
        return found

    def _find_phases(self) -> list[int]:
        """Where the rank turns to another ministage or, once, direction: positions of computations."""
        computed = [position for position, action in enumerate(self._actions) if action.kind in COMPUTE]
        sizes = [len(own) for own in split_phases(self._actions[position] for position in computed)]
        return [computed[first] for first in accumulate(sizes[:-1], initial=0)] if computed else []

    # -- parameters ------------------------------------------------------------------------

    def add_parameters(self) -> None:
        for ministage in self._ministages[1:]:
            needs = [(self._ahead_of(start), start, stop) for start, stop in self._reads(ministage)]
            steps = self._positions[Kind.STEP, ministage]
            if self._spec.masters:  # The update overwrites them, so nothing is loaded for it.
                for position in steps:
                    self._after[position].append(Action(Kind.OFFLOAD, ministage))
            else:
                needs += [(self._ahead_of_step(position), position, position) for position in steps]
            for load, _, last in _merge(needs):
                self._before[load].append(Action(Kind.LOAD, ministage))
                self._after[last].append(Action(Kind.OFFLOAD, ministage))

    def _reads(self, ministage: int) -> list[tuple[int, int]]:
        """First and last position of each stretch in which FSDP reads the shards."""
        if self._zero in (1, 2):
            return [(p, p) for p in self._positions[Kind.UNSHARD, ministage]]
        by_kind = [self._positions[kind, ministage] for kind in (Kind.F, Kind.B)]
        if self._zero == 3:
            return [(positions[0], positions[-1]) for positions in by_kind if positions]
        # ZeRO 0 gathers as layers are first called: by a forward, or by the reduction of an idle rank.
        first = (*self._positions[Kind.F, ministage], *self._positions[Kind.REDUCE_GRAD, ministage])[:1]
        return [(p, p) for p in first]

    def _ahead_of(self, position: int) -> int:
        """Where a load must start to be there at `position`: a phase earlier, unless what stands there
        is itself a gather ahead of its use. At the turn from forward to backward a ministage is
        gathered twice running; its shards stay for the second time."""
        action = self._actions[position]
        if action.kind is Kind.UNSHARD:
            before = max((p for p in self._gathers if p < position), default=position)
            return before if self._actions[before] == action else position
        earlier = [phase for phase in self._phases if phase < position]
        return earlier[-1] if earlier else position

    # -- optimizer state and deferred gradients --------------------------------------------

    def add_state(self) -> None:
        deferred = bool(self._positions[Kind.NORM, None])
        for ministage in self._ministages:
            for position in self._positions[Kind.STEP, ministage]:
                load = self._ahead_of_step(position)
                self._before[load].append(Action(Kind.LOAD_STATE, ministage))
                self._after[position].append(Action(Kind.OFFLOAD_STATE, ministage))
                if deferred:
                    self._before[load].append(Action(Kind.LOAD_GRAD, ministage))
                    self._after[self._reduced_at(ministage)].append(Action(Kind.OFFLOAD_GRAD, ministage))

    def _ahead_of_step(self, position: int) -> int:
        """The beginning of the ministage's backward, or of the last of it where others come in between; for a
        deferred update the update before it, for the first of them the norm."""
        norms = self._positions[Kind.NORM, None]
        if norms:
            earlier = range(position - 1, norms[0], -1)
            return next((p for p in earlier if self._actions[p].kind is Kind.STEP), norms[0])
        ministage = self._actions[position].ministage
        backwards = self._positions[Kind.B, ministage]
        if not backwards:
            return position
        others = (p for i in self._ministages if i != ministage for p in self._positions[Kind.B, i])
        between = max((p for p in others if p < backwards[-1]), default=-1)
        # A rank without the last microbatches of its group reaches its updates without backwards in between.
        updates = sorted(p for i in self._ministages for p in self._positions[Kind.STEP, i] if p < position)
        room = updates[-2] + 1 if len(updates) > 1 else 0
        return max(room, next(p for p in backwards if p > between))

    def _reduced_at(self, ministage: int) -> int:
        """After this its gradients are final."""
        kinds = (Kind.B, Kind.REDUCE_GRAD, Kind.TIE_GRAD)
        return max(position for kind in kinds for position in self._positions[kind, ministage])

    # -- activations -----------------------------------------------------------------------

    def add_activations(self) -> None:
        backwards = [
            (position, action)
            for position, action in enumerate(self._actions)
            if action.kind is Kind.B and action.microbatch is not None and self._has_rows(action)
        ]
        kept = self._find_turns() | {
            (action.ministage, action.microbatch)
            for _, action in backwards[:KEPT_MICROBATCHES]
            if action.ministage == backwards[0][1].ministage
        }
        for position, action in enumerate(self._actions):
            is_due = action.kind is Kind.F and (action.ministage or 0) >= self._spec.lowest_backward
            if is_due and self._has_rows(action) and (action.ministage, action.microbatch) not in kept:
                offload = Action(Kind.OFFLOAD, action.ministage, action.microbatch)
                self._after[self._last_send(position)].append(offload)
        for number, (position, action) in enumerate(backwards):
            if (action.ministage, action.microbatch) not in kept:
                ahead = backwards[number - 1][0] if number else position
                self._before[ahead].append(Action(Kind.LOAD, action.ministage, action.microbatch))

    def _find_turns(self) -> set[tuple[int | None, int | None]]:
        """Ministage and microbatch of each forward that its backward follows directly."""
        computed = (action for action in self._actions if action.kind in COMPUTE)
        turn = (Kind.F, Kind.B)
        return {
            (a.ministage, a.microbatch)
            for a, b in pairwise(computed)
            if (a.kind, b.kind) == turn and (a.ministage, a.microbatch) == (b.ministage, b.microbatch)
        }

    def _has_rows(self, action: Action) -> bool:
        return action.microbatch is not None and action.microbatch < self._num_microbatches

    def _last_send(self, position: int) -> int:
        while position + 1 < len(self._actions) and self._actions[position + 1].kind in SENDS:
            position += 1
        return position


def _merge(needs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """`(load, first, last)` in order, with those joined whose load would precede the free before it."""
    merged: list[tuple[int, int, int]] = []
    for load, first, last in sorted(needs, key=lambda need: need[1]):
        if merged and load <= merged[-1][2] + 1:
            merged[-1] = (*merged[-1][:2], last)
        else:
            merged.append((load, first, last))
    return merged
