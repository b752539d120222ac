"""Where `[hetero] plan = "auto"` keeps its three files, and whether those that are there fit the job."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from zorselike.cost.catalogue import find_memory_bytes
from zorselike.cost.profile import Profile
from zorselike.errors import ClusterError, ConfigError, FileError, PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.plan.workload import Workload
from zorselike.profiler.machine.found_cluster import list_machines
from zorselike.text.files import read_text
from zorselike.text.wording import show_bytes
from zorselike.train.config.checks import check_against_plan
from zorselike.train.config.config import Config

logger = logging.getLogger("zorselike")

Machines = Mapping[str, tuple[str, ...]]
"""The types of the devices of each node, by local rank."""


@dataclass(frozen=True)
class AutoFiles:
    """One recipe's files; paths of the machine of rank 0."""

    plan: Path
    profile: Path
    cluster: Path
    profile_is_given: bool
    """By the recipe, so that it is not ours to put aside."""
    cluster_is_given: bool

    @classmethod
    def of(cls, config: Config, recipe: Path | None) -> AutoFiles:
        """Those of `[hetero]`; what it does not name is in `<dump_folder>/<recipe>-plan`."""
        folder = Path(config.job.dump_folder) / f"{recipe.stem if recipe else 'run'}-plan"
        hetero = config.hetero
        return cls(
            plan=folder / "plan.toml",
            profile=Path(hetero.profile) if hetero.profile else folder / "profile.json",
            cluster=Path(hetero.cluster) if hetero.cluster else folder / "cluster.toml",
            profile_is_given=bool(hetero.profile),
            cluster_is_given=bool(hetero.cluster),
        )

    def make_folders(self) -> None:
        """Raises `ConfigError` where they cannot be made."""
        for path in (self.plan, self.profile, self.cluster):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{path.parent}: cannot be made: {error.strerror}") from error

    def read(self) -> dict[str, str]:
        """The text of those that are there, by the names that they have in a run's folder; raises
        `ConfigError` where one has none."""
        named = {"plan.toml": self.plan, "profile.json": self.profile, "cluster.toml": self.cluster}
        texts = {}
        for name, path in named.items():
            try:
                if path.exists():
                    texts[name] = read_text(path, Path(name).stem)
            except FileError as error:
                raise ConfigError(f"{path}: {error}; mend or remove it") from None
        return texts


def name_written_plan(config: Config, files: AutoFiles) -> Config:
    """The job as if its recipe named the plan that was written."""
    return replace(config, hetero=replace(config.hetero, plan=str(files.plan), profile="", cluster=""))


def load_plan(config: Config, files: AutoFiles) -> Plan:
    """The plan of an earlier run of this recipe; raises as `load_written_plan` does."""
    with _telling_mend(files):
        plan = Plan.load(files.plan)
        check_against_plan(name_written_plan(config, files), plan)
    return plan


def load_written_plan(config: Config, files: AutoFiles, workload: Workload, here: Machines) -> Plan | None:
    """The plan of an earlier run of this recipe, None if there is none.

    Raises:
        PlanError: It is malformed, or for another model, other machines or more memory; names the mend.
        ClusterError: The cluster file beside it is malformed; names the mend.
        ConfigError: The recipe has changed and contradicts it.
    """
    if not files.plan.exists():
        return None
    plan = load_plan(config, files)
    with _telling_mend(files):
        cluster = _find_cluster(plan, files)
    planned = _planned_machines(plan, cluster)
    mend = _mend(files)
    if plan.workload_fingerprint != workload.fingerprint:
        raise PlanError(
            f"{files.plan} was made for another workload ({plan.model}, {plan.workload_fingerprint}) than "
            f"the recipe's ({workload.model} in {workload.dtype}, {workload.fingerprint}): undo what has "
            f"changed, {mend}"
        )
    if planned != here:
        raise PlanError(
            f"{files.plan} was made for other machines ({list_machines(planned)}) than run here "
            f"({list_machines(here)}): start it on those, {mend}"
        )
    if cluster is not None:
        _check_cluster(plan, cluster, files)
    return plan


def _check_cluster(plan: Plan, cluster: Cluster, files: AutoFiles) -> None:
    """What the cluster file says by now, beside what it said when the plan was made."""
    for rank, (place, peak) in enumerate(
        zip(cluster.place_ranks(plan), plan.estimates.peak_memory_bytes, strict=False)
    ):
        limit = find_memory_bytes(cluster, place)
        if limit is not None and peak > limit:
            raise PlanError(
                f"{files.plan} takes up to {show_bytes(peak)} on rank {rank}, of which {files.cluster} says "
                f"{show_bytes(limit)} by now: say more there, {_mend(files)}"
            )
    if plan.cluster_fingerprint not in (None, cluster.fingerprint):
        logger.info(
            "%s has changed since %s was made; remove the plan to plan anew", files.cluster, files.plan
        )


def put_unfitting_aside(files: AutoFiles, workload: Workload, here: Machines) -> list[str]:
    """Makes room where a profile or cluster file of ours is of something else; a line for each.

    Raises:
        ProfileError, ClusterError: One that the recipe names is.
    """
    told = []
    if files.profile.exists() and (mistake := _find_profile_mistake(files.profile, workload)) is not None:
        if files.profile_is_given:
            raise ProfileError(
                f"[hetero] profile = {files.profile}: {mistake}; name another file, or leave the key out and "
                "what is missing is measured"
            )
        told.append(_put_aside(files.profile, mistake))
    if files.cluster.exists() and (mistake := _find_cluster_mistake(files.cluster, here)) is not None:
        if files.cluster_is_given:
            raise ClusterError(
                f"[hetero] cluster = {files.cluster}: {mistake}; name another file, or leave the key out and "
                "it is written for what runs"
            )
        told.append(_put_aside(files.cluster, mistake))
    return told


@contextmanager
def _telling_mend(files: AutoFiles) -> Iterator[None]:
    """Errors about what an earlier run left say what to do."""
    try:
        yield
    except (PlanError, ClusterError, ConfigError) as error:
        raise type(error)(f"{error}; {_mend(files)}") from None


def _mend(files: AutoFiles) -> str:
    return f"or remove {files.plan}, and a plan is made for what runs"


def _find_cluster(plan: Plan, files: AutoFiles) -> Cluster | None:
    """What the cluster file says, where it is of the plan's machines."""
    if not files.cluster.exists():
        return None
    cluster = Cluster.load(files.cluster)
    nodes = _list_nodes(cluster)
    known = all((d.local_rank, d.type) in enumerate(nodes.get(d.node, ())) for d in plan.devices)
    return cluster if known else None


def _planned_machines(plan: Plan, cluster: Cluster | None) -> Machines:
    """All that ran when the plan was made: it may leave devices out, which only the cluster file names."""
    if cluster is not None:
        return _list_nodes(cluster)
    used: dict[str, tuple[str, ...]] = {}
    for device in sorted(plan.devices, key=lambda each: (each.node, each.local_rank)):
        used[device.node] = (*used.get(device.node, ()), device.type)
    return used


def _list_nodes(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    return {node.name: node.devices for node in cluster.nodes}


def _find_profile_mistake(path: Path, workload: Workload) -> str | None:
    """Why a profile cannot be continued for a workload, without its name."""
    try:
        own = Profile(model=workload.model, workload_fingerprint=workload.fingerprint)
        Profile.load(path).merge(own)
    except ProfileError as error:
        return str(error).removeprefix(f"{path}: ")
    return None


def _find_cluster_mistake(path: Path, here: Machines) -> str | None:
    """Why a cluster file is not of the machines that run, without its name."""
    try:
        known = _list_nodes(Cluster.load(path))
    except ClusterError as error:
        return str(error).removeprefix(f"{path}: ")
    if known == here:
        return None
    return f"is of other machines ({list_machines(known)}) than run here ({list_machines(here)})"


def _put_aside(path: Path, why: str) -> str:
    old = path.with_name(f"{path.stem}.old{path.suffix}")
    path.replace(old)
    return f"{path}: {why}; kept as {old.name} and made anew"
