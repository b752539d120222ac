"""`zorselike doctor`: problems that would break a long job, found before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from zorselike.errors import ClusterError
from zorselike.plan.plan import Plan
from zorselike.text.wording import count

if TYPE_CHECKING:
    from zorselike.cost.profile import LinkTimes
    from zorselike.profiler.machine.health import Finding
    from zorselike.runtime.processes.processes import Processes

_SIZES = (2**16, 2**20, 2**24)
"""Message sizes with which links are tested, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Find problems that would break a long job on these machines, and say how to solve them.

    Start it like the job, on every node: torchrun --nproc-per-node gpu ... -m zorselike.cli doctor --data ...
    It ends with an error if something would break the job.
    """

    data: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="PATH ...", help_behavior_hint="(default: none)")
    ] = ()
    """Paths that every rank must be able to read."""

    plan: Annotated[str | None, tyro.conf.arg(metavar="PLAN.toml", help_behavior_hint="(default: none)")] = (
        None
    )
    """Plan of the job, to check that it matches these nodes and devices."""

    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Dtype in which layers will compute."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the job; `auto`: CUDA where torch finds a GPU, else CPU."""

    timeout: float = 60.0
    """Seconds that ranks wait for each other."""

    def run(self) -> None:
        plan = None if self.plan is None else Plan.load(self.plan)

        import torch

        from zorselike.profiler.machine.examine import examine
        from zorselike.profiler.machine.health import (
            describe_links,
            describe_nodes,
            find_problems,
            find_slow_links,
        )
        from zorselike.profiler.processes import read_timeout
        from zorselike.runtime.processes.processes import join_processes

        wanted = self.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        with join_processes(
            torch.device("cpu"), timeout=read_timeout(self.timeout), described=torch.device(wanted)
        ) as processes:
            health = examine(processes.infos[processes.rank], data=self.data)
            healths = processes.gather(health)
            found = find_problems(
                healths, plan=plan, dtype=self.dtype, device=None if self.device == "auto" else self.device
            )
            links = _measure(processes)
            found += find_slow_links(links)
            if processes.rank == 0:
                print(describe_nodes(healths))
                if links:
                    print(f"\n{describe_links(links)}")
                print(f"\n{_describe(found)}", flush=True)
        _raise_if_broken(found)


def _measure(processes: Processes) -> list[LinkTimes]:
    """Measures every pair of nodes over Gloo, which works everywhere; collective."""
    from zorselike.profiler.machine.link_timing import all_pairs, measure_links
    from zorselike.profiler.tasks import describe_source

    found = processes.gather_or_raise(
        lambda: measure_links(
            all_pairs(processes.nodes),
            processes,
            repeats=3,
            source=describe_source(processes),
            sizes=_SIZES,
        )
    )
    return [entry for entries in found for entry in entries]


def _describe(found: Sequence[Finding]) -> str:
    if not found:
        return "no problems found"
    return "\n".join(f"{finding.severity}: {finding.text}" for finding in found)


def _raise_if_broken(found: Sequence[Finding]) -> None:
    broken = [finding for finding in found if finding.severity == "breaks"]
    if broken:
        rest = f" (and {len(broken) - 1} more, above)" if len(broken) > 1 else ""
        raise ClusterError(f"doctor: {count(len(broken), 'thing')} would break a job: {broken[0].text}{rest}")
