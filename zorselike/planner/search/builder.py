"""From choices to a whole candidate plan: rows to devices and layers to ministages, until memory fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from itertools import combinations, islice

from zorselike.errors import PlanError
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan, Sizes, list_largest
from zorselike.planner.candidate.choice import Choice, GroupChoice
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.estimate.layer_costs import LayerCosts
from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.estimate.room import Class, Overfull, Room
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.groups.replicas import find_degrees
from zorselike.planner.layers.split_layers import shorten_first, split_layers, visit_in_turn
from zorselike.planner.problem import PlanProblem
from zorselike.planner.rows.share_rows import RankCosts, share_once, share_per_microbatch
from zorselike.planner.rows.units import find_unit, to_rows

_MAX_REPAIRS = 6
"""How often room is taken back from groups that turn out too full."""
_SHARE_FOR_WHOLE = 0.7
"""Share of a device's memory that gathered ministages may take at most."""
_LEAST_LEFT = 0.02
"""Share of a device's memory that each repair takes at least."""
FEW_DEVICES = 8
"""Of up to so many single layers are moved until a choice fits, modes are changed with all else as it is, and
every set is refined."""
_NEARLY = 1.5
"""Up to so many times its memory may be asked of a device for layers to be moved."""
MOST_WALKED, MOST_MOVED = 6, 8
"""Layers whose moves are walked, of which one is moved; and how often that would have to be done at most, by
what it took away of what is too much."""
WORTH_CUTTING = 1.1
"""Times the best estimate that a candidate may take at best, for its layers to be cut otherwise."""
MOST_GUESSED, MOST_TRIED = 12, 4
"""Moves of a layer whose memory is guessed, and walked, of which the first that fits is taken."""
_MAY_FIT = 1.05
"""Times a device's memory that guesses may come to, for a candidate to be walked."""
MOST_CUTS = 20
"""Cuts of layers that are all tried where nothing fits."""


class CandidateBuilder:
    """Builds candidate plans for one problem; keeps the shares of rows that it found."""

    def __init__(
        self, problem: PlanProblem, table: LayerTable, step_time: StepTimeEstimate, memory: RankMemory
    ) -> None:
        self._problem, self._table, self._step_time, self._memory = problem, table, step_time, memory
        self.room = Room(problem, table, memory)
        self._shares: dict[object, tuple[Sizes, ...] | None] = {}
        self._layer_costs = LayerCosts(problem, table, step_time, memory)
        self._parameters = {key: float(table.kind(key).num_parameters) for key in table.counts}
        each, kinds = problem.parameter_bytes, [(table.kind(key), n) for key, n in table.counts.items()]
        self._whole_bytes = sum(
            n * (kind.num_parameters * each.weight + kind.trainable * each.gradient) for kind, n in kinds
        )
        """All parameters as they are gathered, and their gradients before they are reduced."""
        self._best_s = math.inf
        """The best estimate of what was cut so that groups wait less."""
        self.host_was_full = False
        """Whether the last choice fitted all devices, and not some node's host with what it offloads."""

    def build(
        self, choice: Choice, is_worth: Callable[[CandidatePlan], bool] | None = None
    ) -> CandidatePlan | None:
        """A candidate plan that fits by the memory walk; None where none was found.

        Args:
            is_worth: is asked before memory is looked at; raises nothing, and where it says no that is the
                end: what memory asks for only makes it slower.
        """
        owners = visit_in_turn(len(choice.groups), choice.num_ministages)
        room = [1.0] * len(choice.groups)
        """Share of each group's memory that its layers may be planned for."""
        most_rows: list[dict[Class, int]] = [{} for _ in choice.groups]
        by_bytes = False
        """Whether layers are shared out by their size, so that no ministage is larger than it must be."""
        self.host_was_full = False
        holds_whole = len(owners) == len(choice.groups) or choice.returns
        if holds_whole and not self._holds_whole(choice):
            return None
        choice = self._normalise(choice)
        num_repairs = 0
        nearest: tuple[float, CandidatePlan] | None = None
        while num_repairs < _MAX_REPAIRS:
            groups = []
            for chosen, most in zip(choice.groups, most_rows, strict=True):
                sizes = self.share_rows(chosen, most, in_rounds=choice.in_flight_factor is not None)
                if sizes is None:
                    return None
                groups.append(self._make_group(chosen, sizes))
            if choice.in_flight_factor is not None:
                bounds = self._step_time.orders.find_bounds(groups, owners, choice.in_flight_factor)
                groups = [
                    replace(own, max_in_flight=bound) for own, bound in zip(groups, bounds, strict=True)
                ]
            kept = self._memory.count_in_flight(groups, owners)
            costs = [
                self._layer_costs.find(group, share, owners.count(g), self._find_kept(g, kept[g], owners))
                for g, (group, share) in enumerate(zip(groups, room, strict=True))
            ]
            if by_bytes:
                costs = [replace(chosen, seconds=self._parameters) for chosen in costs]
            split = split_layers(self._table.keys, owners, costs)
            if split is None:
                break
            ends = shorten_first(split.ends, owners, [group.first_share for group in choice.groups])
            candidate = CandidatePlan(tuple(groups), owners, ends)
            shortest = self._shorten_waits(candidate)
            if not self.room.may_run(candidate) or (is_worth is not None and not is_worth(shortest)):
                return None
            over = self.room.find_overfull(candidate)
            if over and self._has_room(candidate, shortest):
                candidate, over = shortest, {}
            if not over:
                self.host_was_full = bool(self._memory.overfull_hosts(candidate))
                return None if self.host_was_full else self._finish(candidate)
            if waiting := [g for g in over if self._may_wait(choice.groups[g])]:
                # The least of repairs: no rows or layers go to others.
                for g in waiting:
                    choice = choice.change(g, mode=_waiting(choice.groups[g].mode))
                continue
            num_repairs += 1
            full = 0
            if candidate.num_devices <= FEW_DEVICES:
                if nearest is not None and nearest[1] == candidate:
                    break  # Less room for layers changes nothing.
                times = _find_excess(over)
                if times < (_NEARLY if nearest is None else nearest[0]):
                    nearest = times, candidate
            for g, classes in over.items():
                if not self._take_rows(candidate, g, classes, most_rows[g]):
                    excess = max(need / limit for need, limit in classes.values())
                    room[g] *= min(1 / excess, 1 - _LEAST_LEFT)
                    full += 1
            if full == len(choice.groups):  # Nobody has room for what others have too much of.
                if by_bytes or len(owners) == 1:
                    break
                by_bytes, room = True, [1.0] * len(choice.groups)
        moved = None if nearest is None else self._move_until_it_fits(*nearest)
        return moved or self._try_all_cuts(tuple(groups), owners)

    def forget(self) -> None:
        """What was found with other memory."""
        self._best_s = math.inf

    # -- layers that groups wait less with ---------------------------------------------------

    def _finish(self, candidate: CandidatePlan) -> CandidatePlan:
        """A candidate that fits, with layers cut so that groups wait less for each other, if it still fits
        then; and reductions beside what follows."""
        shortest = self._shorten_waits(candidate)
        if shortest is not candidate:
            if self._step_time.estimate_s(shortest) < WORTH_CUTTING * self._best_s:
                candidate = self._climb(candidate, shortest)
            self._best_s = min(self._best_s, self._step_time.estimate_s(candidate))
        return self._overlap(candidate)

    def _climb(self, candidate: CandidatePlan, shortest: CandidatePlan) -> CandidatePlan:
        """As near to the shortest as memory allows, by single layers."""
        if self._has_room(candidate, shortest):
            return shortest
        waits = self._layer_costs.find_waits(candidate)
        better: CandidatePlan | None = candidate
        while better is not None and waits is not None:
            candidate = better
            moved = (replace(candidate, ends=ends) for ends in waits.list_better(candidate.ends))
            likely = (own for own in islice(moved, MOST_GUESSED) if self._may_fit(candidate, own))
            better = next(filter(self.room.has_room, islice(likely, MOST_TRIED)), None)
        return candidate

    def _has_room(self, known: CandidatePlan, changed: CandidatePlan) -> bool:
        """Whether a candidate fits that differs in layers from one that was walked; False without a walk
        where that is not likely."""
        return self._may_fit(known, changed) and self.room.has_room(changed)

    def _may_fit(self, known: CandidatePlan, changed: CandidatePlan) -> bool:
        return self._guess_excess(known, changed) <= _MAY_FIT

    def _shorten_waits(self, candidate: CandidatePlan) -> CandidatePlan:
        """Whether it fits or not. Of many devices links, collectives and copies make more of a difference
        than these waits."""
        waits = self._layer_costs.find_waits(candidate) if candidate.num_devices <= FEW_DEVICES else None
        return candidate if waits is None else replace(candidate, ends=waits.shorten(candidate.ends))

    def _make_group(self, chosen: GroupChoice, sizes: tuple[Sizes, ...]) -> CandidateGroup:
        if not chosen.degrees:
            return CandidateGroup(chosen.devices, chosen.mode, sizes)
        replicas = self._problem.replicas.cut(chosen.devices, chosen.degrees)
        devices = tuple(device for replica in replicas for device in replica)
        return CandidateGroup(devices, chosen.mode, sizes, degrees=find_degrees(replicas))

    # -- reductions that run beside what follows, or are waited for -------------------------

    def _normalise(self, choice: Choice) -> Choice:
        """Without settings that make no difference to a group, so that equal candidates are equal."""
        for g, group in enumerate(choice.groups):
            beside = replace(group.mode, overlap_grad_reduce=True)
            if beside != group.mode and not self._step_time.reduces_beside(beside, group.devices):
                choice = choice.change(g, mode=beside)
        return choice

    def _may_wait(self, group: GroupChoice) -> bool:
        """Whether its reductions, now beside what follows, may be waited for instead."""
        is_free = self._problem.fixed.overlap_grad_reduce is None
        return is_free and group.may_wait and self._step_time.reduces_beside(group.mode, group.devices)

    def _overlap(self, candidate: CandidatePlan) -> CandidatePlan:
        """A candidate that fits, with reductions beside what follows wherever these find room after all."""
        if self._problem.fixed.overlap_grad_reduce is None:
            for g, group in enumerate(candidate.groups):
                if not group.mode.overlap_grad_reduce:
                    changed = candidate.with_mode(g, replace(group.mode, overlap_grad_reduce=True))
                    if not self.room.find_overfull(changed, only=g):
                        candidate = changed
        return candidate

    def fit(self, candidate: CandidatePlan, choice: Choice) -> CandidatePlan | None:
        """A candidate that was changed, its groups waiting for reductions where they must and as `choice`
        lets them; None where it does not fit a device or host, or may not be run."""
        if not self.room.may_run(candidate):
            return None
        for g in self.room.find_overfull(candidate):
            group = candidate.groups[g]
            if not self._may_wait(replace(choice.groups[g], devices=group.devices, mode=group.mode)):
                return None
            candidate = candidate.with_mode(g, _waiting(group.mode))
            if self.room.find_overfull(candidate, only=g):
                return None
        candidate = self._overlap(candidate)
        return None if self._memory.overfull_hosts(candidate) else candidate

    def _holds_whole(self, choice: Choice) -> bool:
        """Whether groups that hold all their ministages whole, having one each or returning to them, could
        hold the whole model's parameters and gradients, and nothing else."""
        room = 0.0
        for group in choice.groups:
            known = self._memory.known_limits(group.devices)
            if group.mode.zero == 3 or len(known) < len(group.devices):
                return True
            room += max(known) * max((degree for _, degree in group.degrees), default=1)
        return self._whole_bytes <= room

    def _move_until_it_fits(self, excess: float, candidate: CandidatePlan) -> CandidatePlan | None:
        """With single layers moved out of groups that are too full, each time as leaves least too much: what
        else is in a device's memory than the sum over its layers, the largest ministage above all, shows in
        walks alone."""
        over = self.room.find_overfull(candidate)
        while over:
            guess = partial(self._guess_excess, candidate)
            likely = nsmallest(MOST_WALKED, _give_layers(candidate, [*over]), key=guess)
            moved = [(self.room.find_overfull(own), own) for own in likely]
            if fits := [own for its_over, own in moved if not its_over]:
                candidate, over = min(fits, key=self._step_time.estimate_s), {}
            else:
                over, candidate = min(moved, key=lambda own: _find_excess(own[0]), default=(over, candidate))
                before, excess = excess, _find_excess(over)
                if (before - excess) * MOST_MOVED <= before - 1:
                    return None
        self.host_was_full = bool(self._memory.overfull_hosts(candidate))
        return None if self.host_was_full or not self.room.may_run(candidate) else self._finish(candidate)

    def _guess_excess(self, known: CandidatePlan, changed: CandidatePlan) -> float:
        """Times its memory that the fullest device of a candidate needs, about: by estimates, which err as
        they do where as much is known of one that differs in a few layers."""
        most = 0.0
        for g, group in enumerate(known.groups):
            for position in list_largest(group.sizes, self.room.list_classes(group)):
                limit = self._memory.limit_bytes(group.firsts[position])
                if limit is not None:
                    before, after = (
                        self._memory.estimate_bytes(own, g, position) for own in (known, changed)
                    )
                    need = self.room.need_bytes(known, g, position, limit)
                    most = max(most, need * after / before / limit)
        return most

    def _try_all_cuts(
        self, groups: tuple[CandidateGroup, ...], owners: tuple[int, ...]
    ) -> CandidatePlan | None:
        """The first that fits of all cuts of few layers: which ministages follow each other on a device
        counts too, and no sum over layers knows that."""
        num_layers, num_cuts = len(self._table.keys), len(owners) - 1
        if math.comb(num_layers - 1, num_cuts) > MOST_CUTS:
            return None
        for inner in combinations(range(1, num_layers), num_cuts):
            candidate = CandidatePlan(groups, owners, (*inner, num_layers))
            if not self.room.may_run(candidate) or self.room.find_overfull(candidate):
                continue
            if not self._memory.overfull_hosts(candidate):
                self.host_was_full = False
                return self._finish(candidate)
            self.host_was_full = True
        return None

    # -- rows ------------------------------------------------------------------------------

    def share_rows(
        self, group: GroupChoice, most: Mapping[Class, int], *, in_rounds: bool = False
    ) -> tuple[Sizes, ...] | None:
        """Microbatches of each replica; None where the rows find no room.

        Args:
            in_rounds: of a pipeline that goes backward before all is forward: there devices that have no part
                in most rounds would hold up the others.
        """
        waits = (group.mode.zero == 3) + group.mode.reduces_per_microbatch
        in_rounds = in_rounds or group.mode.reduces_per_microbatch
        limits = tuple(sorted(most.items()))
        beside = self._step_time.reduces_beside(group.mode, group.devices)
        settings = group.mode.recompute, waits, in_rounds, beside and group.mode.reduces_per_microbatch
        key = (group.devices, settings, group.microbatches_per_device, limits, group.degrees)
        if key not in self._shares:
            try:
                self._shares[key] = self._share_rows(group, most, in_rounds)
            except PlanError:
                self._shares[key] = None
        return self._shares[key]

    def _share_rows(
        self, group: GroupChoice, most: Mapping[Class, int], in_rounds: bool
    ) -> tuple[Sizes, ...]:
        num_rows = self._problem.global_batch
        num_replicas = len(self._problem.replicas.cut(group.devices, group.degrees))
        at_once = [self._problem.most_rows_at_once] * num_replicas
        whole = self._share(group, most, at_once, group.mode.reduces_per_microbatch)
        if group.microbatches_per_device == 1 and not group.mode.reduces_per_microbatch:
            return whole
        cut = [max(1, math.ceil(sum(sizes) / group.microbatches_per_device)) for sizes in whole]
        if max(cut) >= num_rows:
            return whole
        return self._share(group, most, cut, in_rounds)

    def _share(
        self, group: GroupChoice, most: Mapping[Class, int], at_once: Sequence[int], in_rounds: bool
    ) -> tuple[Sizes, ...]:
        """With at most so many rows at once on each replica, and of each class in a step."""
        num_rows, most_rows = self._problem.global_batch, self._problem.most_rows_at_once
        replicas = self._problem.replicas.cut(group.devices, group.degrees)
        computers = self._problem.replicas.computers(replicas)
        recompute = group.mode.recompute
        fitting = [self._table.most_rows(computer, recompute) for computer in computers]
        limits = [most_rows if found is None else min(most_rows, found) for found in fitting]
        caps = [min(pair) for pair in zip(limits, at_once, strict=True)]
        unit = find_unit(num_rows, caps, most_rows)
        costs = []
        for replica, computer, cap, limit in zip(replicas, computers, caps, limits, strict=True):
            at_most = min(-(-cap // unit), limit // unit) * unit
            seconds = self._table.model_s(computer, recompute, at_most, unit)
            room = most.get(self.room.class_of(replica[0], len(replica)))
            costs.append(RankCosts(replica[0], seconds, None if room is None else room // unit))
        if in_rounds:
            exposed_s, hidden_s = self._round_s(group) if group.mode.reduces_per_microbatch else (0.0, 0.0)
            shares = share_per_microbatch(
                costs, -(-num_rows // unit), collective_s=exposed_s, hidden_s=hidden_s
            )
        else:
            shares = share_once(costs, -(-num_rows // unit))
        return to_rows(shares, unit, num_rows)

    def _round_s(self, group: GroupChoice) -> tuple[float, float]:
        """What the collectives of one round through the whole model take, without and beside computation."""
        collect_s, counts = self._step_time.collect_layer_s, self._table.counts.items()
        replicas = self._problem.replicas.cut(group.devices, group.degrees)
        reduced_s = sum(n * collect_s("reduce_scatter", replicas, key) for key, n in counts)
        if group.mode.zero != 3:
            is_beside = self._step_time.reduces_beside(group.mode, group.devices)
            return (0.0, reduced_s) if is_beside else (reduced_s, 0.0)
        gathered_s = sum(2 * n * collect_s("all_gather", replicas, key) for key, n in counts)
        # Only the first unit's gather and the last one's reduction wait for nothing to hide behind.
        total_s = reduced_s + gathered_s
        return total_s / len(self._table.keys), total_s

    # -- layers ----------------------------------------------------------------------------

    def _find_kept(self, g: int, kept: int, owners: tuple[int, ...]) -> Mapping[str, int]:
        """Of how many microbatches activations of layers of a kind are kept, where not of all of the group's:
        those of its last ministage."""
        if owners.count(g) == 1:
            return dict.fromkeys(self._table.counts, kept)
        last = self._table.keys[-1]
        return {last: kept} if g == owners[-1] and self._table.counts[last] == 1 else {}

    def count_ministages_per_group(self, groups: Sequence[tuple[int, ...]], degree: int = 1) -> int:
        """How often each group must be visited at least, so that two ministages, whole, and the gradients of
        one find room on its smallest devices (ZeRO 2), of which so many are a replica."""
        kinds, workload = [self._table.kind(key) for key in self._table.counts], self._problem.workload
        num_layers, each = len(self._table.keys), self._problem.parameter_bytes
        whole = min(max(kind.num_parameters for kind in kinds), 2 * workload.num_parameters / num_layers)
        trained = min(max(kind.trainable for kind in kinds), 2 * workload.num_trainable / num_layers)
        needed = 2 * whole * each.weight + trained * each.gradient
        layers = 0.0
        for devices in groups:
            known = self._memory.known_limits(devices)
            room = _SHARE_FOR_WHOLE * degree * min(known, default=0)
            layers += max(1.0, room // needed) if known and needed else math.inf
        return math.ceil(num_layers / layers)

    # -- memory ----------------------------------------------------------------------------

    def _take_rows(
        self,
        candidate: CandidatePlan,
        g: int,
        classes: Mapping[Class, tuple[int, int]],
        most_rows: dict[Class, int],
    ) -> bool:
        """Gives the rows of classes that are too full to others of their group, where these have room."""
        group = candidate.groups[g]
        owners = self.room.list_classes(group)
        if group.mode.reduces_per_microbatch or {*owners} <= {*classes}:
            return False
        for device_class, (need, limit) in classes.items():
            rows = max(
                sum(sizes) for sizes, other in zip(group.sizes, owners, strict=True) if other == device_class
            )
            fewer = min(rows - 1, int(rows * limit / need))
            if fewer < 0:
                return False
            most_rows[device_class] = fewer
        return True


def _waiting(mode: Mode) -> Mode:
    return replace(mode, overlap_grad_reduce=False)


def _find_excess(over: Overfull) -> float:
    """Times its memory that is asked of the fullest device; 0 where all fits."""
    needs = (need / limit for classes in over.values() for need, limit in classes.values())
    return max(needs, default=0.0)


def _give_layers(candidate: CandidatePlan, groups: Collection[int]) -> Iterator[CandidatePlan]:
    """A layer from a ministage of one of these groups to the one before or after it."""
    starts = (0, *candidate.ends[:-1])
    for i, (start, end) in enumerate(zip(starts, candidate.ends, strict=True)):
        if candidate.owners[i] not in groups or end - start == 1:
            continue
        for boundary, place in ((i - 1, start + 1), (i, end - 1)):
            if 0 <= boundary < len(candidate.ends) - 1:
                ends = (*candidate.ends[:boundary], place, *candidate.ends[boundary + 1 :])
                yield replace(candidate, ends=ends)
