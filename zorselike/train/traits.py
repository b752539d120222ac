"""In what the processes of a run must be alike, whatever else their recipes say."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zorselike.errors import ClusterError
from zorselike.runtime.processes.processes import Peers
from zorselike.train.config.config import AUTO, Config
from zorselike.train.config.model import TrainedModel
from zorselike.train.data.rows import Rows

_PLACES = ("folder", "initial_load_path", "upload")
"""Keys of `[checkpoint]` and `[lora]` that may differ from node to node."""


def find_traits(config: Config, model: TrainedModel) -> dict[str, str]:
    """What the losses depend on, and when all do something together; data apart."""
    training, validation = config.training, config.validation
    found: dict[str, Any] = {
        "the model": f"{model.name}, {model.size}",
        "[training] seq_len": training.seq_len,
        "[training] steps": training.steps,
        "[training] max_norm": training.max_norm,
        "[training] mixed_precision_param": training.mixed_precision_param,
        "[hetero] clip": config.hetero.clip,
        "[validation] enable": validation.enable,
        "[validation] freq": validation.freq,
        "[validation] steps": validation.steps,
        "[metrics] log_freq": config.metrics.log_freq,
        "[debug] seed": config.debug.seed,
        "[profiling] enable_profiling": config.profiling.enable_profiling,
        "[elastic] min_ranks": config.elastic.min_ranks,
    }
    for name in ("optimizer", "lr_scheduler", "lora", "checkpoint"):
        section = asdict(getattr(config, name))
        found |= {f"[{name}] {key}": value for key, value in section.items() if key not in _PLACES}
    return {name: str(value) for name, value in found.items()}


def find_data_traits(rows: Rows, held_out: Rows | None) -> dict[str, str]:
    """By what data differs."""
    validated = None if held_out is None else held_out.fingerprint()
    return {"the training data": rows.fingerprint(), "the validation data": str(validated)}


def _find_plan_traits(config: Config) -> dict[str, str]:
    """Where the plan is from, and what makes it, if that is no file; plans themselves are compared later."""
    plan, training = config.hetero.plan, config.training
    if plan not in (AUTO, ""):
        return {"[hetero] plan": "a file"}
    return {
        "[hetero] plan": f'"{plan}"',
        "[training] global_batch_size": str(training.global_batch_size),
        "[parallelism] tensor_parallel_degree": str(config.parallelism.tensor_parallel_degree),
        "[activation_checkpoint] mode": config.activation_checkpoint.mode,
    }


def check_same_recipe(config: Config, model: TrainedModel, world: Peers) -> None:
    """Raises `ClusterError`, on every rank alike, where a process has another recipe, or other options;
    collective."""
    # Where the plan is from comes first: it says which traits there are.
    everyone = world.gather(_find_plan_traits(config) | find_traits(config, model))
    for name, value in everyone[0].items():
        for rank, traits in enumerate(everyone):
            if traits[name] != value:
                raise ClusterError(
                    f"{name} is {traits[name]} in process {rank} and {value} in process 0: start every node "
                    "with the same recipe and the same options"
                )
