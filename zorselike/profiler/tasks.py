"""What is measured, one thing after the other, and kept after each: so a profile can be continued."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import (
    CollectiveTimes,
    Entry,
    HostLinkRates,
    LayerTimes,
    Overheads,
    Profile,
    Source,
    UpdateTime,
)
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Recompute
from zorselike.profiler.largest_batch.search import StageResult, make_entries, search_stages
from zorselike.profiler.layers.in_step import LayersInStep
from zorselike.profiler.layers.probes import LayerProbe, MeasuredModel
from zorselike.profiler.layers.row_search import TrialResult
from zorselike.profiler.layers.timing import LayerBench
from zorselike.profiler.machine.collective_timing import SIZES as COLLECTIVE_SIZES
from zorselike.profiler.machine.collective_timing import measure_collectives
from zorselike.profiler.machine.device_memory import CudaMemory, DeviceMemory
from zorselike.profiler.machine.host_link_timing import measure_host_link
from zorselike.profiler.machine.link_timing import SIZES as LINK_SIZES
from zorselike.profiler.machine.link_timing import Pair, choose_pairs, measure_links
from zorselike.profiler.program.timing import BetweenSteps, ProgramBench, no_work
from zorselike.profiler.program.update_timing import measure_update
from zorselike.runtime.processes.processes import Processes

Part = Literal["layers", "update", "host_link", "links", "collectives", "largest_batch", "program"]

LARGEST_BATCH = "largest batch"
COLLECTIVES = "collectives"
PROGRAM = "the program itself"
"""Names of tasks."""


@dataclass(frozen=True, kw_only=True)
class Job(MeasuredModel):
    """What is to be measured."""

    probes: tuple[LayerProbe, ...]
    recompute: tuple[Recompute, ...]
    degrees: tuple[int, ...] = (1,)
    """Of tensor parallelism, at which numbered layers are measured."""
    stages: tuple[int, ...]
    """ZeRO stages under which the largest batch is looked for."""
    parts: frozenset[Part]
    largest_message_bytes: int
    """Of links and collectives."""
    again: bool
    """Measure also what is known."""
    between_steps: BetweenSteps = no_work
    """What a training program does between two steps."""

    @property
    def typical(self) -> LayerProbe:
        """The probe of the kind of layer of which the model has most."""
        return max(self.probes, key=lambda probe: probe.num_instances)

    @property
    def recompute_of_batches(self) -> Recompute:
        """With which the largest batch is looked for."""
        return "layer" if self.recompute == ("layer",) else "none"


Told = Callable[[str], None]
"""Hears what is being measured, for a person who waits."""


@dataclass(frozen=True)
class Task:
    """One measurement of all ranks together."""

    name: str
    is_known: Callable[[Profile], bool]
    run: Callable[[Profile, Told], Profile | None]
    """On every rank, given what is known; what this one found, if anything."""


def make_tasks(job: Job, processes: Processes, memory: DeviceMemory) -> list[Task]:
    """All measurements of a job, in an order in which early ones help most if the rest never comes."""
    measurer = _Measurer(job, processes, memory)
    tasks: list[Task] = []
    if "layers" in job.parts:
        tasks += [
            measurer.layer(probe, setting, degree)
            for degree in (1, *(degree for degree in job.degrees if degree > 1))
            for probe in job.probes
            if degree == 1 or probe.is_numbered
            for setting in (job.recompute if probe.is_numbered else ("none",))
        ]
    if "update" in job.parts:
        tasks.append(measurer.update())
    if "host_link" in job.parts:
        tasks.append(measurer.host_link())
    if "links" in job.parts and processes.size > 1:
        tasks.append(measurer.links())
    if "collectives" in job.parts and processes.size > 1:
        tasks.append(measurer.collectives())
    if "largest_batch" in job.parts:
        tasks.append(measurer.largest_batch())
    if "program" in job.parts:
        tasks.append(measurer.program())
    if job.parts & {"largest_batch", "program"} and isinstance(memory, CudaMemory):
        tasks.append(measurer.overheads(memory))
    return tasks


def run_tasks(tasks: Sequence[Task], profile: Profile, processes: Processes, path: Path) -> Profile:
    """The profile with what each task found; saved by rank 0 after each, with a bar there if tqdm is
    installed. The same on every rank.

    Raises:
        ClusterError: On all ranks, naming the one that failed.
    """
    with _progress(len(tasks), is_shown=processes.rank == 0) as show:
        for number, task in enumerate(tasks):
            show(number, task.name)

            def tell(text: str, number: int = number, name: str = task.name) -> None:
                show(number, f"{name}: {text}")

            found = processes.gather_or_raise(partial(task.run, profile, tell))
            profile = reduce(Profile.merge, (each for each in found if each is not None), profile)
            save_once(processes, profile, path)
        show(len(tasks), "")
    return profile


@contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[Callable[[int, str], None]]:
    """A bar that is told how many are done, and what comes next."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda done, text: None
        return
    with tqdm(total=total, disable=not is_shown, file=sys.stderr, dynamic_ncols=True) as bar:

        def show(done: int, text: str) -> None:
            bar.set_description_str(text)
            bar.update(done - bar.n)

        yield show


def save_once(processes: Processes, content: Profile | Cluster, path: Path) -> None:
    """Rank 0 writes the file; where it cannot, all ranks raise `ClusterError`. Collective."""
    processes.gather_or_raise(lambda: content.save(path) if processes.rank == 0 else None)


def describe_source(processes: Processes) -> Source:
    """Measured here and today."""
    date = datetime.date.today().isoformat()
    return Source("measured", date, f"zorselike profile on {processes.node}, torch {torch.__version__}")


def devices_by_node(processes: Processes) -> dict[str, tuple[str, ...]]:
    """The device types of each node, one a rank."""
    return {node: tuple(processes.types[rank] for rank in ranks) for node, ranks in processes.nodes.items()}


class _Measurer:
    """Makes the tasks of one job on one rank."""

    def __init__(self, job: Job, processes: Processes, memory: DeviceMemory) -> None:
        self._job = job
        self._processes = processes
        self._memory = memory
        self._source = describe_source(processes)
        self._represents_type = processes.represents(of=lambda rank: processes.types[rank])

    def _profile(self, **entries: object) -> Profile:
        workload = self._job.workload
        return Profile(model=workload.model, workload_fingerprint=workload.fingerprint, **entries)  # type: ignore[arg-type]

    def _sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those that are not too large; two at least, for a latency and a rate."""
        fitting = tuple(size for size in sizes if size <= self._job.largest_message_bytes)
        return max(fitting, tuple(sizes[:2]), key=len)

    def _for_each_type(
        self,
        name: str,
        section: str,
        measure: Callable[[Told], Entry | None],
        *,
        matches: Callable[[Any], bool] = lambda entry: True,
        together: bool = False,
    ) -> Task:
        """What gives one entry of a `section` of the profile for every type of device. The first rank of each
        type measures it, or with `together` all do at once, and the first tells."""

        def known(profile: Profile) -> set[str]:
            return {entry.device for entry in getattr(profile, section) if matches(entry)}

        def run(profile: Profile, tell: Told) -> Profile | None:
            is_known = self._processes.type in known(profile) and not self._job.again
            if is_known or not (together or self._represents_type):
                return None
            found = measure(tell)
            self._memory.release()
            return self._profile(**{section: (found,)}) if found and self._represents_type else None

        return Task(name, lambda profile: set(self._processes.types) <= known(profile), run)

    def layer(self, probe: LayerProbe, setting: Recompute, degree: int = 1) -> Task:
        """A kind of layer, or one rank's part of it with tensor parallelism."""
        workload, job, device = self._job.workload, self._job, self._processes.device
        is_cpu = device.type == "cpu"

        def measure(tell: Told) -> LayerTimes | None:
            bench = LayerBench(
                job, probe, device=device, memory=self._memory, recompute=setting, degree=degree
            )
            in_step: LayersInStep | None = None

            def time_in_step(rows: int, alone: TrialResult) -> tuple[float, float] | None:
                nonlocal in_step
                if not is_cpu or degree > 1 or not LayersInStep.matters(alone):
                    return None
                if in_step is None:
                    in_step = LayersInStep(
                        job, probe, device=device, alone=self._processes.alone, recompute=setting
                    )
                return in_step.time(rows, repeats=job.repeats)

            return bench.measure(
                device=self._processes.type,
                source=self._source,
                time_in_step=time_in_step,
                told=lambda rows, result: tell(f"{rows} rows {'done' if result.fits else 'do not fit'}"),
            )

        def matches(times: LayerTimes) -> bool:
            own = times.kind, times.dtype, times.sequence_length, times.recompute, times.tensor_parallel
            return own == (probe.kind, workload.dtype, workload.sequence_length, setting, degree)

        name = f"{probe.kind}, recompute {setting}" if probe.is_numbered else probe.kind
        name += f", tensor parallelism {degree}" if degree > 1 else ""
        # Ranks that compute on the same processors do so together, as in a step.
        return self._for_each_type(name, "layers", measure, matches=matches, together=is_cpu)

    def update(self) -> Task:
        """The optimizer."""

        def measure(tell: Told) -> UpdateTime:
            return measure_update(
                self._processes.device,
                type=self._processes.type,
                dtype=self._job.dtype,
                repeats=self._job.repeats,
                source=self._source,
            )

        dtype = self._job.workload.dtype
        return self._for_each_type(
            "optimizer update", "updates", measure, matches=lambda entry: entry.dtype == dtype
        )

    def host_link(self) -> Task:
        """Copies between device and host."""

        def measure(tell: Told) -> HostLinkRates:
            return measure_host_link(
                self._processes.device,
                type=self._processes.type,
                repeats=self._job.repeats,
                source=self._source,
            )

        return self._for_each_type("host link", "host_links", measure)

    def links(self) -> Task:
        """Messages between one pair of nodes of each two types, and inside one node of each type."""
        pairs = list(choose_pairs(devices_by_node(self._processes)))

        def missing(profile: Profile) -> list[Pair]:
            known = {entry.between for entry in profile.links}
            return [pair for pair in pairs if pair not in known]

        def run(profile: Profile, tell: Told) -> Profile | None:
            found = measure_links(
                pairs if self._job.again else missing(profile),
                self._processes,
                repeats=self._job.repeats,
                source=self._source,
                sizes=self._sizes(LINK_SIZES),
            )
            return self._profile(links=tuple(found)) if found else None

        return Task("links", lambda profile: not missing(profile), run)

    def collectives(self) -> Task:
        """Of all ranks together, and of one node of each type that has several."""
        processes = self._processes
        wholes = [tuple(range(processes.size))]
        pairs = choose_pairs(devices_by_node(processes))
        wholes += [tuple(processes.nodes[a]) for a, b in pairs if a == b and len(processes.nodes) > 1]

        def key(ranks: tuple[int, ...]) -> tuple[tuple[str, ...], int]:
            devices = tuple(sorted(processes.types[rank] for rank in ranks))
            return devices, len({processes.infos[rank].node for rank in ranks})

        def missing(profile: Profile) -> list[tuple[int, ...]]:
            known = {(entry.devices, entry.num_nodes) for entry in profile.collectives}
            return [ranks for ranks in wholes if key(ranks) not in known]

        def run(profile: Profile, tell: Told) -> Profile | None:
            found: list[CollectiveTimes] = []
            for ranks in wholes if self._job.again else missing(profile):
                group = cast(dist.ProcessGroup, dist.new_group(list(ranks)))
                if processes.rank in ranks:
                    devices, num_nodes = key(ranks)
                    times = measure_collectives(
                        group,
                        processes.device,
                        devices=devices,
                        num_nodes=num_nodes,
                        repeats=self._job.repeats,
                        source=self._source,
                        sizes=self._sizes(COLLECTIVE_SIZES),
                    )
                    if processes.rank == ranks[0]:
                        found += times
                    dist.destroy_process_group(group)
            return self._profile(collectives=tuple(found)) if found else None

        return Task(COLLECTIVES, lambda profile: not missing(profile), run)

    def largest_batch(self) -> Task:
        """The most rows of the whole model under each ZeRO stage."""
        job, size, recompute = self._job, self._processes.size, self._job.recompute_of_batches

        def is_known(profile: Profile) -> bool:
            return set(self._processes.types) <= {
                entry.device
                for entry in profile.largest_batches
                if entry.recompute == recompute and entry.num_ranks == (size if entry.zero else 1)
            }

        def run(profile: Profile, tell: Told) -> Profile:
            found = search_stages(
                job,
                self._processes,
                self._memory,
                recompute=recompute,
                kept_bytes=LayerTimeModel(profile, job.workload).kept_bytes,
                stages=job.stages,
                told=lambda zero, tried, fitted: tell(_describe_round(zero, tried, fitted)),
            )
            pairs: list[tuple[str, list[StageResult]]] = self._processes.gather((self._processes.type, found))
            return self._profile(largest_batches=make_entries(pairs, recompute, self._source))

        return Task(LARGEST_BATCH, is_known, run)

    def overheads(self, memory: CudaMemory) -> Task:
        """What CUDA and the allocator take beside tensors."""

        def run(profile: Profile, tell: Told) -> Profile | None:
            found = self._processes.gather((memory.context_bytes(), memory.allocator_share))
            overheads = Overheads(
                context_bytes=max(context for context, _ in found),
                allocator_share=max(share for _, share in found),
                source=self._source,
            )
            return self._profile(overheads=overheads)

        return Task("CUDA context", lambda profile: profile.overheads.context_bytes > 0, run)

    def program(self) -> Task:
        """What the program itself takes for each action."""
        job, processes = self._job, self._processes

        def run(profile: Profile, tell: Told) -> Profile | None:
            if not job.typical.follows_itself:
                return None
            bench = ProgramBench(job, job.typical, processes, self._memory, between_steps=job.between_steps)
            if min(processes.gather(self._memory.limit_bytes)) < bench.least_bytes:
                return None
            found = bench.measure(self._source)
            self._memory.release()
            return self._profile(overheads=found)

        return Task(PROGRAM, lambda profile: bool(profile.overheads.action_s), run)


def _describe_round(zero: int, tried: Sequence[int | None], fitted: Sequence[bool]) -> str:
    """`ZeRO 2, rows 4 and 8 (no)`."""
    rounds = zip(tried, fitted, strict=True)
    told = [f"{rows}{'' if fits else ' (no)'}" for rows, fits in rounds if rows is not None]
    return f"ZeRO {zero}, rows {', '.join(told)}"
