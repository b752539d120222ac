"""Four wrong models: each must miss where what it gets wrong matters, or the comparison shows nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zorselike.cost.network import CollectiveOp, Flow
from zorselike.schedule.actions import Action, Kind
from zorselike.simulator.engine import simulate

from .predict import HostedNetwork, Prediction
from .scenarios import Stress

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
