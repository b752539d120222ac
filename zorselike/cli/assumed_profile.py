"""What stands in for a profile where nothing was measured."""

from __future__ import annotations

from zorselike.cli.show import ALLOCATOR_SHARE, CONTEXT_BYTES
from zorselike.cost.layer_times import REACHED_OF_PEAK
from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.plan.workload import Workload

NOT_MEASURED = (
    f"NOT MEASURED: without --profile devices are taken to reach {REACHED_OF_PEAK:.0%} of the "
    f"catalogue's peak FLOP/s, a process to take {CONTEXT_BYTES / 2**30:g} GiB of each and the "
    f"allocator {ALLOCATOR_SHARE:.0%} more than tensors ask for; `zorselike profile` measures that"
)


def assume_profile(workload: Workload) -> Profile:
    """A profile without measurements, which leaves room for what a process takes."""
    overheads = Overheads(
        context_bytes=CONTEXT_BYTES, allocator_share=ALLOCATOR_SHARE, source=Source("given", note="assumed")
    )
    return Profile(model=workload.model, overheads=overheads)
