"""One ministage's graph, built of nodes of the captured one, and what is known of such nodes."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

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


class Builder:
    """Copies nodes of a captured graph into another."""

    def __init__(self, program: ExportedProgram, device: torch.device, changed: Container[fx.Node]) -> None:
        """`changed`: values that are changed in place, or views of such."""
        self._program = program
        self._device = device
        self._changed = changed
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, Any] = {}

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

    def copy(self, node: fx.Node) -> None:
        """An operation on what was entered, taken and copied before."""
        owner = self._program.graph_module
        _copy_node(node, self._graph, self._copies, owner, self._attributes, self._device, self._changed)

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
        self._graph.lint()
        return fx.GraphModule(self._attributes, self._graph)


def _copy_node(
    node: fx.Node,
    graph: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    owner: torch.nn.Module,
    attributes: dict[str, Any],
    device: torch.device,
    changed: Container[fx.Node],
) -> None:
    """Copies a node, and a graph that it refers to, for another device."""
    if node.op == "get_attr":
        name = str(node.target)
        attributes[name] = _move(operator.attrgetter(name)(owner), device)
    copy = graph.node_copy(node, lambda source: copies[source])
    copy.meta = {}
    if node.op == "call_function":
        copy.args = fx.node.map_aggregate(copy.args, lambda x: device if isinstance(x, torch.device) else x)
        copy.kwargs = fx.node.map_aggregate(
            copy.kwargs, lambda x: device if isinstance(x, torch.device) else x
        )
        if _name(node) == "wrap_with_autocast":
            copy.args = (device.type, *copy.args[1:])
        if node.target is torch.ops.aten.view.default and node not in changed:
            # Another device's kernels may lay their results out so that a view is impossible.
            copy.target = torch.ops.aten.reshape.default
    copies[node] = copy


def _move(value: Any, device: torch.device) -> Any:
    """A graph within a graph (a region without gradients, say), for another device."""
    if not isinstance(value, fx.GraphModule):
        return value
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    has_changes = any(changed_by(node) for node in value.graph.nodes)
    changed = set(value.graph.nodes) if has_changes else set()
    for node in value.graph.nodes:
        if not is_called(node, DROPPED):
            _copy_node(node, graph, copies, value, attributes, device, changed)
    return fx.GraphModule(attributes, graph)


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
