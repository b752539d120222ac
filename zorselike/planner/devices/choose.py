"""Which devices to plan for: all, fewer of some kind, or what money and numbers allow (Sailor 4.2).

A choice is so many nodes of each kind, whole nodes first, since a rented node is paid for as a whole. Bounds
from computation alone say which choices cannot keep what is asked for, and in which order the rest is worth
planning; what Sailor's dynamic programme would take is among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite

import numpy as np

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.errors import ProfileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.planner.answer import NothingFitsError
from zorselike.planner.devices.bounds import DeviceBounds
from zorselike.planner.devices.mixes import Mix, mix_kinds
from zorselike.planner.devices.node_kinds import find_node_kinds
from zorselike.planner.devices.pipeline_costs import allocate_devices, count_state_bytes
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.problem import PlanProblem
from zorselike.text.wording import count, list_few

MOST_SETS = 100
LIKELY_SHARE = 0.75
"""Share of a bound that plans are likely to reach: sets that keep the constraints with it come first."""
MOST_NAMED = 24
"""Sets that a person would name, which are proposed before others."""
MOST_FASTEST = 8
"""Mixes with the lowest bounds that are taken."""
TIME_LIMIT_S = 0.3
TRIED_PER_S = 60_000
"""Partial pipelines that the dynamic programme tries in a second."""
_SLACK = 1e-9
"""Relative, by which a bound may break a constraint."""


@dataclass(frozen=True)
class DeviceSet:
    """Devices that a plan could be made for."""

    devices: tuple[int, ...]
    """Indices into `Cluster.places`, rising."""
    bound_s: float
    """No step on these devices or fewer of them takes less."""
    price_per_hour: float
    """Price of all their nodes."""
    note: str = ""
    """What a user should know: which part of the cluster is not joined to these."""
    is_share: bool = False
    """Whether a person would name them: all, those of a type, a region, a zone or a kind of nodes, or all but
    those; or of the fastest types. They are looked at first."""

    @property
    def bound_cost(self) -> float:
        """No step that uses a device of each of their nodes costs less."""
        return self.price_per_hour * self.bound_s / 3600


def leave_out_unknown(problem: PlanProblem, clock: LayerTimeModel) -> tuple[PlanProblem, tuple[str, ...]]:
    """Without devices of which nothing says how fast they are, such as those without this dtype; and a note
    for each type of them.

    Raises:
        ProfileError: Nothing is known of any device, or of one in groups that are fixed.
    """
    types = problem.device_types
    unknown: dict[str, ProfileError] = {}
    for device in dict.fromkeys(types[d] for d in problem.usable):
        try:
            clock.model_s(device)
        except ProfileError as error:
            unknown[device] = error
    if not unknown:
        return problem, ()
    known = tuple(d for d in problem.usable if types[d] not in unknown)
    given = {d for group in problem.fixed.groups or () for d in group}
    if not known or given - {*known}:
        raise next(iter(unknown.values()))
    notes = tuple(f"{device} left out: {error}" for device, error in unknown.items())
    return replace(problem, devices=known), notes


def propose_devices(
    problem: PlanProblem, *, bounds: DeviceBounds | None = None, time_limit_s: float = TIME_LIMIT_S
) -> tuple[DeviceSet, ...]:
    """Sets of the usable devices, `MOST_SETS` at most, the most promising first; of a cluster in unconnected
    parts, of each part.

    Whole mixes of nodes whose bounds break a constraint are left out, unless none is left.

    Args:
        problem: has passed its `check`.
        bounds: of the problem, if there are some already.
        time_limit_s: what the dynamic programme may take, about: it is counted in what it looks at, so that
            the same is proposed whatever the machine is doing.

    Raises:
        NothingFitsError: No plan of any of the devices keeps a constraint, by the bounds.
        ClusterError: Nothing says how the devices of a node are connected.
        ProfileError: Nothing is known of the speed of some device.
    """
    bounds = DeviceBounds(problem) if bounds is None else bounds
    _refuse(problem, bounds)
    if problem.fixed.groups is not None:
        devices = tuple(sorted(device for group in problem.fixed.groups for device in group))
        return (replace(_make_set(bounds, devices), is_share=True),)
    whole = problem.read_bandwidths(problem.usable)
    parts = whole.connected_parts()
    max_tried = int(time_limit_s / len(parts) * TRIED_PER_S)
    if len(parts) == 1:
        return tuple(_Chooser(problem, bounds, whole, max_tried).choose())
    found: list[DeviceSet] = []
    for part in parts:
        note = _describe_rest(problem.cluster, part, whole.devices)
        chooser = _Chooser(replace(problem, devices=part), bounds, problem.read_bandwidths(part), max_tried)
        found += [replace(chosen, note=note) for chosen in chooser.choose()]
    return tuple(sorted(found, key=lambda chosen: _rank(problem, chosen))[:MOST_SETS])


def _refuse(problem: PlanProblem, bounds: DeviceBounds) -> None:
    """Raises `NothingFitsError` where the bounds alone leave nothing."""
    whose = f"of {count(len(problem.usable), 'device')}"
    if problem.max_devices is not None and problem.max_devices < len(problem.usable):
        whose = f"of any {count(problem.max_devices, 'device')}"
    if problem.min_throughput * bounds.floor_s > 1 + _SLACK:
        raise NothingFitsError(
            f"plan: at least {problem.describe_speed(problem.min_throughput)} cannot be reached: a step "
            f"{whose} takes {bounds.floor_s:.4g} s of computation at least, "
            f"{problem.describe_speed(1 / bounds.floor_s)}; "
            "ask for less, make the batch smaller, or allow more devices"
        )
    if isfinite(problem.max_cost_per_iteration):
        least = bounds.least_cost(problem.usable)
        if least > problem.max_cost_per_iteration * (1 + _SLACK):
            currency = problem.cluster.currency
            raise NothingFitsError(
                f"plan: at most {problem.max_cost_per_iteration:g} {currency} an iteration cannot be kept: "
                f"computation alone costs {least:.4g} {currency} where it is cheapest; allow more, or make "
                "the batch smaller"
            )


def _describe_rest(cluster: Cluster, part: Sequence[int], devices: Iterable[int]) -> str:
    left = sorted({*devices} - {*part})
    nodes = list(dict.fromkeys(cluster.nodes[cluster.places[device].node].name for device in left))
    return (
        f"no link joins {list_few(nodes, 'node')} ({count(len(left), 'device')}) to the "
        f"{count(len(part), 'device')} of the part that is planned for; they are left out, unless the "
        "cluster file gets a [[links]] for them or a default_link"
    )


def _make_set(bounds: DeviceBounds, devices: tuple[int, ...]) -> DeviceSet:
    return DeviceSet(devices, bounds.bound_s(devices), bounds.price_per_hour(devices))


def _keeps(problem: PlanProblem, chosen: DeviceSet, share: float = 1.0) -> bool:
    """Whether a step that takes its bound by `share` keeps what is asked for."""
    return (
        problem.min_throughput * chosen.bound_s <= share * (1 + _SLACK)
        and chosen.bound_cost <= share * problem.max_cost_per_iteration * (1 + _SLACK)
        and (problem.max_devices is None or len(chosen.devices) <= problem.max_devices)
    )


def _rank(problem: PlanProblem, chosen: DeviceSet) -> tuple[bool, float, int, float]:
    """By which sets are ordered, the most promising first."""
    if problem.objective == "cost":
        # Nodes of one kind do the same work for the same money, more of them with more waiting.
        wanted = (float(f"{chosen.bound_cost:.6g}"), len(chosen.devices), chosen.bound_s)
    else:
        wanted = (chosen.bound_s, len(chosen.devices), chosen.bound_cost)
    return (not _keeps(problem, chosen, LIKELY_SHARE), *wanted)


class _Chooser:
    """Sets of devices of one connected part."""

    def __init__(
        self, problem: PlanProblem, bounds: DeviceBounds, bandwidths: Bandwidths, max_tried: int
    ) -> None:
        """`max_tried` as `allocate_devices` takes it."""
        self._problem, self._bounds, self._bandwidths = problem, bounds, bandwidths
        self._max_tried = max_tried
        self._kinds = find_node_kinds(bandwidths, problem.usable, bounds.model_s)
        self._state_bytes = sum(count_state_bytes(problem.workload))

    def choose(self) -> list[DeviceSet]:
        """Those of which the bounds promise most; of the first few, what the dynamic programme takes."""
        allocated = allocate_devices(
            self._problem, self._bounds.clock, self._kinds, self._bandwidths, max_tried=self._max_tried
        )
        shares = dict.fromkeys(self._list_named())
        possible = filter(self._is_possible, dict.fromkeys((*shares, *self._list_choices(), *allocated)))
        sets = [replace(_make_set(self._bounds, devices), is_share=devices in shares) for devices in possible]
        kept = [chosen for chosen in sets if _keeps(self._problem, chosen)] or sets
        kept.sort(key=lambda chosen: (not self._holds_state(chosen), *_rank(self._problem, chosen)))
        first = [chosen for chosen in kept if chosen.devices in allocated]
        if not self._problem.asks_for_money:
            first = [*kept[:1], *first]
        named = [chosen for chosen in kept if chosen.is_share and self._holds_state(chosen)][:MOST_NAMED]
        return [*{chosen.devices: chosen for chosen in (*first, *named, *kept)}.values()][:MOST_SETS]

    def _is_possible(self, devices: tuple[int, ...]) -> bool:
        """Not too many; where groups may not span regions, each region's could be a group of their own; and
        some way joins them all, over none but them."""
        problem = self._problem
        most = inf if problem.max_devices is None else problem.max_devices
        regions = {problem.cluster.nodes[problem.nodes[device]].region for device in devices}
        most_groups = problem.fixed.ministages or len(problem.workload.layers)
        if not 0 < len(devices) <= most or (len(regions) > most_groups and not problem.spans_regions):
            return False
        return self._is_all_joined or len(self._bandwidths.connected_parts(devices)) == 1

    @cached_property
    def _is_all_joined(self) -> bool:
        between = self._bandwidths.rates.copy()
        np.fill_diagonal(between, np.inf)
        return bool((between > 0).all())

    def _holds_state(self, chosen: DeviceSet) -> bool:
        """Whether parameters, gradients and optimizer state have room in all devices together; offloaded
        they may need less."""
        blocks = (self._bandwidths.blocks[self._bandwidths.block_of[device]] for device in chosen.devices)
        return sum(block.memory_bytes or inf for block in blocks) >= self._state_bytes

    # -- choices ---------------------------------------------------------------------------

    def _list_choices(self) -> Iterator[tuple[int, ...]]:
        """The same perhaps several times."""
        for kind in self._kinds:
            yield tuple(sorted(kind.nodes[0]))
        for members in self._by(self._problem.device_types).values():
            yield (members[0],)
        yield from map(self._take, self._list_mixes())

    def _list_named(self) -> Iterator[tuple[int, ...]]:
        """All, each share, all but that, and the fastest types; the same perhaps several times."""
        usable = self._problem.usable
        yield usable
        of_types = self._by(self._problem.device_types)
        fastest = sorted(of_types, key=self._bounds.model_s)
        for number in range(2, len(fastest)):
            yield tuple(sorted(device for name in fastest[:number] for device in of_types[name]))
        for share in self._list_shares():
            yield tuple(sorted({*usable} - {*share}))
            yield tuple(sorted(share))

    def _list_shares(self) -> Iterator[Sequence[int]]:
        """What people would leave out, or take alone: a type, a region, a zone, a kind of nodes."""
        problem = self._problem
        node_of = [problem.cluster.nodes[node] for node in problem.nodes]
        regions, zones = [node.region for node in node_of], [node.zone for node in node_of]
        for names in (problem.device_types, regions, zones):
            shares = self._by(names)
            if len(shares) > 1:
                yield from (members for name, members in shares.items() if name)
        if len(self._kinds) > 1:
            yield from (kind.devices for kind in self._kinds)

    def _by(self, names: Sequence[str]) -> dict[str, list[int]]:
        """By a name that each device of the cluster has."""
        found: dict[str, list[int]] = {}
        for kind in self._kinds:
            for device in kind.devices:
                found.setdefault(names[device], []).append(device)
        return found

    def _list_mixes(self) -> Iterator[Mix]:
        """The fastest for so much money or so many devices."""
        most = self._problem.max_devices
        coarse = most is None and not self._problem.asks_for_money
        mixes = mix_kinds(self._kinds, self._bounds, max_devices=most, coarse=coarse)
        picked = [*mixes.pick(mixes.num_devices), *mixes.pick_fastest(MOST_FASTEST)]
        if self._problem.asks_for_money:
            shares, slowest = (1.0, LIKELY_SHARE), self._problem.min_throughput
            picked += mixes.pick(
                mixes.bound_cost,
                spent_limits=[share * self._problem.max_cost_per_iteration for share in shares],
                seconds_limits=[share / slowest for share in shares] if slowest else (),
            )
        for i in dict.fromkeys(picked):
            yield mixes[i]

    def _take(self, mix: Mix) -> tuple[int, ...]:
        taken: list[int] = []
        for k, (kind, number) in enumerate(zip(self._kinds, mix.num_nodes, strict=True)):
            taken += [device for node in kind.nodes[:number] for device in node]
            if k == mix.part_kind:
                taken += kind.nodes[number][: mix.part_devices]
        return tuple(sorted(taken))
