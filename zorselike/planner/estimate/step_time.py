"""About how long a step of a candidate plan takes, in a fraction of a simulation's time.

A group is one worker with as many microbatches as its busiest device; what it sends on after each lets the
next group begin with the same rows. Rows from one group to another follow each other, and gathers have what
rows leave of their wires; else collectives and transfers share wires only with themselves. The order is the
schedule's (`schedule/orders/ours.py`), but that of the last ministages only the very last goes forward and
backward in turn; so fill, drain and what gathers, reductions, updates and copies leave exposed are there, a
little more than there is. What else one group's traffic takes from another's, and unevenness inside a group,
are not. The simulator decides in the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from zorselike.cost.catalogue import CPU
from zorselike.cost.network import CollectiveOp, Flow, Network
from zorselike.cost.parameter_bytes import largest_shard
from zorselike.cost.replica_times import time_collective
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import LayerKind
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan, Sizes
from zorselike.planner.candidate.computers import list_computers
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.modes import Mode
from zorselike.planner.estimate.forward_first import (
    Clock,
    Copies,
    Crossing,
    StepWork,
    Work,
    Worker,
    run_step,
)
from zorselike.planner.estimate.in_flight import run_step_in_flight
from zorselike.planner.estimate.rounds import Order, Pipeline, RoundOrders, Rounds
from zorselike.planner.groups.replicas import Computer, Replica, degree_of, type_of
from zorselike.planner.problem import PlanProblem
from zorselike.schedule.contract import NUM_STEPS, reduces_beside

_TYPICAL_BYTES = 1e8


class StepTimeEstimate:
    """Estimates for one problem; keeps what candidates have in common."""

    def __init__(self, problem: PlanProblem, table: LayerTable) -> None:
        self._problem, self._table = problem, table
        self._types, self._nodes = problem.device_types, problem.nodes
        self._overheads = overheads = problem.profile.overheads
        self._host_s = dict(overheads.action_s)
        self._unit_host_s, self._shared_host_s = dict(overheads.unit_s), dict(overheads.shared_unit_s)
        self._sum = cache(self._find_sum)
        self.collective_s = cache(self._find_collective_s)
        self._collect_pieces_s = cache(self._find_pieces_s)
        self._sends: dict[object, float] = {}
        self._delays: dict[object, float] = {}
        self._find_used = cache(self._find_used_shares)
        self._computed: dict[object, Mapping[str, tuple[float, float]]] = {}
        self.orders = RoundOrders()
        self._copied: dict[object, float] = {}

    @property
    def network(self) -> Network:
        """Between all devices of the cluster, by their index in `Cluster.places`."""
        return self._problem.network

    # -- a step ----------------------------------------------------------------------------

    def estimate_s(self, candidate: CandidatePlan) -> float:
        """Seconds of a step in a steady run."""
        entered = [self._table.kind(self._table.keys[end]) for end in candidate.ends[:-1]]
        step = StepWork(
            owners=candidate.owners,
            workers=[self._make_worker(group) for group in candidate.groups],
            works=self._measure_all(candidate),
            sends=self._measure_sends(candidate, [kind.input_elements_per_row for kind in entered]),
            returns=self._measure_sends(candidate, [kind.gradient_elements for kind in entered]),
            lowest_backward=self._lowest_backward(candidate),
            defers=self._problem.defer_updates,
        )
        ties_s = self._measure_ties(candidate)
        order = self._order_in_flight(candidate, step.lowest_backward)
        clocks = [Clock() for _ in step.workers]
        ended = began = 0.0
        for _ in range(NUM_STEPS):
            began = ended
            if order is None:
                run_step(step, clocks)
            else:
                run_step_in_flight(step, order.steps, clocks)
            ended = max(clock.end for clock in clocks) + ties_s
            if ties_s:
                for clock in clocks:
                    clock.compute = ended
        return max(ended - began, self._find_launch_s(candidate))

    def _find_launch_s(self, candidate: CandidatePlan) -> float:
        """What the busiest host takes to launch what its device does in a step; it is ahead of the device, or
        the device waits for it. On a CPU it is the device."""
        if not self._host_s and not self._unit_host_s:
            return 0.0
        seconds = [0.0] * len(candidate.groups)
        owners = (None, *candidate.owners, None)
        for i, (start, stop) in enumerate(pairwise((0, *candidate.ends))):
            before, g, after = owners[i : i + 3]
            assert g is not None, "a ministage has a group"
            group = candidate.groups[g]
            if self._types[group.devices[0]] == CPU:
                continue
            kinds = ["F", "B"]
            kinds += ["RECV_F", "SEND_B"] * (before not in (None, g))
            kinds += ["SEND_F", "RECV_B"] * (after not in (None, g))
            gathers = len(group.devices) > 1 and group.mode.zero == 3
            for kind in kinds:
                unit_s = self._unit_host_s.get(kind, 0.0) + gathers * self._shared_host_s.get(kind, 0.0)
                each_s = self._host_s.get(kind, 0.0) + (stop - start) * unit_s
                seconds[g] += group.microbatches_per_device * each_s
        return max(seconds)

    def _order_in_flight(self, candidate: CandidatePlan, lowest_backward: int) -> Order | None:
        """What groups compute in turn, about; None where all is forward first."""
        if not candidate.bounds_in_flight:
            return None
        rounds = tuple(
            Rounds.of(
                group,
                group.max_in_flight or group.microbatches_per_device * candidate.owners.count(g),
            )
            for g, group in enumerate(candidate.groups)
        )
        return self.orders.find(Pipeline(rounds, candidate.owners, lowest_backward))

    def _lowest_backward(self, candidate: CandidatePlan) -> int:
        trains = (self._table.kind(key).trains for key in self._table.keys)
        lowest = next((layer for layer, own in enumerate(trains) if own), len(self._table.keys))
        return candidate.ministage_of(lowest)

    def _make_worker(self, group: CandidateGroup) -> Worker:
        return Worker(
            is_cpu=self._types[group.devices[0]] == CPU,
            zero=group.mode.zero,
            microbatches_per_device=group.microbatches_per_device,
            num_reductions=group.microbatches_per_device if group.mode.reduces_per_microbatch else 1,
            overlap_slowdown=self._overheads.overlap_slowdown,
            reduces_beside=self.reduces_beside(group.mode, group.devices),
        )

    def reduces_beside(self, mode: Mode, devices: Sequence[int]) -> bool:
        """Whether reductions run beside backwards, and are no part of them."""
        is_cpu = self._types[devices[0]] == CPU
        return reduces_beside(mode.zero, len(devices), overlap=mode.overlap_grad_reduce, on_gpu=not is_cpu)

    # -- a ministage -----------------------------------------------------------------------

    def group_seconds(self, group: CandidateGroup) -> Mapping[str, tuple[float, float]]:
        """By key of a layer: forward and backward of all rows through one, on the group's slowest replica."""
        cache_key = (group.dealt, group.mode.recompute)
        if cache_key not in self._computed:
            computers = list_computers(group, self._problem)
            # Replicas with work, those that are alike once.
            alike = [own for own in dict.fromkeys(zip(computers, group.sizes, strict=True)) if own[1]]
            computed = {}
            for key in self._table.counts:
                forward_s, backward_s = zip(
                    *(self._sum(key, *own, group.mode.recompute) for own in alike), strict=True
                )
                computed[key] = max(forward_s), max(backward_s)
            self._computed[cache_key] = computed
        return self._computed[cache_key]

    def _find_sum(
        self, key: str, computer: Computer, sizes: Sizes, recompute: Recompute
    ) -> tuple[float, float]:
        """All microbatches of a replica through one layer."""
        times = Counter(sizes)
        found = {rows: self._table.seconds(key, computer, rows, recompute) for rows in times}
        return (
            sum(number * found[rows].forward for rows, number in times.items()),
            sum(number * found[rows].backward for rows, number in times.items()),
        )

    def _measure_all(self, candidate: CandidatePlan) -> list[Work]:
        """Each ministage; those of one group with the same layers are alike."""
        found: dict[tuple[int, Sequence[str]], Work] = {}
        works = []
        for start, stop, g in zip((0, *candidate.ends), candidate.ends, candidate.owners, strict=False):
            key = g, self._table.keys[start:stop]
            if key not in found:
                found[key] = self._measure(candidate.groups[g], Counter(key[1]))
            works.append(found[key])
        return works

    def _measure(self, group: CandidateGroup, keys: Mapping[str, int]) -> Work:
        seconds = self.group_seconds(group)
        forward_s = sum(number * seconds[key][0] for key, number in keys.items())
        backward_s = sum(number * seconds[key][1] for key, number in keys.items())
        gather_s = self._collect_s("all_gather", group, keys) if group.mode.zero else 0.0
        reduce_s = self._collect_s(group.mode.reduction, group, keys)
        if self._types[group.devices[0]] == CPU:
            forward_s += group.microbatches_per_device * self._host_s.get("F", 0.0)
            backward_s += group.microbatches_per_device * self._host_s.get("B", 0.0)
            reduce_s += self._host_s.get("REDUCE_GRAD", 0.0)
        return Work(
            forward_s=forward_s,
            backward_s=backward_s,
            gather_s=gather_s,
            first_unit=1 / max(1, sum(keys.values())),
            reduce_s=reduce_s,
            update_s=self._update_s(group, keys),
            copies=self._copies(group, keys),
        )

    def _update_s(self, group: CandidateGroup, keys: Mapping[str, int]) -> float:
        if not group.degrees:
            trained = sum(number * self._table.kind(key).trainable for key, number in keys.items())
            types = {self._types[device] for device in group.devices}
            return max(
                self._table.update_s(device, largest_shard(trained, group.num_shards)) for device in types
            )
        sums = Counter[bool]()
        for key, number in keys.items():
            sums[self._table.is_cut(key)] += number * self._table.kind(key).trainable
        return max(
            self._table.update_s(
                type_of(computer),
                sum(
                    largest_shard(number, group.count_shards_of(is_cut=is_cut, degree=degree_of(computer)))
                    for is_cut, number in sums.items()
                ),
            )
            for computer in {*list_computers(group, self._problem)}
        )

    def _collect_s(self, op: CollectiveOp, group: CandidateGroup, keys: Mapping[str, int]) -> float:
        return sum(number * self.collect_one_s(op, group, key) for key, number in keys.items())

    def collect_one_s(self, op: CollectiveOp, group: CandidateGroup, key: str) -> float:
        """A layer's gather or reduction in a group, alone on its wires."""
        if not group.degrees:
            return self.collective_s(op, group.devices, key)
        return self.collect_layer_s(op, group.replicas, key)

    def collect_layer_s(self, op: CollectiveOp, replicas: tuple[Replica, ...], key: str) -> float:
        """The same in a group of these replicas: of what is cut the holders of each piece, all at once."""
        degree = max(map(len, replicas))
        if degree == 1 or not self._table.is_cut(key):
            devices = tuple(device for replica in replicas for device in replica)
            return self.collective_s(op, devices, key)
        return self._collect_pieces_s(op, replicas, key)

    def _find_pieces_s(self, op: CollectiveOp, replicas: tuple[Replica, ...], key: str) -> float:
        return time_collective(self.network, op, replicas, self._bytes_of(op, key), is_cut=True)

    def _bytes_of(self, op: CollectiveOp, key: str) -> int:
        """Of a layer, whole, as it is gathered or reduced."""
        kind, each = self._table.kind(key), self._problem.parameter_bytes
        return kind.num_parameters * each.weight if op == "all_gather" else kind.trainable * each.gradient

    def _find_collective_s(self, op: CollectiveOp, devices: tuple[int, ...], key: str) -> float:
        """A layer's gather or reduction that is alone on its wires."""
        num_bytes = self._bytes_of(op, key)
        if len(devices) == 1 or not num_bytes:
            return 0.0
        return self.network.time_alone(self.network.collective(op, devices, num_bytes))

    def _copies(self, group: CandidateGroup, keys: Mapping[str, int]) -> Copies:
        """Between the device that is worst off and its host."""
        offload = group.mode.offload
        if not offload:
            return Copies()
        each = self._problem.parameter_bytes
        load_s = state_s = stash_s = 0.0
        if "params" in offload:
            parameters = self._shard(group, keys, lambda kind: kind.num_parameters)
            load_s = self._copy_s(group, parameters * each.weight)
        if "optimizer" in offload:
            trained = self._shard(group, keys, lambda kind: kind.trainable)
            state_s = self._copy_s(group, trained * each.state)
        if "activations" in offload:
            recompute = group.mode.recompute
            stashed = (
                sum(n * self._table.kept_bytes(key, recompute, group.degree_of(i)) for key, n in keys.items())
                * sum(sizes)
                for i, sizes in enumerate(group.sizes)
            )
            stash_s = self._copy_s(group, float(max(stashed)))
        return Copies(load_s, state_s, stash_s)

    def _shard(
        self, group: CandidateGroup, keys: Mapping[str, int], count: Callable[[LayerKind], int]
    ) -> float:
        """Parameters of the largest shard: of the device that has the largest part of each layer."""
        kinds = [(key, self._table.kind(key), number) for key, number in keys.items()]
        if not group.degrees:
            return sum(n * count(kind) for _, kind, n in kinds) / group.num_shards
        least = min(group.degrees)
        return sum(
            n * count(kind) / group.count_shards_of(is_cut=self._table.is_cut(key), degree=least)
            for key, kind, n in kinds
        )

    def copied_s(self, group: CandidateGroup, key: str) -> float:
        """What copies from the host take for one layer in a step, which computation hides at best."""
        wanted = (group.dealt, group.mode, key)
        if wanted not in self._copied:
            load_s, state_s, stash_s = self._copies(group, {key: 1})
            loads = 2 if group.mode.zero in (2, 3) else 1  # For the forward, and again for the backward.
            self._copied[wanted] = loads * load_s + state_s + stash_s
        return self._copied[wanted]

    def _copy_s(self, group: CandidateGroup, num_bytes: float) -> float:
        """From the host, or to it, whichever is slower, all devices of a node at once."""
        if not num_bytes:
            return 0.0
        return max(
            self.network.time_alone([self.network.copy(device, num_bytes, to_device=to_device)])
            for device in {self._types[d]: d for d in group.devices}.values()
            for to_device in (True, False)
        )

    # -- transfers -------------------------------------------------------------------------

    def _measure_sends(self, candidate: CandidatePlan, elements: Sequence[int]) -> list[Crossing]:
        """For each boundary before a ministage but the first: so many elements of each row of a step over it,
        one way."""
        found: dict[tuple[int, int, int], Crossing] = {}  # Most boundaries are between few pairs of groups.
        sends = [Crossing()]
        for (a, b), number in zip(pairwise(candidate.owners), elements, strict=True):
            if (a, b, number) not in found:
                row_bytes = number * self._problem.workload.itemsize
                groups = candidate.groups
                found[a, b, number] = Crossing() if a == b else self._cross(groups[a], groups[b], row_bytes)
            sends.append(found[a, b, number])
        return sends

    def _cross(self, lower: CandidateGroup, upper: CandidateGroup, row_bytes: int) -> Crossing:
        return Crossing(
            self.send_s(lower, upper, row_bytes),
            row_bytes * self._delay_s(lower, upper, lower.devices),
            row_bytes * self._delay_s(lower, upper, upper.devices),
        )

    def _delay_s(self, source: CandidateGroup, target: CandidateGroup, devices: tuple[int, ...]) -> float:
        """By how much all rows of a step, for each byte of one, delay collectives of some devices at most:
        their time on the wire where they do, times the share of it that these would use alone."""
        wanted = (source.dealt, target.dealt, devices)
        if wanted not in self._delays:
            used = self._find_used(devices)
            rows: defaultdict[int, float] = defaultdict(float)
            for flow in self._list_flows(source, target, 1) if used else ():
                for index in flow.capacities:
                    rows[index] += flow.num_bytes
            self._delays[wanted] = max((rows[i] * share for i, share in used.items()), default=0.0)
        return self._delays[wanted]

    def _find_used_shares(self, devices: tuple[int, ...]) -> Mapping[int, float]:
        """By capacity: the share of it that a collective of these devices uses alone, for each byte a second
        of it."""
        if len(devices) == 1:
            return {}
        network, loads = self.network, defaultdict[int, float](float)
        flows = network.collective("all_gather", devices, _TYPICAL_BYTES)
        for flow in flows:
            for index in flow.capacities:
                loads[index] += flow.num_bytes / network.capacities[index]
        seconds = network.time_alone(flows)
        return {i: own / seconds / network.capacities[i] for i, own in loads.items() if own}

    def send_s(self, source: CandidateGroup, target: CandidateGroup, row_bytes: int) -> float:
        """All rows of a step from one group to another, every sender's rows evenly to all receivers."""
        wanted = (source.dealt, target.dealt, row_bytes)
        if wanted not in self._sends:
            self._sends[wanted] = self._find_send_s(source, target, row_bytes)
        return self._sends[wanted]

    def _find_send_s(self, source: CandidateGroup, target: CandidateGroup, row_bytes: int) -> float:
        flows = self._list_flows(source, target, row_bytes)
        # Each piece is sent once the one before it between the same two ranks has arrived.
        pieces = max(sum(map(len, group.sizes)) for group in (source, target))
        number = pieces / max(sum(map(bool, group.sizes)) for group in (source, target))
        latency_s = (number - 1) * max((flow.latency_s for flow in flows), default=0.0)
        return self.network.time_alone(flows) + latency_s

    def _list_flows(self, source: CandidateGroup, target: CandidateGroup, row_bytes: int) -> list[Flow]:
        senders, receivers = self._rows_by_node(source), self._rows_by_node(target)
        num_rows = self._problem.global_batch
        flows = []
        for a, (given, most_given, first) in senders.items():
            for b, (taken, most_taken, second) in receivers.items():
                rows = given * taken if a != b else max(most_given * taken, most_taken * given)
                if rows and row_bytes:
                    flows.append(self.network.transfer(first, second, rows / num_rows * row_bytes))
        return flows

    def _measure_ties(self, candidate: CandidatePlan) -> float:
        """Gradients of tied weights to their owners and values back, which nothing hides."""
        each, total = self._problem.parameter_bytes, 0.0
        for owner, borrower in self._table.ties:
            a, b = (candidate.groups[candidate.owner_of(layer)] for layer in (owner, borrower))
            if a is not b:
                number = self._table.kind(self._table.keys[borrower]).borrowed_trainable
                total += self._tie_s(b, a, number * each.gradient)
                total += self._tie_s(a, b, number * each.weight)
        return total

    def _tie_s(self, source: CandidateGroup, target: CandidateGroup, num_bytes: int) -> float:
        """A weight from one group to another; with ZeRO 0 every device takes all of it."""
        givers, takers = (Counter(self._nodes[d] for d in own.devices) for own in (source, target))
        senders, receivers = ({self._nodes[d]: d for d in own.devices} for own in (source, target))
        copies = 1.0 if target.mode.zero == 0 else 1 / len(target.devices)
        flows = [
            self.network.transfer(
                senders[a], receivers[b], num_bytes * copies * taken * given / len(source.devices)
            )
            for a, given in givers.items()
            for b, taken in takers.items()
        ]
        return self.network.time_alone(flows)

    def _rows_by_node(self, group: CandidateGroup) -> dict[int, tuple[int, int, int]]:
        """Rows of each node's replicas, the most of one of these, and the first device of one."""
        found: dict[int, tuple[int, int, int]] = {}
        for device, own in zip(group.firsts, map(sum, group.sizes), strict=True):
            rows, most, first = found.get(self._nodes[device], (0, 0, device))
            found[self._nodes[device]] = (rows + own, max(most, own), first)
        return found
