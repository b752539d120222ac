"""What each kind of device adds to a plan: planned again without it (`--explain`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from zorselike.errors import ConfigError
from zorselike.planner.answer import Ending, NothingFitsError, PlanAnswer, Planned
from zorselike.planner.problem import PlanProblem
from zorselike.text.wording import count

WORTH = 0.05
"""Devices that add less are not worth a run with more kinds and more devices."""

Search = Callable[[PlanProblem, str], PlanAnswer]
"""Plans for a problem; the text says for what, to who waits."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """The best plan with devices of one type, and without."""

    device: str
    num_usable: int
    num_used: int
    """By the best plan."""
    without: Planned | None
    """The best plan without any of them; None where they are not used, or nothing fits without."""
    reason: str = ""
    """Why there is no plan without them: nothing fits, or what is fixed cannot be."""


def find_additions(
    problem: PlanProblem, answer: PlanAnswer, search: Search
) -> tuple[PlanAnswer, tuple[Addition, ...]]:
    """What each device type adds to the best plan; and the answer, which begins with another plan where one
    without some type turned out to be better, unless the user has fixed the groups."""
    additions = measure_additions(problem, answer, search)
    others = [addition.without for addition in additions if addition.without is not None]
    best = min([answer.best, *others], key=lambda planned: _measure(problem, planned))
    if best is answer.best or problem.fixed.groups is not None:
        return answer, additions
    used = ", ".join(dict.fromkeys(best.case.device_types))
    note = f"A plan with {used} alone was found to be better, and is the first below."
    better = replace(answer, plans=(best, *answer.plans), notes=(*answer.notes, note))
    return find_additions(problem, better, search)


def measure_additions(problem: PlanProblem, answer: PlanAnswer, search: Search) -> tuple[Addition, ...]:
    """For each device type that may be used, with `search` for plans without it; nothing for one type alone.

    Ends early where a search was interrupted.
    """
    groups = problem.fixed.groups
    devices = problem.usable if groups is None else [device for group in groups for device in group]
    usable = Counter(problem.device_types[device] for device in devices)
    used = Counter(answer.best.case.device_types)
    additions: list[Addition] = []
    for device, num_usable in usable.items() if len(usable) > 1 else ():
        without, reason, is_over = None, "", False
        if used[device]:
            try:
                found = search(leave_out(problem, device), f"without {device}")
            except (ConfigError, NothingFitsError) as error:
                reason = str(error)
            except KeyboardInterrupt:
                break
            else:
                without, is_over = found.best, found.ending == "interrupted"
        additions.append(
            Addition(
                device=device, num_usable=num_usable, num_used=used[device], without=without, reason=reason
            )
        )
        if is_over:
            break
    return tuple(additions)


def leave_out(problem: PlanProblem, device: str) -> PlanProblem:
    """The same problem without devices of a type."""
    rest = tuple(own for own in problem.usable if problem.device_types[own] != device)
    fixed = problem.fixed
    if fixed.groups is not None:
        groups = [tuple(own for own in group if own in rest) for group in fixed.groups]
        fixed = replace(fixed, groups=tuple(group for group in groups if group))
    return replace(problem, devices=rest, fixed=fixed)


def describe_additions(
    problem: PlanProblem, best: Planned, additions: Sequence[Addition], *, ending: Ending = "finished"
) -> list[str]:
    """A sentence or two for each type; says plainly what is not worth it. `ending`: of the best plan's
    search, which may have ended before it came to plans with all types."""
    return [_describe(problem, best, addition, ending) for addition in additions]


def _describe(problem: PlanProblem, best: Planned, addition: Addition, ending: Ending) -> str:
    number = addition.num_used or addition.num_usable
    them, are, s = (
        (f"The {number} {addition.device}", "are", "")
        if number > 1
        else (f"The one {addition.device}", "is", "s")
    )
    if not addition.num_used and ending != "finished":
        return f"{them} {are} not in the best plan found; a longer search may find a better one with them."
    if not addition.num_used:
        return f"{them} {are} not worth it: the best plan found goes without."
    if addition.without is None:
        return f"{them} {are} needed: without, {addition.reason.removeprefix('plan: ')}."
    first, second = best.case.simulation, addition.without.case.simulation
    is_money = problem.objective == "cost" and (first.cost or second.cost)  # Else both are free.
    if is_money and not first.cost:
        gain, share = inf, "all that a step costs"
    else:
        gain = second.cost / first.cost - 1 if is_money else second.iteration_s / first.iteration_s - 1
        share = f"{gain:.1%}"
    change = _describe_change(best, addition.without)
    if gain <= 0:
        return f"{them} {are} not worth it: without, {change}. Leave out: --quota {addition.device}=0."
    told = f"{them} {'save' if is_money else 'add'}{s} {share}: without, {change}."
    if gain < WORTH:
        return f"{told} Not worth it, unless idle anyway: without, the run is simpler."
    return told


def _measure(problem: PlanProblem, planned: Planned) -> float:
    """What is to be small."""
    simulation = planned.case.simulation
    return simulation.cost if problem.objective == "cost" else simulation.iteration_s


def _describe_change(best: Planned, without: Planned) -> str:
    first, second = best.case.simulation, without.case.simulation
    parts = [f"a step takes {second.iteration_s:.4g} s in place of {first.iteration_s:.4g} s"]
    if first.cost or second.cost:
        currency = best.case.costs.currency
        parts.append(f"costs {second.cost:.4g} {currency} in place of {first.cost:.4g}")
    parts.append(
        f"with {count(without.case.plan.num_ranks, 'device')} in place of {best.case.plan.num_ranks}"
    )
    return ", ".join(parts)
