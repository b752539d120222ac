"""The loss over validation data, between training steps and without a trace in them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from zorselike.errors import ConfigError
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.processes import Peers
from zorselike.text.wording import count
from zorselike.train.config.config import Config
from zorselike.train.data.loader import StepDataset
from zorselike.train.data.rows import Rows
from zorselike.train.processes import agree_on_data
from zorselike.train.report.metrics import MetricsLog
from zorselike.train.stop import StopVote

logger = logging.getLogger("zorselike")

LONG_S = 20.0
"""A validation that is expected to take so long says so as it begins."""


def open_validation_rows(
    config: Config, training: Rows, reader: Callable[..., Rows], *, global_batch: int, world: Peers
) -> Rows | None:
    """The rows of `[validation]`, the same on every rank; None if that is not enabled. Collective.

    `reader` is `open_rows` for this job.

    Raises:
        ConfigError: as for the training data, or it does not fill a global batch.
        ClusterError: as for the training data.
    """
    if not config.validation.enable:
        return None
    rows = agree_on_data(
        world, partial(reader, section="validation"), describe=lambda rows: rows.fingerprint()
    )
    if rows.num_rows < global_batch:
        raise ConfigError(
            f"{rows.source}: {count(rows.num_rows, 'row')} of validation data do not fill the plan's "
            f"global batch of {global_batch}; give more{' or set packing = false' if rows.is_packed else ''}"
        )
    if world.rank == 0 and rows.fingerprint() == training.fingerprint():
        logger.warning(
            "%s: the validation data are the training data; give others by dataset_path", rows.source
        )
    return rows


class Validation:
    """Evaluates the first global batches of data, in its own order: every time the same rows, whatever
    the plan. Every rank has one and calls it at the same steps."""

    def __init__(
        self,
        config: Config,
        rows: Rows,
        pipe: HeteroPipeline,
        *,
        keywords: Sequence[str] = (),
        metrics: MetricsLog,
        vote: StopVote,
    ) -> None:
        """
        Args:
            config: `[validation]`, and the steps of the whole run, after which comes the last validation.
            rows: at least a global batch of them.
            keywords: those of `document_keywords`, for packed rows.
            vote: a signal to stop ends a validation early.
        """
        settings = config.validation
        self._freq, self._steps = settings.freq, config.training.steps
        self._pipe, self._metrics, self._vote = pipe, metrics, vote
        self.stopped_by = 0
        """The signal that ended the last `run` early; 0: none did."""
        size = pipe.plan.global_batch
        whole = rows.num_rows // size
        self._num_batches = whole if settings.steps == -1 else min(settings.steps, whole)
        self._batches = StepDataset(
            rows,
            global_batch=size,
            seed=None,
            input_rows=pipe.input_rows,
            target_rows=pipe.target_rows,
            keyword_rows=pipe.rows,
            keywords=keywords if rows.is_packed else (),
        )
        batches = count(self._num_batches, "batch")
        left_out = rows.num_rows - whole * size if self._num_batches == whole else 0
        logger.info(
            "validation every %d steps: %s; %s of %d rows%s",
            self._freq,
            rows.describe(),
            batches,
            size,
            f"; {count(left_out, 'row')} at the end fill no batch and are left out" if left_out else "",
        )

    def is_due(self, step: int) -> bool:
        """Whether validation follows a step, counted from 1."""
        return step % self._freq == 0 or step == self._steps

    def run(self, step: int) -> float:
        """The mean loss over the valid targets of all batches, on every rank, written to log and metrics as
        of `step`; nan if a signal to stop came before its end. Collective."""
        with self._metrics.excluding():
            began, self.stopped_by = time.perf_counter(), 0
            results = []
            for index in range(self._num_batches):
                self._vote.open()
                batch = self._batches[index]
                if isinstance(batch, ConfigError):
                    raise batch
                results.append(self._pipe.evaluate(batch.inputs, batch.targets, **batch.keywords))
                if index == 0:
                    self._say_how_long(step, time.perf_counter() - began)
                self.stopped_by = self._vote.close()
                if self.stopped_by:
                    break
            num_targets = sum(result.num_targets for result in results)
            loss = sum(result.loss * result.num_targets for result in results if result.num_targets)
            loss = loss / num_targets if num_targets else math.nan
            seconds = time.perf_counter() - began
        if self.stopped_by:
            logger.info("validation after step %d was stopped by a signal: it gives no loss", step)
            return math.nan
        self._metrics.log_validation(step, loss, num_batches=len(results), seconds=seconds)
        return loss

    def _say_how_long(self, step: int, first_s: float) -> None:
        """Where it takes a while, since nothing else is logged until it is over."""
        seconds = first_s * self._num_batches
        if seconds > LONG_S:
            batches = count(self._num_batches, "batch")
            logger.info("validation after step %d: %s, about %.0f s", step, batches, seconds)
