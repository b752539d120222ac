"""How Zorse's closed form (Eq. 1) orders plans, beside the simulator: a pruner must keep the best.

    python tools/rank_closed_form.py --plans 200 --json figures.json

Draws plans of one workload (Llama 7B shapes, 192 rows of 512 tokens) for one mixed cluster of 24 devices:
groups, their order, ministages, microbatches, ZeRO stages, recomputation, shares by speed or even. Both
models score each with the same costs. Shown are Spearman's rank correlation, the ratio of the two, and how
much slower by the simulator the closed form's best is than the simulator's, among the first few of each.
Layer times are made up, proportional to the devices' peaks: only the order of plans matters here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.published.zorse_closed_form import estimate_step_s
from zorselike.cost.assemble import make_costs
from zorselike.cost.catalogue import find_device
from zorselike.cost.profile import Profile
from zorselike.models import get_config, module_names
from zorselike.models.workload import make_workload
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule import build
from zorselike.simulator.engine import simulate

ROWS = 192
DTYPE = "float16"
DEVICES_PER_NODE = 4
KEPT = (1, 5, 20)
"""How many plans a pruner would pass on to the simulator."""


@dataclass(frozen=True)
class Scores:
    """One plan's seconds."""

    closed_form_s: float
    simulated_s: float


@dataclass(frozen=True)
class Summary:
    num_plans: int
    spearman: float
    mean_ratio: float
    """Of the closed form to the simulator."""
    min_ratio: float
    max_ratio: float
    regret: dict[int, float]
    """By number of plans kept: how much slower the best of them is than the best of all."""


def main() -> None:
    args = _read_arguments()
    scores = score_plans(args.plans, random.Random(args.seed))
    summary = summarise(scores)
    kept = ", ".join(f"{regret:.1%} with {number} kept" for number, regret in summary.regret.items())
    print(
        f"{summary.num_plans} plans: Spearman {summary.spearman:.3f}; closed form / simulator "
        f"{summary.mean_ratio:.2f} on average, {summary.min_ratio:.2f} to {summary.max_ratio:.2f}; the best "
        f"of those kept is slower than the best of all by {kept}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=100, help="how many plans to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def make_cluster() -> Cluster:
    """Two nodes each of A100, V100 and T4."""
    fabrics = {"A100-40": Link(200e9, 5e-6), "V100-16": Link(130e9, 5e-6), "T4": Link(10e9, 5e-6)}
    cards = {"A100-40": Link(6.25e9), "V100-16": Link(3.125e9), "T4": Link(3.125e9)}
    nodes = tuple(
        Node(name=f"{device}-{i}", devices=(device,) * DEVICES_PER_NODE, fabric=fabric, nic=cards[device])
        for device, fabric in fabrics.items()
        for i in range(2)
    )
    return Cluster(nodes=nodes, default_link=Link(6.25e9, 3e-5))


def score_plans(num_plans: int, rng: random.Random) -> list[Scores]:
    """Both models' seconds of random plans."""
    config = get_config("llama", "7b")
    workload = make_workload(config, sequence_length=512, dtype=DTYPE, model="llama 7b")
    cluster, profile = make_cluster(), Profile(model="llama 7b")
    scores: list[Scores] = []
    while len(scores) < num_plans:
        plan = draw_plan(cluster, module_names(config), rng)
        if plan is None:
            continue
        costs = make_costs(plan, workload, cluster, profile)
        simulated = simulate(plan, build(plan, masters=workload.masters), costs)
        scores.append(Scores(estimate_step_s(plan, costs), simulated.iteration_s))
    return scores


def summarise(scores: Sequence[Scores]) -> Summary:
    ratios = [score.closed_form_s / score.simulated_s for score in scores]
    best = min(score.simulated_s for score in scores)
    ordered = sorted(scores, key=lambda score: score.closed_form_s)
    correlation = spearmanr([s.closed_form_s for s in scores], [s.simulated_s for s in scores])
    return Summary(
        num_plans=len(scores),
        spearman=float(correlation.statistic),
        mean_ratio=statistics.fmean(ratios),
        min_ratio=min(ratios),
        max_ratio=max(ratios),
        regret={n: min(s.simulated_s for s in ordered[:n]) / best - 1 for n in KEPT if n <= len(scores)},
    )


# -- plans ---------------------------------------------------------------------------------


def draw_plan(cluster: Cluster, modules: Sequence[str], rng: random.Random) -> Plan | None:
    """A plan with neighbouring nodes in a group; None if a ministage would have no modules."""
    num_groups = rng.choice([1, 2, 3, 6])
    size = len(cluster.nodes) // num_groups
    parts = [range(i * size, (i + 1) * size) for i in range(num_groups)]
    if rng.random() < 0.3:
        rng.shuffle(parts)
    speeds = [find_device(node.devices[0]).peak_flops[DTYPE] for node in cluster.nodes]
    work = [sum(speeds[node] for node in part) for part in parts] * rng.choice([1, 2, 3])
    cuts = [round(share * len(modules) / sum(work)) for share in (0, *accumulate(work))]
    if any(start == stop for start, stop in pairwise(cuts)):
        return None
    ministages = tuple(
        Ministage(i % num_groups, tuple(modules[start:stop]))
        for i, (start, stop) in enumerate(pairwise(cuts))
    )
    groups = tuple(_draw_group(part, speeds, rng) for part in parts)
    return Plan(global_batch=ROWS, groups=groups, ministages=ministages).validate()


def _draw_group(nodes: Sequence[int], speeds: Sequence[float], rng: random.Random) -> Group:
    is_even = rng.random() < 0.2
    share = {
        DEVICES_PER_NODE * node + i: 1.0 if is_even else speeds[node]
        for node in nodes
        for i in range(DEVICES_PER_NODE)
    }
    num_rows = rng.choice([1, 2, 4])
    loads = dict.fromkeys(share, 0.0)
    microbatches = []
    for start in range(0, ROWS, num_rows):
        rank = min(loads, key=lambda rank: (loads[rank] + 1) / share[rank])
        loads[rank] += 1
        microbatches.append(Microbatch(rank, start, start + num_rows))
    return Group(
        ranks=tuple(share),
        microbatches=tuple(microbatches),
        zero=rng.choice([1, 2, 2, 2, 3]),
        recompute=rng.choice(["none", "layer"]),
    )


if __name__ == "__main__":
    main()
