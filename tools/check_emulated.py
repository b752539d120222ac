"""The simulator against emulated runs of the real runtime: iteration time and memory.

    python tools/check_emulated.py --json result.json     # all runs, about 22 minutes on 2 idle cores
    python tools/check_emulated.py --runs 6               # the first ones of each kind
    python tools/check_emulated.py --quick                # two steps each
    python tools/check_emulated.py --only "ZeRO 3"        # runs whose names hold that

Four kinds of runs: sleeping layers over links that are slept in the transport; layers that tensor-parallel
replicas share, likewise; sleeping layers over links that
the kernel limits (`tbf` in network namespaces; needs root); and layers that really compute, one rank a
core. What this machine itself adds is measured first, by runs that are not scored. Each run stands beside
what the simulator says of it, and four wrong models must miss.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# Before torch is imported, here and in every rank forked from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.bench.forked import RankFailedError
from tools.emulation.comparison import Comparison, Scores, compare, format_comparison, score
from tools.emulation.constants import HostConstants, measure_constants
from tools.emulation.emulation import run
from tools.emulation.model import calibrate
from tools.emulation.namespaces import NamespaceError, find_obstacle
from tools.emulation.noise import Moment, is_busy
from tools.emulation.predict import predict_emulation
from tools.emulation.scenarios import RUNS, Scenario, count_kinds, set_up
from tools.report import choose_named, describe_machine, make_parser, num_cores, positive, write_json
from zorselike.cost.profile import Profile

MAX_MEAN_ERROR = 0.05
MAX_ERROR = 0.12
MAX_MEMORY_ERROR = 0.05
MIN_MUTATION_ERROR = 0.05
IDLE_LOAD = 0.3
"""Processes a core before a run, on a machine that does nothing else."""


@dataclass
class Check:
    """Runs in progress."""

    num_steps: int
    constants: HostConstants
    comparisons: list[Comparison] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    computed: Profile | None = field(default=None, repr=False)
    """Times of computing layers, measured before the first such run."""

    def do(self, scenario: Scenario) -> None:
        """Predicts, runs, compares and prints; a run that fails is counted, and the next one follows."""
        try:
            # Steps that compute are short, and the machine's other work shows in them.
            emulation = set_up(scenario, num_steps=self.num_steps * (1 + scenario.computes))
            if scenario.computes:
                self.computed = self.computed or calibrate(emulation.workload, scenario.repeats)
                emulation = replace(emulation, profile=self.computed)
            prediction = predict_emulation(emulation, self.constants)
            before = Moment.now()
            measured = run(emulation)
            own = compare(scenario, prediction, measured, others_share=Moment.now().others_share(before))
        except (RankFailedError, NamespaceError, ValueError) as error:
            self.failures.append(f"{scenario.name}: {error}")
            print(f"{scenario.name}: FAILED, {error}", flush=True)
            return
        self.comparisons.append(own)
        print(format_comparison(own), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; the exit status says whether every target was met."""
    options = parse(arguments)
    begin_s = time.monotonic()
    notes = []
    obstacle = find_obstacle()
    if obstacle:
        notes.append(f"no limit by the kernel here ({obstacle}): those runs sleep in the transport too")
    scenarios = choose(options, kernel_works=not obstacle)
    if find_load() > IDLE_LOAD:
        notes.append(f"the machine is busy ({find_load():.1f} processes a core before the first run)")
    for note in notes:
        print(f"note: {note}")
    print(f"{count_kinds(scenarios)}; measuring what this machine adds ...", flush=True)
    constants = measure_constants()
    check = Check(2 if options.quick else 3, constants)
    for number, scenario in enumerate(scenarios, 1):
        print(f"[{number}/{len(scenarios)}, {time.monotonic() - begin_s:.0f} s] ", end="", flush=True)
        check.do(scenario)
    if not check.comparisons:
        print("no run ended")
        return 1
    scores = score(check.comparisons)
    misses = list_misses(scores, check)
    if is_busy([own.others_share for own in check.comparisons]):
        notes.append("other processes used the cores during most runs: measured times are too long")
        print(f"note: {notes[-1]}")
    print(format_scores(scores, misses))
    seconds = time.monotonic() - begin_s
    print(f"{seconds:.0f} s")
    report = {"scores": scores, "check": check, "misses": misses, "notes": notes, "seconds": seconds}
    write_json(options.json, report | {"machine": describe_machine()})
    return int(bool(misses))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=positive, metavar="N", help="that many runs at most, of all kinds")
    parser.add_argument("--quick", action="store_true", help="two timed steps each")
    parser.add_argument("--only", metavar="TEXT", help="runs whose names hold this")
    return parser.parse_args(arguments)


def choose(options: argparse.Namespace, *, kernel_works: bool) -> tuple[Scenario, ...]:
    """The runs asked for; computing ones only where each rank has a core."""
    kernel = RUNS["kernel"] if kernel_works else tuple(replace(own, limit="sleep") for own in RUNS["kernel"])
    computing = tuple(own for own in RUNS["computing"] if own.num_ranks <= num_cores())
    kinds = (RUNS["sleeping"], RUNS["replicas"], kernel, computing)
    scenarios = choose_named((own for kind in kinds for own in kind), options.only)
    if options.runs is None or options.runs >= len(scenarios):
        return tuple(scenarios)
    # Spread over all kinds.
    step = len(scenarios) / options.runs
    return tuple(scenarios[int(number * step)] for number in range(options.runs))


def find_load() -> float:
    """Processes a core that ran in the last minute."""
    return os.getloadavg()[0] / num_cores()


def list_misses(scores: Scores, check: Check) -> list[str]:
    """What is not as it should be, a line each."""
    misses = [
        f"{name} {value:.1%}, not at most {limit:.0%}"
        for name, value, limit in (
            ("time_mean_error", scores.time_mean_error, MAX_MEAN_ERROR),
            ("time_max_error", scores.time_max_error, MAX_ERROR),
            ("memory_mean_error", scores.memory_mean_error, MAX_MEMORY_ERROR),
        )
        if value > limit
    ]
    misses += [
        f"{text}: misses by {error:.1%} only, not by more than {MIN_MUTATION_ERROR:.0%}"
        for text, error in scores.mutation_errors.items()
        if error <= MIN_MUTATION_ERROR
    ]
    return misses + check.failures


def format_scores(scores: Scores, misses: Sequence[str]) -> str:
    """The figures and what they miss."""
    lines = [
        f"time_mean_error   {scores.time_mean_error:.2%}",
        f"time_max_error    {scores.time_max_error:.2%}",
        f"memory_mean_error {scores.memory_mean_error:.2%} (worst {scores.memory_max_error:.2%})",
        *(f"with {text}: {error:.1%}" for text, error in scores.mutation_errors.items()),
        *(f"MISSED: {miss}" for miss in misses),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
