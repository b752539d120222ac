"""What a stranger gets who follows README's loop on CPU ranks: estimates of plans against runs of them.

    python tools/check_loop.py                          # all cases, three rounds: about ten minutes
    python tools/check_loop.py --rounds 1 --only "ZeRO 3"

Everything by the command line, as README has it: `zorselike profile` under torchrun, `zorselike plan
--shares`, `zorselike simulate --write-estimates --defer-updates`, and a recipe that trains the plan, which
says at its end what it found. Each round measures its own profile and then runs each case once, so that
a machine that is slower today is slower in both. A case's figure is the median over rounds of estimate over
fact. Cases that `--shares` does not make (uneven rows, groups in line) are its plan with these changed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.emulation.noise import Moment, is_busy
from tools.report import make_parser, num_cores, positive, write_json
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

SEQUENCE_LENGTH = 128
NUM_STEPS = 50
LOG_FREQ = 10
MOST_ROWS = 8
TARGET = 0.10


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan of the debug Llama."""

    ministages: int = 1
    rows_per_microbatch: int = 2
    global_batch: int = 16
    zero: int = 2
    recompute: str = "none"
    rows_of_rank_0: int | None = None
    """Rows of rank 0 where shares are not equal."""
    in_line: bool = False
    """Whether each rank is a group, and rows travel from one to the next."""


CASES = {
    "1 ministage": Case(),
    "2 ministages": Case(ministages=2),
    "3 ministages": Case(ministages=3),
    "1 row a microbatch": Case(rows_per_microbatch=1),
    "4 rows a microbatch": Case(rows_per_microbatch=4, global_batch=32),
    "uneven rows": Case(rows_of_rank_0=10),
    "ZeRO 0": Case(zero=0),
    "ZeRO 1": Case(zero=1),
    "ZeRO 3": Case(zero=3),
    "recomputed": Case(recompute="layer"),
    "groups in line": Case(in_line=True),
    "groups in line, 2 ministages": Case(in_line=True, ministages=2, rows_per_microbatch=4),
}


@dataclass(frozen=True)
class Pair:
    """Seconds of a step."""

    estimated_s: float
    found_s: float
    others_share: float | None
    """Share of the cores that other processes used during the run."""

    @property
    def ratio(self) -> float:
        return self.estimated_s / self.found_s


class LoopError(RuntimeError):
    """A command of the loop failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if cases are as near as they are to be on average, 1 if not, 2 where a command failed."""
    options = parse(arguments)
    pairs: dict[str, list[Pair]] = {name: [] for name in CASES if options.only in (None, name)}
    print(f"{options.ranks} CPU ranks on {num_cores()} cores, {options.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(options.folder or folder), options.ranks)
        try:
            for turn in range(options.rounds):
                loop.profile()
                for name, own in pairs.items():
                    own.append(loop.run(CASES[name]))
                    print(f"round {turn}  {format_pair(name, own[-1])}", flush=True)
        except LoopError as error:
            print(error, file=sys.stderr)
            return 2
    print(f"\n{summarise(pairs)}")
    mean = mean_error(pairs)
    write_json(options.json, {"mean_error": mean, "cases": pairs})
    return 0 if mean <= TARGET else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument(
        "--ranks", type=positive, default=2, metavar="N", help="CPU ranks; no more than cores"
    )
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--folder", help="where files are kept; by default nowhere")
    options = parser.parse_args(arguments)
    if options.ranks > num_cores():
        parser.error(f"--ranks {options.ranks} is more than this machine's {num_cores()} cores")
    return options


# -- the loop --------------------------------------------------------------------------------


class Loop:
    """README's commands, in one folder."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._num_ranks = folder, num_ranks

    def profile(self) -> None:
        """Measures anew."""
        self._torchrun(
            "zorselike.cli",
            *("profile", "--family", "llama", "--flavor", "debug", "--dtype", "float32", "--device", "cpu"),
            *("--seq-len", SEQUENCE_LENGTH, "--most-rows", MOST_ROWS, "--recompute", "both"),
            *("--only", "layers", "update", "links", "collectives", "program", "--again"),
        )

    def run(self, case: Case) -> Pair:
        """Plans, simulates and trains one case."""
        files = ("--profile", "profile.json", "--cluster", "cluster.toml")
        self._zorselike(
            *("plan", "--shares", *files, "--global-batch", case.global_batch),
            *("--ministages", case.ministages, "--rows-per-microbatch", case.rows_per_microbatch),
            *("--zero", case.zero, "--recompute", case.recompute, "-o", "plan.toml"),
        )
        change_plan(self._folder / "plan.toml", case)
        self._zorselike("simulate", "plan.toml", *files, "--write-estimates", "--defer-updates")
        (self._folder / "recipe.toml").write_text(_RECIPE, encoding="utf-8")
        begin = Moment.now()
        said = self._torchrun("zorselike.train", "--config", "recipe.toml")
        estimated_s, found_s = read_comparison(said)
        return Pair(estimated_s, found_s, Moment.now().others_share(begin))

    def _zorselike(self, *arguments: object) -> str:
        return self._command(sys.executable, "-m", "zorselike.cli", *arguments)

    def _torchrun(self, module: str, *arguments: object) -> str:
        launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", self._num_ranks)
        return self._command(*launcher, "-m", module, *arguments)

    def _command(self, *words: object) -> str:
        command = [str(word) for word in words]
        root = Path(__file__).parents[1]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        # What torchrun sets by itself, but says so.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LoopError(f"{' '.join(command)}: code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


_RECIPE = f"""
[job]
description = "README's loop"
[model]
name = "llama"
flavor = "debug"
[hetero]
plan = "plan.toml"
device = "cpu"
[training]
dataset = "stdlib"
seq_len = {SEQUENCE_LENGTH}
steps = {NUM_STEPS}
max_norm = 1.0
mixed_precision_param = "float32"
[metrics]
log_freq = {LOG_FREQ}
"""


def change_plan(path: Path, case: Case) -> None:
    """What `--shares` does not make of equal devices."""
    plan = Plan.load(path)
    if case.in_line:
        plan = put_in_line(plan, case)
    elif case.rows_of_rank_0 is not None:
        plan = share_unevenly(plan, case.rows_of_rank_0, case.rows_per_microbatch)
    else:
        return
    plan.validate().save(path)


def share_unevenly(plan: Plan, rows_of_rank_0: int, at_once: int) -> Plan:
    """The plan's one group, so many rows on its first rank and the others' equal shares of the rest."""
    (group,) = plan.groups
    first, *others = group.flat_ranks
    left = plan.global_batch - rows_of_rank_0
    stops = [rows_of_rank_0 + left * (i + 1) // len(others) for i in range(len(others))]
    starts = [0, rows_of_rank_0, *stops[:-1]]
    microbatches = [
        own
        for rank, start, stop in zip((first, *others), starts, (rows_of_rank_0, *stops), strict=True)
        for own in cut(rank, start, stop, at_once)
    ]
    return replace(plan, groups=(replace(group, microbatches=tuple(microbatches)),))


def put_in_line(plan: Plan, case: Case) -> Plan:
    """Each rank a group with its part of the layers; each computes all rows."""
    ranks = plan.groups[0].flat_ranks
    modules = list(plan.ministage_of)
    number = case.ministages * len(ranks)
    cuts = [round(i * len(modules) / number) for i in range(number + 1)]
    return replace(
        plan,
        groups=tuple(
            Group(
                ranks=(rank,),
                microbatches=tuple(cut(rank, 0, plan.global_batch, case.rows_per_microbatch)),
                zero=case.zero,
            )
            for rank in ranks
        ),
        ministages=tuple(
            Ministage(i % len(ranks), tuple(modules[cuts[i] : cuts[i + 1]])) for i in range(number)
        ),
    )


def cut(rank: int, start: int, stop: int, at_once: int) -> list[Microbatch]:
    """Rows as microbatches of a rank."""
    return [Microbatch(rank, first, min(first + at_once, stop)) for first in range(start, stop, at_once)]


_COMPARISON = re.compile(r"rank \d+: estimated (\S+) s per step, measured (\S+) \(")


def read_comparison(said: str) -> tuple[float, float]:
    """The last lines of a run; the slowest rank's."""
    found = [(float(estimated), float(fact)) for estimated, fact in _COMPARISON.findall(said)]
    if not found:
        raise LoopError(f"the run does not compare itself with its plan's estimates:\n{said}")
    return max(found, key=lambda pair: pair[1])


# -- figures ---------------------------------------------------------------------------------


def format_pair(name: str, pair: Pair) -> str:
    others = "" if pair.others_share is None else f"  others {pair.others_share:.0%} of the cores"
    return (
        f"{name:<30} estimated {pair.estimated_s:.4f} s, found {pair.found_s:.4f} s "
        f"({pair.ratio - 1:+.1%}){others}"
    )


def median_ratio(pairs: Sequence[Pair]) -> float:
    return statistics.median(pair.ratio for pair in pairs)


def mean_error(pairs: dict[str, list[Pair]]) -> float:
    """Mean distance of the cases' median ratios from 1."""
    return statistics.fmean(abs(median_ratio(own) - 1) for own in pairs.values())


def summarise(pairs: dict[str, list[Pair]]) -> str:
    """A line a case, and the mean."""
    lines = [f"{'case':<30} {'estimated':>10} {'found':>10}  estimate over fact, median (least to most)"]
    for name, own in pairs.items():
        estimated_s, found_s = (
            statistics.median(getattr(pair, key) for pair in own) for key in ("estimated_s", "found_s")
        )
        ratios = [pair.ratio for pair in own]
        lines.append(
            f"{name:<30} {estimated_s:>8.4f} s {found_s:>8.4f} s  {median_ratio(own):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    worst = max(abs(median_ratio(own) - 1) for own in pairs.values())
    mean = mean_error(pairs)
    verdict = "reached" if mean <= TARGET else "NOT REACHED"
    lines.append(
        f"mean error {mean:.1%}, worst {worst:.1%}; to be reached: {TARGET:.0%} on average, {verdict}"
    )
    if is_busy([pair.others_share for own in pairs.values() for pair in own]):
        lines.append("note: other processes used much of the machine; run this on a quiet one")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
