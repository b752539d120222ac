"""The training program for ranks that die, leave and come: what `trainer` does, generation by generation."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path

import torch

from zorselike.elastic.drawing import find_memory
from zorselike.elastic.meeting.environment import from_environment
from zorselike.errors import CheckpointError, ClusterError
from zorselike.plan.plan import Plan
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.device import find_device
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.world import describe_process, device_type
from zorselike.text.wording import count
from zorselike.train.checkpoints import RunCheckpoints, checkpoint_folder, will_load
from zorselike.train.config.file import Request, dump_config
from zorselike.train.config.model import TrainedModel, find_model, find_param_dtype
from zorselike.train.elastic.generation import GenerationRun
from zorselike.train.elastic.known import Alone, Known, RanksOfGeneration, agree
from zorselike.train.elastic.notice import Notice, name_signal
from zorselike.train.elastic.pipeline import ProgramPipeline
from zorselike.train.elastic.planning import find_plan, refuse_launcher
from zorselike.train.optimizer import build_optimizer_factory, log_schedule
from zorselike.train.parts import (
    check_seq_len,
    choose_kernels,
    collecting_garbage,
    find_keywords,
    log_data,
    open_data,
)
from zorselike.train.processes import set_up_logging
from zorselike.train.report.run_folder import log_into, open_run_folder
from zorselike.train.report.writers import check_writers
from zorselike.train.traits import find_data_traits, find_traits

logger = logging.getLogger("zorselike")

_MOST_LINES = 1000
"""That are kept until it is known who logs."""
_MOST_SHOWN = 16


def run_elastic(request: Request, plan: Plan | None) -> int:
    """Trains with whoever is there; returns the exit code, 0 also where this process has left the job.

    Raises:
        ConfigError, PlanError: Before this process joins.
        ClusterError: The job has ended, or goes on without this process.
    """
    set_up_logging(None)
    refuse_launcher()
    config = request.config
    model = find_model(config)
    check_seq_len(config, model)
    check_writers(config)
    choose_kernels(config)
    device = find_device(
        config.hetero.device,
        without_gpu='[hetero] device = "cuda", but torch finds no GPU here; set it to "cpu"',
    )
    run = ElasticRun(request, plan, model, device)
    with closing(run.notice), collecting_garbage(config.training.gc_freq) as run.collect:
        return run.train()


class ElasticRun:
    """One process's part in a run, as long as it lives."""

    def __init__(
        self, request: Request, plan: Plan | None, model: TrainedModel, device: torch.device
    ) -> None:
        self._request, self.model = request, model
        found = find_plan(request.config, plan, model, request.config_path, device)
        self.config, self._first_plan, planner = found
        config = self.config
        self._module = self._build_model()
        # Before joining: the others need not wait for it.
        self.rows, self.held_out = open_data(
            config, model, self._module, Alone(), global_batch=self._first_plan.global_batch
        )
        self.keywords = find_keywords(self._module, self.rows, self.held_out)
        self.known = Known(process=f"{os.getpid()} of {find_identity().node}")
        self._processes: list[str] = []
        """By rank."""
        self.checkpoints: RunCheckpoints | None = None
        """Of the pipeline that has just been filled from one."""
        self.collect: Callable[[int], None] = lambda step: None
        """Collects garbage after a step, where that is due."""
        self.promised: int | None = None
        """How many steps a loss undoes at most, as was said last."""
        self._unlogged: list[logging.LogRecord] = []
        """Of a pipeline that was filled before it was known who logs."""
        self._began_s = time.perf_counter()
        self.notice = Notice(notice_s=config.elastic.notice_s)
        info = describe_process(device, rank=0)
        self.pipe = self.notice.pipe = ProgramPipeline(
            self._build_model,
            self._first_plan,
            meeting=partial(
                from_environment, device_type=device_type(info), memory_bytes=find_memory(device)
            ),
            planner=planner,
            payback_s=config.elastic.payback_s,
            replan_on_drift=config.elastic.replan_on_drift,
            settings=find_traits(config, model) | find_data_traits(self.rows, self.held_out),
            begin=self._begin if model.weights is not None or will_load(config) else None,
            mirror_share=config.elastic.mirror_share,
            optimizer=build_optimizer_factory(config.optimizer),
            device=device,
            param_dtype=find_param_dtype(config),
            compile=config.compile.enable and "model" in config.compile.components,
            max_norm=config.training.max_norm or None,
            clip=config.hetero.clip,
            seed=config.debug.seed,
        )
        self.pipe.begin_with = self._begin

    def _build_model(self) -> torch.nn.Module:
        return copy.deepcopy(self.model.build())  # One of Hugging Face is built once.

    def train(self) -> int:
        """Generation after generation; returns the exit code."""
        pipe, ended = self.pipe, ""
        with pipe:
            while not ended and pipe.wait():
                number, own = pipe.generation, None
                try:
                    with pipe.recovering():
                        own = self._make_generation()
                    while own is not None and pipe.runs(number) and not ended:
                        with pipe.recovering():
                            ended = own.finish_step()
                            if ended:
                                own.save_last(ended)
                        if not pipe.runs(number):
                            ended = ""
                        elif not ended:
                            own.step()
                finally:
                    if own is not None:
                        own.close()
                        self.known = own.tell()
            if not ended:
                text = f"out of the job after step {pipe.num_steps}, with nothing lost: {pipe.why_left}"
                print(f"zorselike: {text}", file=sys.stderr, flush=True)
                return 0
            self._say_end(ended)
        if ended == "short":
            config = self.config
            where = f"; its state is in {checkpoint_folder(config)}" if config.checkpoint.enable else ""
            raise ClusterError(
                f"{count(pipe.plan.num_ranks, 'rank')} left, [elastic] min_ranks = "
                f"{config.elastic.min_ranks}: the run has ended after step {pipe.num_steps}{where}"
            )
        return 0

    # -- a generation begins ---------------------------------------------------------------

    def _make_generation(self) -> GenerationRun:
        """What this rank has for the generation that runs; collective."""
        pipe = self.pipe
        inner = pipe.pipe
        assert inner is not None
        ranks = self._agree(inner)
        checkpoints, self.checkpoints = self.checkpoints, None
        if checkpoints is not None:
            self.known = replace(self.known, saved=checkpoints.saved)
        else:
            checkpoints = self._make_checkpoints(inner, ranks)
        is_first = self.known.first_step < 0
        if is_first:
            step = pipe.num_steps
            validated = step - 1 if checkpoints.owes_validation else step
            self.known = replace(self.known, first_step=step, validated=validated, last=None)
        folder = Path(self.known.folder)
        checkpoints.run = {"job": self.known.job, "folder": self.known.folder}
        if self.config.checkpoint.enable:
            self._claim(checkpoints, must_succeed=is_first)
            if self.known.saved is not None:
                checkpoints.remember(self.known.saved)
                pipe.note_checkpoint(str(checkpoints.folder))
        own = GenerationRun(self, inner, ranks, checkpoints, folder)
        if self.known.change is None:
            self._say_start(inner)
        own.say_change()
        processes = ", ".join(
            f"rank {i} process {name}" for i, name in enumerate(self._processes[:_MOST_SHOWN])
        )
        more = ", ..." if len(self._processes) > _MOST_SHOWN else ""
        logger.info("elastic: %s%s", processes, more)
        return own

    def _agree(self, inner: HeteroPipeline) -> RanksOfGeneration:
        """Learns what the others know, and has this rank log if it leads; collective."""
        ranks = RanksOfGeneration(inner.rank, inner.assembly.control)
        said = ranks.gather(self.known)
        is_first = not any(known.job for known in said)
        set_up_logging(ranks.rank)
        known = replace(agree(said), process=self.known.process)
        self._processes = [other.process for other in said]
        if is_first:
            known = replace(known, job=self.pipe.job, folder=self._open_folder(ranks), first_step=-1)
        elif ranks.rank == 0:
            self._log_on(Path(known.folder))
        for record in self._unlogged:
            logger.handle(record)
        self.known, self._unlogged = known, []
        return ranks

    def _claim(self, checkpoints: RunCheckpoints, *, must_succeed: bool) -> None:
        """Later a disk that is full, or away, is a reason to save nothing for now, as it is at a save."""
        try:
            checkpoints.claim(job=self.known.job)
        except CheckpointError as error:
            if must_succeed:
                raise
            if self.pipe.rank == 0:
                logger.warning("nothing can be saved now, and training goes on: %s", error)

    def _log_on(self, folder: Path) -> None:
        try:
            log_into(folder)
        except OSError as error:
            logger.warning("this rank's log goes to no file: %s", error)

    def _open_folder(self, ranks: RanksOfGeneration) -> str:
        """The run's: a new one, unless all who were there before have lost this job to others, who go on from
        its checkpoint; collective."""
        run = {} if self.checkpoints is None else self.checkpoints.run
        if run.get("job") != self.pipe.job:
            plan, recipe = self.pipe.plan, self._request.config_path
            return str(open_run_folder(self.config, plan, ranks, recipe=recipe, beside_plan={}).absolute())
        if ranks.rank == 0:
            log_into(Path(run["folder"]))
        return run["folder"]

    def _make_checkpoints(self, inner: HeteroPipeline, ranks: RanksOfGeneration) -> RunCheckpoints:
        return RunCheckpoints(self.config, inner, ranks, self.model, self._module, self.rows)

    def _begin(self, inner: HeteroPipeline, checkpoint: str | None = None) -> None:
        """Fills a pipeline where nobody has a state to give: from its job's `checkpoint`, if it has saved
        one; collective."""
        ranks = RanksOfGeneration(inner.rank, inner.assembly.control)
        set_up_logging(ranks.rank)
        keeps = BufferingHandler(_MOST_LINES)
        logger.handlers = [keeps]
        self.checkpoints = self._make_checkpoints(inner, ranks)
        self.checkpoints.go_on(claims=False, must_load=checkpoint is not None)
        self._unlogged = list(keeps.buffer)

    # -- what is said ----------------------------------------------------------------------

    def _say_start(self, inner: HeteroPipeline) -> None:
        config, elastic = self.config, self.config.elastic
        if config.job.print_config:
            logger.info("configuration:\n%s", dump_config(config))
        logger.info("%s\n%s", config.job.description or config.hetero.plan, inner.describe())
        logger.info("model: %s, %s", self.model.name, self.model.size)
        log_data(config, self.rows)
        log_schedule(config.lr_scheduler, steps=config.training.steps)
        beyond = (
            "goes back to the newest checkpoint"
            if config.checkpoint.enable
            else "ends the job, since [checkpoint] is not enabled"
        )
        logger.info(
            "elastic: mirrors may be on their way for %.0f %% of the time ([elastic] mirror_share); how many "
            "steps a loss undoes at most is said once steps are measured; the loss of a rank and its mirror "
            "at once %s",
            100 * elastic.mirror_share,
            beyond,
        )

    def _say_end(self, ended: str) -> None:
        step, steps = self.pipe.num_steps, self.config.training.steps
        how = "finished" if ended == "finished" else "ends"
        if ended.isdecimal():
            how = f"stopped by {name_signal(int(ended))}"
        seconds = time.perf_counter() - self._began_s
        logger.info(
            "%s after %d of %d steps and %.1f s; see %s", how, step, steps, seconds, self.known.folder
        )
        if ended != "finished" and self.config.checkpoint.enable:
            logger.info("the same command goes on from step %d", step)
