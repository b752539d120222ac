"""Training by whole replicas, of which each holds the model: who loses a device is out until it is back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.elastic.replay.rates import Devices, Rates, Running
from zorselike.planner.problem import PlanProblem


@dataclass(frozen=True)
class Replicas:
    """Equal shares of the batch for replicas of so many devices of one type."""

    members: tuple[Devices, ...]
    running: tuple[Running, ...]
    """Each one's plan for its share of the rows."""
    reduce_s: float
    """All-reduce of the gradients, after each step."""

    def list_alive(self, there: Devices) -> tuple[int, ...]:
        """Replicas of which every device is there."""
        return tuple(i for i, devices in enumerate(self.members) if {*devices} <= {*there})

    def step_s(self, alive: Sequence[int]) -> float:
        """All wait for the slowest."""
        return max(self.running[i].step_s for i in alive) + (self.reduce_s if len(alive) > 1 else 0.0)

    def rows(self, alive: Sequence[int]) -> int:
        """Of a step: those of the replicas that are out are left out."""
        return sum(self.running[i].plan.global_batch for i in alive)

    def num_devices(self, alive: Sequence[int]) -> int:
        return sum(len(self.members[i]) for i in alive)


def choose_replicas(rates: Rates, there: Devices) -> Replicas | None:
    """The fastest for the devices that are there first, of 1, 2, 4, ... devices each; None: none fits."""
    best, best_rows_per_s = None, 0.0
    for size in _list_sizes(rates.problem, there):
        members = tuple(_divide(rates.problem, size))
        alive = [i for i, devices in enumerate(members) if {*devices} <= {*there}]
        if not alive:
            continue
        share = ceil(rates.problem.global_batch / len(alive))
        types = {rates.problem.device_types[devices[0]] for devices in members}
        firsts = {
            kind: next(m for m in members if rates.problem.device_types[m[0]] == kind) for kind in types
        }
        plans = {kind: rates.find_best(devices, share) for kind, devices in firsts.items()}
        kept = [m for m in members if plans[rates.problem.device_types[m[0]]] is not None]
        running = [plan for m in kept if (plan := plans[rates.problem.device_types[m[0]]]) is not None]
        if not kept:
            continue
        replicas = Replicas(tuple(kept), tuple(running), _reduce_s(rates.problem, kept))
        alive = list(replicas.list_alive(there))
        if alive and (rows_per_s := replicas.rows(alive) / replicas.step_s(alive)) > best_rows_per_s:
            best, best_rows_per_s = replicas, rows_per_s
    return best


def _list_sizes(problem: PlanProblem, there: Devices) -> Iterator[int]:
    size = 1
    while size <= max(sum(problem.device_types[d] == kind for d in there) for kind in problem.device_types):
        yield size
        size *= 2


def _divide(problem: PlanProblem, size: int) -> Iterator[Devices]:
    """All of the cluster's devices, type by type, in so many each; what is left over is left out."""
    for kind in dict.fromkeys(problem.device_types):
        own = [device for device in problem.usable if problem.device_types[device] == kind]
        for start in range(0, len(own) - size + 1, size):
            yield tuple(own[start : start + size])


def _reduce_s(problem: PlanProblem, members: Sequence[Devices]) -> float:
    """A ring over the replicas, each of which sends from all its nodes at once."""
    places = problem.cluster.places
    number = problem.workload.num_trainable * ParameterBytes.of(problem.workload).gradient
    slowest_s = 0.0
    for a, b in zip(members, [*members[1:], members[0]], strict=True):
        if a == b:
            continue
        num_nodes = len({places[device].node for device in a})
        bandwidth = problem.cluster.link(places[a[0]], places[b[0]]).bandwidth_bytes_per_s
        nic = problem.cluster.nodes[places[a[0]].node].nic
        if nic is not None and places[a[0]].node != places[b[0]].node:
            bandwidth = min(bandwidth, nic.bandwidth_bytes_per_s)
        slowest_s = max(slowest_s, number / (bandwidth * num_nodes))
    return 2 * (len(members) - 1) / len(members) * slowest_s
