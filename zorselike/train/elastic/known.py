"""What the processes of an elastic run tell each other whenever who is there has changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.processes.processes import Peers
from zorselike.train.elastic.pipeline import Change

Last = tuple[int, float, float]
"""A step, its loss and its gradient norm."""


@dataclass(frozen=True)
class RanksOfGeneration(Peers):
    """The ranks of one generation; a plan's ranks are the default group's."""

    rank: int
    control: ProcessGroup


class Alone(Peers):
    """A process that reads its data before it knows who else is there."""

    rank = 0

    @property
    def size(self) -> int:
        return 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


@dataclass(frozen=True)
class Known:
    """What one process knows of the run."""

    job: str = ""
    """By which this job's leaders hand its folder of checkpoints on; empty: this process has just come."""
    folder: str = ""
    """Of the run."""
    first_step: int = 0
    """After which this run has begun."""
    saved: tuple[int, dict[str, Any]] | None = None
    """As `RunCheckpoints.saved`."""
    validated: int = 0
    """The last step after which all that follows a step has been done."""
    last: Last | None = None
    change: Change | None = None
    process: str = ""
    """Its number and node, for people."""


def agree(said: Sequence[Known]) -> Known:
    """What all know together."""
    there = [known for known in said if known.job]
    first = there[0] if there else said[0]
    saved = [known.saved for known in said if known.saved is not None]
    changes = [known.change for known in said if known.change is not None]
    change = changes[0] if changes else None
    if change is not None:
        why = {id: reason for other in reversed(changes) for id, reason in other.why.items()}
        change = replace(change, why=why, step_before=max(other.step_before for other in changes))
    return replace(
        first,
        saved=max(saved, key=lambda own: own[0], default=None),
        validated=max((known.validated for known in there), default=0),
        last=max((one for k in said if (one := k.last) and not math.isnan(one[1])), default=None),
        change=change,
    )


def describe_change(change: Change, step: int, summary: str) -> str:
    """One line: who, why, how long, what it costs, and the plan now."""
    parts = [f"{what} {_list(change, members)}" for what, members in _moves(change)]
    if not parts:
        failed = "; ".join(change.why.values())
        parts = ["another plan" if change.reason == "change" else f"a failure: {failed or 'see above'}"]
    lost = max(0, change.step_before - step)
    source = "the newest checkpoint" if change.is_from_checkpoint else "memory"
    cost = "no step lost" if not lost else f"{lost} step{'s' if lost > 1 else ''} lost"
    return (
        f"{'; '.join(parts)}; goes on after step {step} from {source} within {change.pause_s:.2f} s, {cost}; "
        f"now {summary.partition(', from step')[0]}"
    )


def _moves(change: Change) -> Iterator[tuple[str, Sequence[Any]]]:
    for what, members in (("lost", change.lost), ("left:", change.left), ("came:", change.arrived)):
        if members:
            yield what, members


def _list(change: Change, members: Sequence[Any]) -> str:
    named = []
    for member in members:
        why = change.why.get(member.id)
        if why is None and member in change.lost:
            why = "its process has ended, or cannot be reached"
        named.append(f"{member.node} local rank {member.local_rank}" + (f" ({why})" if why else ""))
    return ", ".join(named)


def count_change(change: Change, *, generation: int, num_ranks: int, step: int) -> dict[str, float]:
    """The same as numbers, by the names of `ELASTIC`."""
    return {
        "elastic/generation": generation,
        "elastic/num_ranks": num_ranks,
        "elastic/num_lost": len(change.lost),
        "elastic/num_left": len(change.left),
        "elastic/num_arrived": len(change.arrived),
        "elastic/steps_lost": max(0, change.step_before - step),
        "elastic/pause(s)": change.pause_s,
    }
