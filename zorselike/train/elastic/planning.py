"""The plan that an elastic run begins with, who finds the next one, and how it is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from zorselike.cost.profile import Profile
from zorselike.elastic.contingency import SearchPlanner
from zorselike.elastic.deciding.decisions import Planner
from zorselike.elastic.meeting.environment import FOUND, JOIN, NANNY_FD
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.world import describe_process
from zorselike.text.units import parse_time
from zorselike.train.auto.files import AutoFiles, name_written_plan
from zorselike.train.auto.plan import make_auto_workload
from zorselike.train.config.checks import check_against_plan
from zorselike.train.config.config import Config
from zorselike.train.config.model import TrainedModel

_NANNY = "-m zorselike.elastic.meeting.nanny"


def refuse_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `ConfigError` where what started this process ends the others when it dies. (What only the
    dynamic rendezvous of torchrun does, `meeting.environment` refuses.)"""
    if FOUND in environment or JOIN in environment:
        return
    identity = find_identity(environment)
    is_alone = identity.size == 1 or NANNY_FD in environment
    if "TORCHELASTIC_RUN_ID" in environment and (identity.local_size or 1) > 1 and not is_alone:
        raise ConfigError(
            "[elastic] enable = true: torchrun ends all processes of a node when one of them dies: start "
            "them by `zorselike run --ranks N -- python -m zorselike.train ...`, or let it start nannies: "
            f"torchrun ... {_NANNY} python -m zorselike.train ..."
        )
    if identity.source == "Slurm" and environment.get("SLURM_KILL_BAD_EXIT") == "1":
        raise ConfigError(
            "[elastic] enable = true: srun --kill-on-bad-exit ends all processes when one dies: start by "
            f"srun --no-kill --kill-on-bad-exit=0 --wait=0 python {_NANNY} python -m zorselike.train ..."
        )
    if identity.source in ("Open MPI", "PALS", "Hydra") and not is_alone:
        raise ConfigError(
            f"[elastic] enable = true: {identity.source} ends all processes when one dies: let it start one "
            "`zorselike run` a node, or nannies: mpirun ... python "
            f"{_NANNY} python -m zorselike.train ..."
        )


def find_plan(
    config: Config, plan: Plan | None, model: TrainedModel, recipe: Path | None, device: torch.device
) -> tuple[Config, Plan, Planner | None]:
    """The recipe with its plan's name, the plan to begin with, and who finds others; None: groups stay.

    Raises:
        ConfigError: `[hetero] plan = "auto"`, and no earlier run has made one; or a file to plan with that is
            named is not there; or another plan is to be found where a card has become slower, and nobody
            knows what devices take.
    """
    files = AutoFiles.of(config, recipe)
    for key, path in (("profile", files.profile), ("cluster", files.cluster)):
        if getattr(config.hetero, key) and config.elastic.replan == "auto" and not path.exists():
            raise ConfigError(
                f'[hetero] {key} = "{path}": is not there, and plans after a loss need it; copy '
                'it to every node, or say [elastic] replan = "same groups"'
            )
    knows_costs = files.profile.exists() and files.cluster.exists()
    if plan is None:
        if not files.plan.exists():
            raise ConfigError(
                f'[elastic] enable = true with [hetero] plan = "auto": {files.plan} is not there yet, and '
                "devices are measured by a run whose processes stay: start this recipe once by torchrun, "
                "without [elastic], on all devices; its plan, profile and cluster file are taken then"
            )
        plan = Plan.load(files.plan)
    elif not config.hetero.profile:
        knows_costs = False
    planner = None
    if config.elastic.replan == "auto" and knows_costs:
        info = describe_process(device, rank=0)
        planner = SearchPlanner(
            make_auto_workload(config, model, (info,)),
            Cluster.load(files.cluster),
            Profile.load(files.profile),
            plan.global_batch,
            budget_s=parse_time(config.hetero.plan_budget) or 30.0,
        )
    if planner is None and config.elastic.replan_on_drift:
        raise ConfigError(
            "[elastic] replan_on_drift = true: a search needs to know what devices and links take: name "
            "[hetero] profile and cluster, as `zorselike profile` writes them"
        )
    if config.hetero.plan == "auto":
        config = name_written_plan(config, files)
        check_against_plan(config, plan)
    return config, plan, planner
