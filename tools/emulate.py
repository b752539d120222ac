"""A plan on an emulated cluster: the real runtime, on ranks that sleep instead of computing.

    python -m tools.emulate --cluster c.toml --profile p.json --plan plan.toml --steps 4
    python -m tools.emulate ... --workload w.json     # where the plan does not name one of our models
    python -m tools.emulate ... --limit kernel        # links limited by tbf in network namespaces (root)
    python -m tools.emulate --constants               # what this machine itself adds

Every rank is a process on this machine. Layers sleep what the profile says for their device type, and
links are as slow as the cluster file says; times are stretched and tensors shrunk by the factors that are
printed, so that all ranks fit the cores. What the simulator says stands beside what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Before torch is imported, here and in every rank forked from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.emulation.constants import choose_counts, measure_constants
from tools.emulation.device_times import DeviceTimes
from tools.emulation.emulation import Emulation, Limit, Measurement, run
from tools.emulation.namespaces import NamespaceError, find_obstacle
from tools.emulation.predict import Prediction, predict_emulation
from tools.emulation.scaling import (
    find_byte_scale,
    find_time_scale,
    scale_cluster,
    scale_profile,
    scale_workload,
)
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload


@dataclass(frozen=True)
class Scaled:
    """An emulation, and by how much it differs from what was asked for."""

    emulation: Emulation
    profile: Profile
    time_by: float
    bytes_by: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for."""
    options = parse(arguments)
    if options.constants:
        constants = measure_constants()
        print(json.dumps(constants.to_json(), indent=1))
        return 0
    limit: Limit = options.limit
    obstacle = find_obstacle() if limit == "kernel" else ""
    if obstacle:
        print(f"the kernel cannot limit links here ({obstacle}): links are slept in the transport")
        limit = "sleep"
    try:
        scaled = prepare(options, limit)
        print(describe(scaled))
        constants = measure_constants(choose_counts(scaled.emulation.plan))
        prediction = predict_emulation(scaled.emulation, scaled.profile, constants)
        print(format_steps(run(scaled.emulation), prediction, scaled.time_by))
    except (ValueError, NamespaceError) as error:
        print(f"emulate: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; needs the three files unless only constants are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", type=Path, metavar="FILE")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("--plan", type=Path, metavar="FILE")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="by default of the plan's model")
    parser.add_argument("--dtype", default="bfloat16", help="of the plan's model (default bfloat16)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="timed steps")
    parser.add_argument("--limit", choices=("sleep", "kernel", "none"), default="sleep")
    parser.add_argument("--time-scale", type=float, metavar="X", help="by how much all times are stretched")
    parser.add_argument("--bytes-scale", type=float, metavar="X", help="by how much tensors are shrunk")
    parser.add_argument("--constants", action="store_true", help="measure what this machine adds, and end")
    options = parser.parse_args(arguments)
    missing = [name for name in ("cluster", "profile", "plan") if getattr(options, name) is None]
    if missing and not options.constants:
        parser.error(f"give {', '.join(f'--{name} FILE' for name in missing)}")
    return options


def prepare(options: argparse.Namespace, limit: Limit) -> Scaled:
    """The files as an emulation that fits this machine; raises the errors of the files."""
    plan, cluster = Plan.load(options.plan), Cluster.load(options.cluster)
    workload = load_workload(options.workload, plan, options.dtype)
    profile = Profile.load(options.profile)
    time_by = options.time_scale or find_time_scale(plan, workload, cluster, profile)
    bytes_by = options.bytes_scale or find_byte_scale(workload)
    light = scale_workload(workload, bytes_by)
    slow = scale_profile(profile, light, time_by=time_by, bytes_by=bytes_by)
    emulation = Emulation(
        plan=plan,
        workload=light,
        cluster=scale_cluster(cluster, time_by=time_by, bytes_by=bytes_by),
        times=DeviceTimes(slow, light),
        limit=limit,
        num_steps=options.steps,
    )
    return Scaled(emulation, slow, time_by, bytes_by)


def load_workload(path: Path | None, plan: Plan, dtype: str) -> Workload:
    """From a file, else of the model that the plan names; raises `ValueError` where neither says it."""
    if path is not None:
        return Workload.load(path)
    family, _, flavor = (plan.model or "").partition(" ")
    if not flavor or plan.sequence_length is None:
        raise ValueError("the plan names no model of ours with a sequence length; give --workload FILE")
    from zorselike.models import get_config
    from zorselike.models.workload import make_workload

    config = get_config(family, flavor)
    return make_workload(config, sequence_length=plan.sequence_length, dtype=dtype, model=plan.model or "")


def describe(scaled: Scaled) -> str:
    """What is emulated how."""
    emulation = scaled.emulation
    limits = {
        "sleep": "links slept in the transport (token buckets)",
        "kernel": "links limited by tbf in network namespaces",
        "none": "links as fast as this machine",
    }
    return (
        f"{emulation.plan.num_ranks} ranks on {len(emulation.cluster.nodes)} nodes; "
        f"{limits[emulation.limit]}; "
        f"times x {scaled.time_by:.4g}, bytes x {scaled.bytes_by:.4g}"
    )


def format_steps(measured: Measurement, prediction: Prediction, time_by: float) -> str:
    """Every step and every rank beside what was predicted, in seconds of the emulation."""
    predicted_s = prediction.step_s
    lines = [
        f"step {number}: {seconds:.3f} s, predicted {predicted_s:.3f} s ({predicted_s / seconds - 1:+.1%})"
        for number, seconds in enumerate(measured.step_s)
    ]
    lines.append(
        f"median {measured.median_s:.3f} s, that is {measured.median_s / time_by:.4g} s on the cluster; "
        f"cores {measured.cpu_share:.0%} busy"
    )
    for rank, (busy_s, times) in enumerate(zip(measured.busy_s, prediction.simulation.ranks, strict=True)):
        forward_backward_s = times.forward_s + times.backward_s
        lines.append(f"  rank {rank}: busy {busy_s:.3f} s, predicted {forward_backward_s:.3f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
