"""A Slurm batch script: a heterogeneous job (https://slurm.schedmd.com/heterogeneous_jobs.html) with a
component for each kind of node, whose ranks `srun` starts alone, so that signals reach them."""

from __future__ import annotations

import re
from collections import Counter
from shlex import join, quote

from zorselike.cli.launch.device_names import require_types
from zorselike.cli.launch.job import Job, NodeKind, write_comment
from zorselike.errors import ConfigError
from zorselike.text.wording import list_few

_TIME = "24:00:00"
_SIGNAL = "USR1@300"
"""A run that gets it ends after its step, and saves where checkpoints are on."""
_CPUS_PER_GPU = 8
_PASSED_ON = re.compile(r"[^\s=*?[]+")
"""A word of a shell's list of pairs."""


def write_batch_script(job: Job, *, file: str) -> str:
    """The script, as `file`; raises `ConfigError` for devices of no type, and for names of nodes that it
    cannot pass on."""
    require_types(job, "Slurm")
    if unfit := [node for node in job.devices_of if not _PASSED_ON.fullmatch(node)]:
        raise ConfigError(
            f"launch: for Slurm a node's name has no spaces and none of = * ? [, and {job.path} has "
            f"{list_few(map(repr, unfit), 'node')}; rename it there and in the cluster, or start by torchrun"
        )
    head = [
        "#!/usr/bin/env bash",
        f"# {job.describe()}, by:",
        f"#   sbatch {quote(file)}",
        *write_comment(
            "Time, CPUs and memory are yours to edit; names of GPU types are your site's: sinfo -o '%N %G'. "
            "All nodes see this folder, and `python` is the one in which zorselike is installed. What the "
            "plan calls a node may be any node of its kind; --nodelist on a component's line asks for "
            "those that you have measured."
        ),
        *write_comment(*(f"{note}." for note in job.list_notes())),
    ]
    components = [line for i, kind in enumerate(job.kinds) for line in _write_component(job, kind, i)]
    return "\n".join([*head, *components, *_write_body(job)]) + "\n"


def _write_component(job: Job, kind: NodeKind, number: int) -> list[str]:
    """The options of one component; what one has the next has again."""
    lines = [] if number == 0 else ["#SBATCH hetjob"]
    lines.append(f"# {kind.describe()}")
    words = [f"--nodes={len(kind.nodes)}", f"--ntasks-per-node={kind.num_processes}"]
    if kind.is_cpu:
        words.append("--cpus-per-task=1")
    else:
        types = (f"gpu:{_name(job, device)}:{number}" for device, number in Counter(kind.types).items())
        words += [f"--cpus-per-task={_CPUS_PER_GPU}", f"--gres={','.join(types)}"]
    common = [f"--job-name={job.name}", f"--time={_TIME}", f"--signal={_SIGNAL}"]
    return [*lines, f"#SBATCH {join(common)}", f"#SBATCH {join(words)}"]


def _name(job: Job, device: str) -> str:
    """What most sites call a GPU type in `--gres`: `a100`, unless the plan has others of that name."""
    short = device.lower().split("-")[0]
    alike = {each.type for each in job.plan.devices if each.type.lower().split("-")[0] == short}
    return short if len(alike) == 1 else device.lower().replace("-", "_")


def _write_body(job: Job) -> list[str]:
    several = len(job.kinds) > 1
    nodelists = [f'"$SLURM_JOB_NODELIST_HET_GROUP_{i}"' for i in range(len(job.kinds))]
    hosts = " ".join(f"$(scontrol show hostnames {nodelist})" for nodelist in nodelists)
    if not several:
        hosts = '$(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    names = [name for kind in job.kinds for name in kind.nodes]
    groups = f" --het-group=0-{len(job.kinds) - 1}" if several else ""
    words = [f"hosts=({hosts})", f"names=({join(names)})  # of the plan's nodes"]
    pair, read = "${hosts[i]}=${names[i]}", "export ZORSELIKE_NODE=${found#*=}"
    if any(kind.leaves_some_out for kind in job.kinds):
        listed = [",".join(map(str, kind.local_ranks)) for kind in job.kinds for _ in kind.nodes]
        words.append(f"ranks=({join(listed)})  # local ranks that the plan uses there")
        pair += "=${ranks[i]}"
        read = "IFS== read -r _ ZORSELIKE_NODE ZORSELIKE_LOCAL_RANKS <<<$found\n    export ${!ZORSELIKE_@}"
    return [
        "set -euo pipefail",
        "",
        *words,
        'for i in "${!hosts[@]}"; do',
        f'    NODES="${{NODES:-}} {pair}"',
        "done",
        "export NODES MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "",
        f"srun{groups} --kill-on-bad-exit=1 bash -c '",
        "    for found in $NODES; do [[ $found == $SLURMD_NODENAME=* ]] && break; done",
        f"    {read}",
        '    exec python "$@"\' zorselike \\',
        f'    {job.write_program()} "$@"',
    ]
