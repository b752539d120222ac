"""What the stages of a pipeline of replicas take and hold, before layers are cut."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache
from itertools import accumulate, pairwise

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.network import CollectiveOp, Network
from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.replica_times import Part, find_parts, time_collective, time_in_replica
from zorselike.cost.wires import make_network
from zorselike.plan.plan import Recompute
from zorselike.plan.shares import apportion
from zorselike.plan.workload import LayerKind
from zorselike.planner.baselines.replicas import Exchanges, Members, Shape
from zorselike.simulator.inputs import SimulationInputs


class Stages:
    """What stages of replicas take and hold for a round of so many rows."""

    def __init__(
        self,
        inputs: SimulationInputs,
        groups: Shape,
        exchanges: Exchanges,
        clock: LayerTimeModel,
        *,
        evenly: bool,
    ) -> None:
        """`evenly`: whether all replicas of a stage get as many rows; else they are done together."""
        self.groups, self.inputs = groups, inputs
        self.workload = self.inputs.workload
        self.parameter_bytes = ParameterBytes.of(self.workload)
        self.places = [place for group in groups for members in group for place in members]
        self.network: Network = make_network(inputs.cluster, self.places, inputs.profile)
        self._evenly, self._clock, self._exchanges = evenly, clock, exchanges
        ends = [*accumulate((len(members) for group in groups for members in group), initial=0)]
        ranks = iter([tuple(range(*cut)) for cut in pairwise(ends)])
        self.ranks = [[next(ranks) for _ in group] for group in groups]
        """Of the replicas of each stage."""
        self.modules = [name for name, _ in self.workload.layers]
        self.kinds = [kind for _, kind in self.workload.layers]
        parts = find_parts(self.workload)
        self._parts: dict[str, Part] = {kind: parts[name] for name, kind in reversed(self.workload.layers)}
        self.layer_kinds = {kind for name, kind in self.workload.layers if parts[name] == "cut"}
        self._on_node: dict[int, list[Members]] = {}
        for members in (own for group in groups for own in group):
            self._on_node.setdefault(members[0].node, []).append(members)
        flops = {name: kind.forward_flops_per_row for name, kind in self.workload.kinds.items()}
        self._commonest = max(
            dict.fromkeys(self.kinds), key=lambda kind: (flops[kind] > 0, self.kinds.count(kind), flops[kind])
        )
        """Of the kinds that compute anything, where there are some."""
        self.share = cache(self._share)
        self.seconds = cache(self._seconds)

    def device(self, members: Members) -> str:
        """The type of a replica's devices."""
        return self.inputs.cluster.device_type(members[0])

    def takes(self, rows: int, recompute: Recompute) -> bool:
        """Whether so many rows fit by the profile, which knows of single devices only."""
        return all(
            most is None or own_rows <= most
            for g, group in enumerate(self.groups)
            for members, own_rows in zip(group, self.share(g, rows, recompute), strict=True)
            if len(members) == 1
            for most in (
                self._clock.max_rows(kind, self.device(members), self._again(kind, recompute))
                for kind in self.workload.kinds
            )
        )

    def _again(self, kind: str, recompute: Recompute) -> Recompute:
        return recompute if kind in self.layer_kinds else "none"

    def _seconds(self, members: Members, kind: str, rows: int, recompute: Recompute) -> float:
        """A layer's forward and backward in a microbatch on a replica."""
        again, device = self._again(kind, recompute), self.device(members)
        if len(members) == 1:
            compute_s = self._clock.forward_s(kind, device, rows, again)
            return compute_s + self._clock.backward_s(kind, device, rows, again)
        return sum(
            time_in_replica(
                self._clock,
                self.workload.kinds[kind],
                self._parts[kind],
                device,
                rows,
                again,
                degree=len(members),
                exchange_s=lambda num_bytes: self._exchanges.seconds(
                    self._on_node[members[0].node], num_bytes
                ),
            )
        )

    def _share(self, g: int, rows: int, recompute: Recompute) -> tuple[int, ...]:
        """Rows of each replica in a round; at least one."""
        group = self.groups[g]
        each, more = divmod(rows, len(group))
        if self._evenly or len({(own[0].node, self.device(own), len(own)) for own in group}) == 1:
            return tuple(each + (i < more) for i in range(len(group)))
        seconds = [self.seconds(own, self._commonest, max(each, 1), recompute) for own in group]
        given = apportion(rows, [1 / own_s if all(seconds) else 1 for own_s in seconds])
        while 0 in given:
            given[given.index(max(given))] -= 1
            given[given.index(0)] += 1
        return tuple(given)

    def gather_s(self, g: int, kind: LayerKind) -> float:
        """A layer's parameters, to the replicas of a stage."""
        return self._collect_s("all_gather", g, kind, kind.num_parameters * self.parameter_bytes.weight)

    def reduce_s(self, g: int, kind: LayerKind) -> float:
        """A layer's gradients."""
        return self._collect_s("reduce_scatter", g, kind, kind.trainable * self.parameter_bytes.gradient)

    def _collect_s(self, op: CollectiveOp, g: int, kind: LayerKind, num_bytes: float) -> float:
        is_cut = kind.name in self.layer_kinds
        return time_collective(self.network, op, self.ranks[g], num_bytes, is_cut=is_cut)

    def memory_bytes(self, members: Members) -> float:
        """Memory of each device of a replica; infinite where it is not known."""
        return find_memory_bytes(self.inputs.cluster, members[0]) or math.inf

    def room_bytes(self, members: Members) -> float:
        """For tensors, on each device."""
        room_bytes = self.memory_bytes(members) - self.inputs.context_bytes(self.device(members))
        return room_bytes / (1 + self.inputs.profile.overheads.allocator_share)

    def pass_on_s(self, g: int, rows: int, recompute: Recompute) -> float:
        """A round's rows from one stage to the next."""
        kind = self.workload.kinds[self._commonest]
        row_bytes = kind.input_elements_per_row * self.workload.itemsize
        ends = {i: list(accumulate(self.share(i, rows, recompute))) for i in (g, g + 1)}
        flows = []
        for start, stop in pairwise(sorted({0, *ends[g], *ends[g + 1]})):
            source, target = (self.ranks[i][bisect_right(own, start)][0] for i, own in ends.items())
            flows.append(self.network.transfer(source, target, (stop - start) * row_bytes))
        return self.network.time_alone(flows)
