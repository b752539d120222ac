"""`[hetero] plan = "auto"`: measures what is missing, plans, and keeps the plan for later runs."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from zorselike.cost.curves import CurveWarning
from zorselike.cost.profile import Profile
from zorselike.errors import ClusterError
from zorselike.models.workload import make_workload
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan, Recompute
from zorselike.plan.workload import Workload
from zorselike.planner.answer import Progress
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans
from zorselike.profiler.layers.probes import find_probes
from zorselike.profiler.processes import measure_in_job
from zorselike.profiler.session import measure
from zorselike.profiler.tasks import Job, Part
from zorselike.profiler.workload.module_workload import measure_causal_lm
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.ministage.updates import defers_updates
from zorselike.runtime.processes.device import choose_dtype
from zorselike.runtime.processes.processes import Processes
from zorselike.runtime.processes.world import LOCAL_RANKS_VARIABLE, ProcessInfo, check_world, device_type
from zorselike.text.units import parse_time
from zorselike.text.wording import count, list_few
from zorselike.train.auto.files import (
    AutoFiles,
    Machines,
    load_written_plan,
    name_written_plan,
    put_unfitting_aside,
)
from zorselike.train.config.config import Config
from zorselike.train.config.model import TrainedModel, find_param_dtype
from zorselike.train.data.loader import loading_rows

logger = logging.getLogger("zorselike")

MOST_ROWS = 64
"""Of one layer at once, that are tried."""

PARTS: frozenset[Part] = frozenset(get_args(Part))

_REPEATS = 5
_LARGEST_MESSAGE_BYTES = 2**26
_TELLING_S = 5.0
"""Between two lines about a search."""

RECOMPUTE: Mapping[str, Recompute | None] = {"plan": None, "none": "none", "full": "layer"}
"""What `[activation_checkpoint] mode` demands of every group."""


@dataclass(frozen=True)
class AutoPlan:
    """A plan for the processes that run, and where it is."""

    plan: Plan
    config: Config
    """The job's, naming the plan's file."""
    members: tuple[int, ...]
    """The processes that the plan uses, rising."""
    texts: Mapping[str, str]
    """Plan, profile and cluster by file name, for the run's folder."""


def find_auto_plan(
    config: Config, model: TrainedModel, processes: Processes, recipe: Path | None
) -> AutoPlan:
    """The plan of an earlier run of this recipe, or a new one; the same on every rank. Collective.

    Raises:
        PlanError, ConfigError, ClusterError, ProfileError: On every rank alike: measuring failed, nothing
            fits, or what an earlier run left is for something else.
    """
    infos = processes.infos
    check_world(infos)
    workload = make_auto_workload(config, model, infos)
    files = AutoFiles.of(config, recipe)
    here = _list_devices(infos)
    written = processes.from_first(lambda: _read_written(config, files, workload, here))
    if written is None:
        if config.compile.enable:
            logger.info(
                "layers are measured without torch.compile, with which steps may take less than planned"
            )
        _measure(config, model, workload, files, processes)
        written = processes.from_first(lambda: _plan_and_write(config, workload, files))
    plan = Plan.parse(written["plan.toml"])
    used = {(device.node, device.local_rank) for device in plan.devices}
    members = tuple(info.rank for info in infos if (info.node, info.local_rank) in used)
    left_out = [f"{device_type(i)} {i.local_rank} of node {i.node}" for i in infos if i.rank not in members]
    if left_out:
        logger.info("faster without %s: there is nothing to do for it and it waits", list_few(left_out))
    return AutoPlan(plan, name_written_plan(config, files), members, written)


def make_auto_workload(config: Config, model: TrainedModel, infos: Sequence[ProcessInfo]) -> Workload:
    """What the recipe trains; `auto` precision is that of the devices."""
    length, param_dtype = config.training.seq_len, choose_dtype(find_param_dtype(config), infos)
    if model.shape is not None:
        dtype = _name_dtype(param_dtype or torch.float32)
        return make_workload(model.shape, sequence_length=length, dtype=dtype, model=model.name)
    built = model.build()
    # Beside adapters it computes in the dtype of its files.
    own = max(built.parameters(), key=Tensor.numel).dtype
    dtype = _name_dtype(param_dtype or own)
    return measure_causal_lm(built, sequence_length=length, dtype=dtype, name=model.name)


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_problem(config: Config, workload: Workload, cluster: Cluster, profile: Profile) -> PlanProblem:
    """The question that a recipe asks."""
    scale = 1.0 if workload.dtype == "float16" else None
    return PlanProblem(
        workload=workload,
        cluster=cluster,
        profile=profile,
        global_batch=config.training.global_batch_size,
        defer_updates=defers_updates(config.training.max_norm or None, config.hetero.clip, scale),
        fixed=Fixed(recompute=RECOMPUTE[config.activation_checkpoint.mode]),
    )


def _list_devices(infos: Sequence[ProcessInfo]) -> Machines:
    """By node and local rank; raises `ClusterError` where one is missing."""
    found: dict[str, tuple[str, ...]] = {}
    for info in sorted(infos, key=lambda each: (each.node, each.local_rank)):
        types = found.get(info.node, ())
        if info.local_rank != len(types):
            raise ClusterError(
                f"node {info.node} runs local rank {info.local_rank} and no local rank {len(types)}; with "
                '[hetero] plan = "auto" a node counts its processes from 0: unset '
                f"{LOCAL_RANKS_VARIABLE}, which is for plans that are there"
            )
        found[info.node] = (*types, device_type(info))
    return found


def _read_written(
    config: Config, files: AutoFiles, workload: Workload, here: Machines
) -> dict[str, str] | None:
    """The files of an earlier run with its plan; where there is none, makes room for new ones."""
    if load_written_plan(config, files, workload, here) is not None:
        logger.info("plan: %s, made by an earlier run; remove it to plan anew", files.plan)
        return files.read()
    files.make_folders()
    for line in put_unfitting_aside(files, workload, here):
        logger.info("%s", line)
    return None


def _measure(
    config: Config, model: TrainedModel, workload: Workload, files: AutoFiles, processes: Processes
) -> None:
    """Brings profile and cluster file up to what planning needs; collective."""

    def build() -> nn.Module:
        return copy.deepcopy(model.build())  # One of Hugging Face is built once, and trains afterwards.

    job = Job(
        workload=workload,
        build=build,
        num_tokens=model.vocab_size,
        probes=find_probes(build, workload),
        # Where nothing is said, planning adds a forward to what is measured without.
        recompute=(RECOMPUTE[config.activation_checkpoint.mode] or "none",),
        loss_fn=token_cross_entropy,
        most_rows=min(MOST_ROWS, config.training.global_batch_size),
        repeats=_REPEATS,
        stages=(0, 1, 2, 3),
        parts=PARTS,
        between_steps=lambda: loading_rows(config.training.seq_len),
        largest_message_bytes=_LARGEST_MESSAGE_BYTES,
        again=False,
    )
    with measure_in_job(processes) as measuring, _counting_noise():  # Of which planning tells.
        measure(job, measuring, path=files.profile, cluster_path=files.cluster, memory_bytes=None)


def _plan_and_write(config: Config, workload: Workload, files: AutoFiles) -> dict[str, str]:
    """Plans with what was measured, on rank 0."""
    began = time.perf_counter()
    problem = make_problem(config, workload, Cluster.load(files.cluster), Profile.load(files.profile))
    with _counting_noise() as noisy:
        plan = _search(config, problem)
    if noisy:
        logger.info(
            "the profile is noisy: in %s times fall while sizes rise, and the least of each size and all "
            "larger ones is taken; remove %s to measure anew",
            count(len(noisy), "curve"),
            files.profile,
        )
    plan.save(files.plan)
    logger.info("planned in %.1f s: %s", time.perf_counter() - began, _describe(plan, workload))
    for reason in plan.estimates.limited_by:
        logger.info("what limits it: %s", reason)
    logger.info("plan: %s; later runs of this recipe take it again, remove it to plan anew", files.plan)
    return files.read()


def _search(config: Config, problem: PlanProblem) -> Plan:
    """The best plan found in time, logging now and then how far the search is; raises `NothingFitsError`."""
    told_s = 0.0

    def tell(progress: Progress) -> None:
        nonlocal told_s
        if progress.best_s is not None and progress.elapsed_s >= told_s + _TELLING_S:
            told_s = progress.elapsed_s
            logger.info(
                "planning for %.0f s: a step of %.3g s so far, none takes less than %.3g s",
                progress.elapsed_s,
                progress.best_s,
                progress.bound_s,
            )

    budget_s = parse_time(config.hetero.plan_budget)
    assert budget_s is not None, "check_config has seen it"
    answer = search_plans(problem, budget_s=budget_s, top=1, seed=config.debug.seed, on_progress=tell)
    if answer.ending == "interrupted":
        raise KeyboardInterrupt  # Of the job, not of the search alone.
    for note in answer.notes:
        logger.info("%s", note)
    return answer.best.case.plan


@contextmanager
def _counting_noise() -> Iterator[set[str]]:
    """Collects what would be a page of warnings about curves that do not rise; other warnings are shown."""
    noisy: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", CurveWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, CurveWarning):
                noisy.add(str(message))
            else:
                show(message, category, *where, **more)

        warnings.showwarning = collect
        yield noisy


def _describe(plan: Plan, workload: Workload) -> str:
    """What it is estimated to reach."""
    step_s, share = plan.estimates.iteration_s, plan.estimates.share_of_ideal
    assert step_s is not None, "planned plans have estimates"
    tokens_per_s = plan.global_batch * workload.sequence_length / step_s
    ideal = "" if share is None else f", {share:.0%} of what its devices could do at most"
    return f"a step should take {step_s:.3g} s, {tokens_per_s:,.0f} tokens/s{ideal}"
