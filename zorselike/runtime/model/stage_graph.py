"""One ministage's graph, built of nodes of the captured one, and what is known of such nodes."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

MARK = "_pipe_split"
DROPPED = {MARK, "_assert_tensor_metadata"}
"""Operations that say where a ministage begins, and what held while the graph was captured."""


@dataclass
class StageGraph:
    """One ministage's graph. Its arguments, in order: what crosses (one tensor each), keyword
    arguments, parameters, buffers, constants."""

    module: fx.GraphModule
    dtypes: list[torch.dtype]
    """Of what crosses and of the keyword arguments."""
    kwargs: list[int] = field(default_factory=list)
    """Numbers among all tensors in keyword arguments."""
    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    constants: list[tuple[str, Tensor]] = field(default_factory=list)
    mutated_buffers: frozenset[str] = frozenset()


class _Copier:
    """Copies nodes of a graph into another, for another device."""

    def __init__(self, owner: torch.nn.Module, device: torch.device, changed: Container[fx.Node]) -> None:
        """`owner`: whose graph it is; `changed`: values that are changed in place, or views of such."""
        self._owner = owner
        self._device = device
        self._changed = changed
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, Any] = {}

    def copy(self, node: fx.Node) -> None:
        """A node, and a graph that it refers to, on what was copied before."""
        if node.op == "get_attr":
            name = str(node.target)
            self._attributes[name] = self._move(operator.attrgetter(name)(self._owner))
        copy = self._graph.node_copy(node, lambda source: self._copies[source])
        copy.meta = {}
        if node.op == "call_function":
            copy.args = fx.node.map_aggregate(copy.args, self._place)
            copy.kwargs = fx.node.map_aggregate(copy.kwargs, self._place)
            if _name(node) == "wrap_with_autocast":
                copy.args = (self._device.type, *copy.args[1:])
            if node.target is torch.ops.aten.view.default and node not in self._changed:
                # Another device's kernels may lay their results out so that a view is impossible.
                copy.target = torch.ops.aten.reshape.default
        self._copies[node] = copy

    def _place(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) else value

    def _move(self, value: Any) -> Any:
        """A graph within a graph (a region without gradients, say)."""
        if not isinstance(value, fx.GraphModule):
            return value
        nodes = list(value.graph.nodes)
        inner = _Copier(value, self._device, set(nodes) if any(map(changed_by, nodes)) else ())
        for node in nodes:
            if not is_called(node, DROPPED):
                inner.copy(node)
        return inner.make_module()

    def make_module(self) -> fx.GraphModule:
        return fx.GraphModule(self._attributes, self._graph)


class Builder(_Copier):
    """One ministage's graph, of the operations that are copied on what was entered and taken."""

    def enter(self, node: fx.Node, *, has_rows: bool, is_changed: bool) -> None:
        """An argument that crosses a boundary."""
        copy = self._graph.placeholder(node.name)
        if not has_rows:
            copy = self._graph.call_function(torch.ops.aten.select.int, (copy, 0, 0))
        if is_changed:  # autograd forbids to change a leaf in place
            copy = self._graph.call_function(torch.ops.aten.clone.default, (copy,))
        self._copies[node] = copy

    def take(self, node: fx.Node) -> None:
        """An argument that every microbatch has: a parameter, a buffer, a keyword argument."""
        self._copies[node] = self._graph.placeholder(node.name)

    def finish(self, leaving: Sequence[fx.Node], has_rows: Sequence[bool], rows: int) -> fx.GraphModule:
        """The graph that returns the tuple of `leaving`."""
        outputs = []
        for node, by_row in zip(leaving, has_rows, strict=True):
            copy = self._copies[node]
            if not by_row:
                copy = self._graph.call_function(torch.ops.aten.unsqueeze.default, (copy, 0))
                shape = [rows, *([-1] * node.meta["val"].dim())]
                copy = self._graph.call_function(torch.ops.aten.expand.default, (copy, shape))
            elif copy.op == "placeholder":  # its gradient must not be that of the input itself
                copy = self._graph.call_method("view_as", (copy, copy))
            outputs.append(copy)
        self._graph.output(tuple(outputs))
        self._graph.eliminate_dead_code()
        self._graph.lint()  # type: ignore[no-untyped-call]
        return self.make_module()


def _name(node: fx.Node) -> str:
    """The name of what a node calls: `add_` for `torch.ops.aten.add_.Tensor`."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", node.target))


def is_called(node: fx.Node, names: set[str]) -> bool:
    return node.op == "call_function" and _name(node) in names


def may_alias(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or all(r.alias_info is None for r in schema.returns):
        return False
    source = node.args[0]
    is_cast = isinstance(source, fx.Node) and _dtype(source) != _dtype(node)
    return not is_cast or changed_by(node) != []


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def changed_by(node: fx.Node) -> list[fx.Node]:
    """Arguments that an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    changed = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            changed += [
                n for n in (given if isinstance(given, list | tuple) else [given]) if isinstance(n, fx.Node)
            ]
    return changed


def is_repeatable(node: fx.Node) -> bool:
    """Whether an operation gives the same result each time, and leaves nothing behind."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    tags = getattr(node.target, "tags", None)
    if isinstance(tags, list):
        return torch.Tag.nondeterministic_seeded not in tags
    graphs = [
        getattr(node.graph.owning_module, str(source.target), None)
        for source in node.all_input_nodes
        if source.op == "get_attr"
    ]
    return bool(graphs) and all(
        isinstance(graph, fx.GraphModule)
        and all(
            inner.op != "call_function" or (is_repeatable(inner) and not changed_by(inner))
            for inner in graph.graph.nodes
        )
        for graph in graphs
    )
