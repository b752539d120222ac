"""Simulates the actions of a schedule under a cost model (Sailor 4.3). No torch."""

from zorselike.simulator.deadlock import DeadlockError
from zorselike.simulator.engine import simulate
from zorselike.simulator.result import RankTimes, Simulation, Span

__all__ = ["DeadlockError", "RankTimes", "Simulation", "Span", "simulate"]
