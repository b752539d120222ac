"""Sailor's real runs (`measured/`): a plan in their form with what it took, read into our plan and cluster.

A run's file holds `pipeline_list`: for each stage its pseudo-layers and its replicas, each of them machines
`[GPU, GPUs of the machine, zone]` with a tensor-parallel degree; `mbs` rows a microbatch, `gbs` rows a step,
`real` seconds of an iteration, `red_grads` seconds of it for reducing gradients, `max_mem` bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

from zorselike.errors import PlanError
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

from ..data import read_object
from .links import MachineLinks, Place
from .profiles import DEVICES, SEQUENCE_LENGTH, module_of

SUSPECT_SHARE = 0.5
"""No run reduces gradients for so much of its time."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage."""

    layers: tuple[int, ...]
    """Pseudo-layers."""
    replicas: tuple[Place, ...]


@dataclass(frozen=True)
class MeasuredRun:
    """One run and what was measured of it."""

    name: str
    stages: tuple[Stage, ...]
    microbatch_rows: int
    global_batch: int
    num_nodes: int
    iteration_s: float
    reduce_s: float | None
    memory_bytes: int | None
    """The most that any GPU held."""
    doubts: tuple[str, ...] = ()
    """What looks wrong in the file."""

    @property
    def num_gpus(self) -> int:
        return sum(replica.tensor_parallel for stage in self.stages for replica in stage.replicas)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Sailor's names of all types in it."""
        return tuple(sorted({replica.gpu for stage in self.stages for replica in stage.replicas}))

    @property
    def num_layers(self) -> int:
        """Pseudo-layers of the model."""
        return sum(len(stage.layers) for stage in self.stages)


def read_run(path: Path, root: Path | None = None) -> MeasuredRun:
    """One file of a run, named by its path under `root`.

    Raises:
        PlanError: It is not such a file, holds several pipelines, a replica over several machines, or rows
            that its microbatches do not divide.
    """
    name = path.relative_to(root or path.parent).as_posix().removesuffix(".json")
    found = read_object(path)
    try:
        pipelines = found["pipeline_list"]
        if len(pipelines) != 1:
            raise PlanError(f"{name}: {len(pipelines)} pipelines; only runs of one can be read")
        stages = tuple(_read_stages(pipelines[0], name))
        run = MeasuredRun(
            name=name,
            stages=stages,
            microbatch_rows=int(found["mbs"]),
            global_batch=int(found["gbs"]),
            num_nodes=int(found.get("N", sum(len(stage.replicas) for stage in stages))),
            iteration_s=float(found["real"]),
            reduce_s=_number(found.get("red_grads")),
            memory_bytes=int(found["max_mem"]) if found.get("max_mem") else None,
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"{name}: not a run of Sailor's ({error!r}); it needs pipeline_list, mbs, gbs, real"
        ) from None
    _check(run)
    return replace(run, doubts=tuple(_find_doubts(run)))


def _read_stages(pipeline: Mapping[str, Any], name: str) -> list[Stage]:
    stages = []
    for layers, replicas in zip(pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True):
        read = []
        for machines, tensor_parallel in replicas:
            if len(machines) != 1:
                raise PlanError(
                    f"{name}: a replica over {len(machines)} machines; only whole ones can be read"
                )
            gpu, _, zone = machines[0]
            read.append(Place(gpu, zone, int(tensor_parallel)))
        stages.append(Stage(tuple(layers), tuple(read)))
    return stages


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _check(run: MeasuredRun) -> None:
    if not run.stages or not all(stage.layers for stage in run.stages):
        raise PlanError(f"{run.name}: a stage without layers; give each its own")
    if run.microbatch_rows < 1 or run.iteration_s <= 0:
        raise PlanError(f"{run.name}: mbs and real must be above 0")
    for stage in run.stages:
        if not stage.replicas or run.global_batch % (len(stage.replicas) * run.microbatch_rows):
            raise PlanError(
                f"{run.name}: {run.global_batch} rows are not whole microbatches of {run.microbatch_rows} on "
                f"{len(stage.replicas)} replicas"
            )


def _find_doubts(run: MeasuredRun) -> list[str]:
    doubts = []
    layers = [layer for stage in run.stages for layer in stage.layers]
    wrong = [layer for layer, expected in zip(layers, range(len(layers)), strict=True) if layer != expected]
    if wrong:
        doubts.append(f"layer {wrong[0]} is out of order; layers are counted, not named")
    if run.reduce_s is not None and run.reduce_s > SUSPECT_SHARE * run.iteration_s:
        doubts.append(f"red_grads {run.reduce_s:g} s of {run.iteration_s:g} s")
    return doubts


def to_plan(run: MeasuredRun) -> Plan:
    """The run as a plan of ours: a group a stage, a rank a replica, whole parameters on each.

    The replica of a stage that has number r computes the rows of replica r in every other stage.
    """
    groups, first = [], 0
    for stage in run.stages:
        ranks = tuple(range(first, first + len(stage.replicas)))
        groups.append(
            Group(
                ranks=ranks, microbatches=deal_in_turn(ranks, run.microbatch_rows, run.global_batch), zero=0
            )
        )
        first += len(ranks)
    return Plan(
        global_batch=run.global_batch,
        groups=tuple(groups),
        ministages=tuple(
            Ministage(g, tuple(module_of(layer, run.num_layers) for layer in layers))
            for g, layers in enumerate(count_layers(run))
        ),
        sequence_length=SEQUENCE_LENGTH,
    )


def count_layers(run: MeasuredRun) -> list[range]:
    """The pseudo-layers of each stage, by how many each has."""
    cuts = [0, *accumulate(len(stage.layers) for stage in run.stages)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def deal_in_turn(ranks: Sequence[int], rows: int, global_batch: int) -> tuple[Microbatch, ...]:
    """Microbatches of so many rows in turn to each rank."""
    return tuple(
        Microbatch(ranks[i % len(ranks)], start, min(start + rows, global_batch))
        for i, start in enumerate(range(0, global_batch, rows))
    )


def to_cluster(run: MeasuredRun, links: MachineLinks) -> Cluster:
    """A node of one device for each replica, in the order of the plan's ranks.

    Every tensor-parallel rank of a replica sends the whole boundary (and reduces its own gradients), so the
    device stands for one GPU with its share of the machine's link.

    Raises:
        ClusterError: No bandwidth is known between two of the machines.
    """
    replicas = [replica for stage in run.stages for replica in stage.replicas]
    nodes = tuple(
        Node(name=f"node{i:03d}", devices=(DEVICES[replica.gpu],), zone=replica.zone)
        for i, replica in enumerate(replicas)
    )
    shares: dict[frozenset[Place], Link] = {}
    node_links = {}
    for (i, a), (j, b) in combinations(enumerate(replicas), 2):
        key = frozenset((a, b))
        if key not in shares:
            shares[key] = links.share(a, b)
        node_links[nodes[i].name, nodes[j].name] = shares[key]
    return Cluster(nodes=nodes, node_links=node_links, name=run.name)
