"""Real faults over the whole matrix of ranks, phases and kinds, job after job, and what they came to."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report import Figure
from .faults import Cell, deal_cells, list_cells, make_matrix_job
from .injection import Phase
from .jobs import Job, JobFailedError, Outcome, run, run_alone

_CELLS_A_JOB = 6
_EXACT, _IN_BF16 = 1e-10, 0.1
"""How far a loss may be from that of the run to which nothing happens. (In bf16 another plan rounds
otherwise, from a state that is the same in every bit.)"""


@dataclass
class Found:
    """What jobs came to. JSON and back, so that pieces of a long run can be counted together."""

    asked: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    """By phase and kind."""
    cells: Counter[str] = field(default_factory=Counter)
    """By phase, kind and rank: what happened of what was asked for."""
    settings: Counter[str] = field(default_factory=Counter)
    """Jobs in which these were: ZeRO stages, offloading, tied weights, bf16, deferred updates."""
    recoveries_s: list[float] = field(default_factory=list)
    """From the end of a process, or its exception."""
    stopped_s: list[float] = field(default_factory=list)
    """From SIGSTOP: with the silence limit."""
    departures_s: list[float] = field(default_factory=list)
    """Pauses when somebody leaves as it was told to."""
    arrivals_s: list[float] = field(default_factory=list)
    formed_s: list[float] = field(default_factory=list)
    """Groups and pipelines of a generation."""
    num_jobs: int = 0
    steps: int = 0
    retries: int = 0
    failed_starts: int = 0
    """Generations that began to be formed and never ran, those that a fault was aimed at among them; of the
    process that saw most of them, in each job."""
    steps_lost: int = 0
    woken: int = 0
    """Processes that stood still, were gone on without, woke, and ended."""
    same_states: int = 0
    """Generations that began with a state equal in every bit to that of another plan before."""
    largest_error: float = 0.0
    largest_error_in_bf16: float = 0.0
    failed: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, job: Job, outcome: Outcome, expected: Sequence[float]) -> None:
        """Takes in a job that has ended.

        Raises:
            JobFailedError: It trained otherwise than the run to which nothing happens.
        """
        for seconds, (_, _, kind, number) in zip(outcome.recoveries(), outcome.happened, strict=True):
            fault = job.faults[number]
            self.happened[f"{fault.phase} {kind}"] += 1
            self.cells[f"{fault.phase} {kind} {fault.rank % job.plan.num_ranks}"] += 1
            if seconds is not None and kind in ("kill", "exit", "raise"):
                self.recoveries_s.append(seconds)
            if seconds is not None and kind == "stop":
                self.stopped_s.append(seconds)
        for reason, seconds in outcome.pauses():
            match reason:
                case "notice":
                    self.departures_s.append(seconds)
                case "arrival":
                    self.arrivals_s.append(seconds)
        self.formed_s += outcome.formed_s()
        self.settings.update(list_settings(job))
        self.num_jobs += 1
        self.steps += job.num_steps
        self.retries += len(outcome.retries(job.faults))
        self.failed_starts += max(report.num_retries for report in outcome.reports)
        self.steps_lost += max(report.num_lost for report in outcome.reports)
        self.woken += len(outcome.woken)
        self.same_states += outcome.check_states()
        self.cpu_s += outcome.cpu_s
        error = outcome.find_error(expected)
        if job.param_dtype is None:
            self.largest_error = max(self.largest_error, error)
        else:
            self.largest_error_in_bf16 = max(self.largest_error_in_bf16, error)
        if error > (_EXACT if job.param_dtype is None else _IN_BF16):
            raise JobFailedError(f"losses are {error:.2e} from those of the run to which nothing happens")

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Found:
        """Of `to_json`."""
        counters = {name: Counter(table[name]) for name in ("asked", "happened", "cells", "settings")}
        return cls(**{**table, **counters})

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def merge(self, other: Found) -> Found:
        """Both together."""
        largest = ("largest_error", "largest_error_in_bf16")
        both = {
            name: max(own, getattr(other, name)) if name in largest else own + getattr(other, name)
            for name, own in vars(self).items()
        }
        return Found(**both)

    def figures(self) -> list[Figure]:
        """Under the names of the issue that asked for them, beside its targets."""
        hangs = sum("had not moved" in text for text in self.failed)
        dealt = {f"{phase} {kind} {rank}" for phase, kind, rank in list_cells()}
        return [
            Figure("faults", sum(self.happened.values()), 500),
            Figure("cells", len(dealt & self.cells.keys()), None, note=f"of {len(dealt)} of the matrix"),
            Figure("retries", self.retries, 0, at_most=True),
            Figure("hangs", hangs, 0, at_most=True),
            Figure("failed_jobs", len(self.failed), 0, at_most=True, note=f"of {self.num_jobs}"),
            Figure("steps_lost", self.steps_lost, 0, at_most=True, note=f"of {self.steps}, k = 1"),
            Figure("largest_error", self.largest_error / 1e-10, 1, at_most=True, note="of a loss, in 1e-10"),
            Figure("largest_error_in_bf16", self.largest_error_in_bf16),
            Figure("same_states", self.same_states, note="generations that began bit-equal"),
            Figure("woken", self.woken, note="stood still, were gone on without, woke and ended"),
            *_quantiles("recovery", self.recoveries_s, 1.5, 5.0),
            *_quantiles("recovery_after_silence", self.stopped_s),
            *_quantiles("departure_pause", self.departures_s, None, 1.5),
            *_quantiles("arrival_pause", self.arrivals_s, None, 1.5),
            *_quantiles("form", self.formed_s, None, 1.0),
        ]

    def describe(self) -> str:
        """What happened where, as text."""
        lines = [
            f"{cell:16} {self.happened[cell]:4} of {asked}" for cell, asked in sorted(self.asked.items())
        ]
        others = {cell: n for cell, n in sorted(self.happened.items()) if cell not in self.asked}
        lines += [f"{cell:16} {n:4} beside these" for cell, n in others.items()]
        lines += [", ".join(f"{name} in {n}" for name, n in sorted(self.settings.items())) + " jobs"]
        return "\n".join([*lines, *self.failed])


def _quantiles(
    name: str, values: Sequence[float], median: float | None = None, p95: float | None = None
) -> list[Figure]:
    if not values:
        return []
    return [
        Figure(f"{name}_median_s", percentile(values, 0.5), median, at_most=True, note=f"of {len(values)}"),
        Figure(f"{name}_p95_s", percentile(values, 0.95), p95, at_most=True),
        Figure(f"{name}_largest_s", max(values)),
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share is no larger than."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def list_settings(job: Job) -> list[str]:
    """What of the matrix of plans a job has."""
    groups = job.plan.groups
    found = [f"ZeRO {zero}" for zero in sorted({group.zero for group in groups})]
    found += [f"offload {kind}" for kind in sorted({kind for group in groups for kind in group.offload})]
    found += ["ties"] * job.tied + ["bf16"] * (job.param_dtype is not None)
    return [*found, "early updates" if job.max_norm is None else "deferred updates"]


def run_matrix(
    count: int,
    *,
    seed: int,
    phases: Sequence[Phase] | None,
    silence_s: float,
    part: tuple[int, int] = (1, 1),
) -> Found:
    """Jobs until so many cells of the matrix have been asked for, or, of these jobs, the i-th of n parts;
    prints each."""
    found = Found()
    began = time.monotonic()
    jobs = list(enumerate(_cut(list(deal_cells(count, seed, phases)), _CELLS_A_JOB)))
    first, last = ((len(jobs) * (part[0] - 1 + i)) // part[1] for i in range(2))
    for number, own in jobs[first:last]:
        job = make_matrix_job(1000 * seed + number, own, silence_s=silence_s)
        found.asked.update(f"{phase} {kind}" for phase, kind, _ in own)
        what = ", ".join(f"{phase} {kind} {rank}" for phase, kind, rank in own)
        try:
            outcome = run(job)
            found.add(job, outcome, run_alone(job))
            times = " ".join("-" if s is None else f"{s:.2f}" for s in outcome.recoveries())
            print(f"job {job.seed} ({what}): gone on after {times} s; ", end="")
        except JobFailedError as error:
            found.failed.append(f"job {job.seed} ({what}): {str(error)[:300]}")
            print(f"job {job.seed} ({what}) FAILED: {error}", file=sys.stderr)
            print(f"job {job.seed} ({what}) FAILED: {str(error)[:300]}; ", end="")
        print(
            f"{sum(found.happened.values())} faults, {len(found.failed)} failed, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    return found


def _cut(cells: Sequence[Cell], size: int) -> list[Sequence[Cell]]:
    return [cells[i : i + size] for i in range(0, len(cells), size)]
