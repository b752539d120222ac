"""A table of what runs where."""

from __future__ import annotations

from zorselike.runtime.assembly import Assembly
from zorselike.runtime.state import count_parameters
from zorselike.text.wording import count


def describe_assembly(assembly: Assembly) -> str:
    """The plan, the parameters of each ministage, and the transport of this rank's channels."""
    plan, compiled = assembly.plan, assembly.compiled
    lines = [plan.explain().rstrip(), "", "ministages:"]
    for index, part in enumerate(compiled.parts):
        group = plan.ministages[index].group
        trains = "" if compiled.spec.trains[index] else ", frozen"
        lines.append(
            f"  {index}: group {group}, {count_parameters(part.module):,} parameters"
            f" in {count(len(part.units) or 1, 'FSDP unit')}{trains}"
        )
    for tie in compiled.ties:
        lines.append(f"  {tie.borrower_fqn} borrows {tie.owner_fqn}")
    lines.append(f"rank {assembly.ranks.rank} on {assembly.device}:")
    channels = assembly.transport.kinds
    for source, target, direction in sorted(channels, key=lambda edge: (edge[2] == "B", edge)):
        what = "activations" if direction == "F" else "gradients"
        lines.append(f"  {source} -> {target}, {what}: {channels[source, target, direction]}")
    for cycle in compiled.report.cycles:
        lines.append(f"  a blocking send could close this cycle, so it goes over Gloo: {cycle}")
    return "\n".join(lines)
