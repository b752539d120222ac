"""What computes the microbatches of a group."""

from __future__ import annotations

from collections.abc import Sequence

from zorselike.planner.candidate.candidate import CandidateGroup
from zorselike.planner.groups.replicas import Computer
from zorselike.planner.problem import PlanProblem


def list_computers(group: CandidateGroup, problem: PlanProblem) -> Sequence[Computer]:
    """Types of its devices, or the kinds of its replicas."""
    if group.degrees:
        return problem.replicas.computers(group.replicas)
    return [problem.device_types[device] for device in group.devices]
