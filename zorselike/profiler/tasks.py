"""What is measured, one thing after the other, and kept after each: so a profile can be continued."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Overheads, Profile, Source
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import Workload
from zorselike.profiler.largest_batch.search import StageResult, StepJob, make_entries, search_stages
from zorselike.profiler.layers.in_step import LayersInStep
from zorselike.profiler.layers.probes import LayerProbe, ModelFactory
from zorselike.profiler.layers.row_search import TrialResult
from zorselike.profiler.layers.timing import LayerBench, measure_layer
from zorselike.profiler.machine.collective_timing import SIZES as COLLECTIVE_SIZES
from zorselike.profiler.machine.collective_timing import measure_collectives
from zorselike.profiler.machine.device_memory import CudaMemory, DeviceMemory
from zorselike.profiler.machine.host_link_timing import measure_host_link
from zorselike.profiler.machine.link_pairs import Pair, choose_pairs
from zorselike.profiler.machine.link_timing import SIZES as LINK_SIZES
from zorselike.profiler.machine.link_timing import measure_links
from zorselike.profiler.program.timing import BetweenSteps, ProgramBench, no_work
from zorselike.profiler.program.update_timing import measure_update
from zorselike.runtime.loss import LossFn
from zorselike.runtime.processes.processes import Processes

Part = Literal["layers", "update", "host_link", "links", "collectives", "largest_batch", "program"]

LARGEST_BATCH = "largest batch"
COLLECTIVES = "collectives"
PROGRAM = "the program itself"
"""Names of tasks."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be measured."""

    workload: Workload
    build: ModelFactory
    num_tokens: int
    """Token ids are below it."""
    probes: tuple[LayerProbe, ...]
    recompute: tuple[Recompute, ...]
    loss_fn: LossFn
    most_rows: int
    repeats: int
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
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.workload.dtype)
        return found


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
        tasks += [measurer.layer(probe, setting) for probe, setting in _settings(job)]
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


class Progress(Protocol):
    """A bar: `tqdm`, or nothing."""

    def update(self, n: int) -> object: ...
    def set_description_str(self, desc: str) -> object: ...


def run_tasks(
    tasks: Sequence[Task], profile: Profile, processes: Processes, path: Path, progress: Progress
) -> Profile:
    """The profile with what each task found; saved by rank 0 after each. The same on every rank.

    Raises:
        ClusterError: On all ranks, naming the one that failed.
    """
    for task in tasks:
        progress.set_description_str(task.name)

        def tell(text: str, name: str = task.name) -> None:
            progress.set_description_str(f"{name}: {text}")

        found = processes.gather_or_raise(partial(task.run, profile, tell))
        profile = reduce(Profile.merge, (each for each in found if each is not None), profile)
        save_once(processes, profile, path)
        progress.update(1)
    return profile


def save_once(processes: Processes, content: Profile | Cluster, path: Path) -> None:
    """Rank 0 writes the file; where it cannot, all ranks raise `ClusterError`. Collective."""
    processes.gather_or_raise(lambda: content.save(path) if processes.rank == 0 else None)


def describe_source(processes: Processes) -> Source:
    """Measured here and today."""
    date = datetime.date.today().isoformat()
    return Source("measured", date, f"zorselike profile on {processes.node}, torch {torch.__version__}")


def devices_by_node(processes: Processes) -> dict[str, list[str]]:
    """The device types of each node, one a rank."""
    return {node: [processes.types[rank] for rank in ranks] for node, ranks in processes.nodes.items()}


def _settings(job: Job) -> list[tuple[LayerProbe, Recompute]]:
    """Recomputation makes a difference only to numbered layers."""
    return [
        (probe, setting)
        for probe in job.probes
        for setting in (job.recompute if probe.is_numbered else ("none",))
    ]


class _Measurer:
    """Makes the tasks of one job on one rank."""

    def __init__(self, job: Job, processes: Processes, memory: DeviceMemory) -> None:
        self._job = job
        self._processes = processes
        self._memory = memory
        self._source = describe_source(processes)
        self._is_cpu = processes.device.type == "cpu"
        self._represents_type = processes.represents(of=lambda rank: processes.types[rank])

    def _profile(self, **entries: tuple[object, ...]) -> Profile:
        workload = self._job.workload
        return Profile(model=workload.model, workload_fingerprint=workload.fingerprint, **entries)  # type: ignore[arg-type]

    @property
    def _types(self) -> set[str]:
        return set(self._processes.types)

    def _measures(self, known: set[str]) -> bool:
        """Whether this rank measures for its type of device, given those that are known."""
        return self._represents_type and self._is_wanted(known)

    def _is_wanted(self, known: set[str]) -> bool:
        return self._job.again or self._processes.type not in known

    def _sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those that are not too large; two at least, for a latency and a rate."""
        fitting = tuple(size for size in sizes if size <= self._job.largest_message_bytes)
        return max(fitting, tuple(sizes[:2]), key=len)

    def layer(self, probe: LayerProbe, setting: Recompute) -> Task:
        """A kind of layer on every type of device."""
        workload, job = self._job.workload, self._job

        def known(profile: Profile) -> set[str]:
            return {
                times.device
                for times in profile.layers
                if (times.kind, times.dtype, times.sequence_length, times.recompute, times.tensor_parallel)
                == (probe.kind, workload.dtype, workload.sequence_length, setting, 1)
            }

        def run(profile: Profile, tell: Told) -> Profile | None:
            # Ranks that compute on the same processors do so together, as in a step; one of them tells.
            takes_part = self._is_wanted if self._is_cpu else self._measures
            if not takes_part(known(profile)):
                return None
            bench = LayerBench(
                job.build,
                probe,
                dtype=job.dtype,
                device=self._processes.device,
                memory=self._memory,
                recompute=setting,
                loss_fn=job.loss_fn,
                num_tokens=job.num_tokens,
            )
            in_step: LayersInStep | None = None

            def time_in_step(rows: int, alone: TrialResult) -> tuple[float, float] | None:
                nonlocal in_step
                if not self._is_cpu or not LayersInStep.matters(alone):
                    return None
                if in_step is None:
                    in_step = self._layers_in_step(probe, setting)
                return in_step.time(rows, repeats=job.repeats)

            times: LayerTimes | None = measure_layer(
                bench,
                kind=probe.kind,
                device=self._processes.type,
                dtype=workload.dtype,
                sequence_length=workload.sequence_length,
                recompute=setting,
                most_rows=job.most_rows,
                repeats=job.repeats,
                source=self._source,
                time_in_step=time_in_step,
                told=lambda rows, result: tell(f"{rows} rows {'done' if result.fits else 'do not fit'}"),
            )
            if times is None or not self._represents_type:
                return None
            return self._profile(layers=(times,))

        name = f"{probe.kind}, recompute {setting}" if probe.is_numbered else probe.kind
        return Task(name, lambda profile: self._types <= known(profile), run)

    def _layers_in_step(self, probe: LayerProbe, setting: Recompute) -> LayersInStep:
        job = self._job
        return LayersInStep(
            job.build,
            probe,
            dtype=job.dtype,
            device=self._processes.device,
            alone=self._processes.alone,
            recompute=setting,
            loss_fn=job.loss_fn,
            num_tokens=job.num_tokens,
        )

    def update(self) -> Task:
        """The optimizer on every type of device."""

        def known(profile: Profile) -> set[str]:
            dtype = self._job.workload.dtype
            return {entry.device for entry in profile.updates if entry.dtype == dtype}

        def run(profile: Profile, tell: Told) -> Profile | None:
            if not self._measures(known(profile)):
                return None
            found = measure_update(
                self._processes.device,
                type=self._processes.type,
                dtype=self._job.dtype,
                repeats=self._job.repeats,
                source=self._source,
            )
            self._memory.release()
            return self._profile(updates=(found,))

        return Task("optimizer update", lambda profile: self._types <= known(profile), run)

    def host_link(self) -> Task:
        """Copies between device and host on every type of device."""

        def known(profile: Profile) -> set[str]:
            return {entry.device for entry in profile.host_links}

        def run(profile: Profile, tell: Told) -> Profile | None:
            if not self._measures(known(profile)):
                return None
            found = measure_host_link(
                self._processes.device,
                type=self._processes.type,
                repeats=self._job.repeats,
                source=self._source,
            )
            self._memory.release()
            return self._profile(host_links=(found,))

        return Task("host link", lambda profile: self._types <= known(profile), run)

    def links(self) -> Task:
        """Messages between one pair of nodes of each two types, and inside one node of each type."""
        pairs: list[Pair] = list(choose_pairs(devices_by_node(self._processes)))

        def missing(profile: Profile) -> list[Pair]:
            known = {entry.between for entry in profile.links}
            return [pair for pair in pairs if pair not in known]

        def run(profile: Profile, tell: Told) -> Profile | None:
            found = measure_links(
                pairs if self._job.again else missing(profile),
                self._processes.nodes,
                rank=self._processes.rank,
                group=self._processes.everyone,
                device=self._processes.device,
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
            found = None
            for ranks in wholes if self._job.again else missing(profile):
                group = dist.new_group(list(ranks))
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
                        one = self._profile(collectives=times)
                        found = one if found is None else found.merge(one)
                    dist.destroy_process_group(group)
            return found

        return Task(COLLECTIVES, lambda profile: not missing(profile), run)

    def largest_batch(self) -> Task:
        """The most rows of the whole model under each ZeRO stage."""
        job, size = self._job, self._processes.size
        recompute: Recompute = "layer" if job.recompute == ("layer",) else "none"

        def is_known(profile: Profile) -> bool:
            return self._types <= {
                entry.device
                for entry in profile.largest_batches
                if entry.recompute == recompute and entry.num_ranks == (size if entry.zero else 1)
            }

        def run(profile: Profile, tell: Told) -> Profile:
            step = StepJob(
                build=job.build,
                workload=job.workload,
                recompute=recompute,
                loss_fn=job.loss_fn,
                most_rows=job.most_rows,
                kept_bytes=LayerTimeModel(profile, job.workload).kept_bytes,
            )
            found = search_stages(
                step,
                self._processes,
                self._memory,
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
            return replace(self._profile(), overheads=overheads)

        return Task("CUDA context", lambda profile: profile.overheads.context_bytes > 0, run)

    def program(self) -> Task:
        """What the program itself takes for each action."""
        job, processes = self._job, self._processes
        probe = max(job.probes, key=lambda probe: probe.num_instances)

        def run(profile: Profile, tell: Told) -> Profile | None:
            if not probe.follows_itself:
                return None
            bench = ProgramBench(
                job.build,
                probe,
                processes,
                dtype=job.dtype,
                repeats=job.repeats,
                between_steps=job.between_steps,
            )
            if min(processes.gather(self._memory.limit_bytes)) < bench.least_bytes:
                return None
            found = bench.measure(self._source)
            self._memory.release()
            return replace(self._profile(), overheads=found)

        return Task(PROGRAM, lambda profile: bool(profile.overheads.action_s), run)


def _describe_round(zero: int, tried: Sequence[int | None], fitted: Sequence[bool]) -> str:
    """`ZeRO 2, rows 4 and 8 (no)`."""
    told = [
        f"{rows}{'' if fits else ' (no)'}"
        for rows, fits in zip(tried, fitted, strict=True)
        if rows is not None
    ]
    return f"ZeRO {zero}, rows {', '.join(told)}"
