"""Which of a model's modules are its layers: what a plan would list and the runtime would cut between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from zorselike.errors import ConfigError
from zorselike.plan.plan import Ministage, Plan
from zorselike.runtime.model.causal_lm import is_causal_lm
from zorselike.runtime.model.decoder_cut import list_modules
from zorselike.runtime.model.pruning import find_units, join
from zorselike.text.wording import list_few

Structure = tuple[Any, ...]


def find_layers(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules with parameters between which the model may be cut, in its own order.

    Of a causal LM of `transformers` those that `list_modules` names; else members of lists and dictionaries
    of modules and of an `nn.Sequential` that repeats itself, wherever they are; beside them the modules
    around which no such list is.

    Raises:
        ConfigError: The model has no parameters in modules.
    """
    if is_causal_lm(model):
        with suppress(ConfigError):
            return list_modules(model)
    names = tuple(_find_below(model, ""))
    if not names:
        raise ConfigError(
            f"model: {type(model).__name__} has no modules with parameters; name its layers by modules=[...]"
        )
    return names


def _find_below(module: nn.Module, fqn: str) -> list[str]:
    names = []
    for name, child in module.named_children():
        if not _has_parameters(child):
            continue
        path = join(fqn, name)
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            members = find_units(child, [key for key, _ in child.named_children()])
            names += [join(path, key) for key in members if _has_parameters(child.get_submodule(key))]
        elif _has_list(child):
            names += _find_below(child, path)
        else:
            names.append(path)
    return names


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_list(module: nn.Module) -> bool:
    """Whether a module is around a list of layers."""
    return any(
        isinstance(below, nn.ModuleList | nn.ModuleDict)
        or (isinstance(below, nn.Sequential) and _repeats(below))
        for below in module.modules()
    )


def _repeats(module: nn.Sequential) -> bool:
    own = list(filter(_has_parameters, module.children()))
    return len(own) > 1 and len({describe_structure(child) for child in own}) < len(own)


def describe_structure(module: nn.Module) -> Structure:
    """Equal for modules that are alike: of one class, with parameters of the same names and shapes."""
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())
    return (type(module), parameters)


def require_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Raises `ConfigError` for names that are no modules of the model, are listed twice or lie within
    each other."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"model: modules= has {list_few(unknown)}, which the model does not have")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ConfigError(f"model: modules= has {list_few(twice)} more than once; list each once")
    for name in names:
        if inner := [other for other in names if other.startswith(f"{name}.")]:
            raise ConfigError(f"model: modules= has {name} and {inner[0]} within it; list one of them")


def plan_of_layers(names: Sequence[str]) -> Plan:
    """Each layer a ministage, for functions of the runtime that ask where a parameter belongs."""
    return Plan(global_batch=1, groups=(), ministages=tuple(Ministage(0, (name,)) for name in names))
