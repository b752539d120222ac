"""The files that `zorselike plan` reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zorselike.cli.assumed_profile import NOT_MEASURED, assume_profile
from zorselike.cost.profile import Profile
from zorselike.errors import ConfigError, ProfileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.workload import Workload
from zorselike.text.wording import list_few

if TYPE_CHECKING:
    from zorselike.cli.plan.command import PlanCommand


class Inputs(NamedTuple):
    """What a plan is made from."""

    cluster: Cluster
    profile: Profile
    workload: Workload
    notes: tuple[str, ...]
    """What was not measured."""


def load_cluster(command: PlanCommand) -> Cluster:
    """That which is given, or the one beside the profile; raises `ClusterError` and `ConfigError`."""
    if command.cluster is not None:
        return Cluster.load(command.cluster)
    assert command.from_profile is not None
    path = Path(command.from_profile).parent / "cluster.toml"
    if not path.exists():
        raise ConfigError(
            f"plan: --from-profile {command.from_profile}: there is no {path} beside it, which `zorselike "
            "profile` writes; give --cluster"
        )
    return Cluster.load(path)


def load_inputs(command: PlanCommand, cluster: Cluster, devices: set[str]) -> Inputs:
    """Profile and workload for devices of these types.

    Raises:
        ConfigError: Nothing says which model, or how long a row is.
        ProfileError: The profile has nothing about one of the devices.
    """
    path = command.profile or command.from_profile
    profile = None if path is None else Profile.load(path)
    workload = command.model.load_workload(
        "plan", source=path or str(command.cluster), devices=devices, profile=profile
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
            f"leave out (--quota {' '.join(f'{device}=0' for device in lacking)}), or plan without a profile"
        )
    return Inputs(cluster, profile, workload, ())
