"""A SkyPilot job group (https://docs.skypilot.co/en/latest/examples/job-groups.html) with a task for each
kind of node; of one kind, a task by itself."""

from __future__ import annotations

from shlex import join, quote

from zorselike.cli.launch.device_names import name_for_skypilot, refuse_mixed_nodes
from zorselike.cli.launch.job import PORT, Job, NodeKind, write_comment
from zorselike.errors import ConfigError
from zorselike.text.wording import list_few


def write_task(job: Job, *, file: str) -> str:
    """The YAML, as `file`; raises `ConfigError` for what SkyPilot does not start as one job."""
    refuse_mixed_nodes(job, "SkyPilot", name_for_skypilot)
    job.check_goes_along("SkyPilot")
    if len(job.regions) > 1:
        raise ConfigError(
            "launch: SkyPilot runs the tasks of a job group in one place, and the plan spans regions "
            f"{list_few(sorted(job.regions))}; plan for one (--quota REGION/TYPE=0 for the other), or start "
            "by torchrun"
        )
    is_group = len(job.kinds) > 1
    command = f"sky jobs launch {quote(file)}"
    head = [f"# {job.describe()}, by:", f"#   {command}"]
    if is_group:
        head += [
            "# Job groups are an experimental feature of SkyPilot; on clouds other than Kubernetes its",
            "# tasks may not find each other by name.",
        ]
    head += [
        "# This folder goes along, with the plan in it; setup is yours to edit, and what disks you want.",
        *write_comment(*(f"{note}." for note in job.list_notes())),
    ]
    documents = [_write_document(job, kind, i) for i, kind in enumerate(job.kinds)]
    if is_group:
        documents.insert(0, [f"name: {job.name}", "execution: parallel"])
    return "\n---\n".join("\n".join(lines) for lines in ([*head, *documents[0]], *documents[1:])) + "\n"


def _write_document(job: Job, kind: NodeKind, number: int) -> list[str]:
    if len(job.kinds) > 1:
        name, meeting = f"n{number}", f"n0-0.$SKYPILOT_JOBGROUP_NAME:{PORT}"
    else:
        name, meeting = job.name, f'$(head -n1 <<<"$SKYPILOT_NODE_IPS"):{PORT}'
    resources = (
        ["  cpus: 2+"]
        if kind.is_cpu
        else [f"  accelerators: {name_for_skypilot(kind.types[0])}:{kind.num_processes}"]
    )
    variables = [
        f"nodes=({join(kind.nodes)})  # of the plan",
        "export ZORSELIKE_NODE=${nodes[$SKYPILOT_NODE_RANK]}",
    ]
    if kind.leaves_some_out:
        variables.append(f"export ZORSELIKE_LOCAL_RANKS={','.join(map(str, kind.local_ranks))}")
    run = [
        *variables,
        f"torchrun --nnodes {job.num_nodes} --nproc-per-node {kind.num_processes} --rdzv-backend c10d \\",
        f"  --rdzv-endpoint {meeting} --rdzv-id {job.name} \\",
        f"  {job.write_program()}",
    ]
    return [
        f"# {kind.describe()}",
        f"name: {name}",
        f"num_nodes: {len(kind.nodes)}",
        "workdir: .",
        "resources:",
        *resources,
        "setup: |",
        "  pip install -c constraints.txt -e .",
        "run: |",
        *(f"  {line}" for line in run),
    ]
