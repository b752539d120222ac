"""One random question, the planner's answer and what is wrong with it."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from zorselike.planner.answer import NothingFitsError, PlanAnswer
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans

from .clusters import WIDE, Limits
from .fitting import count_tries, find_fit
from .problems import Drawn, draw_problem, name_cluster
from .verdict import LIMITED, find_faults

T = TypeVar("T")
CHUNK = 4
"""Seeds that a process takes at a time."""
REPEATED = 10
"""One in so many searches, if it ends by itself, is made twice and must find the same."""
TOP = 2
"""Plans of each answer that are examined."""


class _Watch:
    """Times one search."""

    def __init__(self) -> None:
        self._begin_s, self._begin_cpu_s = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {
            "search_s": time.perf_counter() - self._begin_s,
            "search_cpu_s": time.process_time() - self._begin_cpu_s,
        }


class TooSlowError(Exception):
    """A search worked on long after its budget."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one seed."""

    seed: int
    what: str
    """The question, for people."""
    num_devices: int
    outcome: str
    """`planned`, `nothing fits` or `failed`."""
    faults: tuple[str, ...] = ()
    nothing_is_proven: bool | None = None
    """Whether all plans were tried where nothing fits; None for other outcomes."""
    share_of_ideal: float | None = None
    gap: float | None = None
    """Gap to the bound of all devices that may be used."""
    share_used: float | None = None
    """The plan's share of the devices that may be used."""
    causes: tuple[str, ...] = ()
    """Causes that the plan itself names."""
    ending: str = ""
    num_simulated: int = 0
    degree: int = 1
    """The largest tensor-parallel degree of the plan."""
    search_s: float = 0.0
    search_cpu_s: float = 0.0
    """Processor seconds of the search."""
    examine_s: float = 0.0


def try_seed(
    seed: int,
    *,
    budget_s: float,
    limits: Limits = WIDE,
    most_tries: int = 20_000,
    timeout_s: float = 120.0,
) -> Trial:
    """Draws, searches and examines.

    Args:
        seed: of the question.
        budget_s: of the search.
        limits: of the cluster.
        most_tries: where nothing fits and there are so many plans at most, all are tried.
        timeout_s: of the processor, after which a search counts as hung.
    """
    drawn = draw_problem(seed, limits)
    problem = drawn.problem
    about: dict[str, Any] = {
        "seed": seed,
        "what": describe(problem),
        "num_devices": problem.cluster.num_devices,
    }
    watch = _Watch()
    try:
        with _alarm(timeout_s):
            answer = search_plans(problem, budget_s=budget_s, top=TOP)
        about |= watch.read()
        faults = find_faults(problem, answer)
        if seed % REPEATED == 0 and answer.ending == "finished":
            again = search_plans(problem, budget_s=budget_s, top=TOP)
            faults += _compare(answer, again)
    except NothingFitsError as error:
        return _judge_nothing(drawn, error, about | watch.read(), most_tries)
    except Exception as error:
        return Trial(**about, outcome="failed", faults=(describe_error(error),))
    examine_s = watch.read()["search_s"] - about["search_s"]
    return Trial(**about, **_measure(problem, answer), faults=tuple(faults), examine_s=examine_s)


def _compare(answer: PlanAnswer, again: PlanAnswer) -> list[str]:
    """Two searches for the same: a fault if both ended by themselves and differ."""
    first, second = (tuple(own.case.plan.fingerprint for own in each.plans) for each in (answer, again))
    if again.ending == "finished" and first != second:
        return [f"two searches of the same seed found {first} and {second}"]
    return []


def _measure(problem: PlanProblem, answer: PlanAnswer) -> dict[str, Any]:
    best = answer.best
    return {
        "outcome": "planned",
        "share_of_ideal": best.share_of_ideal,
        "gap": answer.gap,
        "share_used": best.case.plan.num_ranks / len(problem.usable),
        "causes": best.case.plan.estimates.limited_by if best.share_of_ideal < LIMITED else (),
        "ending": answer.ending,
        "num_simulated": answer.progress.num_simulated,
        "degree": max(group.degree for group in best.case.plan.groups),
    }


def _judge_nothing(drawn: Drawn, error: NothingFitsError, about: dict[str, Any], most_tries: int) -> Trial:
    """Tries all plans of a tiny question of which the planner says that nothing fits."""
    faults = [] if str(error).strip() else ["it says that nothing fits, and not what would"]
    is_proven = drawn.is_tiny and count_tries(drawn.problem) <= most_tries
    begin_s = time.perf_counter()
    if is_proven and (case := find_fit(drawn.problem)) is not None:
        faults.append(f"it says that nothing fits ({error}), and this does:\n{case.plan.explain()}")
    return Trial(
        **about,
        outcome="nothing fits",
        faults=tuple(faults),
        nothing_is_proven=is_proven,
        causes=(str(error),),
        examine_s=time.perf_counter() - begin_s,
    )


def describe_error(error: Exception) -> str:
    """An error with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__}: {error} ({place})"


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raises `TooSlowError` in the main thread after so many seconds of the processor."""

    def ring(*_: object) -> None:
        raise TooSlowError(f"not finished after {timeout_s:g} s of the processor")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def map_seeds(work: Callable[[int], T], seeds: Sequence[int], num_workers: int) -> Iterator[T]:
    """What comes of each seed, in their order, by so many processes."""
    if num_workers == 1 or len(seeds) == 1:
        yield from map(work, seeds)
        return
    with ProcessPoolExecutor(num_workers) as pool:
        yield from pool.map(work, seeds, chunksize=CHUNK)


def describe(problem: PlanProblem) -> str:
    """The question in a line."""
    wishes = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value, default in (
            ("objective", problem.objective, "throughput"),
            ("max_cost", problem.max_cost_per_iteration, float("inf")),
            ("min_throughput", problem.min_throughput, 0.0),
            ("max_devices", problem.max_devices, None),
            ("usable", None if problem.devices is None else len(problem.devices), None),
            ("spans_regions", problem.spans_regions, False),
            ("defer_updates", problem.defer_updates, False),
        )
        if value != default
    ]
    fixed = [f"{name}={value}" for name, value in vars(problem.fixed).items() if value is not None]
    workload = problem.workload
    parts = [
        name_cluster(problem.cluster),
        f"{workload.model}, {len(workload.layers)} layers, {workload.num_parameters / 1e6:.0f} M parameters, "
        f"{workload.dtype}",
        f"{problem.global_batch} rows",
        *wishes,
        *([f"fixed {' '.join(fixed)}"] if problem.fixed != Fixed() else []),
    ]
    return "; ".join(parts)
