"""What plans are simulated with: workload, cluster, profile, and when updates run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zorselike.cost.assemble import make_costs
from zorselike.cost.largest_batch import find_corrections
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.cost.step_costs import StepCosts
from zorselike.errors import PlanError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload
from zorselike.schedule.actions import Action
from zorselike.schedule.build import build
from zorselike.schedule.errors import ScheduleError
from zorselike.schedule.orders import DEFAULT_ORDER
from zorselike.schedule.spec import ScheduleSpec
from zorselike.simulator.classes.class_actions import ActionsByClass, put_firsts_for_peers
from zorselike.simulator.classes.rank_classes import NotAlikeError, RankClasses, find_rank_classes
from zorselike.simulator.engine import simulate
from zorselike.simulator.garbage import without_collection
from zorselike.simulator.memory import MemoryWalks
from zorselike.simulator.simulated_plan import SimulatedPlan


@dataclass(frozen=True, kw_only=True)
class SimulationInputs:
    """Workload, cluster and profile of a simulation."""

    workload: Workload
    cluster: Cluster
    profile: Profile
    defer_updates: bool = False
    """Whether updates wait for all gradients of the step, as with a global `max_norm` and with float16."""
    is_mirrored: bool = False
    """Whether hosts hold copies and mirrors of the state, as those of an elastic job do."""

    def make_spec(self, plan: Plan) -> ScheduleSpec:
        """What a schedule of the plan is built for."""
        kind_of = self.workload.kind_of
        trains = tuple(any(kind_of[m].trains for m in ministage.modules) for ministage in plan.ministages)
        home = plan.ministage_of
        ties = [
            (home[owner], home[borrower])
            for owner, borrower in self.workload.ties
            if kind_of[borrower].borrowed_trainable
        ]
        return ScheduleSpec(
            plan,
            trainable=trains,
            ties=tuple((a, b) for a, b in ties if a != b and trains[a] and trains[b]),
            defer_steps=self.defer_updates,
            masters=self.workload.masters,
        )

    @without_collection()
    def list_actions(
        self, plan: Plan, schedule: str = DEFAULT_ORDER, *, ranks: Collection[int] | None = None
    ) -> Mapping[int, Sequence[Action]]:
        """Each rank's actions in a step, or those of some ranks, in the order `schedule` (see `build`);
        raises `PlanError` if that cannot run the plan."""
        try:
            return build(self.make_spec(plan), schedule, ranks=ranks)
        except PlanError:  # A `LowBoundError`, which a search goes on from.
            raise
        except ScheduleError as error:
            raise PlanError(str(error)) from None

    @cached_property
    def corrected_bytes(self) -> Mapping[str, int]:
        """By type of device: memory that the largest batches found there ask for beside the context."""
        kept_bytes = LayerTimeModel(self.profile, self.workload).kept_bytes
        corrections = find_corrections(self.profile, self.workload, kept_bytes)
        return {device: found.num_bytes for device, found in corrections.items()}

    def context_bytes(self, device: str) -> int:
        """Memory of a type of device that tensors do not have."""
        return self.profile.overheads.process_bytes + self.corrected_bytes.get(device, 0)

    def find_costs(self, plan: Plan) -> StepCosts:
        """Costs of a plan's actions; raises `ClusterError` and `ProfileError`."""
        return make_costs(plan, self.workload, self.cluster, self.profile)

    @without_collection()
    def simulate(
        self,
        plan: Plan,
        costs: StepCosts | None = None,
        *,
        schedule: str = DEFAULT_ORDER,
        record: bool = False,
        num_steps: int | None = None,
        classes: RankClasses | None = None,
        check: Callable[[], None] | None = None,
    ) -> SimulatedPlan:
        """Simulates a step of a plan; `record` keeps spans, for drawings; `num_steps` and `check` as for
        `simulate`; `classes` as found by `find_classes`: a rank of each is simulated for all, to the same
        result."""
        costs = self.find_costs(plan) if costs is None else costs
        if classes is not None:
            try:
                return self._simulate_firsts(plan, costs, classes, num_steps, check)
            except NotAlikeError:
                pass
        actions = self.list_actions(plan, schedule)
        return SimulatedPlan(
            plan=plan,
            workload=self.workload,
            cluster=self.cluster,
            actions=actions,
            costs=costs,
            simulation=simulate(plan, actions, costs, record=record, num_steps=num_steps, check=check),
            schedule=schedule,
            is_mirrored=self.is_mirrored,
        )

    def find_classes(self, plan: Plan, costs: StepCosts) -> RankClasses | None:
        """Ranks that are alike in `DEFAULT_ORDER`; None where too few are."""
        return find_rank_classes(plan, costs, with_norm=self.defer_updates)

    def _simulate_firsts(
        self,
        plan: Plan,
        costs: StepCosts,
        classes: RankClasses,
        num_steps: int | None,
        check: Callable[[], None] | None,
    ) -> SimulatedPlan:
        """Of each class one rank; raises `NotAlikeError` where that is not the same."""
        firsts = self.list_actions(plan, ranks=classes.members.keys())
        own = put_firsts_for_peers(firsts, classes)
        simulation = simulate(plan, own, costs, num_steps=num_steps, classes=classes, check=check)
        actions = ActionsByClass(plan, firsts, classes)
        return SimulatedPlan(
            plan=plan,
            workload=self.workload,
            cluster=self.cluster,
            actions=actions,
            costs=costs,
            simulation=replace(simulation, memory=MemoryWalks(plan, actions, costs, classes.first)),
            is_mirrored=self.is_mirrored,
        )
