"""What the stages of a pipeline of replicas take and hold, before layers are cut."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache
from itertools import accumulate, pairwise

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.network import Network
from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.sizes import is_layer
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Place
from zorselike.plan.plan import Recompute
from zorselike.plan.shares import apportion
from zorselike.plan.workload import LayerKind
from zorselike.planner.baselines.replicas import Replicas, count_backward_passes


class Stages:
    """What stages of replicas take and hold for a round of so many rows."""

    def __init__(self, replicas: Replicas, clock: LayerTimeModel, *, evenly: bool) -> None:
        """`evenly`: whether all replicas of a stage get as many rows; else they are done together."""
        self.replicas, self.groups, self.inputs = replicas, replicas.groups, replicas.inputs
        self.workload = self.inputs.workload
        self.parameter_bytes = ParameterBytes.of(self.workload)
        self.places = [place for group in self.groups for place in group]
        self.network: Network = make_network(self.inputs.cluster, self.places, self.inputs.profile)
        self._evenly, self._clock = evenly, clock
        starts = [0, *accumulate(map(len, self.groups))]
        self.ranks = [tuple(range(*ends)) for ends in pairwise(starts)]
        self.modules = [name for name, _ in self.workload.layers]
        self.kinds = [kind for _, kind in self.workload.layers]
        self.layer_kinds = {kind for name, kind in self.workload.layers if is_layer(name)}
        self._commonest = max(dict.fromkeys(self.kinds), key=self.kinds.count)
        self.share = cache(self._share)
        self.seconds = cache(self._seconds)

    def device(self, place: Place) -> str:
        return self.inputs.cluster.device_type(place)

    def takes(self, rows: int, recompute: Recompute) -> bool:
        """Whether so many rows fit by the profile, which knows of single devices only."""
        return all(
            most is None or own_rows <= most
            for g, group in enumerate(self.groups)
            for place, own_rows in zip(group, self.share(g, rows, recompute), strict=True)
            if self.replicas.degree(place) == 1
            for most in (
                self._clock.max_rows(kind, self.device(place), self._again(kind, recompute))
                for kind in self.workload.kinds
            )
        )

    def _again(self, kind: str, recompute: Recompute) -> Recompute:
        return recompute if kind in self.layer_kinds else "none"

    def _seconds(self, place: Place, kind: str, rows: int, recompute: Recompute) -> float:
        """A layer's forward and backward in a microbatch on a replica."""
        again = self._again(kind, recompute)
        device = self.device(place)
        compute_s = self._clock.forward_s(kind, device, rows, again)
        compute_s += self._clock.backward_s(kind, device, rows, again)
        if kind not in self.layer_kinds:
            return compute_s / self.replicas.degree(place)
        num_passes = 1 + count_backward_passes(again)
        return compute_s / self.replicas.degree(place) + num_passes * self.replicas.pass_s(place, kind, rows)

    def _share(self, g: int, rows: int, recompute: Recompute) -> tuple[int, ...]:
        """Rows of each replica in a round; at least one."""
        group = self.groups[g]
        each, more = divmod(rows, len(group))
        if self._evenly or len({(place.node, self.device(place)) for place in group}) == 1:
            return tuple(each + (i < more) for i in range(len(group)))
        given = apportion(
            rows, [1 / self.seconds(place, self._commonest, max(each, 1), recompute) for place in group]
        )
        while 0 in given:
            given[given.index(max(given))] -= 1
            given[given.index(0)] += 1
        return tuple(given)

    def gather_s(self, g: int, kind: LayerKind) -> float:
        """A layer's parameters, to the replicas of a stage."""
        num_bytes = kind.num_parameters * self.parameter_bytes.weight
        return self.network.time_alone(self.network.collective("all_gather", self.ranks[g], num_bytes))

    def reduce_s(self, g: int, kind: LayerKind) -> float:
        """A layer's gradients."""
        num_bytes = kind.trainable * self.parameter_bytes.gradient
        return self.network.time_alone(self.network.collective("reduce_scatter", self.ranks[g], num_bytes))

    def memory_bytes(self, place: Place) -> float:
        """Memory of a replica; infinite where it is not known."""
        return find_memory_bytes(self.inputs.cluster, place) or math.inf

    def room_bytes(self, place: Place) -> float:
        """For tensors."""
        context_bytes = self.inputs.context_bytes(self.device(place)) * self.replicas.degree(place)
        room_bytes = self.memory_bytes(place) - context_bytes
        return room_bytes / (1 + self.inputs.profile.overheads.allocator_share)

    def pass_on_s(self, g: int, rows: int, recompute: Recompute) -> float:
        """A round's rows from one stage to the next."""
        kind = self.workload.kinds[self._commonest]
        row_bytes = kind.input_elements_per_row * self.workload.itemsize
        ends = {i: list(accumulate(self.share(i, rows, recompute))) for i in (g, g + 1)}
        flows = []
        for start, stop in pairwise(sorted({0, *ends[g], *ends[g + 1]})):
            source, target = (self.ranks[i][bisect_right(own, start)] for i, own in ends.items())
            flows.append(self.network.transfer(source, target, (stop - start) * row_bytes))
        return self.network.time_alone(flows)
