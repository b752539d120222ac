"""What tells planned plans apart, in words and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from zorselike.plan.plan import OFFLOAD_KINDS, Group
from zorselike.planner.answer import Planned
from zorselike.text.layout import align_columns

_MAX_GROUPS = 4
"""As many are listed one by one."""


def drop_alike(plans: Sequence[Planned]) -> list[Planned]:
    """Without those of which nothing is told that an earlier one does not have as well."""
    told: dict[tuple[str, ...], Planned] = {}
    for planned in plans:
        settings = (describe(planned) for describe in _SETTINGS.values())
        told.setdefault((*settings, f"{planned.case.simulation.iteration_s:.4g}"), planned)
    return list(told.values())


def tabulate_plans(plans: Sequence[Planned]) -> list[str]:
    """A line for each plan: how fast, for how much, and in what it differs from the others; then what all
    have in common."""
    speed = {
        "s per step": [f"{planned.case.simulation.iteration_s:.4g}" for planned in plans],
        "tokens/s": [f"{planned.case.tokens_per_s:,.0f}" for planned in plans],
        **_list_money(plans),
        "of ideal": [f"{planned.share_of_ideal:.0%}" for planned in plans],
    }
    settings = {name: [describe(planned) for planned in plans] for name, describe in _SETTINGS.items()}
    different = {name: cells for name, cells in settings.items() if len({*cells}) > 1}
    if "groups" in different:  # These say more than how they were found, and lines are long.
        settings.pop("made")
        different.pop("made", None)
    alike = {name: cells[0] for name, cells in settings.items() if name not in different}
    columns = {"": [str(number + 1) for number in range(len(plans))], **speed, **different}
    table = [tuple(columns), *zip(*columns.values(), strict=True)]
    first_text = len(columns) - len(different)
    lines = [f"  {line}" for line in align_columns(table, left=range(first_text, len(columns)))]
    if alike:
        whose = "In all of them: " if len(plans) > 1 else "It has: "
        lines.append(whose + "; ".join(f"{name} {value}" for name, value in alike.items()))
    return lines


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


def describe_zero(planned: Planned) -> str:
    return _join(planned, lambda group: str(group.zero))


def describe_recomputation(planned: Planned) -> str:
    return _join(planned, lambda group: group.recompute)


def describe_offload(planned: Planned) -> str:
    return _join(planned, _describe_offloaded)


def describe_rows(planned: Planned) -> str:
    """The largest microbatches of each group."""
    return _join(planned, lambda group: str(max(m.num_rows for m in group.microbatches)))


def describe_reductions(planned: Planned) -> str:
    return _join(planned, lambda group: "microbatch" if group.reduces_per_microbatch else "once")


def describe_in_flight(planned: Planned) -> str:
    """Microbatches of a rank that are held at once, at most."""
    return _join(planned, lambda group: "all" if group.max_in_flight is None else str(group.max_in_flight))


_SETTINGS: Mapping[str, Callable[[Planned], str]] = {
    "groups": describe_groups,
    "made": lambda planned: planned.grouping,
    "ministages": lambda planned: str(planned.case.plan.num_ministages),
    "ZeRO": describe_zero,
    "rows at once": describe_rows,
    "recompute": describe_recomputation,
    "offload": describe_offload,
    "grad_reduce": describe_reductions,
    "in flight": describe_in_flight,
}


def _describe_offloaded(group: Group) -> str:
    return "all" if {*group.offload} == {*OFFLOAD_KINDS} else "+".join(group.offload) or "none"


def _join(planned: Planned, describe: Callable[[Group], str]) -> str:
    """One word for all groups, or theirs in turn."""
    words = [describe(group) for group in planned.case.plan.groups]
    if len({*words}) == 1:
        return words[0]
    if len(words) > _MAX_GROUPS:
        return ", ".join(f"{word} in {number}" for word, number in Counter(words).items())
    return "/".join(words)


def _describe_devices(types: Iterable[str]) -> str:
    return " + ".join(f"{number} {device}" for device, number in Counter(types).items())


def _list_money(plans: Sequence[Planned]) -> dict[str, list[str]]:
    if not any(planned.case.simulation.cost for planned in plans):
        return {}
    currency = plans[0].case.costs.currency
    return {f"{currency} per step": [f"{planned.case.simulation.cost:.4g}" for planned in plans]}
