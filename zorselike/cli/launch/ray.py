"""A Ray driver (https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html): a bundle for each
node, all of them at once and each on a node of its own, in which torchrun starts the ranks."""

from __future__ import annotations

import json
from shlex import quote

from zorselike.cli.launch.device_names import name_for_ray, refuse_mixed_nodes
from zorselike.cli.launch.job import PORT, Job, NodeKind, write_comment

_SOME = 0.001
"""A node has one of `accelerator_type:TYPE`; a bundle that wants the type takes some of it."""

_BODY = '''
import os
import subprocess
import sys

import ray
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def start(node, num_processes, local_ranks, meeting):
    """One torchrun, for the node of the plan."""
    variables = {"ZORSELIKE_NODE": node} | ({"ZORSELIKE_LOCAL_RANKS": local_ranks} if local_ranks else {})
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(len(NODES)), "--nproc-per-node", str(num_processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", RDZV_ID]
    subprocess.run([*command, *PROGRAM], env=os.environ | variables, check=True)


def main():
    ray.init()
    bundles = placement_group([bundle for _, bundle, *_ in NODES], strategy="STRICT_SPREAD")
    try:
        ray.get(bundles.ready())
        parts = [
            PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=i)
            for i in range(len(NODES))
        ]
        where = ray.remote(get_node_ip_address).options(num_cpus=0, scheduling_strategy=parts[0])
        meeting = f"{ray.get(where.remote())}:{PORT}"
        runs = [
            ray.remote(start)
            .options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_retries=0, scheduling_strategy=part
            )
            .remote(node, num_processes, local_ranks, meeting)
            for (node, bundle, num_processes, local_ranks), part in zip(NODES, parts)
        ]
        ray.get(runs)
    finally:
        remove_placement_group(bundles)


if __name__ == "__main__":
    main()
'''


def write_driver(job: Job, *, file: str) -> str:
    """The script, as `file`; raises `ConfigError` for nodes with GPUs of several types."""
    refuse_mixed_nodes(job, "Ray", name_for_ray)
    job.check_goes_along("Ray")
    entries = [
        f"    {_write_node(kind, node)},  # {kind.describe()}"
        if node == kind.nodes[0]
        else f"    {_write_node(kind, node)},"
        for kind in job.kinds
        for node in kind.nodes
    ]
    head = [
        f'"""{job.describe()[0].upper()}{job.describe()[1:]}, by:',
        f"    ray job submit --working-dir . -- python {quote(file)}",
        "",
        "The working directory goes along, with the plan in it. Every node has zorselike installed. The",
        "names of GPU types are Ray's (ray.util.accelerators), which each node finds by itself.",
        *write_comment(*(f"{note}." for note in job.list_notes()), prefix=""),
        '"""',
        "",
        f"PORT, RDZV_ID = {PORT}, {json.dumps(job.name)}",
        f"PROGRAM = {json.dumps(['-m', 'zorselike.train', *job.list_arguments()])}",
        "# Of the plan: name, what it takes of a node, processes, and their local ranks if not 0, 1, 2, ...",
        "NODES = [",
        *entries,
        "]",
    ]
    return "\n".join(head) + "\n" + _BODY


def _write_node(kind: NodeKind, node: str) -> str:
    bundle: dict[str, float] = {"CPU": kind.num_processes}
    if not kind.is_cpu:
        bundle |= {"GPU": kind.num_processes, f"accelerator_type:{name_for_ray(kind.types[0])}": _SOME}
    local_ranks = ",".join(map(str, kind.local_ranks)) if kind.leaves_some_out else ""
    return f"({json.dumps(node)}, {json.dumps(bundle)}, {kind.num_processes}, {json.dumps(local_ranks)})"
