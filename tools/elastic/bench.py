"""Kills, stops and fails ranks of elastic jobs in every phase of steps and recoveries, and says how they went
on.

python -m tools.elastic.bench --faults 500 --json elastic.json   # the matrix of phases, kinds and ranks
python -m tools.elastic.bench --faults 20 --phases form fill     # some of it
python -m tools.elastic.bench --cycles 100      # one job, whose lost ranks are replaced each time
python -m tools.elastic.bench --switches 6      # planned changes of plan
python -m tools.elastic.bench --partitions      # two nodes in network namespaces, whose link is cut
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .faults import RECOVERY_PHASES, STEP_PHASES, Cell, deal_cells, make_matrix_job, make_plan
from .injection import Fault, Phase
from .jobs import Job, JobFailedError, Outcome, run, run_alone
from .partition import two_nodes

_CELLS_A_JOB = 6
_EXACT, _IN_BF16 = 1e-10, 0.1
"""How far a loss may be from that of the run to which nothing happens. (In bf16 another plan rounds
otherwise, from a state that is the same in every bit.)"""


@dataclass
class Found:
    """What jobs came to."""

    asked: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    """By phase and kind."""
    recoveries_s: list[float] = field(default_factory=list)
    stopped_s: list[float] = field(default_factory=list)
    """Recoveries from SIGSTOP: with the silence limit."""
    left_s: list[float] = field(default_factory=list)
    """Until the others go on after one was told to leave."""
    retries: int = 0
    steps_lost: int = 0
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
            self.happened[f"{job.faults[number].phase} {kind}"] += 1
            if seconds is not None and kind not in ("pause",):
                self._times_of(kind).append(seconds)
        self.retries += max((report.num_retries for report in outcome.reports), default=0)
        self.steps_lost += max((report.num_lost for report in outcome.reports), default=0)
        self.same_states += outcome.check_states()
        self.cpu_s += outcome.cpu_s
        losses = outcome.losses
        missing = [step for step in range(job.num_steps) if step not in losses]
        if missing:
            raise JobFailedError(f"nobody has seen the losses of steps {missing}")
        error = max(abs(losses[step] - loss) for step, loss in enumerate(expected))
        if job.param_dtype is None:
            self.largest_error = max(self.largest_error, error)
        else:
            self.largest_error_in_bf16 = max(self.largest_error_in_bf16, error)
        if error > (_EXACT if job.param_dtype is None else _IN_BF16):
            raise JobFailedError(f"losses are {error:.2e} from those of the run to which nothing happens")

    def _times_of(self, kind: str) -> list[float]:
        match kind:
            case "stop":
                return self.stopped_s
            case "term" | "leave":
                return self.left_s
        return self.recoveries_s

    def to_json(self) -> dict[str, Any]:
        return {
            "faults": sum(self.happened.values()),
            "retries": self.retries,
            "hangs": sum("had not moved" in text for text in self.failed),
            "failed_jobs": self.failed,
            "steps_lost": self.steps_lost,
            "recovery_median_s": percentile(self.recoveries_s, 0.5),
            "recovery_p95_s": percentile(self.recoveries_s, 0.95),
            "recovery_after_silence_median_s": percentile(self.stopped_s, 0.5),
            "departure_median_s": percentile(self.left_s, 0.5),
            "states_equal_in_every_bit": self.same_states,
            "largest_error_of_loss": self.largest_error,
            "largest_error_of_loss_in_bf16": self.largest_error_in_bf16,
            "cells": {
                cell: f"{self.happened[cell]} of {asked}" for cell, asked in sorted(self.asked.items())
            },
            "others": {cell: n for cell, n in sorted(self.happened.items()) if cell not in self.asked},
            "cpu_s": round(self.cpu_s),
        }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that so large a share is no larger than."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def run_matrix(count: int, *, seed: int, phases: Sequence[Phase] | None, silence_s: float) -> Found:
    """Jobs until so many cells of the matrix have been asked for; prints each."""
    found = Found()
    began = time.monotonic()
    cells = list(deal_cells(count, seed, phases))
    for number, own in enumerate(_cut(cells, _CELLS_A_JOB)):
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


def run_cycles(count: int) -> dict[str, Any]:
    """One job in which a rank is killed and replaced so often; what is open in who saw most generations."""
    plan, num_layers = make_plan(random.Random(1), (2, 1), offload=False)
    faults = tuple(Fault(2 + 3 * i, 1, "kill", (i % 10) / 10) for i in range(count))
    # That a process has been killed is certain at once: nobody is given up for being slow.
    job = Job(plan, num_layers, 5 + 3 * count, faults, replaces=True, silence_s=30.0)
    outcome = run(job)
    eldest = max(outcome.reports, key=lambda report: len(report.usage))
    usage = eldest.usage
    return {
        "cycles": len(outcome.happened),
        "eldest_member": eldest.member,
        "generations": len(usage),
        "files": [entry[0] for entry in usage],
        "threads": [entry[1] for entry in usage],
        "resident_mib": [entry[2] for entry in usage],
    }


def run_switches(count: int) -> dict[str, Any]:
    """One job that goes over to another plan so often; how much longer those steps took."""
    rng = random.Random(2)
    plan, num_layers = make_plan(rng, (2, 1), offload=False)
    plans = []
    for i in range(count):
        other, layers = make_plan(rng, ((1, 2), (3,), (1, 1, 1))[i % 3], offload=False)
        while layers != num_layers:
            other, layers = make_plan(rng, ((1, 2), (3,))[i % 2], offload=False)
        plans.append((4 + 8 * i, other))
    job = Job(plan, num_layers, 8 + 8 * count, plans=tuple(plans))
    outcome = run(job)
    expected = run_alone(job)
    finished = outcome.reports[0].finished
    took = [(b[1] - a[1], a[2] != b[2]) for a, b in pairwise(finished)]
    usual = statistics.median(seconds for seconds, changes in took if not changes)
    pauses = [seconds - usual for seconds, changes in took if changes]
    return {
        "switches": len(pauses),
        "pause_median_s": statistics.median(pauses) if pauses else None,
        "pause_largest_s": max(pauses, default=None),
        "step_median_s": usual,
        "largest_error_of_loss": max(abs(outcome.losses[i] - loss) for i, loss in enumerate(expected)),
    }


def run_partitions(silence_s: float) -> dict[str, Any]:
    """Jobs of three processes on two nodes, whose link is cut: who goes on, and who says that it ends."""
    found = {}
    for first_alone in (False, True):
        plan, num_layers = make_plan(random.Random(3), (2, 1), offload=False)
        fault = Fault(3, 0, "cut")
        job = Job(plan, num_layers, 8, (fault,), silence_s=silence_s, first_alone=first_alone)
        with two_nodes() as hosts:
            job = replace(job, hosts=hosts)
            outcome = run(job)
        error = max(abs(outcome.losses[i] - loss) for i, loss in enumerate(run_alone(job)))
        name = "the leader is on the smaller side" if first_alone else "the leader is on the larger side"
        found[name] = {
            "went_on": sum(max(report.losses) == job.num_steps - 1 for report in outcome.reports),
            "ended": outcome.num_ended,
            "seconds": outcome.recoveries(),
            "steps_lost": max(report.num_lost for report in outcome.reports),
            "largest_error_of_loss": error,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=(*STEP_PHASES, *RECOVERY_PHASES))
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--switches", type=int, default=0)
    parser.add_argument("--partitions", action="store_true", help="needs root")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--silence", type=float, default=4.0, help="seconds after which a rank is given up")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, result, has_failed = time.monotonic(), {}, False
    if chosen.faults:
        found = run_matrix(chosen.faults, seed=chosen.seed, phases=chosen.phases, silence_s=chosen.silence)
        result |= found.to_json()
        has_failed = bool(found.failed)
    if chosen.cycles:
        result |= {"cycles": run_cycles(chosen.cycles)}
    if chosen.switches:
        result |= {"switches": run_switches(chosen.switches)}
    if chosen.partitions:
        result |= {"partitions": run_partitions(chosen.silence)}
    result |= {"seconds": round(time.monotonic() - began), "load": os.getloadavg()}
    print(json.dumps(result, indent=2))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
