"""Jobs of one question each: does anything grow, what does a switch cost, who goes on when links are cut."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..report import Figure
from .faults import make_plan
from .injection import Fault
from .jobs import Job, JobFailedError, Outcome, run, run_alone
from .matrix import percentile
from .partition import two_nodes

CUT_S = 20.0
"""For how long links are cut."""
_PATIENT_S = 60.0
"""A silence limit beyond that."""
_MAY_GROW = {"files": 2, "threads": 2, "resident_mib": 16}
"""From the first tenth of many recoveries to the last."""


def run_cycles(count: int) -> dict[str, Any]:
    """One job in which a rank is killed and replaced so often; what is open in who saw most generations."""
    plan, num_layers = make_plan(random.Random(1), (2, 1), offload=False)
    faults = tuple(Fault(2 + 3 * i, 1, "kill", (i % 10) / 10) for i in range(count))
    # That a process has been killed is certain at once: nobody is given up for being slow.
    job = Job(plan, num_layers, 5 + 3 * count, faults, replaces=True, silence_s=30.0)
    outcome = run(job)
    eldest = max(outcome.reports, key=lambda report: len(report.usage))
    usage = eldest.usage
    columns = dict(zip(_MAY_GROW, zip(*usage, strict=True), strict=True))
    return {
        "count": len(outcome.happened),
        "generations": len(usage),
        "steps_lost": max(report.num_lost for report in outcome.reports),
        "largest_error": outcome.find_error(run_alone(job)),
        "recoveries_s": [seconds for seconds in outcome.recoveries() if seconds is not None],
        **{name: list(column) for name, column in columns.items()},
        "grown": {name: _find_growth(column) for name, column in columns.items()},
    }


def _find_growth(column: Sequence[int]) -> float:
    """From the first tenth, but for the first few, to the last."""
    tenth = max(1, len(column) // 10)
    first = column[min(3, len(column) - 1) :][:tenth]
    return statistics.median(column[-tenth:]) - statistics.median(first)


def describe_cycles(found: dict[str, Any]) -> list[Figure]:
    grown, times = found["grown"], found["recoveries_s"]
    return [
        Figure("cycles", found["count"], 100),
        Figure("cycles_steps_lost", found["steps_lost"], 0, at_most=True),
        Figure("cycles_recovery_median_s", statistics.median(times), note=f"of {len(times)}"),
        Figure("cycles_recovery_p95_s", percentile(times, 0.95)),
        *(
            Figure(f"cycles_{name}_grown", grown[name], limit, at_most=True, note=_show_ends(found[name]))
            for name, limit in _MAY_GROW.items()
        ),
    ]


def _show_ends(column: Sequence[int]) -> str:
    return f"{column[min(3, len(column) - 1)]} at the start, {column[-1]} at the end"


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
    return {
        "pauses_s": [seconds for reason, seconds in outcome.pauses() if reason == "change"],
        "largest_error": outcome.find_error(run_alone(job)),
    }


def describe_switches(found: dict[str, Any]) -> list[Figure]:
    pauses = found["pauses_s"]
    return [
        Figure("switches", len(pauses)),
        Figure("switch_pause_median_s", statistics.median(pauses)),
        Figure("switch_pause_largest_s", max(pauses), 1.5, at_most=True),
    ]


@dataclass(frozen=True)
class Cut:
    """What links between two nodes do, and what is promised then."""

    name: str
    first_alone: bool
    """Whether the leader is on the smaller side."""
    silence_s: float
    mends: bool
    goes_on: int
    """How many of three processes."""


def list_cuts(silence_s: float) -> list[Cut]:
    """Of three processes one is cut off from two others: for good, for 20 s with a limit of silence below
    that, and for 20 s with one beyond it."""
    return [
        Cut("for good, the leader with another one", False, silence_s, False, 2),
        Cut("for good, the leader alone", True, silence_s, False, 2),
        Cut("20 s, the leader with another one", False, silence_s, True, 2),
        Cut("20 s, the leader alone", True, silence_s, True, 2),
        Cut("20 s, which is not called silence", False, _PATIENT_S, True, 3),
    ]


def run_cut(cut: Cut) -> dict[str, Any]:
    """One job of three processes on two nodes.

    Raises:
        JobFailedError: Others go on than is promised.
    """
    plan, num_layers = make_plan(random.Random(3), (2, 1), offload=False)
    fault = Fault(3, 0, "cut", mends_s=CUT_S if cut.mends else None)
    job = Job(plan, num_layers, 8, (fault,), silence_s=cut.silence_s, first_alone=cut.first_alone)
    with two_nodes() as hosts:
        job = replace(job, hosts=hosts)
        outcome = run(job)
    error = outcome.find_error(run_alone(job))
    went_on = sum(step == job.num_steps - 1 for diary in outcome.diaries for step, _, _ in diary.losses)
    if (went_on, outcome.num_ended) != (cut.goes_on, 3 - cut.goes_on) or error > 1e-10:
        raise JobFailedError(
            f"cut {cut.name}: {went_on} went on and {outcome.num_ended} ended, {error:.1e} from the losses "
            "of the run to which nothing happens"
        )
    return {
        "went_on": went_on,
        "ended": outcome.num_ended,
        "seconds": _find_pause(outcome),
        "steps_lost": max(report.num_lost for report in outcome.reports),
        "largest_error": error,
    }


def _find_pause(outcome: Outcome) -> float:
    """The longest time from one step to the next of who did all."""
    whole = max(outcome.diaries, key=lambda diary: len(diary.losses))
    times = [at_s for _, at_s, _ in whole.losses]
    return max(b - a for a, b in pairwise(times))


def run_partitions(silence_s: float) -> dict[str, Any]:
    """Every cut, by its name."""
    found = {}
    for cut in list_cuts(silence_s):
        found[cut.name] = run_cut(cut)
        print(f"cut {cut.name}: {found[cut.name]}", flush=True)
    return found


def describe_partitions(found: dict[str, Any]) -> list[Figure]:
    return [
        Figure("partitions", len(found), note="in each as many went on and ended as is promised"),
        Figure("partition_steps_lost", max(each["steps_lost"] for each in found.values()), 0, at_most=True),
        *(Figure(f"cut {name}", each["seconds"], note=_say_sides(each)) for name, each in found.items()),
    ]


def _say_sides(each: dict[str, Any]) -> str:
    return f"s without a step; {each['went_on']} went on, {each['ended']} ended"
