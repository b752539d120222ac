"""How fast each rank of a plan would be by itself."""

from __future__ import annotations

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload


def measure_speeds(
    plan: Plan, workload: Workload, cluster: Cluster, clock: LayerTimeModel
) -> tuple[float, ...]:
    """Rows per second at which each rank alone would run the whole model forward and backward, without
    recomputation, if it had enough memory.

    Microbatches have the size at which the rank is fastest, among those of the plan and powers of two up to
    an even share of the rows.
    """
    places = cluster.place_ranks(plan)
    most = -(-plan.global_batch // len(places))
    powers = {2**power for power in range(most.bit_length())} | {most}
    speeds = []
    for rank, place in enumerate(places):
        device = cluster.device_type(place)
        sizes = {microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank)}
        seconds = {
            rows: clock.model_s(device, rows)
            for rows in powers | sizes
            if rows in sizes or _is_known(workload, clock, device, rows)
        }
        speeds.append(max(rows / seconds[rows] for rows in seconds))
    return tuple(speeds)


def _is_known(workload: Workload, clock: LayerTimeModel, device: str, rows: int) -> bool:
    """Whether the profile does not exclude so many rows; one row is always allowed."""
    most = (clock.max_rows(kind, device, "none") for kind in workload.kinds)
    return rows == 1 or all(limit is None or rows <= limit for limit in most)
