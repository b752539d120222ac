"""Cuts a captured graph into one graph a ministage.

What one ministage computes and a later one needs crosses all boundaries between them. Two things
do not go by row, and so need care: what follows from keyword arguments, buffers and constants
alone (masks, rotary tables) is not sent but computed again where it is needed; other values
without rows (a learned table of positions, say) cross once per row.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

_MARK = "_pipe_split"
_DROPPED = {_MARK, "_assert_tensor_metadata"}
"""Operations that say where a ministage begins, and what held while the graph was captured."""


class CannotCut(Exception):
    """The graph cannot be cut as asked; the message says why."""


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


@dataclass(frozen=True)
class _Input:
    """What a placeholder of the captured graph stands for."""

    kind: InputKind
    name: str
    number: int = -1
    """Among the user's tensors."""


class Flow:
    """Where each value of a captured graph is computed, and where it is needed."""

    def __init__(
        self,
        program: ExportedProgram,
        stages: Sequence[str],
        *,
        num_inputs: int,
        has_rows: Sequence[bool],
        rows: int,
        is_replica: Callable[[str], bool],
    ) -> None:
        """`stages`: names of the ministages; `num_inputs`: how many of the user's tensors enter the
        first, the others being keyword arguments; `is_replica`: whether every ministage can have
        a buffer. Raises `CannotCut`."""
        self.stages = stages
        self.rows = rows
        self._program = program
        self._num_inputs = num_inputs
        self._inputs = dict(self._read_inputs())
        self._nodes = [n for n in program.graph.nodes if n.op in ("call_function", "get_attr")]
        self._stage = self._find_stages()
        self._nodes = [n for n in self._nodes if not _is_called(n, _DROPPED)]
        self._position = {node: i for i, node in enumerate(program.graph.nodes)}
        self._root = self._find_roots()
        self._mutators = self._find_mutators()
        self._free = self._find_free(is_replica)
        self._by_row = self._find_by_row(has_rows)
        self.outputs = self._read_outputs()
        self._last_use = self._find_last_uses()
        self._refuse_distant_mutations()

    # -- reading ---------------------------------------------------------------------------

    def _read_inputs(self) -> Iterator[tuple[fx.Node, _Input]]:
        placeholders = [node for node in self._program.graph.nodes if node.op == "placeholder"]
        number = 0
        for node, spec in zip(placeholders, self._program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                yield node, _Input(spec.kind, node.name, number)
                number += 1
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                yield node, _Input(spec.kind, str(spec.target))
            else:
                raise CannotCut(f"its graph takes '{node.name}', a {spec.kind.name.lower()}")

    def _read_outputs(self) -> list[fx.Node]:
        (output,) = (node for node in self._program.graph.nodes if node.op == "output")
        specs = self._program.graph_signature.output_specs
        nodes = [
            node
            for node, spec in zip(output.args[0], specs, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        if len(nodes) != len(specs) or not all(isinstance(node, fx.Node) for node in nodes):
            raise CannotCut("its graph returns something else than tensors")
        return nodes

    def _find_stages(self) -> dict[fx.Node, int]:
        """The ministage of every operation, by the marks before it."""
        stage: dict[fx.Node, int] = {}
        current = 0
        for node in self._nodes:
            current += _is_called(node, {_MARK})
            source = node.args[0] if node.target is operator.getitem else None
            # What is taken out of a tuple belongs to where the tuple was made: only tensors cross.
            stage[node] = stage[source] if isinstance(source, fx.Node) and source in stage else current
        if current != len(self.stages) - 1:
            raise CannotCut(
                f"{len(self.stages)} ministages need {len(self.stages) - 1} beginnings in its graph, which "
                f"has {current}: the first module of a ministage is called more than once, never, or "
                "inside a region without gradients"
            )
        return stage

    def _is_entry(self, node: fx.Node) -> bool:
        """Whether a node is one of the model's inputs (not a keyword argument)."""
        entry = self._inputs.get(node)
        return entry is not None and entry.kind is InputKind.USER_INPUT and entry.number < self._num_inputs

    # -- aliases and dependencies ----------------------------------------------------------

    def _find_roots(self) -> dict[fx.Node, fx.Node]:
        """The value that each one is, or may be, a view of."""
        root = {node: node for node in self._inputs}
        for node in self._nodes:
            source = node.args[0] if node.args and _may_alias(node) else None
            root[node] = root[source] if isinstance(source, fx.Node) else node
        return root

    def _find_mutators(self) -> dict[fx.Node, list[fx.Node]]:
        """Operations that change a value in place, by its root."""
        mutators: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self._nodes:
            for changed in _changed_by(node):
                mutators[self._root[changed]].append(node)
        return mutators

    def _writes(self, node: fx.Node) -> list[fx.Node]:
        """Roots of what a node gives or changes."""
        return [self._root[node], *(self._root[changed] for changed in _changed_by(node))]

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        """What must have been computed before a node: its inputs, with all changes to them."""
        needed = list(node.all_input_nodes)
        for source in node.all_input_nodes:
            for mutator in self._mutators.get(self._root[source], ()):
                if mutator is not node and self._position[mutator] < self._position[node]:
                    needed.append(mutator)
        return needed

    def _find_free(self, is_replica: Callable[[str], bool]) -> set[fx.Node]:
        """Values that any ministage can compute by itself, always to the same result."""
        bound_roots = {
            node
            for node, entry in self._inputs.items()
            if entry.kind is InputKind.PARAMETER
            or self._is_entry(node)
            or (entry.kind is InputKind.BUFFER and not is_replica(entry.name))
            or node in self._mutators
        }
        bound_roots |= {
            root for node in self._nodes if not _is_repeatable(node) for root in self._writes(node)
        }
        for root, mutators in self._mutators.items():
            if len({self._stage[node] for node in mutators}) > 1:
                bound_roots.add(root)
        while True:
            more = {
                root
                for node in self._nodes
                if any(self._root[needed] in bound_roots for needed in self._needs(node))
                for root in self._writes(node)
            } - bound_roots
            if not more:
                return {node for node, root in self._root.items() if root not in bound_roots}
            bound_roots |= more

    def _find_by_row(self, has_rows: Sequence[bool]) -> set[fx.Node]:
        """Values that depend on rows of the batch."""
        by_row = {n for n, e in self._inputs.items() if e.kind is InputKind.USER_INPUT and has_rows[e.number]}
        for node in self._nodes:
            if any(needed in by_row for needed in self._needs(node)):
                by_row.add(node)
        return by_row

    def _find_last_uses(self) -> dict[fx.Node, int]:
        """The last ministage that needs each value that can cross."""
        last: dict[fx.Node, int] = {}
        for node in self._nodes:
            if node not in self._free:
                for source in node.all_input_nodes:
                    last[source] = max(last.get(source, 0), self._stage[node])
        for node in self.outputs:
            last[node] = len(self.stages) - 1
        return {node: use for node, use in last.items() if self._can_cross(node)}

    def _can_cross(self, node: fx.Node) -> bool:
        return node not in self._free and (node not in self._inputs or self._is_entry(node))

    def _refuse_distant_mutations(self) -> None:
        """Keyword arguments and buffers are every ministage's own, and views of one value lose each
        other when they cross."""
        for root, mutators in self._mutators.items():
            entry = self._inputs.get(root)
            if entry is not None and entry.kind is InputKind.USER_INPUT and not self._is_entry(root):
                raise CannotCut(f"'{mutators[0].name}' changes a keyword argument in place")
            users = {
                self._stage[node] for node in self._nodes if root in map(self._root.get, node.all_input_nodes)
            }
            if entry is not None and entry.kind is InputKind.BUFFER and len(users) > 1:
                raise CannotCut(f"'{mutators[0].name}' changes a buffer that several ministages use")
        members = defaultdict(list)
        for node in self._last_use:
            members[self._root[node]].append(node)
        for root, mutators in self._mutators.items():
            for mutator in mutators:
                now = self._stage[mutator]
                views = [n.name for n in members[root] if self._made_in(n) < now <= self._last_use[n]]
                if len(views) > 1:
                    raise CannotCut(
                        f"{self.stages[now]} changes in place ('{mutator.name}') what an earlier one computed "
                        f"and hands on in {len(views)} views ({', '.join(views)})"
                    )

    def _made_in(self, node: fx.Node) -> int:
        return self._stage.get(node, 0)

    # -- cutting ---------------------------------------------------------------------------

    def crossing(self, boundary: int) -> list[fx.Node]:
        """Values that enter ministage `boundary`, in the order in which they were computed."""
        if boundary == 0:
            return [node for node in self._inputs if self._is_entry(node)]
        nodes = [n for n, last in self._last_use.items() if self._made_in(n) < boundary <= last]
        return sorted(nodes, key=lambda node: self._position[node])

    def depends_on_rows(self, node: fx.Node) -> bool:
        """Whether a value differs from row to row, or may."""
        return node in self._by_row

    def build(self, index: int, layout: Sequence[Sequence[bool]], device: torch.device) -> StageGraph:
        """One ministage's graph, its operations on `device`. `layout[b][i]`: whether value i at
        boundary b has rows. Raises `CannotCut` where this row count needs another layout."""
        entering = self.crossing(index)
        leaving = self.outputs if index == len(self.stages) - 1 else self.crossing(index + 1)
        for boundary, nodes in ((index, entering), (index + 1, leaving)):
            if boundary < len(layout) and len(nodes) != len(layout[boundary]):
                raise CannotCut(
                    f"{len(nodes)} tensors enter {self.stages[boundary]} with {self.rows} rows, and "
                    f"{len(layout[boundary])} with others; the model computes differently"
                )
        changed = {node for node, root in self._root.items() if root in self._mutators}
        builder = _Builder(self._program, device, changed)
        for node, has_rows in zip(entering, layout[index], strict=True):
            if has_rows and node.meta["val"].shape[0] != self.rows:
                raise CannotCut(
                    f"'{node.name}', which enters {self.stages[index]}, lacks rows for {self.rows}"
                )
            is_changed = any(self._stage[m] == index for m in self._mutators.get(self._root[node], ()))
            builder.enter(node, has_rows=has_rows, is_changed=is_changed)
        body = self._body(index, leaving)
        used = {source for node in body for source in node.all_input_nodes} | set(leaving)
        fixed = [node for node in self._inputs if node in used and not self._is_entry(node)]
        fixed.sort(key=lambda node: _ORDER.index(self._inputs[node].kind))
        for node in fixed:
            builder.take(node)
        for node in body:
            builder.copy(node)
        is_last = index == len(self.stages) - 1
        leaves_by_row = [True] * len(leaving) if is_last else layout[index + 1]
        module = builder.finish(leaving, leaves_by_row, self.rows)
        return self._describe(module, entering, fixed)

    def _body(self, index: int, leaving: Sequence[fx.Node]) -> list[fx.Node]:
        """A ministage's own operations, and the free ones that they need, in order."""
        own = [node for node in self._nodes if node not in self._free and self._stage[node] == index]
        body = set(own)
        stack = [needed for node in own for needed in self._needs(node)]
        stack += [node for node in leaving if node not in self._inputs]
        while stack:
            node = stack.pop()
            if node in self._free and node not in body and node not in self._inputs:
                body.add(node)
                stack += self._needs(node)
        return sorted(body, key=lambda node: self._position[node])

    def _describe(
        self, module: fx.GraphModule, entering: Sequence[fx.Node], fixed: Sequence[fx.Node]
    ) -> StageGraph:
        graph = StageGraph(module, [node.meta["val"].dtype for node in entering])
        mutated = {n for n in fixed if n in self._mutators and self._inputs[n].kind is InputKind.BUFFER}
        graph.mutated_buffers = frozenset(self._inputs[node].name for node in mutated)
        for node in fixed:
            entry = self._inputs[node]
            match entry.kind:
                case InputKind.USER_INPUT:
                    graph.kwargs.append(entry.number - self._num_inputs)
                    graph.dtypes.append(node.meta["val"].dtype)
                case InputKind.PARAMETER:
                    graph.parameters.append(entry.name)
                case InputKind.BUFFER:
                    graph.buffers.append(entry.name)
                case _:
                    graph.constants.append((entry.name, self._program.constants[entry.name]))
        return graph


_ORDER = (InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""Of a ministage graph's arguments, after what crosses."""


def find_layout(few: Flow, more: Flow, rows: tuple[int, int]) -> list[list[bool]]:
    """Whether each value at each boundary has rows, from the graphs of two row counts.

    Raises `CannotCut` for one that mixes rows, or has them elsewhere than in dimension 0.
    """
    layout = []
    for boundary in range(len(few.stages)):
        nodes, others = few.crossing(boundary), more.crossing(boundary)
        where = few.stages[boundary]
        if len(nodes) != len(others):
            raise CannotCut(
                f"{len(nodes)} tensors enter {where} with {rows[0]} rows, and {len(others)} with {rows[1]}"
            )
        if not nodes:
            raise CannotCut(f"nothing that the ministages before it compute enters {where}")
        layout.append(
            [_has_rows(few, node, other, rows, where) for node, other in zip(nodes, others, strict=True)]
        )
    return layout


def _has_rows(few: Flow, node: fx.Node, other: fx.Node, rows: tuple[int, int], where: str) -> bool:
    value, second = node.meta["val"], other.meta["val"]
    if not isinstance(value, Tensor) or not isinstance(second, Tensor):
        raise CannotCut(f"'{node.name}', which enters {where}, is a {type(value).__name__}, not a tensor")
    shapes = tuple(value.shape), tuple(second.shape)
    if value.dim() and (shapes[0][0], shapes[1][0]) == rows and shapes[0][1:] == shapes[1][1:]:
        return True
    if shapes[0] == shapes[1] and not few.depends_on_rows(node):
        return False
    raise CannotCut(
        f"'{node.name}', which enters {where}, is {list(shapes[0])} for {rows[0]} rows and "
        f"{list(shapes[1])} for {rows[1]}; dimension 0 must be rows"
    )


class _Builder:
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
    has_changes = any(_changed_by(node) for node in value.graph.nodes)
    changed = set(value.graph.nodes) if has_changes else set()
    for node in value.graph.nodes:
        if not _is_called(node, _DROPPED):
            _copy_node(node, graph, copies, value, attributes, device, changed)
    return fx.GraphModule(attributes, graph)


def _name(node: fx.Node) -> str:
    """The name of what a node calls: `add_` for `torch.ops.aten.add_.Tensor`."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", node.target))


def _is_called(node: fx.Node, names: set[str]) -> bool:
    return node.op == "call_function" and _name(node) in names


def _may_alias(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or all(r.alias_info is None for r in schema.returns):
        return False
    source = node.args[0]
    is_cast = isinstance(source, fx.Node) and _dtype(source) != _dtype(node)
    return not is_cast or _changed_by(node) != []


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _changed_by(node: fx.Node) -> list[fx.Node]:
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


def _is_repeatable(node: fx.Node) -> bool:
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
            inner.op != "call_function" or (_is_repeatable(inner) and not _changed_by(inner))
            for inner in graph.graph.nodes
        )
        for graph in graphs
    )
