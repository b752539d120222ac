"""One run beside its prediction, and what all of them come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zorselike.cost.network import CollectiveOp, Flow
from zorselike.cost.purposes import MemoryWalk
from zorselike.runtime.memory_report import MemoryLine
from zorselike.schedule.actions import Action, Kind
from zorselike.simulator.engine import simulate

from .emulation import Measurement
from .predict import HostedNetwork, Prediction
from .scenarios import Scenario, Stress

Actions = Mapping[int, Sequence[Action]]


def drop_dependency(prediction: Prediction) -> float:
    """Forwards do not wait for what the ministage before them sends."""
    transfers = (Kind.SEND_F, Kind.RECV_F)
    actions = {
        rank: [action for action in own if action.kind not in transfers]
        for rank, own in prediction.actions.items()
    }
    return simulate(prediction.plan, actions, prediction.costs).iteration_s


class FreeCollectives(HostedNetwork):
    """Gathers and reductions take no time."""

    def collective(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        return ()


class OwnWires(HostedNetwork):
    """Every flow has all wires on its way to itself."""

    def transfer(self, source: int, target: int, num_bytes: float) -> Flow:
        return self._alone(super().transfer(source, target, num_bytes))

    def collective(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        return tuple(self._alone(flow) for flow in super().collective(op, ranks, num_bytes))

    def _alone(self, flow: Flow) -> Flow:
        rate = min([flow.max_rate, *(self.capacities[index] for index in flow.capacities)])
        return replace(flow, capacities=(), max_rate=rate)


class WholeRings(HostedNetwork):
    """Over every edge of a ring goes the whole buffer instead of (n - 1)/n of it, and an all-reduce goes
    around once instead of twice."""

    def collective(self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float) -> tuple[Flow, ...]:
        share = (len(ranks) - 1) / len(ranks) if ranks else 1.0
        wrong = 0.5 / share if op == "all_reduce" else 1 / share
        return tuple(
            replace(flow, num_bytes=flow.num_bytes * wrong)
            for flow in super().collective(op, ranks, num_bytes)
        )


@dataclass(frozen=True)
class Mutation:
    """A wrong model."""

    stress: Stress
    """The runs on which it must miss."""
    text: str
    step_s: Callable[[Prediction], float]
    """What it predicts."""


def _with_network(network: type[HostedNetwork]) -> Callable[[Prediction], float]:
    def predict(prediction: Prediction) -> float:
        right = prediction.costs.network
        assert isinstance(right, HostedNetwork)
        wrong = replace(prediction.costs, network=right.turn_into(network))
        return simulate(prediction.plan, prediction.actions, wrong).iteration_s

    return predict


MUTATIONS = (
    Mutation("dependency", "a dependency dropped", drop_dependency),
    Mutation("collectives", "collectives free", _with_network(FreeCollectives)),
    Mutation("contention", "contention off", _with_network(OwnWires)),
    Mutation("ring", "a wrong ring factor", _with_network(WholeRings)),
)


BUSY_SHARE = 0.3
"""Ranks that sleep stay below this share of the cores; above, what is measured is the machine."""


@dataclass(frozen=True)
class MemoryPair:
    """Bytes of one purpose on one rank, at most: as planned and as found."""

    rank: int
    purpose: str
    place: str
    """`device` or `host`."""
    planned: int
    found: int

    @property
    def error(self) -> float:
        return abs(self.planned - self.found) / self.found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run."""

    scenario: Scenario
    measured_s: tuple[float, ...]
    """Seconds of each timed step."""
    predicted_s: float
    mutated_s: Mapping[Stress, float]
    """What wrong models predict, those that must miss here."""
    cpu_share: float
    """Share of the cores that the ranks used."""
    others_share: float | None = None
    """Share of the cores that other processes used; None where the system does not tell."""
    memory: tuple[MemoryPair, ...] = field(default=(), repr=False)

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        """Error of the prediction relative to the measurement; below 0: too fast."""
        return self.predicted_s / self.median_s - 1

    @property
    def spread(self) -> float:
        """Spread of the steps relative to their median: how much the machine varied."""
        return (max(self.measured_s) - min(self.measured_s)) / self.median_s

    def mutated_error(self, stress: Stress) -> float:
        return abs(self.mutated_s[stress] / self.median_s - 1)

    @property
    def memory_error(self) -> float:
        """The mean over ranks and purposes."""
        return statistics.fmean(pair.error for pair in self.memory) if self.memory else 0.0


def compare(
    scenario: Scenario, prediction: Prediction, measured: Measurement, *, others_share: float | None
) -> Comparison:
    """Holds a measurement against a prediction, and against what wrong models would have predicted."""
    return Comparison(
        scenario=scenario,
        measured_s=measured.step_s,
        predicted_s=prediction.step_s,
        mutated_s={
            mutation.stress: mutation.step_s(prediction)
            for mutation in MUTATIONS
            if mutation.stress in scenario.stresses
        },
        cpu_share=measured.cpu_share,
        others_share=others_share,
        memory=tuple(
            pair
            for rank, (run, walk) in enumerate(zip(measured.ranks, prediction.simulation.memory, strict=True))
            for pair in pair_memory(rank, run.memory, walk)
        ),
    )


def pair_memory(rank: int, found: Sequence[MemoryLine], planned: MemoryWalk) -> list[MemoryPair]:
    """All purposes that the runtime counts and that hold something: storages of CPU tensors."""
    expected = [
        {str(purpose): held for purpose, held in own.items()} for own in (planned.device, planned.host)
    ]
    return [
        MemoryPair(rank, line.purpose, place, walk[line.purpose], held)
        for line in found
        for place, held, walk in zip(
            ("device", "host"), (line.device_peak, line.host_peak), expected, strict=True
        )
        if held
    ]


@dataclass(frozen=True)
class Scores:
    """What all runs come to."""

    time_mean_error: float
    time_max_error: float
    memory_mean_error: float
    memory_max_error: float
    mutation_errors: Mapping[str, float]
    """The mean miss of each mutation on the runs where it matters."""


def score(comparisons: Sequence[Comparison]) -> Scores:
    """Errors without their signs, each run counted once."""
    errors = [abs(own.error) for own in comparisons]
    memory = [pair.error for own in comparisons for pair in own.memory]
    mutated = {
        mutation.text: [
            own.mutated_error(mutation.stress) for own in comparisons if mutation.stress in own.mutated_s
        ]
        for mutation in MUTATIONS
    }
    return Scores(
        time_mean_error=statistics.fmean(errors),
        time_max_error=max(errors),
        memory_mean_error=statistics.fmean(memory) if memory else 0.0,
        memory_max_error=max(memory, default=0.0),
        mutation_errors={text: statistics.fmean(found) for text, found in mutated.items() if found},
    )


def format_comparison(own: Comparison) -> str:
    mutated = "".join(f", {stress} wrong {own.mutated_error(stress):.0%}" for stress in own.mutated_s)
    notes = "" if own.scenario.computes or own.cpu_share < BUSY_SHARE else ", too busy"
    others = "" if own.others_share is None else f", others {own.others_share:.0%}"
    return (
        f"{own.scenario.name:46} {own.scenario.limit:6} measured {own.median_s:6.3f} s "
        f"(+-{own.spread / 2:.1%}), predicted {own.predicted_s:6.3f} s {own.error:+6.1%}, "
        f"memory {own.memory_error:.1%}, cores {own.cpu_share:.0%}{notes}{others}{mutated}"
    )
