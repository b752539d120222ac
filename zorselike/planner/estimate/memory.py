"""What each device of a candidate plan holds at its peak: the runtime's own walk, over the list of one
device.

A device's memory depends on its ministages, its microbatches and its group's settings, not on who the other
groups are. So the walk is over a plan of two groups: the device's own with one rank (and an idle one, if it
has company), and one that has all other layers and the same microbatches. Of what a rank joins out of several
pieces that it receives nothing is known then; the largest there can be is added. In place of many
microbatches a few of the largest are walked, whose rows keep as much as all rows do: what is held at once is
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from zorselike.cost.catalogue import CPU, find_memory_bytes
from zorselike.cost.memory import walk_memory
from zorselike.cost.purposes import Purpose
from zorselike.cost.sizes import (
    GATHERS_PER_LAYER,
    KeptBytes,
    MinistageBytes,
    add_up,
    find_row_bytes,
    list_units,
)
from zorselike.plan.plan import Group, Ministage, Plan, Recompute
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan, Sizes
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.estimate.few_microbatches import (
    FEW_MICROBATCHES,
    add_largest,
    find_peak_bytes,
    make_microbatches,
    return_to_ministages,
    take_few,
    take_more,
)
from zorselike.planner.estimate.rounds import RoundOrders
from zorselike.planner.problem import PlanProblem
from zorselike.schedule.actions import Action
from zorselike.schedule.build import build
from zorselike.schedule.contract import RECEIVES_AHEAD, SENDS_KEPT_BY_NCCL
from zorselike.schedule.lowering.lower import lower
from zorselike.simulator.mirrors import State, host_copies, state_of
from zorselike.simulator.mirrors import add_up as add_up_states

_OWN, _REST = 0, 1


@dataclass(frozen=True)
class Need:
    """What one device needs."""

    device_bytes: int
    """At its peak, context and allocator included."""
    host_bytes: int
    """What it needs of its node's memory."""


class _Few(NamedTuple):
    """Few microbatches in place of many that are held at once."""

    sizes: Sizes
    share: float
    """How many rows each of theirs stands for."""
    last_share: float
    """The same of those of the last ministage."""
    num_held: int | None = None
    """Where they go back before all are forward, how many are forward then."""


class _Part(NamedTuple):
    """All that a device has of one ministage while that computes, in bytes."""

    whole: float
    gradients: float
    state: float
    unit: float
    unit_gradients: float
    kept_per_row: float
    working_per_row: float
    boundary_per_row: float
    masters: bool
    uncut: float
    """Of the whole, what tensor parallelism does not cut; of gradients and state likewise."""
    uncut_gradients: float
    uncut_state: float


class RankMemory:
    """Needs and limits for one problem; keeps what was walked."""

    def __init__(self, problem: PlanProblem, table: LayerTable, kept_bytes: KeptBytes) -> None:
        self._problem, self._table, self._kept_bytes = problem, table, kept_bytes
        self._overheads = problem.profile.overheads
        self._limits = [find_memory_bytes(problem.cluster, place) for place in problem.cluster.places]
        self._needs: dict[object, Need] = {}
        self._lists: dict[object, Sequence[Action]] = {}
        self._part = cache(self._add_up)
        self._in_flight = cache(RoundOrders().count_in_flight)
        self._describe_cuts = cache(self._find_description)
        self.scale = 1.0
        """Share of the memory of devices and hosts that is planned with; over 1 asks what would fit then."""
        self.host_scale = 1.0
        """Beside that, of hosts alone."""

    # -- what there is ---------------------------------------------------------------------

    def limit_bytes(self, device: int) -> int | None:
        """Memory of a device; None where it is not known."""
        return self._scaled(self._limits[device])

    def _scaled(self, limit: int | None, more: float = 1.0) -> int | None:
        return limit if limit is None or self.scale * more == 1 else round(limit * self.scale * more)

    def known_limits(self, devices: Iterable[int]) -> list[int]:
        """Memory of those devices of which it is known."""
        return [limit for limit in map(self.limit_bytes, devices) if limit is not None]

    def overfull_hosts(self, candidate: CandidatePlan) -> dict[int, tuple[int, int]]:
        """By node: what is asked of its memory, and what it has, where that is less."""
        wanted: Counter[int] = Counter()
        for g, group in enumerate(candidate.groups):
            for position, device in enumerate(group.firsts) if group.mode.offload else ():
                own = self.need(candidate, g, position).host_bytes * group.degree_of(position)
                wanted[self._problem.nodes[device]] += own
        if self._problem.is_mirrored and any(node.host_memory_bytes for node in self._problem.cluster.nodes):
            wanted += self._mirror(candidate)
        hosts = self._problem.cluster.nodes
        limits = {node: self._scaled(hosts[node].host_memory_bytes, self.host_scale) for node in wanted}
        return {
            node: (wanted[node], limit)
            for node, limit in limits.items()
            if limit is not None and wanted[node] > limit
        }

    def _mirror(self, candidate: CandidatePlan) -> Counter[int]:
        """By node: what copies and mirrors of the state take there, and what CPU ranks compute with."""
        states: list[State] = []
        devices: list[int] = []
        wanted: Counter[int] = Counter()
        for g, group in enumerate(candidate.groups):
            layers = [i for m in candidate.ministages_of(g) for i in candidate.layers_of(m)]
            keys = [self._table.keys[layer] for layer in layers]
            cut, whole = (
                add_up_states(
                    [
                        state_of(self._table.kind(key), self._problem.parameter_bytes)
                        for key in keys
                        if self._table.is_cut(key) == is_cut
                    ]
                )
                for is_cut in (True, False)
            )
            devices += group.devices
            for position, device in enumerate(group.firsts):
                degree = group.degree_of(position)
                own = cut.share(degree * len(group.sizes)), whole.share(len(group.devices))
                states += [add_up_states(own)] * degree
                if self._problem.device_types[device] == CPU:
                    need = self.need(candidate, g, position)
                    wanted[self._problem.nodes[device]] += degree * need.device_bytes
        nodes = [self._problem.nodes[device] for device in devices]
        for node, num_bytes in zip(nodes, host_copies(states, nodes), strict=True):
            wanted[node] += num_bytes
        return wanted

    # -- what is needed --------------------------------------------------------------------

    def count_in_flight(self, groups: Sequence[CandidateGroup], owners: tuple[int, ...]) -> Sequence[int]:
        """Of how many microbatches a device holds activations of its last ministage, by group; of its others
        of all, or as many as are bounded."""
        numbers = tuple(group.microbatches_per_device for group in groups)
        if any(group.max_in_flight is not None for group in groups):
            return numbers
        return self._in_flight(numbers, owners)

    def need(self, candidate: CandidatePlan, group: int, position: int) -> Need:
        """What the device, or each of the replica, at a position of a group needs."""
        chosen = candidate.groups[group]
        device = self._problem.device_types[chosen.firsts[position]]
        cuts = tuple(
            (layers.start, layers.stop) for layers in map(candidate.layers_of, candidate.ministages_of(group))
        )
        held = chosen.held_sizes(position, len(cuts))
        sizes = held or max(chosen.sizes, key=len)
        bounded = None if chosen.max_in_flight is None else (len(sizes), chosen.microbatches_per_device)
        few = min(len(sizes), FEW_MICROBATCHES)
        kept = min(len(sizes), self.count_in_flight(candidate.groups, candidate.owners)[group])
        summary = (sum(sizes), max(sizes), few, bool(chosen.sizes[position]), bounded, kept)
        degree = chosen.degree_of(position)
        replicas = (len(chosen.sizes), chosen.degree // degree, degree) if chosen.degrees else None
        key = (self._describe_cuts(cuts), chosen.mode, summary, len(chosen.devices), device, replicas)
        if key not in self._needs:
            self._needs[key] = self._walk(cuts, chosen, held, (device, degree), kept)
        return self._needs[key]

    def _find_description(self, cuts: tuple[tuple[int, int], ...]) -> object:
        """What a device's memory depends on of the layers of its ministages, and of what is between them."""
        keys = self._table.keys
        if self._table.ties:
            return cuts  # Which layers are tied counts too.
        edges = sorted({0, len(keys), *(edge for cut in cuts for edge in cut)})
        parts: list[tuple[bool, object, bool]] = []
        for start, stop in pairwise(edges):
            is_own = (start, stop) in cuts
            trains = any(self._table.kind(key).trains for key in keys[start:stop])
            parts.append((is_own, keys[start:stop] if is_own else keys[start], trains))
        return tuple(parts)

    def estimate_bytes(self, candidate: CandidatePlan, group: int, position: int) -> int:
        """About what `need` would find of a device, without a walk."""
        chosen = candidate.groups[group]
        device = self._problem.device_types[chosen.firsts[position]]
        ministages = candidate.ministages_of(group)
        sizes = chosen.held_sizes(position, len(ministages))
        degree = chosen.degree_of(position)
        parts = [
            self._part(candidate.layers_of(i), chosen.mode.recompute, device, degree) for i in ministages
        ]
        rows_at_once = max(sizes, default=0)
        rows = [sum(sizes)] * len(parts)
        last, turns = candidate.num_ministages - 1, chosen.max_in_flight is None
        if turns:
            rows[-1] = add_largest(sizes, self.count_in_flight(candidate.groups, candidate.owners)[group])
        num_shards = (chosen.num_replica_shards, chosen.num_shards)
        early = [0.0] * len(parts)
        if turns and last not in ministages:  # Gradients of its last ministage come back at once.
            early[-1] = rows[-1] * parts[-1].boundary_per_row
        held = _hold(parts, chosen.mode, num_shards, (rows, early), rows_at_once, self._problem.defer_updates)
        if chosen.max_in_flight is not None and len(parts) > 1:
            held += _hold_returning(parts, chosen.mode)
        context_bytes = self._problem.setting.context_bytes(device)
        return context_bytes + round(held * (1 + self._overheads.allocator_share))

    def _add_up(self, layers: range, recompute: Recompute, device: str, degree: int) -> _Part:
        itemsize, each = self._problem.workload.itemsize, self._problem.parameter_bytes
        kept = working = 0.0
        number = trained = largest = largest_trained = 0.0
        uncut = uncut_trained = 0
        keys = Counter(self._table.keys[layer] for layer in layers)
        for key, count in keys.items():
            kind, is_cut = self._table.kind(key), self._table.is_cut(key)
            parameters: float = kind.num_parameters + kind.num_borrowed
            trainable: float = kind.trainable + kind.borrowed_trainable
            whole = self._kept_bytes.get((kind.name, device, "none"), kind.activation_bytes_per_row)
            working_bytes: float = kind.working_bytes_per_row
            inputs: float = kind.input_elements_per_row * itemsize
            kept_inputs = self._kept_bytes.get((kind.name, device, "layer"), inputs)
            if not is_cut:
                uncut += count * (kind.num_parameters + kind.num_borrowed)
                uncut_trained += count * (kind.trainable + kind.borrowed_trainable)
            if degree > 1:
                whole, working_bytes, kept_inputs = (x / degree for x in (whole, working_bytes, kept_inputs))
            if degree > 1 and is_cut:
                parameters, trainable = parameters / degree, trainable / degree
                whole += GATHERS_PER_LAYER * (inputs - inputs / degree)
            number += count * parameters
            trained += count * trainable
            largest, largest_trained = max(largest, parameters), max(largest_trained, trainable)
            if self._table.recompute(key, recompute) == "layer":
                kept += count * kept_inputs
                working = max(working, whole + working_bytes)
            else:
                kept += count * whole
                working = max(working, working_bytes)
        edges = [layers.start, min(layers.stop, len(self._table.keys) - 1)]
        inside = [self._table.kind(self._table.keys[edge]) for edge in edges if edge]  # None of a lone layer.
        boundary = max((kind.input_elements_per_row for kind in inside), default=0)
        return _Part(
            whole=number * each.weight,
            gradients=trained * each.gradient,
            state=trained * each.state,
            unit=largest * each.weight,
            unit_gradients=largest_trained * each.gradient,
            kept_per_row=kept,
            working_per_row=working,
            boundary_per_row=boundary * itemsize / degree,
            masters=each.masters,
            uncut=uncut * each.weight,
            uncut_gradients=uncut_trained * each.gradient,
            uncut_state=uncut_trained * each.state,
        )

    def _walk(
        self,
        cuts: tuple[tuple[int, int], ...],
        group: CandidateGroup,
        sizes: Sizes,
        device: tuple[str, int],
        kept: int,
    ) -> Need:
        """`device`: its type, and how many of them are a replica; `kept`: microbatches of the last ministage
        that are in flight, where nothing is bounded."""
        few, share = take_few(sizes)
        if group.max_in_flight is not None and len(cuts) > 1:
            num_held = len(few) or len(take_few(max(group.sizes, key=len))[0])
            more = (*few, *few[:1]) if len(sizes) < group.microbatches_per_device else few
            walked = [
                self._walk_few(cuts, group, sizes, device, _Few(few, share, share)),
                self._walk_few(cuts, group, sizes, device, _Few(more, share, share, num_held)),
            ]
            return Need(*map(max, zip(*walked, strict=True)))
        if group.max_in_flight is not None and group.mode.reduces_per_microbatch:
            few, share = take_more(sizes, group.microbatches_per_device)
        last_share = share
        if group.max_in_flight is None and len(few) < len(sizes):
            last_share = add_largest(sizes, kept) / sum(few)
        return Need(*self._walk_few(cuts, group, sizes, device, _Few(few, share, last_share)))

    def _walk_few(
        self,
        cuts: tuple[tuple[int, int], ...],
        group: CandidateGroup,
        sizes: Sizes,
        device_and_degree: tuple[str, int],
        walked: _Few,
    ) -> tuple[int, int]:
        """Bytes of the device and of its host, of `sizes` held at once."""
        few, share, last_share, num_held = walked
        device, degree = device_and_degree
        plan = self._make_plan(cuts, group, few)
        actions = self._list_actions(plan, num_held, keeps_gathered=group.max_in_flight is not None)
        is_stashed = "activations" in group.mode.offload
        own = plan.ministages_of_group(_OWN)
        # Each microbatch goes back before the next one comes.
        turns = group.max_in_flight is None and own[-1] == plan.num_ministages - 1
        last_share = 1.0 if turns else last_share
        shares = dict.fromkeys(own, 1.0 if is_stashed else share)
        shares[own[-1]] = 1.0 if is_stashed else last_share
        measured = self._measure(plan, group, device_and_degree, shares)
        context_bytes = self._problem.setting.context_bytes(device)
        if device != CPU and group.degrees:  # Of its replica, and of the pieces that others hold too.
            more = (degree > 1) + (group.degree // degree if len(group.sizes) > 1 else 0)
            context_bytes += more * self._overheads.communicator_bytes
        walk = walk_memory(
            plan,
            0,
            actions,
            measured,
            context_bytes=context_bytes,
            num_sends_kept=None if device == CPU else SENDS_KEPT_BY_NCCL,
            on_gpu=device != CPU,
            communicator_bytes=self._overheads.communicator_bytes,
        )
        # What is received: joined of several pieces, and with bounds on microbatches in flight early, the
        # gradients of all of these and the inputs of those that follow.
        rows = max(sizes, default=0) if len(plan.groups) > 1 else 0
        owners = tuple(ministage.group for ministage in plan.ministages)
        if group.max_in_flight is not None:
            rows += sum(sizes) + RECEIVES_AHEAD * max(sizes, default=0)
        boundary = max(size.boundary_bytes_per_row for size in measured.values())
        peak = walk.device_peak_bytes
        if last_share > 1 and owners[-2:] == (_OWN, _REST):  # Gradients come back at once.
            more_bytes = round((last_share - 1) * max(few) * boundary)
            peak = find_peak_bytes(actions, walk.device_bytes, len(owners) - 2, more_bytes)
        peak += rows * boundary
        added = round(self._overheads.allocator_share * (peak - context_bytes))
        host_bytes = walk.host_peak_bytes
        if is_stashed and share > 1:  # Of many microbatches all but a few are on the host.
            *others, last = (size.activation_bytes_per_row for size in measured.values())
            kept = sum(sizes) * sum(others)
            if not turns:
                kept += round(last_share * sum(few)) * last
            host_bytes += kept - walk.host[Purpose.ACTIVATIONS]
        return peak + added, host_bytes

    def _list_actions(self, plan: Plan, num_held: int | None, *, keeps_gathered: bool) -> Sequence[Action]:
        """The device's actions, the same whatever layers the ministages have, and whatever waits for
        reductions; of a group that returns to its ministages, with so many microbatches of each held."""
        spec = self._problem.setting.make_spec(plan)
        owners = tuple(ministage.group for ministage in plan.ministages)
        groups = tuple(replace(group, overlap_grad_reduce=True) for group in plan.groups)
        keeps_gathered = keeps_gathered and owners.count(_OWN) > 1
        key = (owners, groups, spec.trainable, spec.ties, num_held, keeps_gathered)
        if key not in self._lists:
            if keeps_gathered:
                self._lists[key] = lower(spec, return_to_ministages(spec, _OWN, num_held), (0,))[0]
            else:
                self._lists[key] = build(spec)[0]
        return self._lists[key]

    def _make_plan(self, cuts: tuple[tuple[int, int], ...], group: CandidateGroup, sizes: Sizes) -> Plan:
        ranks = (0,) if len(group.devices) == 1 else (0, 1)
        modules = self._table.modules
        edges = sorted({0, len(modules), *(edge for cut in cuts for edge in cut)})
        ministages = [
            Ministage(_OWN if (start, stop) in cuts else _REST, modules[start:stop])
            for start, stop in pairwise(edges)
        ]
        has_rest = any(ministage.group == _REST for ministage in ministages)
        # A device that holds shards only joins what others do.
        has_rows, others = (sizes, 0) if sizes else (take_few(max(group.sizes, key=len))[0], ranks[-1])
        mode = group.mode
        groups = [
            Group(
                ranks,
                make_microbatches(others, has_rows),
                zero=mode.zero,
                grad_reduce=mode.grad_reduce,
                overlap_grad_reduce=mode.overlap_grad_reduce,
                offload=mode.offload,
                recompute=mode.recompute,
            )
        ]
        if has_rest:
            groups.append(Group((len(ranks),), make_microbatches(len(ranks), has_rows), zero=0))
        return Plan(sum(has_rows), tuple(groups), tuple(ministages))

    def _measure(
        self,
        plan: Plan,
        group: CandidateGroup,
        device_and_degree: tuple[str, int],
        shares: Mapping[int, float],
    ) -> dict[int, MinistageBytes]:
        """Sizes of each ministage of the device's group, with so many times its activations."""
        workload, each = self._problem.workload, self._problem.parameter_bytes
        device, degree = device_and_degree
        units = list_units(plan, workload)
        measured = {}
        for i, share in shares.items():
            rows = find_row_bytes(plan, workload, i, device, self._kept_bytes, degree)
            kept = round(share * rows.activation_bytes)
            measured[i] = add_up(
                units[i],
                replace(rows, activation_bytes=kept),
                each,
                num_shards=group.num_shards,
                degree=degree,
                num_replicas=group.num_replica_shards,
            )
        return measured


def _hold(
    parts: Sequence[_Part],
    mode: Mode,
    num_shards: tuple[int, int],
    rows_and_early: tuple[Sequence[int], Sequence[float]],
    rows_at_once: int,
    defers: bool,
) -> float:
    """The most that a device with these ministages holds, about; `num_shards`: of each piece of what is cut,
    and of what is not; `rows_and_early`: those that each ministage holds at most, and what it is sent of
    gradients while it goes forward."""
    rows, early = rows_and_early

    def shard(whole: float, uncut: float) -> float:
        of_piece, of_whole = num_shards
        return whole / of_whole if of_piece == of_whole else (whole - uncut) / of_piece + uncut / of_whole

    shards = [shard(part.whole, part.uncut) for part in parts]
    states = [shard(part.state, part.uncut_state) for part in parts]
    gradient_shards = [shard(part.gradients, part.uncut_gradients) for part in parts]
    stays = sum(sorted(states)[-2:]) if "optimizer" in mode.offload else sum(states)
    stays += shards[0] + sum(sorted(shards)[-2:]) if "params" in mode.offload else sum(shards)
    if mode.zero < 2:
        stays += sum(part.whole for part in parts)
    peak = kept = 0.0
    for i, part in enumerate(parts):
        if "activations" in mode.offload:
            kept = min(3 * rows_at_once, rows[i]) * part.kept_per_row
        else:
            kept += rows[i] * part.kept_per_row
        rounded = part.masters * gradient_shards[i] / 2
        held = kept + rows_at_once * (part.working_per_row + 5 * part.boundary_per_row) + part.unit + early[i]
        if mode.zero == 2:
            held += part.whole + (parts[i - 1].whole if i else 0.0)
        elif mode.zero == 3:
            held += 2 * part.unit
        held += part.unit_gradients if mode.zero == 3 else part.gradients
        held += part.unit_gradients + rounded + part.masters * gradient_shards[i]
        held += sum(gradient_shards[i + 1 :]) if defers else max(gradient_shards[i + 1 :], default=0.0)
        peak = max(peak, held)
    return stays + peak


def _hold_returning(parts: Sequence[_Part], mode: Mode) -> float:
    """What a group that returns to its ministages holds besides, about: all whole, and all gradients."""
    others = sorted(parts, key=lambda part: part.whole)[:-1]
    held = 0.0
    if mode.zero == 2:
        held += sum(part.whole for part in others[:-1])
    if not mode.reduces_per_microbatch:
        held += sum(part.gradients for part in others)
    return held
