"""What a planner answers: the best plans found, how good they can be at most, and how far it looked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from zorselike.errors import PlanError
from zorselike.simulator.simulated_plan import SimulatedPlan

Ending = Literal["finished", "budget", "interrupted"]


class NothingFitsError(PlanError):
    """No plan was found that fits; the message says the smallest change that would."""


@dataclass(frozen=True)
class Planned:
    """One plan, simulated, with its estimates in it."""

    case: SimulatedPlan
    grouping: str
    """How its groups were found: `by device type`."""
    ideal_s: float
    """What its devices take if all compute all the time, nothing recomputed; no plan of them is faster."""
    is_first_step: bool = False
    """Whether its time is that of one step from a standing start, and not of one of several in a row."""

    @property
    def share_of_ideal(self) -> float:
        """Share that the plan reaches of what its devices could do at most."""
        return self.ideal_s / self.case.simulation.iteration_s


@dataclass(frozen=True)
class Progress:
    """How far a search is."""

    elapsed_s: float
    num_estimated: int
    """Candidates whose time was estimated."""
    num_simulated: int
    best_s: float | None
    """A step of the best plan so far."""
    best_cost: float | None
    """Money of it."""
    bound_s: float
    """No plan of any of the devices takes less."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """When a search found something better than all before."""

    elapsed_s: float
    """Since the search began."""
    num_simulated: int
    """Plans simulated until then."""
    iteration_s: float
    cost: float
    """Money of a step."""
    num_devices: int


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """The end of a search."""

    plans: tuple[Planned, ...]
    """The best first, of different structure each; at least one."""
    progress: Progress
    ending: Ending
    notes: tuple[str, ...] = ()
    """What a user should know: parts of the cluster that are not joined, devices left out."""
    improvements: tuple[Improvement, ...] = ()
    """How the best found moved over time."""
    unseen: tuple[str, ...] = ()
    """What was not looked at, each in a few words: `12 of 40 sets of devices`."""

    @property
    def best(self) -> Planned:
        return self.plans[0]

    @property
    def gap(self) -> float:
        """How much longer a step is than proven necessary with all devices that may be used: 0.05 for 5 %."""
        return self.best.case.simulation.iteration_s / self.progress.bound_s - 1


OnProgress = Callable[[Progress], None]
