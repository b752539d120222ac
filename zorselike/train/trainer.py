"""The training program: builds what a recipe names, and runs the loop."""

from __future__ import annotations

import logging
import math
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from zorselike.errors import CheckpointError, PlanError
from zorselike.plan.plan import Plan
from zorselike.runtime.assembly import CompiledPlan, compile_plan
from zorselike.runtime.ministage.updates import defers_updates
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.processes import Processes
from zorselike.train.auto.files import AutoFiles, load_plan, name_written_plan
from zorselike.train.auto.plan import find_auto_plan
from zorselike.train.checkpoints import RunCheckpoints, will_load
from zorselike.train.config.config import Config
from zorselike.train.config.file import Request, dump_config
from zorselike.train.config.model import TrainedModel, find_model, find_param_dtype
from zorselike.train.data.loader import RowLoader, StepDataset
from zorselike.train.data.rows import Rows
from zorselike.train.dry_run import check_data, describe_planning, describe_run
from zorselike.train.equal_replicas import make_equal_plan
from zorselike.train.optimizer import (
    WarmupStableDecay,
    build_lr_scheduler_factory,
    build_optimizer_factory,
    log_schedule,
)
from zorselike.train.parts import (
    build_metrics,
    check_seq_len,
    choose_kernels,
    collecting_garbage,
    find_keywords,
    log_data,
    open_data,
)
from zorselike.train.processes import join_job, narrow, set_up_logging
from zorselike.train.report.estimates import compare_with_estimates
from zorselike.train.report.memory import describe_deferral, describe_fullest
from zorselike.train.report.profiling import profiler
from zorselike.train.report.run_folder import open_run_folder
from zorselike.train.report.writers import check_writers, open_writers
from zorselike.train.stop import WHAT_TORCHRUN_PRINTS, SignalWatch, StopVote
from zorselike.train.traits import check_same_recipe
from zorselike.train.validation import Validation

logger = logging.getLogger("zorselike")


def run(request: Request, plan: Plan | None) -> int:
    """Trains, or with `--dry-run` only describes it; returns the exit code. Without a plan one is searched
    (`zorselike/train/auto/plan.py`).

    Raises:
        ConfigError, PlanError, ClusterError, ProfileError: on every rank alike, before any work starts.
    """
    set_up_logging(find_identity().rank)
    config = request.config
    model = find_model(config)
    check_seq_len(config, model)
    if not config.hetero.plan:
        plan = _make_plan(request, model)
    if request.dry_run:
        if find_identity().rank == 0:
            print(_describe_dry_run(request, plan, model), flush=True)
            check_data(config)  # Last: the plan is of use also where the data are elsewhere.
        return 0
    check_writers(config)
    choose_kernels(config)
    with join_job(config, plan) as world:
        check_same_recipe(config, model, world)
        if plan is not None:
            return _train(request, config, plan, model, world)
        # Wrong data is said before devices are measured; what is read here is read from the cache later.
        open_data(config, model, model.build(), world, global_batch=config.training.global_batch_size)
        auto = find_auto_plan(config, model, world, request.config_path)
        with narrow(world, auto.members) as members:
            if members is None:
                return 0
            return _train(request, auto.config, auto.plan, model, members, beside_plan=auto.texts)


def _make_plan(request: Request, model: TrainedModel) -> Plan:
    """Of the processes that run, or that a dry run stands for: one replica, where none were started."""
    config, size = request.config, find_identity().size
    if request.dry_run and size == 1:
        size = config.parallelism.tensor_parallel_degree
    return make_equal_plan(config, [*model.forward_flops(config.training.seq_len)], size)


def _train(
    request: Request,
    config: Config,
    plan: Plan,
    model: TrainedModel,
    world: Processes,
    *,
    beside_plan: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Trains with the plan's processes; returns the exit code. `beside_plan`: further files for the run's
    folder, by name."""
    module = model.build()
    rows, held_out = open_data(config, model, module, world, global_batch=plan.global_batch)
    keywords = find_keywords(module, rows, held_out)
    refused: CheckpointError | None = None
    skips_init = any(world.gather(model.weights is not None or will_load(config)))
    with _build_pipeline(config, plan, module, world, skip_init=skips_init) as pipe:
        folder = open_run_folder(config, plan, world, recipe=request.config_path, beside_plan=beside_plan)
        if config.job.print_config:
            logger.info("configuration:\n%s", dump_config(config))
        logger.info("%s\n%s", config.job.description or config.hetero.plan, pipe.describe())
        logger.info("model: %s, %s", model.name, model.size)
        log_data(config, rows)
        _log_deferral(config, pipe, world)
        try:
            signal_number = _run_steps(config, pipe, rows, held_out, keywords, model, module, world, folder)
        except CheckpointError as error:  # Every rank raises it: none waits for another.
            refused = error
    if refused is not None:
        raise refused
    return 128 + signal_number if signal_number else 0


def _run_steps(
    config: Config,
    pipe: HeteroPipeline,
    rows: Rows,
    held_out: Rows | None,
    keywords: Sequence[str],
    model: TrainedModel,
    module: nn.Module,
    world: Processes,
    folder: Path,
) -> int:
    """Runs all steps, with validation where there are rows `held_out`; returns 0, or the signal that
    stopped the run, on every rank alike. `keywords`: those of `find_keywords`."""
    checkpoints = RunCheckpoints(config, pipe, world, model, module, rows)
    checkpoints.go_on()
    before, steps = pipe.num_steps, config.training.steps
    if before >= steps or checkpoints.is_finished():
        after = (
            "" if before >= steps else f", whose model is handed on; more steps would follow step {before}"
        )
        logger.info("all of [training] steps = %d are taken%s; nothing is left to train", steps, after)
        checkpoints.hand_on()
        if before >= steps and held_out is not None:
            return _validate(config, pipe, held_out, keywords, model, world, folder)
        return 0
    dataset = StepDataset(
        rows,
        global_batch=pipe.plan.global_batch,
        seed=config.debug.seed,
        input_rows=pipe.input_rows,
        target_rows=pipe.target_rows,
        rows_before=pipe.rows_seen,
        keyword_rows=pipe.rows,
        keywords=keywords if rows.is_packed else (),
    )
    loader = RowLoader(dataset, config.training.dataloader, device=world.device)
    writers = open_writers(config, folder=folder, rank=pipe.rank, launcher_rank=world.rank)
    metrics = build_metrics(config, pipe, model, world.control, writers)
    began = time.perf_counter()
    schedulers = pipe.lr_schedulers(
        build_lr_scheduler_factory(config.lr_scheduler, steps=steps, steps_before=before)
    )
    rate = WarmupStableDecay.of(config.lr_scheduler, steps=steps)
    log_schedule(config.lr_scheduler, steps=steps)
    if pipe.loss_scale is not None:
        # torch mistakes a skipped first step for a schedule that is ahead of its optimizer.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    with (
        closing(loader),
        closing(metrics),
        closing(SignalWatch()) as watch,
        profiler(config.profiling, folder=folder, rank=pipe.rank) as profile,
        collecting_garbage(config.training.gc_freq) as collect,
    ):
        vote = StopVote(watch, world.control)
        validation = None
        if held_out is not None:
            validation = Validation(config, held_out, pipe, keywords=keywords, metrics=metrics, vote=vote)
        batches = iter(loader)
        batch = next(batches)
        metrics.restart()
        if validation is not None and checkpoints.owes_validation:
            checkpoints.save_if_due(before, validation_loss=validation.run(before))
        for step in range(before + 1, steps + 1):
            metrics.begin_step()
            vote.open()
            result = pipe.step(batch.inputs, batch.targets, **batch.keywords)
            metrics.end_step(result)
            schedulers.step()  # Also after a skipped step: the rate depends on the step alone.
            batch = metrics.wait_for_data(batches)  # While a GPU still computes.
            collect(step)
            if step == before + 1:
                # Before metrics reset the device's peak.
                reports = world.gather(pipe.memory_report())
                logger.info("%s", describe_fullest(pipe.plan, reports))
            if metrics.is_due(step):
                lr = config.optimizer.lr * rate(step - 1)
                metrics.log(step, lr=lr, busy_s=pipe.busy_s, loss_scale=pipe.loss_scale)
            signal_number = vote.close()
            profile(result)
            is_validated = validation is not None and validation.is_due(step)
            loss = math.nan
            if validation is not None and is_validated and not signal_number:
                loss = validation.run(step)
                signal_number = validation.stopped_by
            checkpoints.owes_validation = is_validated and signal_number != 0
            if signal_number:
                break
            with metrics.excluding():
                checkpoints.save_if_due(step, validation_loss=loss)
        checkpoints.save_last(is_finished=not signal_number)
    comparison = compare_with_estimates(pipe.plan.estimates, world.gather(metrics.facts()))
    if comparison is not None:
        logger.info("%s", comparison)
    how = f"stopped by {signal.Signals(signal_number).name}" if signal_number else "finished"
    seconds = time.perf_counter() - began
    logger.info("%s after %d of %d steps and %.1f s; see %s", how, step, steps, seconds, folder)
    if signal_number and config.checkpoint.enable:
        logger.info("the same command goes on from step %d", step)
    if signal_number and dist.is_torchelastic_launched():
        logger.info("%s", WHAT_TORCHRUN_PRINTS)
    return signal_number


def _validate(
    config: Config,
    pipe: HeteroPipeline,
    rows: Rows,
    keywords: Sequence[str],
    model: TrainedModel,
    world: Processes,
    folder: Path,
) -> int:
    """The validation of what is trained already; returns 0, or the signal that stopped it."""
    writers = open_writers(config, folder=folder, rank=pipe.rank, launcher_rank=world.rank)
    metrics = build_metrics(config, pipe, model, world.control, writers)
    with closing(metrics), closing(SignalWatch()) as watch:
        vote = StopVote(watch, world.control)
        metrics.restart()
        validation = Validation(config, rows, pipe, keywords=keywords, metrics=metrics, vote=vote)
        validation.run(pipe.num_steps)
        return validation.stopped_by


# -- parts of a run ----------------------------------------------------------------------------


def _describe_dry_run(request: Request, plan: Plan | None, model: TrainedModel) -> str:
    """Describes what a run would do."""
    config, lines = request.config, []
    if plan is None:
        files = AutoFiles.of(config, request.config_path)
        if not files.plan.exists():
            return describe_planning(config, model, files)
        lines = [f"{files.plan} exists from an earlier run and is used again, if the same devices run"]
        plan = load_plan(config, files)
        config = name_written_plan(config, files)
    with _naming_plan_file(config):
        compiled = _compile(config, plan, model.build())
    return "\n".join([*lines, describe_run(config, plan, compiled, model)])


def _compile(config: Config, plan: Plan, model: nn.Module) -> CompiledPlan:
    """What `HeteroPipeline` would compile; without the cards, "auto" is bf16."""
    dtype = find_param_dtype(config)
    if isinstance(dtype, str):
        dtype = torch.bfloat16
    scale = 1.0 if dtype is torch.float16 else None
    defers = defers_updates(config.training.max_norm or None, config.hetero.clip, scale)
    return compile_plan(model, plan, defer_steps=defers, param_dtype=dtype)


def _build_pipeline(
    config: Config, plan: Plan, model: nn.Module, world: Processes, *, skip_init: bool = False
) -> HeteroPipeline:
    with _naming_plan_file(config):
        pipe = HeteroPipeline(
            model,
            plan,
            optimizer=build_optimizer_factory(config.optimizer),
            device=world.device,
            param_dtype=find_param_dtype(config),
            compile=config.compile.enable and "model" in config.compile.components,
            max_norm=config.training.max_norm or None,
            clip=config.hetero.clip,
            seed=config.debug.seed,
            skip_init=skip_init,
        )
    if world.alarm is not None:
        world.alarm.abandon()
    return pipe


def _log_deferral(config: Config, pipe: HeteroPipeline, world: Processes) -> None:
    """Logs what deferred updates keep in memory; collective."""
    if defers_updates(config.training.max_norm or None, config.hetero.clip, pipe.loss_scale):
        reports = world.gather(pipe.memory_report())
        logger.info("%s", describe_deferral(pipe.plan, reports, in_fp16=pipe.loss_scale is not None))


@contextmanager
def _naming_plan_file(config: Config) -> Iterator[None]:
    """Prefixes errors about plan and model, or plan and processes, with the plan's file, or what made it."""
    try:
        yield
    except PlanError as error:
        degree = config.parallelism.tensor_parallel_degree
        made_by = f"[parallelism] tensor_parallel_degree = {degree}"
        raise PlanError(f"{config.hetero.plan or made_by}: {error}") from error
