"""What a plan with tensor-parallel replicas cuts of a model, and what of it cannot be run yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from zorselike.cost.sizes import is_layer
from zorselike.errors import ConfigError
from zorselike.plan.pieces import Cut
from zorselike.plan.plan import Plan
from zorselike.plan.validate import validate_degrees
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.pruning import find_units
from zorselike.runtime.tensor_parallel.dropout import find_between
from zorselike.runtime.tensor_parallel.pieces import blocks_of
from zorselike.runtime.tensor_parallel.styles import Blocks, TensorParallelPlan, find_blocks, find_cuts

_MEND = "list single ranks in the plan"


@dataclass(frozen=True)
class CutPlan:
    """What is cut, the same on every rank; nothing in a plan without replicas."""

    blocks: Blocks = field(default_factory=dict)
    cuts: tuple[Mapping[str, Cut], ...] = ()
    """How parameters are cut, by ministage and global name; as many pieces as its group's degree."""
    trained: frozenset[str] = frozenset()
    """Of these parameters, those that train."""

    def of(self, ministage: int) -> Mapping[str, Cut]:
        """How parameters of a ministage are cut; the others are whole."""
        return self.cuts[ministage] if self.cuts else {}


def cut_model(
    model: nn.Module,
    plan: Plan,
    parts: Sequence[ModelPart],
    tp_plan: TensorParallelPlan | None,
    *,
    tied: Sequence[str],
) -> CutPlan:
    """What the plan's replicas cut; nothing where it has none. `tied`: weights that several ministages have.

    Raises `PlanError` for a degree that a layer's heads do not allow, `ConfigError` where `find_blocks` does
    and for what tensor parallelism cannot do yet.
    """
    if not plan.has_replicas:
        return CutPlan()
    blocks = find_blocks(model, tp_plan)
    validate_degrees(plan, {layer: min(b.num_units for b in of_layer) for layer, of_layer in blocks.items()})
    cuts: list[Mapping[str, Cut]] = []
    for index, part in enumerate(parts):
        degree = plan.group_of(index).degree
        if degree == 1:
            cuts.append({})
            continue
        _refuse_unready(part, find_units(part.module, plan.ministages[index].modules), blocks)
        cuts.append(find_cuts(model, blocks_of(blocks, part.units), degree))
    _refuse_shared(model, {name for own in cuts for name in own}, tied)
    names = {name for own in cuts for name in own}
    trained = frozenset(name for name, p in model.named_parameters() if name in names and p.requires_grad)
    return CutPlan(blocks, tuple(cuts), trained)


def _refuse_unready(part: ModelPart, modules: Sequence[str], blocks: Blocks) -> None:
    """`modules`: what the ministage consists of, each of them computed once."""
    where = f"{part.name} belongs to a group with tensor-parallel replicas"
    if not part.skeleton.takes_any_shape or not part.units:
        raise ConfigError(f"{where}, which need a model cut between its layers, and this one is not; {_MEND}")
    for name in modules:
        if is_layer(name) and name not in blocks:
            raise ConfigError(f"{where}, and no style of tp_plan cuts '{name}'; name its layers, or {_MEND}")
        if is_layer(name) and name not in part.units:
            raise ConfigError(f"{where}, and '{name}' shares a weight with another of its modules; {_MEND}")
    for name, rate in find_dropout(
        part.module, {name: blocks[name] for name in part.units if name in blocks}
    ):
        raise ConfigError(
            f"{where}, and '{name}' drops out {rate:g} of what it is given, with other masks than one process"
            " (those of adapters, and of an nn.Dropout beside what is cut of a layer, are the same): set it "
            f"to 0, or {_MEND}"
        )
    for layer in blocks:
        if any(layer.startswith(f"{name}.") for name in modules):
            raise ConfigError(f"{where}, and the plan lists a module around '{layer}'; list the layer itself")


def find_dropout(module: nn.Module, blocks: Blocks) -> Iterator[tuple[str, float]]:
    """Names of what drops out with other masks than one process has, and rates over 0; `blocks`: of the
    layers that are cut, whose adapters and dropout beside what is cut have the same masks."""
    exact = {name for layer in blocks.values() for block in layer for name in block.dropouts}
    for layer, own in blocks.items():
        inside = [module.get_submodule(block.name) for block in own]
        exact |= {f"{layer}.{name}" for name, _ in find_between(module.get_submodule(layer), inside)}
    for name, child in module.named_modules():
        if name in exact:
            continue
        rates = {"p": getattr(child, "p", 0.0)} if type(child).__name__.startswith("Dropout") else {}
        rates |= {key: value for key, value in vars(child).items() if "drop" in key}
        for key, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                yield f"{name}.{key}", rate


def _refuse_shared(model: nn.Module, cut: set[str], tied: Sequence[str]) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and {other, name} & cut:
            raise ConfigError(
                f"'{other}' and '{name}' are one weight, which tensor parallelism cannot cut; {_MEND}"
            )
    for name in {*tied} & cut:
        raise ConfigError(
            f"'{name}' is tied across ministages, and tensor parallelism cannot cut it; {_MEND}"
        )
