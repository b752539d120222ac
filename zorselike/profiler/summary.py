"""A profile in a few lines, for the one who has waited for it."""

from __future__ import annotations

from collections.abc import Iterator

from zorselike.cost.layer_times import name_times
from zorselike.cost.profile import Overheads, Profile
from zorselike.cost.wires import fit_link
from zorselike.text.wording import count


def describe_profile(profile: Profile) -> str:
    """What it says: milliseconds of the most rows of each layer, links, the largest batches."""
    return "\n".join([f"profile of {profile.model}:", *(f"  {line}" for line in _lines(profile))])


def _lines(profile: Profile) -> Iterator[str]:
    for times in profile.layers:
        limit = f"; at most {times.max_rows} fit" if times.max_rows is not None else ""
        yield (
            f"{name_times(times)}: {times.rows[-1]} rows forward {1e3 * times.forward_s[-1]:.3g} ms, "
            f"backward {1e3 * times.backward_s[-1]:.3g} ms{limit}"
        )
    for update in profile.updates:
        milliseconds = 1e9 * update.seconds_per_parameter
        yield f"optimizer on {update.device}: {milliseconds:.3g} ms for a million parameters"
    for host in profile.host_links:
        yield (
            f"host link of {host.device}: {host.to_device / 1e9:.3g} GB/s to it, {host.to_host / 1e9:.3g} "
            f"from it, {host.both / 1e9:.3g} both at once"
        )
    for entry in profile.links:
        link = fit_link(entry)
        where = "inside " + entry.between[0] if len(set(entry.between)) == 1 else " - ".join(entry.between)
        yield (
            f"link {where}: {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, "
            f"latency {1e6 * link.latency_s:.3g} us"
        )
    if profile.overheads.action_s:
        yield _describe_program(profile.overheads)
        yield (
            f"beside tensors: {profile.overheads.pools_bytes / 2**20:.3g} MiB for its streams, and "
            f"{profile.overheads.communicator_bytes / 2**20:.3g} MiB for each communicator of a GPU"
        )
    for batch in profile.largest_batches:
        refused = "" if batch.refused_rows is None else f", {batch.refused_rows} do not"
        fitted = f"{count(batch.max_rows, 'row')} fit with ZeRO {batch.zero}"
        yield f"whole model on {batch.device}: {fitted}{refused}"


def _describe_program(overheads: Overheads) -> str:
    costs = dict(overheads.action_s), dict(overheads.unit_s), dict(overheads.shared_unit_s)
    gather, reduce, update = (
        f"{1e3 * sum(of.get(kind, 0.0) for of in costs):.2g} ms"
        for kind in ("UNSHARD", "REDUCE_GRAD", "STEP")
    )
    slower = f"; computing is {overheads.overlap_slowdown:.3g} times slower beside a collective"
    return (
        f"the program itself: {1e3 * overheads.step_s:.2g} ms a step; with one layer {gather} to gather, "
        f"{reduce} to reduce, {update} to update{slower if overheads.overlap_slowdown > 1 else ''}"
    )
