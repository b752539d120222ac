"""What mirrors, switches and restarts take."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from zorselike.elastic.mirror_rules import choose_interval
from zorselike.elastic.replay.rates import Running
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.workload import Workload
from zorselike.simulator.mirrors import assign_mirrors, list_states


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times that no simulation knows: measured on the machines in question, or assumed."""

    recovery_s: float = 5.0
    """From a loss to the next step in the same processes, without the bytes that are moved."""
    switch_s: float = 2.0
    """Of going over to another plan between two steps, likewise."""
    restart_s: float = 120.0
    """From a loss to the next step where processes start anew and load a checkpoint."""
    checkpoint_every_s: float = 600.0
    checkpoint_s: float = 0.0
    """For how long a checkpoint holds up training."""
    payback_s: float = 600.0
    """Within which a better plan must have paid for going over to it."""
    mirror_share: float = 0.1
    """Of the time that mirrors of the state may take."""


@dataclass(frozen=True)
class Mirroring:
    """How a plan's state is mirrored."""

    holder_of: dict[int, int]
    """By device: on which other one its state is mirrored."""
    mirror_s: float
    """One mirror of everything."""
    interval: int
    """Steps from one mirror to the next."""

    def survives(self, lost: set[int]) -> bool:
        """Whether every lost device's state is on one that is left."""
        return all(self.holder_of.get(device, device) not in lost for device in lost & {*self.holder_of})


def find_mirroring(running: Running, workload: Workload, cluster: Cluster, share: float) -> Mirroring:
    """As `ElasticPipeline` mirrors (DESIGN: on another node where there is one)."""
    places = [cluster.places[device] for device in running.devices]
    sizes = [round(state.changing) for state in list_states(running.plan, workload)]
    holders = assign_mirrors([cluster.nodes[place.node].name for place in places], sizes)
    out: dict[int, float] = defaultdict(float)
    into: dict[int, float] = defaultdict(float)
    slowest_s = 0.0
    for rank, holder in holders.items():
        link = cluster.link(places[rank], places[holder])
        slowest_s = max(slowest_s, sizes[rank] / link.bandwidth_bytes_per_s)
        if places[rank].node != places[holder].node:
            out[places[rank].node] += sizes[rank]
            into[places[holder].node] += sizes[rank]
    for node in {*out, *into}:
        nic = cluster.nodes[node].nic
        if nic is not None:
            slowest_s = max(slowest_s, max(out[node], into[node]) / nic.bandwidth_bytes_per_s)
    return Mirroring(
        {running.devices[rank]: running.devices[holder] for rank, holder in holders.items()},
        slowest_s,
        choose_interval(slowest_s, running.step_s, share),
    )
