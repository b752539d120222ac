"""What the simulator says of an emulated run: the cost model, and what this machine adds to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from zorselike.cost.assemble import make_costs
from zorselike.cost.network import CollectiveOp, Flow, Network
from zorselike.cost.profile import CollectiveTimes, LayerTimes, Profile, Source
from zorselike.cost.step_costs import StepCosts
from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.schedule import ScheduleSpec, build
from zorselike.schedule.actions import Action
from zorselike.simulator.engine import simulate
from zorselike.simulator.result import Simulation

from .constants import HostConstants, measure_gloo
from .emulation import Emulation, enter_node
from .namespaces import Namespaces


@dataclass(frozen=True)
class HostedNetwork(Network):
    """The cost model's network, with the time that Gloo itself takes on this machine."""

    constants: HostConstants | None = None

    def transfer(self, source: int, target: int, num_bytes: float) -> Flow:
        flow = super().transfer(source, target, num_bytes)
        assert self.constants is not None
        return _later(flow, self.constants.gloo_s("transfer", 2, num_bytes))

    def collective(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        flows = super().collective(op, ranks, num_bytes)
        assert self.constants is not None
        if self.collectives and len({self.places[rank].node for rank in ranks}) > 1:
            return flows  # Measured with Gloo in them.
        gloo_s = self.constants.gloo_s(op, len(ranks), num_bytes)
        return tuple(_later(flow, gloo_s) for flow in flows)

    def turn_into(self, kind: type[HostedNetwork]) -> HostedNetwork:
        """The same wires under other rules."""
        return kind(**_list_fields(self))


def host_network(network: Network, constants: HostConstants) -> HostedNetwork:
    """The same network on this machine."""
    return HostedNetwork(**_list_fields(network), constants=constants)


def _list_fields(network: Network) -> dict[str, Any]:
    """But for what was looked up already."""
    return {field.name: getattr(network, field.name) for field in fields(network) if field.name != "_found"}


def _later(flow: Flow, seconds: float) -> Flow:
    return replace(flow, latency_s=flow.latency_s + seconds)


def add_host(profile: Profile, constants: HostConstants, *, sleeps: bool) -> Profile:
    """The profile of the same devices as they are emulated: a layer takes its sleep and by how much that is
    too long, and the runtime what it takes on this machine."""
    overshoot_s = constants.sleep_overshoot_s if sleeps else 0.0

    def lengthen(times: LayerTimes) -> LayerTimes:
        return replace(
            times,
            forward_s=tuple(seconds + overshoot_s for seconds in times.forward_s),
            backward_s=tuple(seconds + overshoot_s for seconds in times.backward_s),
        )

    return replace(
        profile,
        layers=tuple(lengthen(times) for times in profile.layers),
        updates=tuple(
            replace(update, seconds_per_call=update.seconds_per_call + overshoot_s)
            for update in profile.updates
        ),
        overheads=constants.after_sleep if sleeps else constants.awake,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A simulated step and what it was made of."""

    plan: Plan
    actions: Mapping[int, Sequence[Action]]
    costs: StepCosts
    simulation: Simulation

    @property
    def step_s(self) -> float:
        return self.simulation.iteration_s


def measure_collectives(
    plan: Plan, cluster: Cluster, namespaces: Namespaces, *, num_bytes: tuple[int, ...] = (4_096, 131_072)
) -> tuple[CollectiveTimes, ...]:
    """Times of each group across nodes, alone on links that the kernel limits: Gloo reduces and scatters in
    the way of an all-reduce."""
    places = cluster.place_ranks(plan)
    groups = dict.fromkeys(tuple(sorted(places[rank] for rank in group.flat_ranks)) for group in plan.groups)
    found: dict[tuple[str, tuple[str, ...], int], CollectiveTimes] = {}
    for own in groups:
        devices, num_nodes = tuple(sorted(map(cluster.device_type, own))), len({place.node for place in own})
        if num_nodes == 1:
            continue
        enter = partial(enter_node, namespaces, own)
        for times in measure_gloo(len(own), num_bytes=num_bytes, repeats=5, enter=enter):
            if times.op != "transfer":
                found[times.op, devices, num_nodes] = CollectiveTimes(
                    op=times.op,  # type: ignore[arg-type]
                    devices=devices,
                    num_nodes=num_nodes,
                    num_bytes=num_bytes,
                    seconds=times.seconds,
                    source=Source("measured", note="in network namespaces"),
                )
    return tuple(found.values())


def predict_emulation(emulation: Emulation, constants: HostConstants) -> Prediction:
    """Simulates what `emulation.run` measures, with collectives measured first where the kernel limits
    the links."""
    plan, workload = emulation.plan, emulation.workload
    hosted = add_host(emulation.profile, constants, sleeps=not emulation.computes)
    if emulation.limit == "kernel":
        with Namespaces(emulation.cluster) as namespaces:
            hosted = replace(hosted, collectives=measure_collectives(plan, emulation.cluster, namespaces))
    network = make_network(emulation.cluster, emulation.places, hosted)
    costs = make_costs(plan, workload, emulation.cluster, hosted, network=host_network(network, constants))
    costs = replace(
        costs,
        is_cpu=(True,) * plan.num_ranks,
        eager_bytes=0 if emulation.limit == "kernel" else math.inf,
    )
    actions = build(ScheduleSpec(plan, masters=workload.masters))
    return Prediction(plan=plan, actions=actions, costs=costs, simulation=simulate(plan, actions, costs))
