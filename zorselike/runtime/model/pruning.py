"""Names of a model's modules, and copies of a model that lack some: shallow, with shared contents."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from types import MethodType

from torch import nn

from zorselike.plan.plan import Plan

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What may simply lack a member; elsewhere a missing module is `None`."""
_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
"""What is never called and holds no module."""


def join(prefix: str, name: str) -> str:
    """`layers.0` of `layers` and `0`; the name itself below the model."""
    return f"{prefix}.{name}" if prefix else name


def plan_module(fqn: str, names: Container[str]) -> str | None:
    """The one among `names` that a parameter is in."""
    parts = fqn.split(".")
    return next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in names), None)


def is_above(name: str, modules: Sequence[str]) -> bool:
    """Whether a module contains some of `modules` (the model itself contains all)."""
    return any(module.startswith(join(name, "")) for module in modules)


def loose_parameters(model: nn.Module, plan: Plan) -> list[str]:
    """Parameters that belong directly to the model, or to a module around modules of the plan."""
    planned = list(plan.ministage_of)
    return [
        join(name, key)
        for name, module in model.named_modules(remove_duplicate=False)
        if name not in planned and is_above(name, planned)
        for key, _ in module.named_parameters(recurse=False)
    ]


def find_units(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """The plan's modules that exist under `module`; the members of a list or dictionary of modules
    in its place, since it is never called itself, and nothing for one of parameters."""
    units: list[str] = []
    for name in names:
        try:
            unit = module.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(unit, nn.ModuleList | nn.ModuleDict):
            units += find_units(module, [join(name, key) for key in unit._modules])
        elif not isinstance(unit, _OF_PARAMETERS):
            units.append(name)
    return tuple(units)


def separate_units(module: nn.Module, units: Sequence[str]) -> tuple[str, ...]:
    """Those of `units` that share no parameter with the rest of `module`.

    FSDP2 keeps a weight tied within one unit only; modules that share one are left to the unit
    of `module` itself.
    """
    holders: dict[int, set[str]] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(plan_module(fqn, units) or "")
    sharing = {unit for names in holders.values() if len(names) > 1 for unit in names}
    return tuple(unit for unit in units if unit not in sharing)


def prune(
    model: nn.Module, ministages: Sequence[Collection[str]], *, homes: Mapping[str, int] | None = None
) -> list[nn.Module]:
    """The model once per ministage, each without the modules that only others have.

    The model and the modules around the named ones are shallow copies; the named modules are the model's own,
    except that one used under a second name is given there as modules of its own around the same parameters,
    since FSDP2 wraps a module once. Modules in no ministage are in all. `homes` places parameters that belong
    to copied modules directly; without it all copies have them.
    """
    copies = []
    used: set[int] = set()
    everything = {name for names in ministages for name in names}
    for index, names in enumerate(ministages):
        pruner = _Pruner(set(names), everything - set(names), homes, index, used)
        copies.append(pruner.copy_around(model, ""))
    return copies


class _Pruner:
    """Makes one ministage's copy."""

    def __init__(
        self, mine: set[str], others: set[str], homes: Mapping[str, int] | None, index: int, used: set[int]
    ) -> None:
        self._mine = mine
        self._others = others
        self._homes = homes
        self._parameters = {name for name, home in (homes or {}).items() if home == index}
        self._index = index
        self._used = used

    def copy_around(self, module: nn.Module, fqn: str) -> nn.Module:
        """A copy of a module that is around modules of the plan."""
        copy = copy_shallow(module)
        for name, child in module._modules.items():
            if child is None:
                continue
            kept = self._keep(child, join(fqn, name))
            if kept is None and isinstance(module, _CONTAINERS):
                del copy._modules[name]
            else:
                copy._modules[name] = kept
        for name in module._parameters:
            if self._homes is not None and self._homes.get(join(fqn, name), self._index) != self._index:
                copy._parameters[name] = None
        return copy

    def _keep(self, child: nn.Module, fqn: str) -> nn.Module | None:
        if fqn in self._mine:
            return self._own(child)
        if fqn in self._others:
            # A loop over a list of modules, or of parameters, goes on over none.
            return type(child)() if type(child) in (nn.ModuleList, nn.ModuleDict, *_OF_PARAMETERS) else None
        has_mine, has_others = (
            any(name.startswith(f"{fqn}.") for name in names)
            for names in ({*self._mine, *self._parameters}, self._others)
        )
        if has_mine or (has_others and isinstance(child, _CONTAINERS)):
            return self.copy_around(child, fqn)
        return None if has_others else child

    def _own(self, module: nn.Module) -> nn.Module:
        """A module of the plan; modules of its own if some are used already."""
        inside = {id(m) for m in module.modules() if any(True for _ in m.parameters(recurse=False))}
        if inside & self._used:
            return copy_tree(module)
        self._used |= inside
        return module


def copy_shallow(module: nn.Module) -> nn.Module:
    """Another module with the same parameters, buffers and submodules, and its own lists of them."""
    copy = nn.Module.__new__(type(module))  # That of an FSDP2 module would call `__init__`.
    own = vars(nn.Module()).keys()  # what every module has: its parameters, buffers, hooks, ...
    for key, value in vars(module).items():
        if key in own and isinstance(value, dict | set):
            value = value.copy()
        elif isinstance(value, MethodType) and value.__self__ is module:
            value = MethodType(value.__func__, copy)
        vars(copy)[key] = value
    return copy


def replace_modules(model: nn.Module, new: Mapping[str, nn.Module]) -> nn.Module:
    """The model with other modules under some names: it and the modules around those are shallow copies, all
    others are the model's own."""
    top = copy_shallow(model)
    copies = {"": top}

    def copy_of(name: str) -> nn.Module:
        if name not in copies:
            above, _, key = name.rpartition(".")
            around = copy_of(above)
            copies[name] = around._modules[key] = copy_shallow(around.get_submodule(key))
        return copies[name]

    for name, module in new.items():
        above, _, key = name.rpartition(".")
        copy_of(above)._modules[key] = module
    return top


def copy_tree(module: nn.Module) -> nn.Module:
    """A module and all below it as other modules around the same parameters and buffers."""
    copies: dict[int, nn.Module] = {}

    def make(original: nn.Module) -> nn.Module:
        if id(original) not in copies:
            copies[id(original)] = copy = copy_shallow(original)
            for name, child in original._modules.items():
                copy._modules[name] = None if child is None else make(child)
        return copies[id(original)]

    return make(module)


def sequential_order(model: nn.Module, plan: Plan) -> list[list[str]] | None:
    """Names of all modules by ministage, if the model is an `nn.Sequential` (perhaps of others)
    and the plan cuts between its children; None otherwise.

    Children that the plan leaves out, such as activations, belong to the ministage before them.
    """
    if not is_sequential(model):
        return None
    order: list[list[str]] = [[] for _ in plan.ministages]
    current = 0
    found = 0
    stack = [("", model)]
    while stack:
        fqn, module = stack.pop()
        is_planned = fqn in plan.ministage_of
        is_around = is_above(fqn, list(plan.ministage_of))
        if not is_planned and (is_around or not fqn):
            if not is_sequential(module):
                return None
            children = [
                (join(fqn, name), child) for name, child in module._modules.items() if child is not None
            ]
            stack += reversed(children)
            continue
        if is_planned:
            current = plan.ministage_of[fqn]
            found += 1
        order[current].append(fqn)
    return order if found == len(plan.ministage_of) else None


def is_sequential(module: nn.Module) -> bool:
    """Whether its forward takes one argument, which goes through its children in turn."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
