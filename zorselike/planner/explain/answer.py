"""What a search found, for people: its best plan, the next ones, and how good they can be at most."""

from __future__ import annotations

from collections.abc import Sequence

from zorselike.plan.plan import Plan
from zorselike.planner.answer import PlanAnswer
from zorselike.planner.explain.plans import drop_alike, tabulate_plans
from zorselike.planner.problem import PlanProblem
from zorselike.text.wording import count

_CLOSE = 0.01
"""A step this near to the proven least is as good as the best."""
_FAR = 1.0
"""From this on a gap is said as a multiple."""
_POINTS = 6
"""Of the way to the best plan."""
_MAX_RANKS = 64
"""Up to how many ranks each has its line."""


def format_answer(
    answer: PlanAnswer,
    problem: PlanProblem,
    *,
    budget_s: float,
    notes: Sequence[str] = (),
    tells_limits: bool = True,
) -> list[str]:
    """What a reader must know, the best plan's table, the plans beside each other, and the gap to the bound:
    sections of lines. `tells_limits`: also what limits a plan far from its ideal, if it is."""
    best = answer.best
    plans = drop_alike(answer.plans)
    number = len(plans)
    heading = "The plan:" if number == 1 else f"The best {number} plans, of different structure each:"
    table = "\n".join([heading, *tabulate_plans(plans)])
    limits = list_limits(answer) if tells_limits else []
    searched = "\n".join([*describe_search(answer, problem, budget_s), *limits])
    told = ["\n".join((*notes, *answer.notes))] if notes or answer.notes else []
    return [*told, _show_plan(best.case.plan), table, searched]


def _show_plan(plan: Plan) -> str:
    """Its table; of many ranks only the groups."""
    table = plan.explain()
    if plan.num_ranks <= _MAX_RANKS:
        return table
    heading, *groups = table.split("\n\n")
    lines = [group.partition("\n")[0] for group in groups]
    return "\n".join([heading, *lines, "`zorselike show` lists each rank"])


def describe_search(answer: PlanAnswer, problem: PlanProblem, budget_s: float) -> list[str]:
    """How far it looked, and what is proven of the result."""
    progress = answer.progress
    looked = (
        f"{count(progress.num_estimated, 'candidate')} estimated, {progress.num_simulated:,} simulated in "
        f"{progress.elapsed_s:.1f} s"
    )
    match answer.ending:
        case "interrupted":
            ending = f"INTERRUPTED: this is the best so far; {looked}"
        case "budget":
            ending = (
                f"The time budget of {budget_s:g} s ended the search, a longer one may find more; {looked}"
            )
        case "finished":
            ending = f"Search finished; {looked}"
    return [f"{ending}.", *_describe_course(answer), _describe_gap(answer, problem)]


def _describe_course(answer: PlanAnswer) -> list[str]:
    """How the best found moved over time, and what was not looked at."""
    lines = []
    if len(answer.improvements) > 1:
        points = [answer.improvements[i] for i in _pick_few(len(answer.improvements))]
        told = ", ".join(
            f"{own.iteration_s:.4g} s after {own.elapsed_s:.1f} s ({count(own.num_devices, 'device')})"
            for own in points
        )
        lines.append(f"Steps of the best found over time: {told}.")
    if answer.unseen:
        lines.append(f"Not looked at: {'; '.join(answer.unseen)}.")
    return lines


def _pick_few(number: int) -> list[int]:
    """The first, the last, and some between."""
    few = min(number, _POINTS)
    return sorted({round(i * (number - 1) / max(1, few - 1)) for i in range(few)})


def list_limits(answer: PlanAnswer) -> list[str]:
    """Why the best plan is far from what its devices could do; nothing if it is not."""
    limited_by = answer.best.case.plan.estimates.limited_by
    if not limited_by:
        return []
    share = answer.best.share_of_ideal
    return [
        f"It reaches only {share:.0%} of what its devices could do; what limits:",
        *(f"- {line}" for line in limited_by),
    ]


def _describe_gap(answer: PlanAnswer, problem: PlanProblem) -> str:
    gap, bound_s = answer.gap, answer.progress.bound_s
    devices = count(len(problem.usable), "device")
    proven = f"no plan of the {devices} that may be used takes less than {bound_s:.4g} s"
    if problem.objective == "cost":
        seconds = answer.best.case.simulation.iteration_s
        return f"It is the cheapest found, at {seconds:.4g} s a step; proven: {proven}."
    if gap < _CLOSE:
        return f"It is the fastest there is, to {max(gap, 0):.1%}; proven: {proven}."
    more = f"{gap:.1%} more than" if gap < _FAR else f"{1 + gap:.1f} x"
    return f"A step takes at most {more} the fastest possible; proven: {proven}."
