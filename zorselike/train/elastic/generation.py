"""One rank's part in one generation: all that depends on who is there."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zorselike.elastic.result import ElasticResult
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.train.checkpoints import RunCheckpoints
from zorselike.train.data.loader import RowLoader, StepDataset
from zorselike.train.elastic.known import Known, RanksOfGeneration, count_change, describe_change
from zorselike.train.elastic.notice import EndVote
from zorselike.train.optimizer import WarmupStableDecay
from zorselike.train.parts import build_metrics
from zorselike.train.report.estimates import compare_with_estimates
from zorselike.train.report.memory import describe_fullest
from zorselike.train.report.profiling import profiler
from zorselike.train.report.writers import open_writers
from zorselike.train.validation import Validation

if TYPE_CHECKING:
    from zorselike.train.elastic.program import ElasticRun

logger = logging.getLogger("zorselike")

_PROMISED_AFTER = 6
"""Steps of a generation after which it is known how often the state is mirrored."""


class GenerationRun:
    """Made when a generation runs, closed when it is over; collective to make."""

    def __init__(
        self,
        run: ElasticRun,
        inner: HeteroPipeline,
        ranks: RanksOfGeneration,
        checkpoints: RunCheckpoints,
        folder: Path,
    ) -> None:
        config = self._config = run.config
        self._run, self._pipe, self._inner = run, run.pipe, inner
        self._ranks, self._checkpoints = ranks, checkpoints
        self._known = run.known
        self._first_step = self._pipe.num_steps
        self._result: ElasticResult | None = None
        self._rate = WarmupStableDecay.of(config.lr_scheduler, steps=config.training.steps)
        group = inner.assembly.groups.make(range(ranks.size), "gloo")
        assert group is not None
        self._vote = EndVote(run.notice.watch, group)
        self._stack = ExitStack()
        try:
            self._prepare(folder)
        except BaseException:
            self._stack.close()
            raise

    def _prepare(self, folder: Path) -> None:
        run, config, inner, ranks = self._run, self._config, self._inner, self._ranks
        writers = open_writers(
            config, folder=folder, rank=inner.rank, launcher_rank=inner.rank, after=self._first_step
        )
        self._metrics = build_metrics(config, inner, run.model, ranks.control, writers)
        self._stack.enter_context(closing(self._metrics))
        dataset = StepDataset(
            run.rows,
            global_batch=inner.plan.global_batch,
            seed=config.debug.seed,
            input_rows=inner.input_rows,
            target_rows=inner.target_rows,
            rows_before=self._pipe.rows_seen,
            keyword_rows=inner.rows,
            keywords=run.keywords if run.rows.is_packed else (),
        )
        loader = self._stack.enter_context(
            closing(RowLoader(dataset, config.training.dataloader, device=inner.device))
        )
        self._validation = None
        if run.held_out is not None:
            self._validation = Validation(
                config,
                run.held_out,
                inner,
                keywords=run.keywords,
                metrics=self._metrics,
                vote=self._vote,
            )
        self._profile = self._stack.enter_context(
            profiler(config.profiling, folder=folder, rank=inner.rank, first_step=self._first_step)
        )
        self._batches = iter(loader)
        self._batch = next(self._batches)
        self._metrics.restart()

    def close(self) -> None:
        """Ends what this rank has of it alone."""
        self._stack.close()

    def tell(self) -> Known:
        """What is known now; not collective."""
        known = replace(self._known, saved=self._checkpoints.saved or self._known.saved, last=None)
        if self._result is not None:
            known = replace(known, last=(self._result_step, self._result.loss, self._result.grad_norm))
        return replace(known, change=self._pipe.change)

    def say_change(self) -> None:
        """Says and writes what has happened, and the step before, which nobody may have written."""
        known, pipe, step = self._known, self._pipe, self._first_step
        change = known.change
        if self._ranks.rank or change is None:
            return
        leads = pipe.leader
        where = f"; led at {leads.host}:{leads.port}" if change.has_new_leader else ""
        logger.info("elastic: %s%s", describe_change(change, step, pipe.summary), where)
        values = count_change(change, generation=pipe.generation, num_ranks=pipe.plan.num_ranks, step=step)
        if known.last is not None and known.last[0] == step:
            self._metrics.fill_in(known.last, lr=self._config.optimizer.lr * self._rate(step - 1))
        self._metrics.write(step, values)

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> None:
        """The next step; afterwards the generation may be another."""
        pipe, metrics, batch = self._pipe, self._metrics, self._batch
        lr = self._config.optimizer.lr * self._rate(pipe.num_steps)
        for optimizer in self._inner.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
        metrics.begin_step()
        self._vote.open()
        result = pipe.step(batch.inputs, batch.targets, **batch.keywords)
        if result.is_done:
            self._result, self._result_step = result, pipe.num_steps
        if pipe.pipe is self._inner:
            metrics.end_step(result)
            self._batch = metrics.wait_for_data(self._batches)
            self._run.collect(pipe.num_steps)

    def finish_step(self) -> str:
        """What follows a step, unless that is done: log, validation, save. How the run ends after it: a
        signal's number, "finished", "short" of ranks, or empty. Collective."""
        step, steps, elastic = self._pipe.num_steps, self._config.training.steps, self._config.elastic
        if self._result is None:
            self._vote.open()
        else:
            self._log(step)
        number = self._vote.close()
        if self._result is not None:
            self._profile(self._result)
        loss = math.nan
        if step > self._known.validated:
            validation = self._validation
            is_due = validation is not None and (validation.is_due(step) or self._checkpoints.owes_validation)
            if validation is not None and is_due and not number:
                loss = validation.run(step)
                number = validation.stopped_by
            self._checkpoints.owes_validation = is_due and number != 0
        with self._metrics.excluding():
            self._save_if_due(step, loss)
        self._known = replace(self._known, validated=max(step, self._known.validated))
        if number:
            return str(number)
        if self._vote.is_alone:
            self._run.notice.leave()
        if step >= steps or (step == self._known.first_step and self._checkpoints.is_finished()):
            return "finished"
        return "short" if self._inner.plan.num_ranks < elastic.min_ranks else ""

    def _log(self, step: int) -> None:
        pipe, inner, metrics = self._pipe, self._inner, self._metrics
        if self._config.profiling.enable_profiling:
            pipe.settle()
        if step == self._known.first_step + 1:
            reports = self._ranks.gather(pipe.memory_report())
            logger.info("%s", describe_fullest(inner.plan, reports))
        if metrics.is_due(step):
            lr = self._config.optimizer.lr * self._rate(step - 1)
            metrics.log(step, lr=lr, busy_s=inner.busy_s, loss_scale=inner.loss_scale)
        if step - self._first_step >= _PROMISED_AFTER:
            self._say_promise()

    def _say_promise(self) -> None:
        """How many steps a loss undoes, when that is known, and when it has grown."""
        lost, before = self._pipe.at_most_lost, self._run.promised
        if before is None or lost > before:
            self._run.promised = lost
            what = f"at most {lost} steps that were done" if lost else "no step that was done"
            every = "every step" if not lost else f"every {lost} steps"
            logger.info("elastic: the state is mirrored %s: a loss undoes %s", every, what)

    def _save_if_due(self, step: int, loss: float) -> None:
        checkpoints, interval = self._checkpoints, self._config.checkpoint.interval
        saved = checkpoints.saved
        if saved is not None and saved != self._known.saved:
            self._pipe.note_checkpoint(str(checkpoints.folder))
        if step == self._known.first_step and math.isnan(loss):
            return
        newest = self._known.saved[0] if self._known.saved else 0
        newest = max(newest, self._known.first_step)
        is_owed = self._result is None and step // interval > newest // interval
        checkpoints.save_if_due(step, validation_loss=loss, is_owed=is_owed)

    def save_last(self, ended: str) -> None:
        """The last checkpoint, and how the run went; collective."""
        self._checkpoints.save_last(is_finished=ended == "finished")
        facts = self._ranks.gather(self._metrics.facts())
        comparison = compare_with_estimates(self._inner.plan.estimates, facts)
        if comparison is not None:
            logger.info("%s", comparison)
