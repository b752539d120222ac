"""What plans are simulated with: workload, cluster, profile, and when updates run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zorselike.cost.assemble import make_costs
from zorselike.cost.profile import Profile
from zorselike.cost.step_costs import StepCosts
from zorselike.errors import PlanError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload
from zorselike.schedule.actions import Action
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.lowering.build import build
from zorselike.schedule.orders.interleaved import build_interleaved
from zorselike.schedule.orders.one_f_one_b import build_one_f_one_b
from zorselike.simulator.engine import simulate
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.simulated_plan import Schedule, SimulatedPlan

_BUILDERS: Mapping[Schedule, Callable[..., dict[int, list[Action]]]] = {
    "ours": build,
    "1f1b": build_one_f_one_b,
    "interleaved": build_interleaved,
}


@dataclass(frozen=True, kw_only=True)
class SimulationInputs:
    """Workload, cluster and profile of a simulation."""

    workload: Workload
    cluster: Cluster
    profile: Profile
    defer_updates: bool = False
    """Whether updates wait for all gradients of the step, as with a global `max_norm` and with float16."""

    @without_collection()
    def list_actions(self, plan: Plan, schedule: Schedule = "ours") -> Mapping[int, Sequence[Action]]:
        """Each rank's actions in a step; raises `PlanError` if the schedule cannot run the plan."""
        try:
            return _BUILDERS[schedule](
                plan,
                trainable=self.find_trainable(plan),
                ties=self.find_ties(plan),
                defer_steps=self.defer_updates,
                masters=self.workload.masters,
            )
        except ScheduleError as error:
            raise PlanError(str(error)) from None

    def find_costs(self, plan: Plan) -> StepCosts:
        """Costs of a plan's actions; raises `ClusterError` and `ProfileError`."""
        return make_costs(plan, self.workload, self.cluster, self.profile)

    @without_collection()
    def simulate(
        self,
        plan: Plan,
        costs: StepCosts | None = None,
        *,
        schedule: Schedule = "ours",
        record: bool = False,
        num_steps: int | None = None,
    ) -> SimulatedPlan:
        """Simulates a step of a plan; `record` keeps spans, for drawings; `num_steps` as for `simulate`."""
        costs = self.find_costs(plan) if costs is None else costs
        actions = self.list_actions(plan, schedule)
        return SimulatedPlan(
            plan=plan,
            workload=self.workload,
            cluster=self.cluster,
            actions=actions,
            costs=costs,
            simulation=simulate(plan, actions, costs, record=record, num_steps=num_steps),
            schedule=schedule,
        )

    def find_trainable(self, plan: Plan) -> tuple[bool, ...]:
        """Whether any parameter of each ministage trains."""
        kind_of = self.workload.kind_of
        return tuple(any(kind_of[m].trains for m in ministage.modules) for ministage in plan.ministages)

    def find_ties(self, plan: Plan) -> tuple[tuple[int, int], ...]:
        """Owner and borrower ministage of each weight that is in two."""
        home = {module: i for i, ministage in enumerate(plan.ministages) for module in ministage.modules}
        pairs = [(home[owner], home[borrower]) for owner, borrower in self.workload.ties]
        return tuple((owner, borrower) for owner, borrower in pairs if owner != borrower)
