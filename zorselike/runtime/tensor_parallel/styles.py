"""Which weights tensor parallelism cuts, in the words of Hugging Face's `tp_plan`.

`{"layers.*.attention.wq": "colwise", "layers.*.attention.wo": "rowwise", ...}`: a star stands for a number.
Of linear layers in one module, such as an attention, those that are `colwise` are cut by what they give and
those that are `rowwise` by what they take. Everything else is whole: embeddings and the head too, whatever
a `tp_plan` says of them, since every rank has positions of its own there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn

from zorselike.cost.sizes import is_layer
from zorselike.errors import ConfigError
from zorselike.plan.pieces import Cut, cut_evenly
from zorselike.runtime.tensor_parallel.linears import CutLinear, Side, find_linear
from zorselike.text.wording import list_few

TensorParallelPlan = Mapping[str, str]
"""Styles by module name, in which a star stands for a number."""

_STYLES: dict[str, Side] = {
    "colwise": "columns",
    "local_colwise": "columns",
    "rowwise": "rows",
    "local_rowwise": "rows",
}
_WHOLE = frozenset(("replicate", "replicated_with_grad_allreduce", "sequence_parallel"))
"""Styles of modules that nothing has to be done for: ranks add up gradients of all that is whole."""

_WRAPPER = "base_model.model."
"""How names begin in a model that peft wraps."""

_WIDTHS_OF_HEADS = ("head_dim", "head_size")
_COUNTS_OF_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nheads")


@dataclass(frozen=True)
class Block:
    """A module inside a layer, such as its attention, in which a width between linear layers is cut."""

    name: str
    """Its global name."""
    columns: tuple[CutLinear, ...]
    """Linear layers that take hidden states, cut by what they give."""
    rows: tuple[CutLinear, ...]
    """Those that give hidden states, cut by what they take."""
    num_units: int
    """What cannot be cut further: heads of keys and values, or the width of a feed-forward network."""

    @property
    def sides(self) -> Iterator[tuple[CutLinear, Side]]:
        """All its layers, and what they are cut by."""
        yield from ((linear, "columns") for linear in self.columns)
        yield from ((linear, "rows") for linear in self.rows)

    @property
    def dropouts(self) -> Iterator[str]:
        """Modules that drop inputs of its layers' adapters."""
        for linear, _ in self.sides:
            yield from linear.dropouts


Blocks = Mapping[str, tuple[Block, ...]]
"""Of each layer that is cut, by its global name, in model order."""


def find_blocks(model: nn.Module, tp_plan: TensorParallelPlan | None = None) -> Blocks:
    """What there is to cut in a model by `tp_plan`, or else by the model's own (`model.tp_plan`, or
    `base_model_tp_plan` of a Hugging Face config).

    Raises `ConfigError` where there is none, where a name of it fits no module, for a style that cannot be
    run, and where it leaves a matrix of a layer whole that other positions might be mixed in.
    """
    styles = _own_plan(model) if tp_plan is None else _check_type(tp_plan)
    found: dict[str, dict[str, dict[Side, list[CutLinear]]]] = {}
    modules = dict(model.named_modules())
    wrapped = _WRAPPER if _WRAPPER.rstrip(".") in modules else ""
    for pattern, style in styles.items():
        matches = [name for name in modules if _fits(pattern, name.removeprefix(wrapped))]
        if not matches and tp_plan is not None:
            raise ConfigError(f"tp_plan names '{pattern}', which no module of the model is called")
        for name in matches:
            layer = layer_of(name)
            if layer is None or style in _WHOLE:
                continue
            if style not in _STYLES:
                raise ConfigError(
                    f"tp_plan: style '{style}' of '{name}' cannot be run; "
                    f"use {list_few(sorted(_STYLES))}, or single ranks in the plan"
                )
            linear = find_linear(modules, name)
            block = name.rpartition(".")[0]
            if block == layer:
                raise ConfigError(
                    f"tp_plan: '{name}' stands in its layer itself; what is cut must be in a module of the "
                    "layer, such as its attention, that takes hidden states and gives hidden states"
                )
            sides = found.setdefault(layer, {}).setdefault(block, {"columns": [], "rows": []})
            sides[_STYLES[style]].append(linear)
    if tp_plan is not None:
        _refuse_fused(modules, found)
    blocks = {
        layer: tuple(_make_block(modules, name, **sides) for name, sides in of_layer.items())
        for layer, of_layer in found.items()
    }
    for layer, of_layer in blocks.items():
        _refuse_whole_matrices(layer, modules, of_layer)
    return {name: blocks[name] for name in modules if name in blocks}


def find_cuts(model: nn.Module, blocks: Iterable[Block], degree: int) -> dict[str, Cut]:
    """How each parameter of some blocks is cut into `degree` pieces, by global name."""
    cuts, modules = {}, dict(model.named_modules())
    for block in blocks:
        edges = cut_evenly(block.num_units, degree)
        for linear, side in block.sides:
            width = linear.width(modules, side) // block.num_units
            for name, kind, dim in linear.cut_tensors(modules, side):
                cuts[f"{name}.{kind}"] = Cut(dim, tuple(edge * width for edge in edges))
    return cuts


def layer_of(name: str) -> str | None:
    """The numbered layer that a module is in, by its name: the outermost."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if is_layer(".".join(parts[:end])):
            return ".".join(parts[:end])
    return None


def _check_type(tp_plan: object) -> dict[str, str]:
    pairs = tp_plan.items() if isinstance(tp_plan, Mapping) else [(tp_plan, None)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ConfigError(
            f"tp_plan = {tp_plan!r} is no mapping of names to styles; give one such as "
            '{"layers.*.attention.wq": "colwise", "layers.*.attention.wo": "rowwise"}'
        )
    return {str(name): str(style) for name, style in pairs}


def _own_plan(model: nn.Module) -> dict[str, str]:
    own = getattr(model, "tp_plan", None)
    if not own:
        base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        own = {f"{prefix}.{name}" if prefix else name: style for name, style in base.items()}
    if not own:
        raise ConfigError(
            f"the plan has tensor-parallel replicas, and {type(model).__name__} has no tp_plan that says how "
            'its layers are cut; pass HeteroPipeline tp_plan={"layers.*.attention.wq": "colwise", ...}, or '
            "list single ranks (in a recipe: a plan without replicas, tensor_parallel_degree = 1)"
        )
    return dict(own)


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _make_block(
    modules: Mapping[str, nn.Module], name: str, columns: list[CutLinear], rows: list[CutLinear]
) -> Block:
    if not columns or not rows:
        there, missing = ("colwise", "rowwise") if columns else ("rowwise", "colwise")
        raise ConfigError(f"tp_plan: '{name}' has {there} layers and no {missing} one; a cut needs both ends")
    given = {linear.width(modules, "columns"): linear.name for linear in rows}
    if len(given) > 1:
        (narrow, inner), (wide, last) = min(given.items()), max(given.items())
        raise ConfigError(
            f"tp_plan: '{inner}' gives {narrow} numbers and '{last}' {wide}, and what is rowwise gives "
            "hidden states, of which a rank of a replica has its own positions; use single ranks in the plan"
        )
    widths = {linear.name: linear.width(modules, "columns") for linear in columns}
    widths |= {linear.name: linear.width(modules, "rows") for linear in rows}
    found = (getattr(modules[name], key, None) for key in _WIDTHS_OF_HEADS)
    head_dim = next((width for width in found if isinstance(width, int)), None)
    if head_dim is None:
        if any(isinstance(getattr(modules[name], key, None), int) for key in _COUNTS_OF_HEADS):
            raise ConfigError(
                f"tp_plan: '{name}' counts heads and has no attribute head_dim, so it cannot be known "
                "whether a cut leaves heads whole; give it one, and let its forward count heads by -1"
            )
        head_dim = 1
    num_units = min(widths.values()) // head_dim
    for linear, width in widths.items():
        if num_units == 0 or width % (num_units * head_dim):
            raise ConfigError(
                f"tp_plan: '{linear}' is {width} wide, which its neighbours in '{name}' with {num_units} "
                f"heads of {head_dim} do not divide; cut layers of one block together or not at all"
            )
    return Block(name, tuple(columns), tuple(rows), num_units)


def _refuse_fused(
    modules: Mapping[str, nn.Module], found: Mapping[str, Mapping[str, Mapping[Side, Sequence[CutLinear]]]]
) -> None:
    """A model's own plan says of itself that parts of such a layer are whole heads, side by side."""
    for sides in chain.from_iterable(of_layer.values() for of_layer in found.values()):
        if len(sides["columns"]) == 1 and sides["rows"]:
            (linear,) = sides["columns"]
            width = linear.width(modules, "columns")
            taken = min(row.width(modules, "rows") for row in sides["rows"])
            if width > taken:
                raise ConfigError(
                    f"tp_plan: '{linear.name}' gives {width} numbers, and the layer that ends the cut takes "
                    f"{taken}: a fused projection of queries, keys and values, or of a gate, whose parts a "
                    "cut would mix up; make it a layer for each, or use single ranks in the plan"
                )


def _refuse_whole_matrices(layer: str, modules: Mapping[str, nn.Module], blocks: Iterable[Block]) -> None:
    known: set[str] = set()
    for block in blocks:
        for linear, side in block.sides:
            known |= {f"{name}.{kind}" for name, kind, _ in linear.cut_tensors(modules, side)}
            known |= {f"{name}.weight" for name in linear.whole_adapters(side)}
    for key, parameter in modules[layer].named_parameters(remove_duplicate=False):
        if parameter.dim() > 1 and f"{layer}.{key}" not in known:
            raise ConfigError(
                f"tp_plan leaves '{layer}.{key}' whole, a matrix in a layer that is cut: what it "
                "multiplies might come from other positions, which a rank of a replica does not have; name "
                "its module too, or list single ranks in the plan"
            )
