"""Parts of a run that every way to train puts together."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from zorselike.cost.catalogue import peak_flops
from zorselike.errors import ConfigError
from zorselike.hf import load_weights
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.processes import Peers
from zorselike.train.config.config import Config
from zorselike.train.config.model import TrainedModel
from zorselike.train.data.corpus import Corpus
from zorselike.train.data.packed_models import document_keywords
from zorselike.train.data.rows import Rows
from zorselike.train.data.sources import open_rows
from zorselike.train.processes import agree_on_data
from zorselike.train.report.metrics import MetricsLog, sum_peak_flops, work_of_step
from zorselike.train.report.writers import Writer
from zorselike.train.validation import open_validation_rows

logger = logging.getLogger("zorselike")


def open_data(
    config: Config, model: TrainedModel, module: nn.Module, world: Peers, *, global_batch: int
) -> tuple[Rows, Rows | None]:
    """The rows of `[training]` and `[validation]`, the same on every rank. Collective."""
    reader = partial(
        open_rows,
        config,
        vocab_size=model.vocab_size,
        before_packing=partial(document_keywords, module, config.training.seq_len),
    )
    rows = agree_on_data(world, reader, describe=lambda rows: rows.fingerprint())
    return rows, open_validation_rows(config, rows, reader, global_batch=global_batch, world=world)


def log_data(config: Config, rows: Rows) -> None:
    """Logs what is trained on."""
    logger.info("data: %s", rows.describe())
    if isinstance(rows, Corpus) and not config.training.packing:
        logger.info(
            '[training] packing = false is for lines of "messages" or "prompt": these data are one stream of '
            "tokens, cut into rows"
        )


def find_keywords(module: nn.Module, rows: Rows, held_out: Rows | None) -> Sequence[str]:
    """By which the model is told where documents begin; none where no rows are packed."""
    is_packed = rows.is_packed or (held_out is not None and held_out.is_packed)
    return document_keywords(module) if is_packed else ()


def choose_kernels(config: Config) -> None:
    """Deterministic ones, if `[debug]` asks for these."""
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)


@contextmanager
def collecting_garbage(freq: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call after each step, by its number: Python's garbage is collected every `freq`
    steps on all ranks together, so that none delays the others. With 0 it is when Python likes."""
    was_enabled = gc.isenabled()
    if freq:
        gc.disable()

    def collect(step: int) -> None:
        if freq and step % freq == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()


def take_weights(pipe: HeteroPipeline, model: TrainedModel, module: nn.Module) -> None:
    """Begins with the weights of a Hugging Face model, if it has any; collective."""
    if model.weights is not None:
        load_weights(pipe, module, model.weights)
        logger.info("begins with the weights of %s", model.weights)
    elif model.folder is not None and pipe.rank == 0:
        logger.warning("%s holds no weights: the model begins with random ones", model.folder)


def build_metrics(
    config: Config,
    pipe: HeteroPipeline,
    model: TrainedModel,
    control: ProcessGroup,
    writers: Sequence[Writer],
) -> MetricsLog:
    """A log for this pipeline; collective among `control`."""
    device = pipe.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = str(pipe.param_dtype or torch.float32).removeprefix("torch.")
    peak = sum_peak_flops(peak_flops(name, dtype), group=control)
    return MetricsLog(
        config.metrics,
        rank=pipe.rank,
        steps=config.training.steps,
        work=work_of_step(model, pipe.plan, seq_len=config.training.seq_len),
        peak_flops=peak,
        device=device,
        group=control,
        writers=writers,
        estimated_step_s=pipe.plan.estimates.iteration_s,
    )


def check_seq_len(config: Config, model: TrainedModel) -> None:
    """Raises `ConfigError` where the model has fewer positions than `[training] seq_len`."""
    if config.training.seq_len > model.max_seq_len:
        raise ConfigError(
            f"[training] seq_len = {config.training.seq_len}, but [model] {model.name} has "
            f"{model.max_seq_len} positions: set seq_len to that or less"
        )
