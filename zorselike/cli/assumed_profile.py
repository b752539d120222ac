"""The profile that is assumed where nothing was measured."""

from __future__ import annotations

from zorselike.cli.show import ALLOCATOR_SHARE, CONTEXT_BYTES
from zorselike.cost.layer_times import REACHED_OF_PEAK
from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.cost.purposes import COMMUNICATOR_BYTES
from zorselike.plan.workload import Workload
from zorselike.text.units import GIB

NOT_MEASURED = (
    f"NOT MEASURED: without --profile devices are assumed to reach {REACHED_OF_PEAK:.0%} of the "
    f"catalogue's peak FLOP/s, a process to take {CONTEXT_BYTES / GIB:g} GiB of each, an NCCL "
    f"communicator {COMMUNICATOR_BYTES / 2**20:g} MiB, and the "
    f"allocator to add {ALLOCATOR_SHARE:.0%} to the size of tensors; `zorselike profile` measures all of this"
)


def assume_profile(workload: Workload) -> Profile:
    """A profile without measurements that reserves memory for the process itself."""
    overheads = Overheads(
        context_bytes=CONTEXT_BYTES,
        communicator_bytes=COMMUNICATOR_BYTES,
        allocator_share=ALLOCATOR_SHARE,
        source=Source("given", note="assumed"),
    )
    return Profile(model=workload.model, overheads=overheads)
