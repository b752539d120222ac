"""Of two orders that bound microbatches in flight, the one that takes less nominal time.

Which computation starts first (`nominal_time.py`) is right where microbatches of all groups have the same
rows. Where they have not, some start a little late, those that wait for them are passed by others, and groups
come to hold fewer than they may: with 32 microbatches in four groups and 43 in the two that follow, and with
as few in flight as fill the pipeline, a step takes up to a fifth longer. The other order is 1F1B as it is
written (Narayanan et al. 2021, section 2.2.1): with one ministage a group, each goes forward until it holds
what it held at most in the first order, and from then on goes backward and forward in turn, whatever is there
sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from zorselike.schedule.orders.nominal_time import (
    Computation,
    Ordered,
    Stage,
    StageNeeds,
    run_in_nominal_time,
)


def order_computations(stages: Sequence[Stage], needs: StageNeeds, bounds: Sequence[int | None]) -> Ordered:
    """What all groups compute; arguments as of `run_in_nominal_time`."""
    first = run_in_nominal_time(stages, needs, bounds)
    if len(stages) > len(bounds):
        return first
    by_stage: list[list[Computation]] = [[] for _ in stages]
    for computation in first.computations:
        by_stage[computation.ministage].append(computation)
    regular = [_alternate(s, stage, first.most_in_flight[stage.group]) for s, stage in enumerate(stages)]
    if regular == by_stage:
        return first
    found = _run(stages, regular, before=first.time)
    return first if found is None else first._replace(computations=found[0], time=found[1])


def _alternate(s: int, stage: Stage, num_held: int) -> list[Computation]:
    """Forward until so many are held, then backward and forward in turn."""
    backward_times, forward_times = stage.times
    forwards = [Computation(s, True, m) for m in range(len(forward_times))]
    backwards = [Computation(s, False, m) for m in range(len(backward_times))]
    if not backwards:
        return forwards
    in_turn = chain.from_iterable(zip(backwards, forwards[num_held:], strict=False))
    return [*forwards[:num_held], *in_turn, *backwards[len(forwards) - num_held :]]


def _run(
    stages: Sequence[Stage], lists: Sequence[Sequence[Computation]], before: int
) -> tuple[list[Computation], int] | None:
    """What these lists compute, everything after what it waits for, and when all is done; None where that is
    not before a time, or never: groups may wait for each other."""
    computations: list[Computation] = []
    ends: list[tuple[list[int], list[int]]] = [([], []) for _ in stages]
    free_at, done = [0] * len(stages), [0] * len(stages)
    total = sum(map(len, lists))
    while len(computations) < total:
        num_before = len(computations)
        for s, (stage, own) in enumerate(zip(stages, lists, strict=True)):
            while done[s] < len(own):
                _, is_forward, m = computation = own[done[s]]
                start, needed = free_at[s], stage.needs[is_forward]
                if needed is not None:
                    sent = ends[s - 1 if is_forward else s + 1][is_forward]
                    if needed[m] >= len(sent):
                        break
                    start = max(start, sent[needed[m]] + stage.delay)
                free_at[s] = start + stage.times[is_forward][m]
                ends[s][is_forward].append(free_at[s])
                done[s] += 1
                computations.append(computation)
        if len(computations) == num_before or max(free_at) >= before:
            return None
    return computations, max(free_at)
