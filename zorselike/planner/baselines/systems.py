"""What other systems would make of the same devices: planned by their rules, simulated on our costs.

Each takes its best setting within its rules, so that a comparison with it says something. What a system has
beside the rules named here (kernels, overheads) is not modelled: all have our layer times, our collectives
and our memory. None may use offloading unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from zorselike.cost.catalogue import find_device
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.errors import ClusterError, PlanError, ProfileError
from zorselike.plan.plan import RECOMPUTE, Recompute
from zorselike.plan.shares import apportion
from zorselike.planner.baselines.cephalo import find_cephalo
from zorselike.planner.baselines.even import find_data_parallel, find_even
from zorselike.planner.baselines.pipeline import Rules, find_pipeline
from zorselike.planner.baselines.replicas import Exchanges, cut_into_replicas
from zorselike.planner.baselines.stages import Stages
from zorselike.planner.groups.candidates import find_groupings
from zorselike.planner.groups.order import order_by_bandwidth
from zorselike.planner.groups.replicas import DEGREES
from zorselike.planner.problem import PlanProblem
from zorselike.simulator.simulated_plan import Baseline

__all__ = ["Baseline", "plan_baselines"]

_BY_SPEED = Rules()
"""Layers to stages for speed, ZeRO 2."""


def plan_baselines(
    problem: PlanProblem, tell: Callable[[str], None] = lambda name: None
) -> tuple[Baseline, ...]:
    """The fastest type of device alone (where there are several), even shares, Whale, Megatron-LM,
    TorchTitan-Het, HexiScale and Cephalo, for the throughput of the devices that may be used.

    Of what the user fixed only `recompute` is heeded: it belongs to the task, the rest to our plan. `tell` is
    called with the name of each before it is planned.

    Raises:
        ConfigError: As `PlanProblem.check`.
        ProfileError: Nothing is known of the speed of some device.
    """
    problem.check()
    systems = _Systems(problem)
    ways: dict[str, Callable[[str], Baseline]] = {
        "even shares": systems.plan_even,
        "Whale": systems.plan_whale,
        "Megatron-like": systems.plan_megatron,
        "TorchTitan-Het": systems.plan_torchtitan,
        "HexiScale-like": systems.plan_hexiscale,
        "Cephalo-like": systems.plan_cephalo,
    }
    fast = [device for device in systems.types if device == systems.types[0]]
    if len(fast) < len(systems.types):
        alone = f"{len(fast)} x {fast[0]} alone"
        ways = {alone: lambda name: systems.plan_even(name, len(fast)), **ways}
    found = []
    for name, plan in ways.items():
        tell(name)
        try:
            found.append(plan(name))
        except (ClusterError, PlanError, ProfileError) as error:  # Such as devices that nothing joins.
            found.append(Baseline(name=name, how="", simulated=None, reason=str(error)))
    return tuple(found)


class _Systems:
    """Plans one problem as each system would."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem, self._inputs = problem, problem.setting
        self._clock = LayerTimeModel(problem.profile, problem.workload)
        fixed = problem.fixed.recompute
        self._recompute: tuple[Recompute, ...] = RECOMPUTE if fixed is None else (fixed,)
        seconds = {device: self._clock.model_s(problem.device_types[device]) for device in problem.usable}
        self._devices = sorted(problem.usable, key=lambda device: seconds[device])[: problem.max_devices]
        """The devices that may be used, the fastest type first; with a limit the first so many."""
        self._places = [problem.cluster.places[device] for device in self._devices]
        self.types = [problem.device_types[device] for device in self._devices]

    def plan_even(self, name: str, num_devices: int | None = None) -> Baseline:
        """FSDP (Zhao et al. 2023) and DDP: one group, every device with as many rows, the best ZeRO stage."""
        places, num_rows = self._places[:num_devices], self._problem.global_batch
        return find_even(name, self._inputs, places, num_rows, recompute=self._recompute)

    def plan_whale(self, name: str) -> Baseline:
        """Whale (Jia et al. 2022, section 3.3.1): rows in proportion to peak FLOP/s, as Poplar compares
        itself with it (Poplar, section 4.1): one group, the best ZeRO stage, the largest microbatches that
        fit."""
        dtype, peaks = self._problem.workload.dtype, []
        for device in self.types:
            peak = find_device(device).peak_flops.get(dtype)
            if not peak:
                raise ProfileError(f"the device catalogue has no peak of {device} for {dtype}")
            peaks.append(peak)
        rows = apportion(self._problem.global_batch, peaks)
        return find_data_parallel(name, self._inputs, self._places, rows, recompute=self._recompute)

    def plan_cephalo(self, name: str) -> Baseline:
        """Cephalo (Guo et al. 2025): `planner/baselines/cephalo.py`."""
        num_rows = self._problem.global_batch
        return find_cephalo(name, self._inputs, self._places, num_rows, recompute=self._recompute)

    def plan_megatron(self, name: str) -> Baseline:
        """Megatron-LM (Narayanan et al. 2021): a rectangular mesh of pipeline, data parallelism with the
        optimizer's state in shards and tensor parallelism inside a node, even rows, as many layers in all
        stages, each with one, two or four parts of the model in interleaved 1F1B (section 2.2.2); all degrees
        are tried."""
        rules = Rules(zero=1, grad_reduce=("once",), equal_layers=(1, 2, 4))
        return self._find_pipeline(name, self._list_meshes(Exchanges(self._inputs), evenly=True), rules)

    def plan_torchtitan(self, name: str) -> Baseline:
        """TorchTitan-Het (Zorse, section 6.1): a rectangular mesh of pipeline, ZeRO-2 data parallelism and
        tensor parallelism inside a node, even rows, layers cut unevenly to balance stages; all degrees are
        tried, with the fastest devices first in the pipeline or last."""
        return self._find_pipeline(name, self._list_meshes(Exchanges(self._inputs), evenly=True))

    def plan_hexiscale(self, name: str) -> Baseline:
        """HexiScale (Yan et al. 2024) as Zorse compares itself with it (section 6.1): stages of any devices,
        with tensor parallelism inside a node and rows by speed, ZeRO 2. Stages are the candidates of our own
        search (`planner/groups/candidates.py`) and TorchTitan's; tensor parallelism is the same in all, or
        what a stage's part of a node allows of it."""
        exchanges = Exchanges(self._inputs)
        meshes = self._list_meshes(exchanges, evenly=False)
        return self._find_pipeline(name, chain(self._list_asymmetric(exchanges), meshes))

    def _find_pipeline(self, name: str, shapes: Iterator[Stages], rules: Rules = _BY_SPEED) -> Baseline:
        num_rows = self._problem.global_batch
        return find_pipeline(name, shapes, num_rows, rules, recompute=self._recompute)

    @property
    def _degrees(self) -> tuple[int, ...]:
        """That the model's layers can be cut for."""
        most = min(self._problem.workload.max_tensor_parallel, self._problem.workload.sequence_length)
        return tuple(degree for degree in DEGREES if degree <= most)

    def _list_meshes(self, exchanges: Exchanges, *, evenly: bool) -> Iterator[Stages]:
        """Stages of as many devices each, with one degree of tensor parallelism in all."""
        nodes, num_places = self._problem.cluster.nodes, len(self._places)
        near = sorted(self._places, key=lambda place: nodes[place.node].region)
        for ordered in dict.fromkeys((tuple(near), tuple(reversed(near)))):
            for degree in self._degrees:
                for width in range(degree, num_places + 1, degree):
                    if num_places % width or num_places // width > len(self._problem.workload.layers):
                        continue
                    groups = [ordered[start : start + width] for start in range(0, num_places, width)]
                    shape = cut_into_replicas(self._problem.cluster, groups, degree)
                    if all(len(members) == degree for own in shape for members in own):
                        yield Stages(self._inputs, shape, exchanges, self._clock, evenly=evenly)

    def _list_asymmetric(self, exchanges: Exchanges) -> Iterator[Stages]:
        """Stages of any devices."""
        bandwidths = self._problem.read_bandwidths(self._devices)
        num_nodes = len({place.node for place in self._places})
        max_groups = min(len(self._problem.workload.layers), len(self._places), 2 * num_nodes)
        all_places = self._problem.cluster.places
        for grouping in find_groupings(bandwidths, max_groups=max_groups):
            order = order_by_bandwidth(bandwidths, grouping.groups)
            groups = [tuple(all_places[device] for device in grouping.groups[g]) for g in order]
            for degree in self._degrees:
                shape = cut_into_replicas(self._problem.cluster, groups, degree)
                yield Stages(self._inputs, shape, exchanges, self._clock, evenly=False)
