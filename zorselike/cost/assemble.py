"""From a plan, a workload, a cluster and a profile to the numbers that a simulator reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations, product

from zorselike.cost.catalogue import CPU, find_memory_bytes
from zorselike.cost.largest_batch import find_corrections
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.network import Network
from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.profile import Overheads, Profile
from zorselike.cost.replica_times import find_parts, time_exchange, time_in_replica
from zorselike.cost.sizes import (
    count_updated,
    find_boundary_bytes,
    find_gradient_bytes,
    find_tie_bytes,
    is_layer,
    list_units,
    measure_ministages,
)
from zorselike.cost.step_costs import StepCosts, UnitBytes
from zorselike.cost.wires import REACHED_OF_BUS, make_network
from zorselike.errors import PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Place
from zorselike.plan.plan import Plan, Recompute, Replica
from zorselike.plan.validate import validate_modules
from zorselike.plan.workload import Workload
from zorselike.schedule.actions import COMPUTE


def make_costs(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    profile: Profile,
    *,
    network: Network | None = None,
) -> StepCosts:
    """What every action of a plan's schedule costs; what the profile lacks is estimated and listed in
    `assumptions`. Threads of ranks on devices of type `CPU` compute by themselves. `network`: in place of
    that of cluster and profile.

    Raises:
        PlanError: The plan's modules are not those of the workload, it is for another model or sequence
            length.
        ProfileError: The profile is for another workload, has nothing about a device that the catalogue
            does not know either, or says that a microbatch does not fit.
        ClusterError: A rank has no place in the cluster, or nothing says how two ranks that exchange
            data are connected.
    """
    check_plan(plan, workload)
    places = cluster.place_ranks(plan)
    _check_links(plan, cluster, places)
    devices = tuple(cluster.device_type(place) for place in places)
    clock = LayerTimeModel(profile, workload)
    network = make_network(cluster, places, profile) if network is None else network
    forward_s, backward_s = _time_microbatches(plan, workload, clock, devices, network)
    overheads = profile.overheads
    corrections = find_corrections(profile, workload, clock.kept_bytes)
    extra_bytes = {device: found.num_bytes for device, found in corrections.items()}
    units, each = _list_unit_bytes(plan, workload), ParameterBytes.of(workload)
    return StepCosts(
        places=places,
        network=network,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s={
            (rank, i): clock.update_s(devices[rank], number)
            for (rank, i), number in count_updated(plan, workload).items()
        },
        row_bytes=find_boundary_bytes(plan, workload),
        gradient_row_bytes=find_gradient_bytes(plan, workload),
        units=units,
        sizes=measure_ministages(plan, workload, devices=devices, measured=clock.kept_bytes),
        tie_bytes=find_tie_bytes(plan, workload, each.weight),
        tie_gradient_bytes=find_tie_bytes(plan, workload, each.gradient),
        host_s=dict(overheads.action_s),
        unit_host_s=_add_up_units(plan, units, overheads),
        step_host_s=overheads.step_s,
        is_cpu=tuple(device == CPU for device in devices),
        overlap_slowdown=overheads.overlap_slowdown,
        context_bytes=tuple(overheads.process_bytes + extra_bytes.get(device, 0) for device in devices),
        communicator_bytes=overheads.communicator_bytes,
        allocator_share=overheads.allocator_share,
        memory_bytes=_find_memory(cluster, places),
        price_per_hour=sum(cluster.nodes[node].price_per_hour for node in {place.node for place in places}),
        egress_price_per_gb=_find_egress_prices(cluster, places),
        currency=cluster.currency,
        assumptions=(
            *clock.assumptions,
            *_list_unmeasured_copies(plan, cluster, places, profile),
            *_list_unmeasured_overheads(devices, overheads),
        ),
        memory_corrections=tuple(str(found) for device, found in corrections.items() if device in devices),
    )


def check_plan(plan: Plan, workload: Workload) -> None:
    """Raises `PlanError` unless the plan divides just this workload's modules, in their order, and is for
    its model and sequence length."""
    modules = [name for name, _ in workload.layers]
    validate_modules(plan, modules, modules)
    if plan.sequence_length is not None and plan.sequence_length != workload.sequence_length:
        raise PlanError(
            f"the plan is for {plan.sequence_length} tokens a row, the workload has "
            f"{workload.sequence_length}; give the workload at the plan's length"
        )
    if plan.workload_fingerprint is not None and plan.workload_fingerprint != workload.fingerprint:
        raise PlanError(
            f"the plan was made for workload {plan.workload_fingerprint}, this is {workload.fingerprint} "
            f"('{workload.model}' in {workload.dtype}, {workload.sequence_length} tokens a row); give the "
            "model, dtype and length that it was made for, or take workload_fingerprint out of the plan"
        )


def _check_links(plan: Plan, cluster: Cluster, places: Sequence[Place]) -> None:
    """Raises `ClusterError` if nothing says how ranks of one group, or of two that pass on rows, are
    connected."""
    owners = [ministage.group for ministage in plan.ministages]
    pairs = {(g, g) for g in owners} | set(pairwise(owners))
    named = {name for pair in cluster.node_links for name in pair}
    looked: set[object] = set()
    for a, b in sorted(pairs):
        first, second = (
            {places[rank].node: places[rank] for rank in plan.groups[g].flat_ranks} for g in (a, b)
        )
        for x, y in product(first.values(), second.values()):
            if x.node == y.node:
                on_node = (places[rank] for g in (a, b) for rank in plan.groups[g].flat_ranks)
                y = next((place for place in on_node if place.node == x.node and place != x), x)
            # Nodes that no link names are alike to all that are in the same zone and region.
            nodes = [cluster.nodes[place.node] for place in (x, y)]
            ends = ((node.name if node.name in named else "", node.zone, node.region) for node in nodes)
            way = x.node if x.node == y.node else (*ends,)
            if x != y and way not in looked:
                looked.add(way)
                cluster.link(x, y)


# -- times ---------------------------------------------------------------------------------

_BySize = dict[tuple[int, int, int], float]
"""By rank, ministage, rows."""


def _time_microbatches(
    plan: Plan, workload: Workload, clock: LayerTimeModel, devices: Sequence[str], network: Network
) -> tuple[_BySize, _BySize]:
    """Seconds of the forward and the backward of every ministage for every size of microbatch."""
    forward_s: _BySize = {}
    backward_s: _BySize = {}
    times = _ReplicaTimes(plan, workload, clock, devices, network)
    for i, ministage in enumerate(plan.ministages):
        group = plan.group_of(i)
        layers: Counter[tuple[str, Recompute]] = Counter(
            (workload.kind_of[name].name, group.recompute if is_layer(name) else "none")
            for name in ministage.modules
        )
        for replica in (replica for replica in group.replicas if replica.degree > 1):
            for rows in {microbatch.num_rows for microbatch in group.microbatches_by_rank[replica.first]}:
                found = times.of(replica, i, rows)
                for rank in replica.ranks:
                    forward_s[rank, i, rows], backward_s[rank, i, rows] = found
        for rank in (replica.first for replica in group.replicas if replica.degree == 1):
            device = devices[rank]
            for rows in {microbatch.num_rows for microbatch in group.microbatches_by_rank[rank]}:
                for kind, recompute in layers:
                    most = clock.max_rows(kind, device, recompute)
                    if most is not None and rows > most:
                        raise ProfileError(
                            f"rank {rank} ({device}) has microbatches of {rows} rows in the plan; the "
                            f"profile found that at most {most} fit through one {kind} on it; plan for "
                            "smaller microbatches"
                        )
                for seconds, time in ((forward_s, clock.forward_s), (backward_s, clock.backward_s)):
                    seconds[rank, i, rows] = sum(
                        number * time(kind, device, rows, recompute)
                        for (kind, recompute), number in layers.items()
                    )
    return forward_s, backward_s


class _ReplicaTimes:
    """What ministages take on replicas of several ranks, collectives inside these included: nothing runs
    beside them but what other replicas of their node do at the same time."""

    def __init__(
        self,
        plan: Plan,
        workload: Workload,
        clock: LayerTimeModel,
        devices: Sequence[str],
        network: Network,
    ) -> None:
        self._plan, self._workload, self._clock, self._devices = plan, workload, clock, devices
        self._network, self._parts = network, find_parts(workload)
        self._on_node: defaultdict[int, list[Replica]] = defaultdict(list)
        for replica in (replica for group in plan.groups for replica in group.replicas if replica.degree > 1):
            self._on_node[network.places[replica.first].node].append(replica)
        self._exchanges: dict[tuple[int, float], float] = {}
        """By a replica's first rank and bytes."""
        self._found: dict[tuple[int, int, int], tuple[float, float]] = {}

    def of(self, replica: Replica, ministage: int, rows: int) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward on every rank of a replica."""
        key = (replica.first, ministage, rows)
        if key not in self._found:
            self._found[key] = self._time(replica, ministage, rows)
        return self._found[key]

    def _time(self, replica: Replica, ministage: int, rows: int) -> tuple[float, float]:
        recompute = self._plan.group_of(ministage).recompute
        kinds = Counter(
            (self._workload.kind_of[name].name, self._parts[name])
            for name in self._plan.ministages[ministage].modules
        )
        forward_s = backward_s = 0.0
        for (kind, part), number in kinds.items():
            seconds = time_in_replica(
                self._clock,
                self._workload.kinds[kind],
                part,
                self._devices[replica.first],
                rows,
                recompute,
                degree=replica.degree,
                exchange_s=lambda num_bytes: self._exchange_s(replica, num_bytes),
            )
            forward_s += number * seconds[0]
            backward_s += number * seconds[1]
        return forward_s, backward_s

    def _exchange_s(self, replica: Replica, num_bytes: float) -> float:
        key = (replica.first, num_bytes)
        if key not in self._exchanges:
            peers = self._on_node[self._network.places[replica.first].node]
            ranks = [other.ranks for other in peers]
            self._exchanges[key] = time_exchange(self._network, ranks, num_bytes)
        return self._exchanges[key]


def _add_up_units(
    plan: Plan, units: Sequence[Sequence[UnitBytes]], overheads: Overheads
) -> dict[tuple[str, int], float]:
    """Host seconds of the units of each ministage, by kind of action."""
    own, shared = dict(overheads.unit_s), dict(overheads.shared_unit_s)
    found: dict[tuple[str, int], float] = {}
    for i in range(plan.num_ministages):
        group = plan.group_of(i)
        is_shared = len(group.flat_ranks) > 1
        for kind in own.keys() | shared.keys():
            gathers = is_shared and (kind not in COMPUTE or group.zero == 3)
            seconds = own.get(kind, 0.0) + (shared.get(kind, 0.0) if gathers else 0.0)
            if seconds:
                found[kind, i] = seconds * sum(unit.gathered_bytes > 0 for unit in units[i])
    return found


# -- bytes, memory and prices --------------------------------------------------------------


def _list_unit_bytes(plan: Plan, workload: Workload) -> tuple[tuple[UnitBytes, ...], ...]:
    each = ParameterBytes.of(workload)
    return tuple(
        tuple(
            UnitBytes(u.num_parameters * each.weight, u.num_trainable * each.gradient, u.is_cut)
            for u in units
        )
        for units in list_units(plan, workload)
    )


def _find_memory(cluster: Cluster, places: Sequence[Place]) -> tuple[int, ...]:
    """Of each rank's device; nothing if one is not known."""
    found = [find_memory_bytes(cluster, place) for place in places]
    known = tuple(memory_bytes for memory_bytes in found if memory_bytes is not None)
    return known if len(known) == len(found) else ()


def _list_unmeasured_copies(
    plan: Plan, cluster: Cluster, places: Sequence[Place], profile: Profile
) -> list[str]:
    """A line for each type of device that offloads over a bus that only the catalogue knows."""
    measured = {rates.device for rates in profile.host_links}
    devices = {
        cluster.device_type(places[rank])
        for group in plan.groups
        for rank in group.flat_ranks
        if group.offload and cluster.nodes[places[rank].node].host_link is None
    }
    return [
        f"{device}: copies between it and its host were not measured; {REACHED_OF_BUS:.0%} of its bus"
        for device in sorted(devices - measured)
    ]


def _list_unmeasured_overheads(devices: Sequence[str], overheads: Overheads) -> list[str]:
    """What counts as nothing because nobody measured it."""
    lines = []
    gpus = sorted({*devices} - {CPU})
    if gpus and not overheads.process_bytes:
        lines.append(
            f"{', '.join(gpus)}: memory of a process beside tensors was not measured and counts as 0"
        )
    if not overheads.action_s:
        lines.append("seconds of the program itself, beside its layers, were not measured and count as 0")
    return lines


def _find_egress_prices(cluster: Cluster, places: Sequence[Place]) -> Mapping[tuple[int, int], float]:
    """By nodes from and to, where a zone's or else a region's price is not 0."""
    prices: dict[tuple[int, int], float] = {}
    given = cluster.egress_price_per_gb
    if not given:
        return prices
    for a, b in permutations(sorted({place.node for place in places}), 2):
        first, second = cluster.nodes[a], cluster.nodes[b]
        of_regions = given.get((first.region, second.region), 0.0)
        if price := given.get((first.zone, second.zone), of_regions):
            prices[a, b] = price
    return prices
