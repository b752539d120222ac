"""The ZeRO stage at which a row fits (Poplar, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zorselike.errors import PlanError


def raise_zero(max_rows: Mapping[int, Sequence[int]], *, least: int = 0) -> int:
    """The first stage from `least` on at which one row fits on every card; where there is none, the first of
    those at which it fits on most (the other cards then hold shards only).

    Args:
        max_rows: for each ZeRO stage in question, the rows that fit at once on each card of the group.

    Raises:
        PlanError: No stage was given, or a row fits on no card at any.
    """
    stages = sorted(stage for stage in max_rows if stage >= least)
    fits = {stage: sum(rows >= 1 for rows in max_rows[stage]) for stage in stages}
    if not any(fits.values()):
        tried = f"ZeRO {', '.join(map(str, stages))}" if stages else f"a ZeRO stage of {least} or more"
        raise PlanError(
            f"batches: not one row fits on any card at {tried}; recompute, offload, or give the group "
            "fewer layers"
        )
    return max(stages, key=lambda stage: (fits[stage], -stage))
