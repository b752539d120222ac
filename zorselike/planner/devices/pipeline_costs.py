"""The devices that Sailor's dynamic programme would take (section 4.2.2), by our costs.

Rough where the real search is not: a stage is so many devices of one kind of nodes, all with as many rows;
parameters, gradients and optimizer state are sharded over them; layers are taken together into a few pieces;
what is sent is not hidden behind computation. What comes of it is a proposal of devices, not a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import ceil, inf, isfinite

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.parameter_bytes import ParameterBytes, largest_shard
from zorselike.plan.plan import RECOMPUTE, Recompute
from zorselike.plan.workload import Workload
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.devices.node_kinds import NodeKind
from zorselike.planner.groups.bandwidths import Bandwidths
from zorselike.planner.pipelines.allocation import AllocationGoal, Problem, find_allocation
from zorselike.planner.pipelines.costs import Pool
from zorselike.planner.problem import PlanProblem

MOST_PIECES = 10
"""Into so many the layers are put together; the search takes as many stages as there are pieces, at most."""
MOST_POOLS = 6
"""Pools that are looked at: the first, those on the nodes with the fastest devices."""
MOST_ROWS = 8
"""Rows of a microbatch, in powers of two."""
TIGHTER = (1.0, 0.8, 0.6)
"""Shares of what is allowed: the costs here are rough, and a little less may be what keeps a constraint."""
_NEVER_S = 1e12
"""For what nothing joins: finite, as the search wants it."""


def count_state_bytes(workload: Workload) -> tuple[int, ...]:
    """Parameters, gradients and optimizer state of each layer, whole and on a device."""
    each = ParameterBytes.of(workload)
    kinds = [workload.kinds[kind] for _, kind in workload.layers]
    return tuple(
        kind.num_parameters * each.weight + kind.trainable * (each.gradient + each.state) for kind in kinds
    )


@dataclass(frozen=True)
class DevicePool:
    """The devices of one type on nodes of one kind."""

    kind: int
    type: str
    first_device: int
    """That stands for all."""
    per_node: int
    pool: Pool


def list_pools(kinds: Sequence[NodeKind], max_devices: int | None = None) -> list[DevicePool]:
    """In the order of the kinds; a node's price is divided among those of its devices that may be used."""
    most = inf if max_devices is None else max_devices
    pools = []
    for k, kind in enumerate(kinds):
        for device in dict.fromkeys(kind.types):
            per_node = kind.types.count(device)
            pool = Pool(
                num_devices=int(min(most, per_node * len(kind.nodes))),
                dollars_per_device_s=kind.price_per_hour / len(kind.types) / 3600,
                devices_per_node=per_node,
            )
            pools.append(DevicePool(k, device, kind.nodes[0][kind.types.index(device)], per_node, pool))
    return pools


class ModelTables:
    """What all degrees and microbatch sizes have in common."""

    def __init__(
        self, problem: PlanProblem, clock: LayerTimeModel, bandwidths: Bandwidths, pools: Sequence[DevicePool]
    ) -> None:
        self.pools = tuple(pools)
        self._cluster, self._bandwidths = problem.cluster, bandwidths
        self.table = LayerTable(problem.workload, clock)
        keys, kinds = self.table.keys, list(map(self.table.kind, self.table.keys))
        size = ceil(len(keys) / MOST_PIECES)
        self.pieces = [keys[start : start + size] for start in range(0, len(keys), size)]
        self.state_bytes = self._before(count_state_bytes(problem.workload))
        self.parameters = self._before([kind.trainable for kind in kinds])
        itemsize = problem.workload.itemsize
        self.entering_bytes = [kind.input_elements_per_row * itemsize for kind in kinds[::size]]
        self.returning_bytes = [kind.gradient_elements * itemsize for kind in kinds[::size]]
        self.working_bytes = max(kind.activation_bytes_per_row + kind.working_bytes_per_row for kind in kinds)
        """What a row needs in the layer that needs most while it is computed again."""
        self.parameter_bytes = problem.parameter_bytes
        self.memory = [
            find_memory_bytes(problem.cluster, problem.cluster.places[pool.first_device]) or inf
            for pool in pools
        ]
        self.piece_s = cache(self._piece_s)
        self.kept_bytes = cache(self._kept_bytes)
        self.rate = cache(self._rate)
        self.egress_price = cache(self._egress_price)

    def _before(self, of_layers: Sequence[int]) -> list[int]:
        """Sums over the layers before each piece, and over all."""
        sums = [0, *accumulate(of_layers)]
        ends = accumulate((len(piece) for piece in self.pieces), initial=0)
        return [sums[end] for end in ends]

    def _piece_s(self, device: str, rows: int, recompute: Recompute, piece: int) -> float:
        pairs = (self.table.seconds(key, device, rows, recompute) for key in self.pieces[piece])
        return sum(forward_s + backward_s for forward_s, backward_s in pairs)

    def _kept_bytes(self, recompute: Recompute) -> list[int]:
        """Bytes of a row's activations before each piece, and of all."""
        return self._before([round(self.table.kept_bytes(key, recompute)) for key in self.table.keys])

    def _rate(self, a: int, b: int) -> float:
        """Bytes per second between nodes of two pools; 0 where nothing joins them. Within one pool between
        two of its nodes, or inside its only one."""
        blocks = self._bandwidths.block_of
        first, second = (blocks[self.pools[p].first_device] for p in (a, b))
        if a != b:
            return float(self._bandwidths.rates[first, second])
        on_node = self._bandwidths.blocks[first].node
        others = [
            blocks[block.devices[0]]
            for block in self._bandwidths.blocks
            if block.node != on_node and block.type == self.pools[a].type
        ]
        joined = [float(self._bandwidths.rates[first, other]) for other in others]
        return max(joined, default=self.inside_rate(a))

    def inside_rate(self, pool: int) -> float:
        block = self._bandwidths.block_of[self.pools[pool].first_device]
        return float(self._bandwidths.rates[block, block])

    def _egress_price(self, a: int, b: int) -> float:
        """Price of a byte."""
        prices = self._cluster.egress_price_per_gb
        first, second = (
            self._cluster.nodes[self._cluster.places[self.pools[p].first_device].node] for p in (a, b)
        )
        price = prices.get((first.zone, second.zone))
        if price is None:
            price = prices.get((first.region, second.region), 0.0)
        return price / 1e9


@dataclass(frozen=True)
class StageOption:
    """Devices of one pool, with or without recomputation."""

    pool: int
    recompute: Recompute


class ModelPipelineCosts:
    """`PipelineCosts` at one degree and one microbatch size."""

    def __init__(
        self, tables: ModelTables, options: Sequence[StageOption], degree: int, rows: int, global_batch: int
    ) -> None:
        self.options = tuple(options)
        self.num_layers = len(tables.pieces)
        self.num_microbatches = ceil(global_batch / (rows * degree))
        self.uses = tuple(
            tuple(degree if p == option.pool else 0 for p in range(len(tables.pools))) for option in options
        )
        self._tables = tables
        self._degree = degree
        self._rows = rows

    def layer_s(self, option: int, layer: int) -> float:
        chosen = self.options[option]
        return self._tables.piece_s(self._tables.pools[chosen.pool].type, self._rows, chosen.recompute, layer)

    def forward_send_s(self, option: int, following: int, stop: int, first_of: int) -> float:
        return self._send_s(option, following, self._tables.entering_bytes[stop])

    def backward_send_s(self, option: int, previous: int, start: int, is_last: bool) -> float:
        return self._send_s(option, previous, self._tables.returning_bytes[start])

    def _send_s(self, option: int, other: int, row_bytes: int) -> float:
        """All devices of a node send at once."""
        a, b = self.options[option].pool, self.options[other].pool
        per_node = self._tables.pools[a].per_node
        num_bytes = self._rows * row_bytes
        if a == b and 2 * self._degree <= per_node:
            rate = self._tables.inside_rate(a)
        else:
            rate = self._tables.rate(a, b) / min(self._degree, per_node)
        return num_bytes / rate if rate else _NEVER_S

    def least_send_s(self, option: int) -> float:
        return 0.0

    def update_s(self, option: int, start: int, stop: int) -> float:
        parameters = self._tables.parameters[stop] - self._tables.parameters[start]
        share = largest_shard(parameters, self._degree)
        return self._tables.table.update_s(self._tables.pools[self.options[option].pool].type, share)

    def sync_s(self, option: int, start: int, stop: int) -> float:
        """Gradients scattered and parameters gathered over a ring."""
        pool = self.options[option].pool
        num_bytes = self._sync_bytes(start, stop)
        if not num_bytes:
            return 0.0
        is_inside = self._degree <= self._tables.pools[pool].per_node
        rate = self._tables.inside_rate(pool) if is_inside else self._tables.rate(pool, pool)
        return num_bytes / rate if rate else _NEVER_S

    def _sync_bytes(self, start: int, stop: int) -> float:
        """Over each edge of the ring."""
        parameters = self._tables.parameters[stop] - self._tables.parameters[start]
        each = self._tables.parameter_bytes
        return parameters * (each.gradient + each.weight) * (self._degree - 1) / self._degree

    def fits(self, option: int, start: int, stop: int, depth: int) -> bool:
        chosen, tables = self.options[option], self._tables
        kept = tables.kept_bytes(chosen.recompute)
        held = min(depth, self.num_microbatches) * self._rows * (kept[stop] - kept[start])
        working = self._rows * tables.working_bytes if chosen.recompute == "layer" else 0
        state = (tables.state_bytes[stop] - tables.state_bytes[start]) / self._degree
        return state + held + working <= tables.memory[chosen.pool]

    def boundary_dollars(self, option: int, following: int, stop: int) -> float:
        """Activations there, gradients back, of all rows."""
        a, b = self.options[option].pool, self.options[following].pool
        num_rows = self.num_microbatches * self._degree * self._rows
        dollars = self._tables.entering_bytes[stop] * self._tables.egress_price(a, b)
        dollars += self._tables.returning_bytes[stop] * self._tables.egress_price(b, a)
        return num_rows * dollars

    def sync_dollars(self, option: int, start: int, stop: int) -> float:
        """Each node on the ring sends to the next."""
        pool = self.options[option].pool
        per_node = self._tables.pools[pool].per_node
        if self._degree <= per_node:
            return 0.0
        num_nodes = ceil(self._degree / per_node)
        return num_nodes * self._sync_bytes(start, stop) * self._tables.egress_price(pool, pool)


def make_problems(tables: ModelTables, problem: PlanProblem) -> Iterator[Problem]:
    """Degrees in powers of two, and all of a node or of a pool; microbatches in powers of two."""
    degrees: set[int] = set()
    for pool in tables.pools:
        number = pool.pool.num_devices
        degrees |= {number, pool.per_node, *(1 << i for i in range(number.bit_length()))}
    settings = RECOMPUTE if problem.fixed.recompute is None else (problem.fixed.recompute,)
    most_rows = min(problem.fixed.rows_per_microbatch or MOST_ROWS, MOST_ROWS)
    for degree in sorted(degrees):
        for rows in [1 << i for i in range(most_rows.bit_length())]:
            if (degree - 1) * rows >= problem.global_batch:
                continue
            options = [
                StageOption(p, recompute)
                for p, pool in enumerate(tables.pools)
                for recompute in settings
                if degree <= pool.pool.num_devices
                and ((most := tables.table.most_rows(pool.type, recompute)) is None or rows <= most)
            ]
            if options:
                costs = ModelPipelineCosts(tables, options, degree, rows, problem.global_batch)
                yield Problem(degree, rows, costs)


# -- the devices it takes ---------------------------------------------------------------------


def allocate_devices(
    problem: PlanProblem,
    clock: LayerTimeModel,
    kinds: Sequence[NodeKind],
    bandwidths: Bandwidths,
    *,
    max_tried: int,
) -> list[tuple[int, ...]]:
    """What the programme takes for the problem's goal, and for somewhat stricter ones.

    Args:
        kinds: of the nodes that may be used, those with the fastest devices first.
        bandwidths: of their devices.
        max_tried: partial pipelines, of all goals together.

    Returns:
        Indices into `Cluster.places`, rising, each choice once; nothing where no pipeline was found.
    """
    pools = list_pools(kinds, problem.max_devices)[:MOST_POOLS]
    tables = ModelTables(problem, clock, bandwidths, pools)
    problems = tuple(make_problems(tables, problem))
    goals = list(_list_goals(problem))
    chosen: dict[tuple[int, ...], None] = {}
    for goal in goals:
        found = find_allocation(
            problems, [pool.pool for pool in pools], goal, max_tried=max_tried // len(goals)
        )
        if found is not None:
            used = {
                (pool.kind, pool.type): number
                for pool, number in zip(pools, found.figures.used, strict=True)
                if number
            }
            whole = _take(kinds, used, whole_nodes=True)
            has_room = problem.max_devices is None or len(whole) <= problem.max_devices
            chosen[whole if has_room else _take(kinds, used)] = None
    return list(chosen)


def _list_goals(problem: PlanProblem) -> Iterator[AllocationGoal]:
    goal = AllocationGoal(
        objective=problem.objective,
        max_cost_per_iteration=problem.max_cost_per_iteration,
        min_throughput=problem.min_throughput,
        max_devices=problem.max_devices,
    )
    is_bound = isfinite(problem.max_cost_per_iteration) or problem.min_throughput > 0
    for share in TIGHTER if is_bound else TIGHTER[:1]:
        yield replace(
            goal,
            max_cost_per_iteration=share * problem.max_cost_per_iteration,
            min_throughput=problem.min_throughput / share,
        )


_Used = Mapping[tuple[int, str], int]
"""Devices by kind of node and type."""


def _take(kinds: Sequence[NodeKind], used: _Used, *, whole_nodes: bool = False) -> tuple[int, ...]:
    """Just as many, node after node; or whole nodes: idle devices of a rented one are paid for."""
    taken: list[int] = []
    for k, kind in enumerate(kinds):
        left = {device: used.get((k, device), 0) for device in kind.types}
        for node in kind.nodes:
            some = []
            for device, device_type in zip(node, kind.types, strict=True):
                if left[device_type]:
                    left[device_type] -= 1
                    some.append(device)
            taken += node if whole_nodes and some else some
    return tuple(sorted(taken))
