"""What a planner is asked: model, machines, batch, what is wanted, and what the user wants kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Literal

from zorselike.cost.network import Network
from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.profile import Profile
from zorselike.cost.wires import make_network
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import OFFLOAD_IN_FLIGHT, GradReduce, Recompute
from zorselike.plan.workload import Workload
from zorselike.planner.groups.bandwidths import Bandwidths, read_bandwidths
from zorselike.planner.groups.replicas import DEGREES, Degrees, ReplicaCuts
from zorselike.simulator.inputs import SimulationInputs
from zorselike.text.wording import count, list_few

Objective = Literal["throughput", "cost"]


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the user has decided; None where the planner decides."""

    groups: tuple[tuple[int, ...], ...] | None = None
    """Indices into `Cluster.places`, groups in the order of the pipeline; no other devices are used."""
    ministages: int | None = None
    """In all, of all groups."""
    rows_per_microbatch: int | None = None
    """At most, on every rank."""
    zero: int | None = None
    grad_reduce: GradReduce | None = None
    overlap_grad_reduce: bool | None = None
    """Of groups where it makes a difference (`Group.overlap_grad_reduce`)."""
    recompute: Recompute | None = None
    offload: tuple[str, ...] | None = None
    """Offload of every group; `()` for none."""
    tensor_parallel: int | None = None
    """Devices of every replica, or as many as its node has like it; 1: no tensor parallelism."""
    bounds_in_flight: bool | None = None
    """Whether groups go backward before all microbatches are forward (`Group.max_in_flight`)."""


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """A question to the planner."""

    workload: Workload
    cluster: Cluster
    profile: Profile
    global_batch: int
    """Rows of a step."""
    objective: Objective = "throughput"
    """The least time of a step, or the least money."""
    max_cost_per_iteration: float = inf
    """In the cluster's currency."""
    min_throughput: float = 0.0
    """Iterations per second."""
    max_devices: int | None = None
    devices: tuple[int, ...] | None = None
    """Indices into `Cluster.places` that may be used (quotas, what is free now); None: all."""
    spans_regions: bool = False
    """Whether a group may have devices of several regions."""
    defer_updates: bool = False
    """As `SimulationInputs.defer_updates`."""
    is_mirrored: bool = False
    """As `SimulationInputs.is_mirrored`."""
    fixed: Fixed = Fixed()

    def check(self) -> None:
        """Raises `ConfigError` for what no plan can answer, before work starts."""
        for fault in self._list_faults():
            raise ConfigError(f"plan: {fault}")

    @property
    def asks_for_money(self) -> bool:
        return self.objective == "cost" or isfinite(self.max_cost_per_iteration)

    def _list_faults(self) -> Iterator[str]:
        if self.global_batch < 1:
            yield f"a global batch of {self.global_batch} rows; give at least 1"
        if not self.usable:
            yield "no devices may be used (all quotas are 0?); allow at least one"
        if unknown := sorted({*self.usable} - {*range(self.cluster.num_devices)}):
            yield f"the cluster has no {list_few(unknown, 'device')}"
        if self.max_devices is not None and self.max_devices < 1:
            yield f"at most {self.max_devices} devices; allow at least 1"
        if not self.max_cost_per_iteration > 0:
            most, currency = self.max_cost_per_iteration, self.cluster.currency
            yield f"at most {most:g} {currency} an iteration; allow more than 0"
        if not (isfinite(self.min_throughput) and self.min_throughput >= 0):
            yield f"at least {self.min_throughput:g} iterations/s; give 0 or more"
        if self.asks_for_money and not any(node.price_per_hour for node in self.cluster.nodes):
            yield "money is asked for, and no node of the cluster has a price; give price_per_hour"
        if not self.profile.layers and not any(
            k.forward_flops_per_row for k in self.workload.kind_of.values()
        ):
            yield (
                f"no layer of {self.workload.model} computes anything; give forward_flops_per_row in its "
                "workload, or a profile with its times"
            )
        fixed, num_layers = self.fixed, len(self.workload.layers)
        if fixed.groups is not None:
            yield from self._list_faults_of_groups(fixed.groups)
        if fixed.ministages is not None and not 1 <= fixed.ministages <= num_layers:
            yield (
                f"{count(fixed.ministages, 'ministage')} are fixed; {self.workload.model} has "
                f"{count(num_layers, 'layer')}, give {'1' if num_layers == 1 else f'1 to {num_layers}'}"
            )
        if fixed.groups is not None and len(fixed.groups) > (fixed.ministages or num_layers):
            yield (
                f"{count(len(fixed.groups), 'group')} are fixed, with "
                f"{count(fixed.ministages or num_layers, 'ministage')} at most; every group needs one"
            )
        if fixed.rows_per_microbatch is not None and fixed.rows_per_microbatch < 1:
            yield f"microbatches of {fixed.rows_per_microbatch} rows; give at least 1"
        if fixed.tensor_parallel is not None and fixed.tensor_parallel not in DEGREES:
            yield f"tensor parallelism of {fixed.tensor_parallel} ranks; give {', '.join(map(str, DEGREES))}"
        elif (fixed.tensor_parallel or 1) > self.workload.max_tensor_parallel:
            most = self.workload.max_tensor_parallel
            model = self.workload.model
            can = f"can be cut into {most} at most" if most > 1 else "cannot be cut"
            yield f"tensor parallelism of {fixed.tensor_parallel} ranks; layers of {model} {can}"
        if fixed.zero == 3 and fixed.grad_reduce == "once":
            yield "ZeRO 3 reduces after every microbatch; grad_reduce = once needs ZeRO 0-2"
        if fixed.zero in (0, 1) and fixed.grad_reduce == "microbatch":
            yield (
                f"ZeRO {fixed.zero} keeps whole gradients until the end of a step; grad_reduce = microbatch "
                "needs ZeRO 2 or 3"
            )
        if fixed.bounds_in_flight:
            what = "microbatches in flight are bounded in pipelines"
            yield from (f"{what} {fault}" for fault in self._list_faults_in_flight())

    def _list_faults_of_groups(self, groups: tuple[tuple[int, ...], ...]) -> Iterator[str]:
        given = [device for group in groups for device in group]
        if not all(groups) or len({*given}) < len(given):
            yield "the groups that are fixed have a device twice, or one has none"
        if outside := sorted({*given} - {*self.usable}):
            yield f"{list_few(outside, 'device')} of the fixed groups may not be used"
        if self.max_devices is not None and len(given) > self.max_devices:
            yield f"the fixed groups have {len(given)} devices, --max-devices is {self.max_devices}"

    def _list_faults_in_flight(self) -> Iterator[str]:
        fixed = self.fixed
        most_groups = len(self.usable) if fixed.groups is None else len(fixed.groups)
        if most_groups < 2:
            yield "of two groups or more, and there is one; leave in_flight out"
        if fixed.ministages == 1:
            yield "of two ministages or more; fixed is 1 ministage"
        once = fixed.zero == 2 and fixed.grad_reduce == "once"
        if once and fixed.ministages is not None and fixed.ministages > most_groups:
            yield (
                "of several ministages a group with ZeRO 0, 1 or 3, or with reductions after every "
                f"microbatch; fixed are ZeRO 2, reductions once and {fixed.ministages} ministages, and "
                f"there are {most_groups} {'groups' if fixed.groups else 'devices'}"
            )
        if unfit := [kind for kind in fixed.offload or () if kind not in OFFLOAD_IN_FLIGHT]:
            allowed = " or ".join(OFFLOAD_IN_FLIGHT)
            yield f"that offload nothing but {allowed}; fixed is {' and '.join(unfit)} too"

    @cached_property
    def usable(self) -> tuple[int, ...]:
        """Indices into `Cluster.places` that may be used."""
        return tuple(range(self.cluster.num_devices)) if self.devices is None else tuple(sorted(self.devices))

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """By index in `Cluster.places`."""
        return tuple(map(self.cluster.device_type, self.cluster.places))

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node of each device, by index in `Cluster.places`."""
        return tuple(place.node for place in self.cluster.places)

    @cached_property
    def network(self) -> Network:
        """Between all devices of the cluster, by their index in `Cluster.places`."""
        return make_network(self.cluster, self.cluster.places, self.profile)

    @cached_property
    def replicas(self) -> ReplicaCuts:
        """Into which tensor-parallel replicas devices may be cut."""
        allowed = min(self.workload.max_tensor_parallel, self.workload.sequence_length)
        most = min(allowed, self.fixed.tensor_parallel or allowed)
        measured = {name for times in self.profile.links for name in times.between}
        return ReplicaCuts(self.cluster, most, measured, lambda: self.network)

    def first_degrees(self, devices: tuple[int, ...]) -> Degrees:
        """With what a search begins on these devices: single ones, or what is fixed."""
        return self.replicas.limit(devices, self.fixed.tensor_parallel) if self.fixed.tensor_parallel else ()

    @property
    def most_rows_at_once(self) -> int:
        """Rows of a microbatch at most."""
        return min(self.global_batch, self.fixed.rows_per_microbatch or self.global_batch)

    def read_bandwidths(self, devices: Iterable[int]) -> Bandwidths:
        """Between some devices, whose groups may span regions or not."""
        return read_bandwidths(self.cluster, devices, span_regions=self.spans_regions)

    def describe_speed(self, iterations_per_s: float) -> str:
        """`0.5 iterations/s (65,536 tokens/s)`: a user may have asked for either."""
        tokens_per_s = iterations_per_s * self.global_batch * self.workload.sequence_length
        return f"{iterations_per_s:.4g} iterations/s ({tokens_per_s:,.0f} tokens/s)"

    @cached_property
    def parameter_bytes(self) -> ParameterBytes:
        """What one parameter of the model takes."""
        return ParameterBytes.of(self.workload)

    @cached_property
    def setting(self) -> SimulationInputs:
        """With what plans are simulated."""
        return SimulationInputs(
            workload=self.workload,
            cluster=self.cluster,
            profile=self.profile,
            defer_updates=self.defer_updates,
            is_mirrored=self.is_mirrored,
        )
