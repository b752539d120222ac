"""What tells planned plans apart, in words and as a table, and what one would give and get by taking another
plan than the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import isclose

from zorselike.plan.plan import OFFLOAD_KINDS, Group
from zorselike.planner.answer import Planned
from zorselike.text.layout import align_columns
from zorselike.text.wording import count

_MAX_GROUPS = 4
"""As many are listed one by one."""
_SEEN = 0.005
"""Differences of time and money below this are none."""
_SEEN_MEMORY = 0.02
"""The same of the share of a device's memory."""


def drop_alike(plans: Sequence[Planned]) -> list[Planned]:
    """Without those of which nothing is told that an earlier one does not have as well."""
    kept: list[tuple[list[str], Planned]] = []
    for planned in plans:
        settings = [describe(planned) for describe in _list_settings(plans).values()]
        if not any(settings == told and _is_as_good(planned, earlier) for told, earlier in kept):
            kept.append((settings, planned))
    return [planned for _, planned in kept]


def _is_as_good(planned: Planned, other: Planned) -> bool:
    one, two = planned.case.simulation, other.case.simulation
    return isclose(one.iteration_s, two.iteration_s, rel_tol=_SEEN) and isclose(
        one.cost, two.cost, rel_tol=_SEEN
    )


def tabulate_plans(plans: Sequence[Planned]) -> list[str]:
    """A line for each plan: how fast, for how much, and in what it differs from the others; then what all
    have in common."""
    speed = {
        "s per step": [f"{planned.case.simulation.iteration_s:.4g}" for planned in plans],
        "tokens/s": [f"{planned.case.tokens_per_s:,.0f}" for planned in plans],
        **_list_money(plans),
        "of ideal": [f"{planned.share_of_ideal:.0%}" for planned in plans],
    }
    settings = {
        name: [describe(planned) for planned in plans] for name, describe in _list_settings(plans).items()
    }
    different = {name: cells for name, cells in settings.items() if len({*cells}) > 1}
    alike = {name: cells[0] for name, cells in settings.items() if name not in different}
    columns = {"": [str(number + 1) for number in range(len(plans))], **speed, **different}
    table = [tuple(columns), *zip(*columns.values(), strict=True)]
    first_text = len(columns) - len(different)
    lines = [f"  {line}" for line in align_columns(table, left=range(first_text, len(columns)))]
    if alike:
        whose = "In all of them: " if len(plans) > 1 else "It has: "
        lines.append(whose + "; ".join(f"{name} {value}" for name, value in alike.items()))
    return lines


def _list_settings(plans: Sequence[Planned]) -> Mapping[str, Callable[[Planned], str]]:
    """Without tensor parallelism where no plan has it, and without how groups were found where they differ,
    which says more: lines are long."""
    left_out = set()
    if not any(planned.case.plan.has_replicas for planned in plans):
        left_out.add(TENSOR_PARALLEL)
    if len({describe_groups(planned) for planned in plans}) > 1:
        left_out.add("made")
    return {name: describe for name, describe in SETTINGS.items() if name not in left_out}


def describe_groups(planned: Planned) -> str:
    """Devices of each group in the order of the pipeline: `4 A100-40 > 8 T4 + 1 V100-16`."""
    plan, types = planned.case.plan, planned.case.device_types
    groups = [_describe_devices(types[rank] for rank in group.flat_ranks) for group in plan.groups]
    if len(groups) <= _MAX_GROUPS:
        return " > ".join(groups)
    runs = [(text, len(list(own))) for text, own in groupby(groups)]
    if len(runs) <= _MAX_GROUPS:
        return " > ".join(text if number == 1 else f"{number} x ({text})" for text, number in runs)
    return f"{len(groups)} groups of {_describe_devices(types)}"


def _of_groups(describe: Callable[[Group], str]) -> Callable[[Planned], str]:
    """One word for all groups, or theirs in turn."""

    def join(planned: Planned) -> str:
        words = [describe(group) for group in planned.case.plan.groups]
        if len({*words}) == 1:
            return words[0]
        if len(words) > _MAX_GROUPS:
            return ", ".join(f"{word} in {number}" for word, number in Counter(words).items())
        return "/".join(words)

    return join


def _describe_degrees(group: Group) -> str:
    """`4`, or `4+2+1` where its replicas have different ones."""
    return "+".join(map(str, sorted({replica.degree for replica in group.replicas}, reverse=True)))


def _describe_offloaded(group: Group) -> str:
    return "all" if {*group.offload} == {*OFFLOAD_KINDS} else "+".join(group.offload) or "none"


def _describe_reduction(group: Group) -> str:
    often = "microbatch" if group.reduces_per_microbatch else "once"
    return f"{often}, waited for" if group.waits_for_reductions else often


def _describe_devices(types: Iterable[str]) -> str:
    return " + ".join(f"{number} {device}" for device, number in Counter(types).items())


def _list_money(plans: Sequence[Planned]) -> dict[str, list[str]]:
    if not any(planned.case.simulation.cost for planned in plans):
        return {}
    currency = plans[0].case.costs.currency
    return {f"{currency} per step": [f"{planned.case.simulation.cost:.4g}" for planned in plans]}


TENSOR_PARALLEL = "tensor parallelism"

SETTINGS: Mapping[str, Callable[[Planned], str]] = {
    "groups": describe_groups,
    "made": lambda planned: planned.grouping,
    "ministages": lambda planned: str(planned.case.plan.num_ministages),
    TENSOR_PARALLEL: _of_groups(_describe_degrees),
    "ZeRO": _of_groups(lambda group: str(group.zero)),
    "rows at once": _of_groups(lambda group: str(max(m.num_rows for m in group.microbatches))),
    "recompute": _of_groups(lambda group: group.recompute),
    "offload": _of_groups(_describe_offloaded),
    "grad_reduce": _of_groups(_describe_reduction),
    "in flight": _of_groups(lambda group: str(group.max_in_flight or "all")),
}
"""What may tell plans apart; of rows and microbatches in flight the most of a rank."""


# -- another plan than the best ---------------------------------------------------------------


def describe_trade(best: Planned, other: Planned) -> str:
    """What the other plan costs beside the best, and what it has in exchange."""
    losses = list(_list_losses(best, other))
    gains = list(_list_gains(best, other))
    what = f"The next best plan ({other.grouping}: {describe_groups(other)})"
    price = f"is {' and '.join(losses)}" if losses else "is as good by time and money"
    if gains:
        return f"{what} {price}; in exchange it {', '.join(gains)}."
    return f"{what} {price}, and has nothing in exchange."


def _list_losses(best: Planned, other: Planned) -> Iterator[str]:
    first, second = best.case.simulation, other.case.simulation
    if second.iteration_s > first.iteration_s * (1 + _SEEN):
        yield f"{second.iteration_s / first.iteration_s - 1:.1%} slower"
    if first.cost and second.cost > first.cost * (1 + _SEEN):
        yield f"{second.cost / first.cost - 1:.1%} dearer"


def _list_gains(best: Planned, other: Planned) -> Iterator[str]:
    first, second = best.case, other.case
    if second.simulation.iteration_s < first.simulation.iteration_s * (1 - _SEEN):
        yield f"is {first.simulation.iteration_s / second.simulation.iteration_s - 1:.1%} faster"
    if second.simulation.cost < first.simulation.cost * (1 - _SEEN):
        yield f"is {1 - second.simulation.cost / first.simulation.cost:.1%} cheaper"
    for noun, before, after in (
        ("device", first.plan.num_ranks, second.plan.num_ranks),
        ("group", len(first.plan.groups), len(second.plan.groups)),
        ("ministage", first.plan.num_ministages, second.plan.num_ministages),
    ):
        if after < before:
            yield f"has {count(after, noun)} in place of {before}"
    before_share, after_share = _fullest(best), _fullest(other)
    if before_share is not None and after_share is not None and after_share < before_share - _SEEN_MEMORY:
        yield f"fills memory to {after_share:.0%} at most in place of {before_share:.0%}"
    if _recomputes(best) and not _recomputes(other):
        yield "recomputes nothing"
    if _offloads(best) and not _offloads(other):
        yield "offloads nothing"


def _fullest(planned: Planned) -> float | None:
    """Share of its memory that the fullest device needs, where memory is known."""
    case = planned.case
    limits = case.costs.memory_bytes
    return max(peak / limit for peak, limit in zip(case.peak_bytes, limits, strict=True)) if limits else None


def _recomputes(planned: Planned) -> bool:
    return any(group.recompute == "layer" for group in planned.case.plan.groups)


def _offloads(planned: Planned) -> bool:
    return any(group.offload for group in planned.case.plan.groups)
