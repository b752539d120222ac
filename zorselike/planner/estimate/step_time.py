"""About how long a step of a candidate plan takes, in a fraction of a simulation's time.

A group is one worker with as many microbatches as its busiest device; what it sends on after each lets the
next group begin with the same rows. Collectives and transfers share wires only with themselves. The order is
the schedule's (`schedule/orders/ours.py`), so fill, drain and what gathers, reductions, updates and copies
leave exposed are there; what one group's traffic takes from another's, and unevenness inside a group, are
not. The simulator decides in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

from zorselike.cost.catalogue import CPU
from zorselike.cost.network import CollectiveOp, Network
from zorselike.cost.parameter_bytes import largest_shard
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Place
from zorselike.plan.plan import Recompute
from zorselike.planner.candidate.candidate import CandidateGroup, CandidatePlan, Sizes
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.estimate.forward_first import Clock, StepWork, Work, Worker, run_step
from zorselike.planner.estimate.one_f_one_b import Order, run_step_in_flight
from zorselike.planner.problem import PlanProblem
from zorselike.schedule.contract import NUM_STEPS
from zorselike.schedule.orders.in_flight import find_needs, order_in_flight


class StepTimeEstimate:
    """Estimates for one problem; keeps what candidates have in common."""

    def __init__(self, problem: PlanProblem, table: LayerTable) -> None:
        self._problem, self._table = problem, table
        self._cluster = problem.cluster
        self._overheads = problem.profile.overheads
        self._sums: dict[tuple[str, str, Recompute, Sizes], tuple[float, float]] = {}
        self._collectives: dict[tuple[CollectiveOp, tuple[int, ...], int], float] = {}
        self._sends: dict[object, float] = {}
        self._computed: dict[object, Mapping[str, tuple[float, float]]] = {}
        self._copied: dict[object, float] = {}
        self._orders: dict[object, list[Order]] = {}

    @cached_property
    def network(self) -> Network:
        """Between all devices of the cluster, by their index in `Cluster.places`."""
        return make_network(self._cluster, self._cluster.places, self._problem.profile)

    def place(self, device: int) -> Place:
        return self._cluster.places[device]

    def device_type(self, device: int) -> str:
        return self._cluster.device_type(self.place(device))

    # -- a step ----------------------------------------------------------------------------

    def estimate_s(self, candidate: CandidatePlan) -> float:
        """Seconds of a step in a steady run."""
        step = StepWork(
            owners=candidate.owners,
            workers=[self._make_worker(group, candidate.accumulates) for group in candidate.groups],
            works=[self._measure(candidate, i) for i in range(candidate.num_ministages)],
            sends=self._measure_sends(candidate),
            lowest_backward=self._lowest_backward(candidate),
            defers=self._problem.defer_updates,
        )
        ties_s = self._measure_ties(candidate)
        orders = self._order_in_flight(candidate, step.lowest_backward)
        clocks = [Clock() for _ in step.workers]
        ended = began = 0.0
        for _ in range(NUM_STEPS):
            began = ended
            if orders is None:
                run_step(step, clocks)
            else:
                run_step_in_flight(step, orders, clocks)
            ended = max(clock.end for clock in clocks) + ties_s
            if ties_s:
                for clock in clocks:
                    clock.compute = ended
        return ended - began

    def _order_in_flight(self, candidate: CandidatePlan, lowest_backward: int) -> list[Order] | None:
        """What each group computes in turn, and what its microbatches wait for, which depends on rows alone
        and on what a backward takes; None where all is forward first."""
        if not candidate.bounds_in_flight:
            return None
        rows = tuple((g.devices, g.sizes, g.max_in_flight, g.mode.recompute) for g in candidate.groups)
        key = rows, lowest_backward
        if key not in self._orders:
            plan = make_plan(candidate, self._problem, self._table)
            needs = [find_needs(a, b) for a, b in pairwise(plan.groups)]
            forward, backward = [(), *(n.forward for n in needs)], [*(n.backward for n in needs), ()]
            computations = order_in_flight(self._problem.setting.make_spec(plan))
            self._orders[key] = [*map(Order, computations, forward, backward)]
        return self._orders[key]

    def _lowest_backward(self, candidate: CandidatePlan) -> int:
        for i in range(candidate.num_ministages):
            if any(self._table.kind(self._table.keys[layer]).trains for layer in candidate.layers_of(i)):
                return i
        return candidate.num_ministages

    def _make_worker(self, group: CandidateGroup, accumulates: bool) -> Worker:
        return Worker(
            is_cpu=all(self.device_type(device) == CPU for device in group.devices[:1]),
            zero=group.mode.zero,
            microbatches_per_device=group.microbatches_per_device,
            num_reductions=group.microbatches_per_device if group.mode.reduces_per_microbatch else 1,
            overlap_slowdown=self._overheads.overlap_slowdown,
            accumulates=accumulates,
        )

    # -- a ministage -----------------------------------------------------------------------

    def group_seconds(self, group: CandidateGroup) -> Mapping[str, tuple[float, float]]:
        """By key of a layer: forward and backward of all rows through one, on the group's slowest device."""
        cache_key = (group.devices, group.sizes, group.mode.recompute)
        if cache_key not in self._computed:
            classes = self._classes(group)
            self._computed[cache_key] = {
                key: (
                    max(self._sum(key, *own, group.mode.recompute)[0] for own in classes),
                    max(self._sum(key, *own, group.mode.recompute)[1] for own in classes),
                )
                for key in self._table.counts
            }
        return self._computed[cache_key]

    def _classes(self, group: CandidateGroup) -> list[tuple[str, Sizes]]:
        """Devices with work, those that are alike once."""
        pairs = zip(map(self.device_type, group.devices), group.sizes, strict=True)
        return [own for own in dict.fromkeys(pairs) if own[1]]

    def _sum(self, key: str, device: str, sizes: Sizes, recompute: Recompute) -> tuple[float, float]:
        """All microbatches of a device through one layer."""
        wanted = (key, device, recompute, sizes)
        if wanted not in self._sums:
            times = Counter(sizes)
            found = {rows: self._table.seconds(key, device, rows, recompute) for rows in times}
            self._sums[wanted] = (
                sum(number * found[rows].forward for rows, number in times.items()),
                sum(number * found[rows].backward for rows, number in times.items()),
            )
        return self._sums[wanted]

    def _measure(self, candidate: CandidatePlan, i: int) -> Work:
        group = candidate.groups[candidate.owners[i]]
        keys = Counter(self._table.keys[layer] for layer in candidate.layers_of(i))
        seconds = self.group_seconds(group)
        forward_s = sum(number * seconds[key][0] for key, number in keys.items())
        backward_s = sum(number * seconds[key][1] for key, number in keys.items())
        is_alone = len(group.devices) == 1
        gather_s = reduce_s = 0.0
        if not is_alone and group.mode.zero:
            gather_s = self._collect_s("all_gather", group, keys, of_gradients=False)
        if not is_alone:
            op: CollectiveOp = "reduce_scatter" if group.mode.zero else "all_reduce"
            reduce_s = self._collect_s(op, group, keys, of_gradients=True)
        host_s = dict(self._overheads.action_s)
        if host_s and self.device_type(group.devices[0]) == CPU:
            forward_s += group.microbatches_per_device * host_s.get("F", 0.0)
            backward_s += group.microbatches_per_device * host_s.get("B", 0.0)
            reduce_s += host_s.get("REDUCE_GRAD", 0.0)
        return Work(
            forward_s=forward_s,
            backward_s=backward_s,
            gather_s=gather_s,
            first_unit=1 / max(1, sum(keys.values())),
            reduce_s=reduce_s,
            update_s=self._update_s(group, keys),
            **self._copies(group, keys),
        )

    def _update_s(self, group: CandidateGroup, keys: Mapping[str, int]) -> float:
        trained = sum(number * self._table.kind(key).trainable for key, number in keys.items())
        types = {self.device_type(device) for device in group.devices}
        return max(self._table.update_s(device, largest_shard(trained, group.num_shards)) for device in types)

    def _collect_s(
        self, op: CollectiveOp, group: CandidateGroup, keys: Mapping[str, int], *, of_gradients: bool
    ) -> float:
        each, total = self._problem.parameter_bytes, 0.0
        for key, number in keys.items():
            kind = self._table.kind(key)
            num_bytes = kind.trainable * each.gradient if of_gradients else kind.num_parameters * each.weight
            if num_bytes:
                total += number * self.collective_s(op, group.devices, num_bytes)
        return total

    def collective_s(self, op: CollectiveOp, devices: tuple[int, ...], num_bytes: int) -> float:
        """One collective that is alone on its wires."""
        wanted = (op, devices, num_bytes)
        if wanted not in self._collectives:
            self._collectives[wanted] = self.network.time_alone(
                self.network.collective(op, devices, num_bytes)
            )
        return self._collectives[wanted]

    def _copies(self, group: CandidateGroup, keys: Mapping[str, int]) -> dict[str, float]:
        """Between the device that is worst off and its host."""
        offload = group.mode.offload
        if not offload:
            return {}
        workload, each = self._problem.workload, self._problem.parameter_bytes
        kinds = [(self._table.kind(key), number) for key, number in keys.items()]
        parameters = sum(number * kind.num_parameters for kind, number in kinds) / group.num_shards
        trained = sum(number * kind.trainable for kind, number in kinds) / group.num_shards
        copied: dict[str, float] = {}
        if "params" in offload:
            copied["load_s"] = self._copy_s(group, parameters * each.weight)
        if "optimizer" in offload:
            copied["state_s"] = self._copy_s(group, trained * each.state)
        if "activations" in offload:
            row_bytes = 0.0
            for key, number in keys.items():
                kind = self._table.kind(key)
                recomputed = self._table.recompute(key, group.mode.recompute) == "layer"
                kept = kind.input_elements_per_row * workload.itemsize
                row_bytes += number * (kept if recomputed else kind.activation_bytes_per_row)
            copied["stash_s"] = self._copy_s(group, row_bytes * max(map(sum, group.sizes)))
        return copied

    def copied_s(self, group: CandidateGroup, key: str) -> float:
        """What copies from the host take for one layer in a step, which computation hides at best."""
        wanted = (group.devices, group.sizes, group.mode, key)
        if wanted not in self._copied:
            copies = self._copies(group, {key: 1})
            loads = 2 if group.mode.zero in (2, 3) else 1  # For the forward, and again for the backward.
            self._copied[wanted] = (
                loads * copies.get("load_s", 0.0) + copies.get("state_s", 0.0) + copies.get("stash_s", 0.0)
            )
        return self._copied[wanted]

    def _copy_s(self, group: CandidateGroup, num_bytes: float) -> float:
        """From the host, or to it, whichever is slower, all devices of a node at once."""
        if not num_bytes:
            return 0.0
        worst = 0.0
        for device in {self.device_type(d): d for d in group.devices}.values():
            for to_device in (True, False):
                worst = max(
                    worst,
                    self.network.time_alone([self.network.copy(device, num_bytes, to_device=to_device)]),
                )
        return worst

    # -- transfers -------------------------------------------------------------------------

    def _measure_sends(self, candidate: CandidatePlan) -> list[float]:
        """For each boundary before a ministage but the first: all rows of a step over it, one way."""
        sends = [0.0]
        for i in range(1, candidate.num_ministages):
            a, b = candidate.owners[i - 1], candidate.owners[i]
            elements = self._table.kind(self._table.keys[candidate.ends[i - 1]]).input_elements_per_row
            row_bytes = elements * self._problem.workload.itemsize
            sends.append(0.0 if a == b else self.send_s(candidate.groups[a], candidate.groups[b], row_bytes))
        return sends

    def send_s(self, source: CandidateGroup, target: CandidateGroup, row_bytes: int) -> float:
        """All rows of a step from one group to another, every sender's rows evenly to all receivers."""
        wanted = (source.devices, source.sizes, target.devices, target.sizes, row_bytes)
        if wanted not in self._sends:
            self._sends[wanted] = self._find_send_s(source, target, row_bytes)
        return self._sends[wanted]

    def _find_send_s(self, source: CandidateGroup, target: CandidateGroup, row_bytes: int) -> float:
        senders, receivers = self._rows_by_node(source), self._rows_by_node(target)
        num_rows = self._problem.global_batch
        flows = []
        for a, (given, first) in senders.items():
            for b, (taken, second) in receivers.items():
                num_bytes = given * taken / num_rows * row_bytes
                if num_bytes and a != b:
                    flows.append(self.network.transfer(first, second, num_bytes))
                elif num_bytes:
                    most = max(self._busiest(source, a) * taken, self._busiest(target, a) * given)
                    flows.append(self.network.transfer(first, second, most / num_rows * row_bytes))
        return self.network.time_alone(flows)

    def _measure_ties(self, candidate: CandidatePlan) -> float:
        """Gradients of tied weights to their owners and values back, which nothing hides."""
        workload, each = self._problem.workload, self._problem.parameter_bytes
        home = {
            self._table.modules[layer]: i
            for i in range(candidate.num_ministages)
            for layer in candidate.layers_of(i)
        }
        total = 0.0
        for owner, borrower in workload.ties:
            a, b = (candidate.groups[candidate.owners[home[module]]] for module in (owner, borrower))
            if home[owner] != home[borrower] and a is not b:
                number = workload.kind_of[borrower].num_borrowed
                total += self._tie_s(b, a, number * each.gradient)
                total += self._tie_s(a, b, number * each.weight)
        return total

    def _tie_s(self, source: CandidateGroup, target: CandidateGroup, num_bytes: int) -> float:
        """A weight from one group to another; with ZeRO 0 every device takes all of it."""
        givers, takers = (Counter(self.place(d).node for d in own.devices) for own in (source, target))
        first = {self.place(d).node: d for d in (*source.devices, *target.devices)}
        copies = 1.0 if target.mode.zero == 0 else 1 / len(target.devices)
        flows = [
            self.network.transfer(
                first[a], first[b], num_bytes * copies * taken * given / len(source.devices)
            )
            for a, given in givers.items()
            for b, taken in takers.items()
            if a != b
        ]
        return self.network.time_alone(flows)

    def _rows_by_node(self, group: CandidateGroup) -> dict[int, tuple[int, int]]:
        """Rows of each node's devices, and one of these."""
        found: dict[int, tuple[int, int]] = {}
        for device, sizes in zip(group.devices, group.sizes, strict=True):
            node = self.place(device).node
            rows, first = found.get(node, (0, device))
            found[node] = (rows + sum(sizes), first)
        return found

    def _busiest(self, group: CandidateGroup, node: int) -> int:
        """Rows of the device with most on a node."""
        return max(
            sum(sizes)
            for device, sizes in zip(group.devices, group.sizes, strict=True)
            if self.place(device).node == node
        )
