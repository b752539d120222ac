"""The files that commands which plan read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from zorselike.cli.assumed_profile import NOT_MEASURED, assume_profile
from zorselike.cost.layer_times import find_implausible
from zorselike.cost.profile import Profile
from zorselike.errors import ConfigError, ProfileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.workload import Workload
from zorselike.text.wording import list_few

if TYPE_CHECKING:
    from zorselike.cli.model_choice import ModelOptions


class Files(Protocol):
    """Options of a command that name files."""

    @property
    def cluster(self) -> str | None: ...
    @property
    def profile(self) -> str | None: ...
    @property
    def from_profile(self) -> str | None: ...
    @property
    def model(self) -> ModelOptions: ...


class Inputs(NamedTuple):
    """Inputs of the planner."""

    cluster: Cluster
    profile: Profile
    workload: Workload
    notes: tuple[str, ...]
    """Notes for the reader on what was not measured, or not well."""


def check_files(name: str, command: Files) -> None:
    """Raises `ConfigError` for contradictory options, before files are read; `name`: of the command."""
    if command.from_profile is not None and command.profile is not None:
        raise ConfigError(f"{name}: --from-profile and --profile are both given; keep one")
    if command.cluster is None and command.from_profile is None:
        raise ConfigError(
            f"{name}: --cluster is missing; give a cluster file (examples: recipes/clusters), or "
            "--from-profile with a file that `zorselike profile` wrote"
        )


def list_files(command: Files) -> list[str | Path | None]:
    """What is read; None for what is not given."""
    beside = None if command.from_profile is None else _cluster_beside(command.from_profile)
    return [command.cluster or beside, command.profile, command.from_profile, command.model.workload]


def _cluster_beside(profile: str) -> Path:
    return Path(profile).parent / "cluster.toml"


def load_cluster(name: str, command: Files) -> Cluster:
    """The given cluster, or the one beside the profile; raises `ClusterError` and `ConfigError`."""
    if command.cluster is not None:
        return Cluster.load(command.cluster)
    assert command.from_profile is not None
    path = _cluster_beside(command.from_profile)
    try:
        path.stat()
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: --from-profile {command.from_profile}: {path}, which `zorselike profile` writes beside "
            "it, does not exist; give --cluster"
        ) from None
    except OSError:  # What it is, reading says.
        pass
    return Cluster.load(path)


def load_inputs(name: str, command: Files, cluster: Cluster, devices: set[str]) -> Inputs:
    """Profile and workload for these device types.

    Raises:
        ConfigError: the model or the sequence length is missing.
        ProfileError: the profile lacks one of the devices.
    """
    path = command.profile or command.from_profile
    profile = None if path is None else Profile.load(path)
    workload = command.model.load_workload(
        name, source=path or str(command.cluster), devices=devices, profile=profile, profile_file=path
    )
    if profile is None:
        return Inputs(cluster, assume_profile(workload), workload, (NOT_MEASURED,))
    try:
        profile.check_workload(workload)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None
    measured = {times.device for times in profile.layers}
    if measured and (lacking := sorted(devices - measured)):
        raise ProfileError(
            f"{path}: nothing was measured on {list_few(lacking)}, which the cluster has; measure there, "
            f"leave them out (--quota {' '.join(f'{device}=0' for device in lacking)}), or plan without a "
            "profile"
        )
    implausible = find_implausible(profile, workload)
    return Inputs(cluster, profile, workload, () if implausible is None else (implausible,))
