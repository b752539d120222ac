"""All ranks of a group issue the same collectives in the same order, those of a replica also the same
computations.

A collective is a rendezvous: two in opposite order on two ranks hang, even past Gloo's timeout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zorselike.schedule.actions import Action, Kind
from zorselike.schedule.checker.steps import Step
from zorselike.schedule.errors import error_at
from zorselike.schedule.spec import ScheduleSpec

_ALWAYS = frozenset(
    {Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.NORM, Kind.TIE_GRAD, Kind.TIE_VALUE, Kind.TIE_FETCH}
)
_WITH_ZERO_3 = _ALWAYS | {Kind.F, Kind.B}
"""With ZeRO 3 a computation gathers and reduces by itself, and in a replica of several ranks it gathers and
reduces activations."""


def check_collectives(
    spec: ScheduleSpec, actions: Mapping[int, Sequence[Action]], steps: Mapping[int, Sequence[Step]]
) -> None:
    """Raises `ScheduleError` at the first collective in which two ranks of a group differ."""
    for g, group in enumerate(spec.plan.groups):
        kinds = _WITH_ZERO_3 if group.zero == 3 else _ALWAYS
        _compare(f"group {g}", "a group", group.flat_ranks, kinds, actions, steps)
        for replica in group.replicas:
            where = f"group {g}, replica {list(replica.ranks)}"
            _compare(where, "a replica", replica.ranks, _WITH_ZERO_3, actions, steps)


def _compare(
    where: str,
    whose: str,
    ranks: Sequence[int],
    kinds: frozenset[Kind],
    actions: Mapping[int, Sequence[Action]],
    steps: Mapping[int, Sequence[Step]],
) -> None:
    first, *others = ranks
    expected = _positions(steps[first], kinds) if others else []
    for rank in others:
        found = _positions(steps[rank], kinds)
        for index, (theirs, mine) in enumerate(zip(expected, found, strict=False)):
            if steps[rank][mine : mine + 1] != steps[first][theirs : theirs + 1]:
                raise error_at(
                    actions,
                    f"{where}, collective {index}: rank {rank} issues {_name(actions[rank], mine)} "
                    f"where rank {first} issues {_name(actions[first], theirs)}; all ranks of {whose} "
                    "must issue the same collectives in the same order",
                    (rank, mine),
                    (first, theirs),
                )


def _positions(steps: Sequence[Step], kinds: frozenset[Kind]) -> list[int]:
    """Of all of these kinds, and the end."""
    return [*(position for position, step in enumerate(steps) if step.kind in kinds), len(steps)]


def _name(actions: Sequence[Action], position: int) -> str:
    return actions[position].text if position < len(actions) else "no more"
