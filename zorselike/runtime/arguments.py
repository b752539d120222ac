"""Arguments of `HeteroPipeline`: what is refused, and what some stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from zorselike.errors import ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.ministage.unit import EVERY_HOOK
from zorselike.runtime.model.partition import (
    BATCH_NORMS,
    INSTANCE_NORMS,
    refuse_batch_statistics,
)
from zorselike.runtime.model.pruning import find_units, is_above, join
from zorselike.runtime.processes.device import ParamDtype
from zorselike.runtime.processes.world import ProcessInfo


def find_patience(processes: Sequence[ProcessInfo]) -> float:
    """Seconds of silence after which a rank of this job is taken for stopped."""
    return max(30.0 if process.device == "cuda" else 5.0 for process in processes)


def check_arguments(
    model: object,
    plan: object,
    max_norm: object,
    clip: object,
    param_dtype: ParamDtype,
    optimizer: object,
    *,
    functions: Mapping[str, object],
    seed: object,
    silence_s: object,
) -> None:
    """Raises `ConfigError` for what is wrong whatever the plan. `functions`: by the names of arguments."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__} and no torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            what = f"'{name}'" if name else "it"
            raise ConfigError(
                f"model: {what} is sharded already, by another pipeline (which uses the modules that it is "
                "given, and copies none) or by fully_shard; build the model once more for this one"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ConfigError(
                f"model: '{name}' was made in torch.inference_mode, and cannot be trained; build it outside"
            )
    if not isinstance(plan, Plan | str | Path):
        raise ConfigError(
            f"plan is a {type(plan).__name__}; give a zorselike.Plan, or the path of a plan file"
        )
    if optimizer is not None and not callable(optimizer):
        made = type(optimizer).__name__
        kind = made if isinstance(optimizer, Optimizer) else "AdamW"
        raise ConfigError(
            f"optimizer is of type {made}; give what makes one of a ministage's parameters, such as "
            f"functools.partial(torch.optim.{kind}, lr=3e-4)"
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name} = {function!r} is no function; give one, or None for the default")
    if not isinstance(seed, Integral):
        raise ConfigError(f"seed = {seed!r} is no whole number")
    if silence_s not in (None, "auto") and not (isinstance(silence_s, Real) and float(silence_s) > 0):
        raise ConfigError(f'silence_s = {silence_s!r}; give seconds above 0, "auto", or None for never')
    if max_norm is not None and not isinstance(max_norm, Real):
        raise ConfigError(f"max_norm = {max_norm!r} is no number; give one above 0, or None")
    if max_norm is not None and not 0 < float(max_norm) < math.inf:
        raise ConfigError(f"max_norm = {max_norm} clips nothing; give a finite number above 0, or None")
    if clip not in ("global", "ministage"):
        raise ConfigError(f"clip = '{clip}' is neither 'global' nor 'ministage'")
    if clip == "ministage" and max_norm is None:
        raise ConfigError(
            "clip = 'ministage' clips nothing without max_norm; give max_norm, or leave clip out"
        )
    if param_dtype not in (None, "auto", torch.float32, torch.float64, *HALF):
        raise ConfigError(
            f'param_dtype = {param_dtype!r}; give torch.bfloat16, torch.float16, "auto", or None'
        )


def refuse_with_replicas(plan: Plan, *, dynamic_shapes: bool) -> None:
    """Raises `ConfigError` for what tensor-parallel replicas cannot do."""
    if plan.has_replicas and dynamic_shapes:
        raise ConfigError(
            "dynamic_shapes=True does not work with tensor-parallel replicas: their schedule says which "
            "positions of rows of the plan's sequence_length each rank sends; pad rows to that length, or "
            "list single ranks in the plan"
        )


def check_model(model: nn.Module, plan: Plan, *, is_copied: bool) -> None:
    """Raises `ConfigError` for what a model has that would not train as in a single process, or not at all.
    `is_copied`: whether ministages get copies of the modules around those of the plan."""
    planned = list(plan.ministage_of) if is_copied and plan.num_ministages > 1 else []
    units = find_units(model, list(plan.ministage_of))
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and (name in units or is_above(name, units)):
            raise ConfigError(
                f"model: '{name}' is compiled by torch.jit, which has no hooks, and is not sharded; give "
                "the module itself, and pass compile=True"
            )
        if module._compiled_call_impl is not None and (name in units or is_above(name, units)):
            what = f"'{name}'" if name else f"the {type(module).__name__} itself"
            raise ConfigError(
                f"model: {what} is compiled in place (Module.compile), which would compile its sharding too; "
                "leave that out, and pass compile=True"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(name, module)
        if type(module).__name__ == "ParamWrapper" and hasattr(module, "lora_A"):
            raise ConfigError(
                f"model: '{name}' has an adapter of a parameter (peft's target_parameters), which would "
                "be added to a shard; name linear layers in target_modules instead"
            )
        if is_above(name, planned) and any(getattr(module, hooks) for hooks in EVERY_HOOK):
            what = f"'{name}'" if name else f"the {type(module).__name__} itself"
            raise ConfigError(
                f"model: {what} has hooks, and every ministage has a copy of it, so that they would run once "
                "in each; register them on modules that the plan names"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"model: '{name}' has a gradient hook, which would be lost when it is sharded; change "
                "gradients in a step hook of the optimizer (register_step_pre_hook)"
            )
        if not parameter.dim():
            raise ConfigError(
                f"model: '{name}' is a scalar, which cannot be sharded; make it a tensor of one element"
            )
        if parameter.is_complex():
            raise ConfigError(
                f"model: '{name}' is of {parameter.dtype}, which no checkpoint can hold; let it be real, of "
                "shape [..., 2], and use torch.view_as_complex in the forward"
            )
        if parameter.requires_grad and not parameter.numel():
            raise ConfigError(
                f"model: '{name}' is trained and has no elements; let it not require a gradient"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"model: '{name}' is not contiguous in memory, and cannot be sharded; make it so "
                "(of channels_last: model.to(memory_format=torch.contiguous_format))"
            )


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    for setting, only_trained, why in (
        ("max_norm", False, "changes weights in a forward, of a gathered copy"),
        (
            "scale_grad_by_freq",
            True,
            "counts within a microbatch, and gradients would depend on the plan",
        ),
        ("sparse", True, "makes gradients that cannot be sharded"),
    ):
        if getattr(module, setting) and (module.weight.requires_grad or not only_trained):
            raise ConfigError(f"model: '{name}' is an embedding with {setting}, which {why}; leave it out")


class Settled:
    """What may not change once ministages are made."""

    def __init__(self, ministages: Iterable[nn.Module]) -> None:
        modules = [named for top in ministages for named in top.named_modules()]
        self._norms = [
            (name, module) for name, module in modules if isinstance(module, (*BATCH_NORMS, *INSTANCE_NORMS))
        ]
        self._trains = [
            (module, name, key, parameter.requires_grad)
            for name, module in modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check(self, *, train: bool) -> None:
        """Raises `ConfigError` if something did. An evaluation puts layers in eval mode itself."""
        refuse_batch_statistics(self._norms if train else ())
        for module, name, key, trains in self._trains:
            if trains and not train:
                continue
            if module._parameters[key].requires_grad is not trains:  # type: ignore[union-attr]
                was, now, mend = (
                    ("trained", "no", "to freeze it, or set its learning rate to 0")
                    if trains
                    else ("frozen", "a", "to train it")
                )
                raise ConfigError(
                    f"'{join(name, key)}' was {was} when this pipeline was made, and now requires {now} "
                    f"gradient: build another pipeline {mend}"
                )


@contextmanager
def apart_from_the_caller() -> Iterator[None]:
    """A caller's no_grad or inference_mode around a call is no part of it. Its autocast is, but not the cache
    of that, in which the cast of a gathered weight would outlive its microbatch."""
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
