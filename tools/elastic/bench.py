"""Kills, stops and fails ranks of elastic jobs in every phase of steps and recoveries, and says how they went
on.

    python tools/elastic/bench.py --faults 530 --json elastic.json   # the matrix, twice
    python tools/elastic/bench.py --faults 530 --part 2/4 --json 2.json   # a quarter of it
    python tools/elastic/bench.py --faults 20 --phases form fill     # some of it
    python tools/elastic/bench.py --cycles 100      # one job, whose lost ranks are replaced each time
    python tools/elastic/bench.py --switches 6      # planned changes of plan
    python tools/elastic/bench.py --partitions      # two nodes in network namespaces, whose link is cut
    python tools/elastic/bench.py --losses 3        # how fast it is after a loss; what mirrors cost
    python tools/elastic/bench.py --members 10000   # of membership alone, in virtual time
    python tools/elastic/bench.py --agents          # torchrun's, of which the first is killed
    python tools/elastic/bench.py --merge 1.json 2.json 3.json       # what pieces came to together

Ranks are processes of this machine with a small model in fp64 (some in bf16). Every loss of every process is
compared with that of a run to which nothing happens, and every state that a generation begins with, bit by
bit, with the one that it was. Nothing is tried twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.elastic.agents import describe_agents, run_agents
from tools.elastic.injection import RECOVERY_PHASES, STEP_PHASES
from tools.elastic.matrix import Found, run_matrix
from tools.elastic.scenarios import (
    describe_cycles,
    describe_partitions,
    describe_switches,
    run_cycles,
    run_partitions,
    run_switches,
)
from tools.elastic.throughput import describe_losses, measure_loss
from tools.elastic.virtual import describe_virtual, run_virtual
from tools.report import Figure, conclude, make_parser, positive

DESCRIBE: dict[str, Callable[[Any], list[Figure]]] = {
    "matrix": lambda table: Found.from_json(table).figures(),
    "cycles": describe_cycles,
    "switches": describe_switches,
    "partitions": describe_partitions,
    "losses": describe_losses,
    "agents": describe_agents,
    "virtual": describe_virtual,
}
"""Figures of what each section has found."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; the exit status says whether every target was met."""
    chosen = parse(arguments)
    torch.set_num_threads(1)
    if chosen.merge:
        return conclude_all(merge(chosen.merge), chosen.json)
    found: dict[str, Any] = {"seconds": 0.0, "loads": []}
    began_s = time.monotonic()
    if chosen.faults:
        matrix = run_matrix(
            chosen.faults,
            part=chosen.part,
            seed=chosen.seed,
            phases=chosen.phases,
            silence_s=chosen.silence,
        )
        found["matrix"] = matrix.to_json()
    if chosen.cycles:
        found["cycles"] = run_cycles(chosen.cycles)
    if chosen.switches:
        found["switches"] = run_switches(chosen.switches)
    if chosen.partitions:
        found["partitions"] = run_partitions(chosen.silence)
    if chosen.losses:
        found["losses"] = []
        for number in range(chosen.losses):
            found["losses"].append(measure_loss(number, mirror_share=chosen.mirror_share))
            print(f"loss {found['losses'][-1]}", flush=True)
    if chosen.agents:
        found["agents"] = run_agents()
    if chosen.members:
        found["virtual"] = run_virtual(chosen.members)
    found |= {"seconds": time.monotonic() - began_s, "loads": [os.getloadavg()[1]]}
    return conclude_all(found, chosen.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--faults", type=positive, default=0)
    parser.add_argument("--part", type=read_part, default=(1, 1), metavar="I/N", help="of --faults")
    parser.add_argument("--phases", nargs="+", choices=(*STEP_PHASES, *RECOVERY_PHASES))
    parser.add_argument("--cycles", type=positive, default=0)
    parser.add_argument("--switches", type=positive, default=0)
    parser.add_argument("--partitions", action="store_true", help="needs root")
    parser.add_argument("--losses", type=positive, default=0, help="of so many of four nodes; needs root")
    parser.add_argument("--mirror-share", type=float, default=0.1, help="of the time, in these")
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--members", type=positive, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--silence", type=float, default=4.0, help="seconds after which a rank is given up")
    parser.add_argument("--merge", type=read, nargs="+", metavar="FILE", help="of earlier runs' --json")
    chosen = parser.parse_args(arguments)
    sections = ("faults", "cycles", "switches", "partitions", "losses", "agents", "members", "merge")
    if not any(getattr(chosen, section) for section in sections):
        parser.error(f"nothing is asked for; give --{', --'.join(sections[:-1])} or --{sections[-1]}")
    if (chosen.partitions or chosen.losses) and os.geteuid() != 0:
        parser.error("--partitions and --losses need root")
    return chosen


def read_part(text: str) -> tuple[int, int]:
    """`2/4`: the second of four."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text} is no part such as 2/4")
    return int(number), int(count)


def read(path: str) -> dict[str, Any]:
    """What an earlier run has found."""
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))["found"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no --json of an earlier run: {error}") from None
    return found


def merge(pieces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of the matrix together; of every other section the last one that there is."""
    whole: dict[str, Any] = {"seconds": 0.0, "loads": []}
    for piece in pieces:
        if "matrix" in piece and "matrix" in whole:
            both = Found.from_json(whole["matrix"]).merge(Found.from_json(piece["matrix"]))
            piece = piece | {"matrix": both.to_json()}
        totals = {key: whole[key] + piece[key] for key in ("seconds", "loads")}
        whole |= piece | totals
    return whole


def conclude_all(found: dict[str, Any], path: Path | None) -> int:
    """Prints all figures beside their targets; the exit status."""
    figures = [
        figure for name, describe in DESCRIBE.items() if name in found for figure in describe(found[name])
    ]
    if "matrix" in found:
        print("\n" + Found.from_json(found["matrix"]).describe())
    loads = found["loads"]
    figures.append(Figure("seconds", found["seconds"], note=f"load {min(loads):.1f} to {max(loads):.1f}"))
    return conclude(path, figures, found=found)


if __name__ == "__main__":
    sys.exit(main())
