"""A Kubernetes JobSet (https://jobset.sigs.k8s.io, v1alpha2) with a replicated job for each kind of node,
and the plan in a ConfigMap beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import join, quote
from textwrap import indent

from zorselike.cli.launch.device_names import name_product, refuse_mixed_nodes
from zorselike.cli.launch.job import PORT, Job, NodeKind, write_comment
from zorselike.errors import ConfigError, FileError
from zorselike.text.files import read_text

IMAGE = "IMAGE"
"""Stands for a container image that the user must name."""
CLAIM = "CLAIM"
"""Stands for a persistent volume claim that pods of all nodes may write to at once."""
PRODUCT = "nvidia.com/gpu.product"
"""Label of a node by NVIDIA's GPU feature discovery: the driver's name of its GPUs with hyphens."""
_FOLDER, _OUTPUTS = "/job", "/outputs"
_GRACE_S = 300
_MOST_NAME, _MOST_POD = 40, 63
"""Characters of a JobSet's name, of which its pods' are made, and of a pod's with its random suffix."""
_MOST_BYTES = 2**20
"""Of a ConfigMap (https://kubernetes.io/docs/concepts/configuration/configmap/)."""


def write_jobset(job: Job, *, file: str) -> str:
    """The manifest, as `file`; raises `ConfigError` for nodes with GPUs of several types, and for a recipe
    that cannot be read."""
    refuse_mixed_nodes(job, "Kubernetes", name_product)
    config = job.program.config
    files = {"plan.toml": job.plan.to_text()}
    if config is not None:
        try:
            files["recipe.toml"] = read_text(Path(config), "recipe")
        except FileError as error:
            raise ConfigError(f"launch: {config}: {error}") from None
    num_bytes = sum(len(text.encode()) for text in files.values())
    if num_bytes > _MOST_BYTES:
        raise ConfigError(
            f"launch: {job.path} has {num_bytes:,} bytes, and a ConfigMap, in which a JobSet gets its plan, "
            f"holds {_MOST_BYTES:,}; start by slurm or torchrun"
        )
    head = [
        f"# {job.describe()}, by:",
        f"#   kubectl apply --server-side -f {quote(file)}",
        f"# {IMAGE} is yours to name: any with zorselike in it. So are the values of {PRODUCT}",
        f"# (kubectl get nodes -L {PRODUCT}), and what pods may have of CPUs, memory and disks.",
        "# What a run saves is gone with its pods, unless it is on a volume: take the # from the lines with",
        f"# `outputs`, name your {CLAIM} there, and add --job.dump_folder {_OUTPUTS} to the commands.",
        *write_comment(*(f"{note}." for note in job.list_notes())),
    ]
    return "\n".join(
        [*head, *_write_files(job, files), "---", *_write_set(job, has_recipe=config is not None), ""]
    )


def _name(job: Job) -> str:
    return job.name[:_MOST_NAME].rstrip("-")


def _name_part(job: Job, kind: NodeKind, number: int) -> str:
    """Of a replicated job: JobSet refuses one with a pod whose name would be too long."""
    others = len(f"{_name(job)}--0-{len(kind.nodes) - 1}-abcde")
    return f"n{number}-{kind.name}"[: _MOST_POD - others].rstrip("-")


def _write_files(job: Job, files: Mapping[str, str]) -> list[str]:
    lines = ["apiVersion: v1", "kind: ConfigMap", "metadata:", f"  name: {_name(job)}-plan", "data:"]
    for name, text in files.items():
        # The 2: spaces before the first line may be the file's own.
        lines += [f"  {name}: |2", indent(text.rstrip("\n"), "    ")]
    return lines


def _write_set(job: Job, *, has_recipe: bool) -> list[str]:
    names = [_name_part(job, kind, i) for i, kind in enumerate(job.kinds)]
    first = f"{_name(job)}-{names[0]}-0-0.{_name(job)}"
    lines = [
        "apiVersion: jobset.x-k8s.io/v1alpha2",
        "kind: JobSet",
        "metadata:",
        f"  name: {_name(job)}",
        "spec:",
        "  network:",
        "    enableDNSHostnames: true  # JobSet-REPLICATED_JOB-0-POD.JobSet",
        "  replicatedJobs:",
    ]
    config = f"{_FOLDER}/recipe.toml" if has_recipe else None
    program = job.write_program(path=f"{_FOLDER}/plan.toml", config=config)
    for kind, name in zip(job.kinds, names, strict=True):
        lines += _write_replicated_job(job, kind, name=name, first=first, program=program)
    return lines


def _write_replicated_job(job: Job, kind: NodeKind, *, name: str, first: str, program: str) -> list[str]:
    variables = [
        f"nodes=({join(kind.nodes)})  # of the plan",
        "export ZORSELIKE_NODE=${nodes[$JOB_COMPLETION_INDEX]}",
    ]
    if kind.leaves_some_out:
        variables.append(f"export ZORSELIKE_LOCAL_RANKS={','.join(map(str, kind.local_ranks))}")
    command = [
        *variables,
        f"exec torchrun --nnodes {job.num_nodes} --nproc-per-node {kind.num_processes} \\",
        f"  --rdzv-backend c10d --rdzv-endpoint {first}:{PORT} --rdzv-id {_name(job)} \\",
        f"  --local-addr $HOSTNAME.{_name(job)} \\",
        f"  {program}",
    ]
    pods = len(kind.nodes)
    return [
        f"  - name: {name}  # {kind.describe()}",
        "    replicas: 1",
        "    template:",
        "      spec:",
        "        completionMode: Indexed",
        f"        completions: {pods}",
        f"        parallelism: {pods}",
        "        backoffLimit: 0",
        "        template:",
        "          spec:",
        "            restartPolicy: Never",
        f"            terminationGracePeriodSeconds: {_GRACE_S}",
        *_write_selectors(kind),
        "            containers:",
        "            - name: train",
        f"              image: {IMAGE}",
        "              command: [bash, -c]",
        "              args:",
        "              - |",
        *(f"                {line}" for line in command),
        *_write_resources(kind),
        "              volumeMounts:",
        f"              - {{name: plan, mountPath: {_FOLDER}}}",
        "              - {name: shared-memory, mountPath: /dev/shm}",
        f"              # - {{name: outputs, mountPath: {_OUTPUTS}}}",
        "            volumes:",
        "            - name: plan",
        f"              configMap: {{name: {_name(job)}-plan}}",
        "            - name: shared-memory",
        "              emptyDir: {medium: Memory}",
        f"            # - {{name: outputs, persistentVolumeClaim: {{claimName: {CLAIM}}}}}",
    ]


def _write_selectors(kind: NodeKind) -> list[str]:
    labels = {} if kind.is_cpu else {PRODUCT: name_product(kind.types[0])}
    if kind.zone:
        labels["topology.kubernetes.io/zone"] = kind.zone
    if not labels:
        return []
    listed = [f"              {key}: {json.dumps(value)}" for key, value in labels.items()]
    return ["            nodeSelector:", *listed]


def _write_resources(kind: NodeKind) -> list[str]:
    if kind.is_cpu:
        return []
    return ["              resources:", f"                limits: {{nvidia.com/gpu: {kind.num_processes}}}"]
