"""Cuts a captured graph into one graph a ministage.

What one ministage computes and a later one needs crosses all boundaries between them. Two things
do not go by row, and so need care: what follows from keyword arguments, buffers and constants
alone (masks, rotary tables) is not sent but computed again where it is needed; other values
without rows (a learned table of positions, say) cross once per row.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from zorselike.runtime.model.stage_graph import (
    DROPPED,
    MARK,
    Builder,
    StageGraph,
    changed_by,
    is_called,
    is_repeatable,
    may_alias,
)


class CannotCut(Exception):
    """The graph cannot be cut as asked; the message says why."""


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
        homes: Mapping[str, int],
    ) -> None:
        """`stages`: names of the ministages; `num_inputs`: how many of the user's tensors enter the
        first, the others being keyword arguments; `is_replica`: whether every ministage can have
        a buffer; `homes`: the ministages of parameters whose values later ones may be sent. Raises
        `CannotCut`."""
        self.stages = stages
        self.rows = rows
        self._program = program
        self._num_inputs = num_inputs
        self._inputs = dict(self._read_inputs())
        self._nodes = [n for n in program.graph.nodes if n.op in ("call_function", "get_attr")]
        self._stage = self._find_stages()
        homes_of = {n: homes.get(e.name) for n, e in self._inputs.items() if e.kind is InputKind.PARAMETER}
        self._homes = {node: home for node, home in homes_of.items() if home is not None}
        self._stage |= self._homes
        self._nodes = [n for n in self._nodes if not is_called(n, DROPPED)]
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
            current += is_called(node, {MARK})
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
            source = node.args[0] if node.args and may_alias(node) else None
            root[node] = root[source] if isinstance(source, fx.Node) else node
        return root

    def _find_mutators(self) -> dict[fx.Node, list[fx.Node]]:
        """Operations that change a value in place, by its root."""
        mutators: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self._nodes:
            for changed in changed_by(node):
                mutators[self._root[changed]].append(node)
        return mutators

    def _writes(self, node: fx.Node) -> list[fx.Node]:
        """Roots of what a node gives or changes."""
        return [self._root[node], *(self._root[changed] for changed in changed_by(node))]

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
            root for node in self._nodes if not is_repeatable(node) for root in self._writes(node)
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
        return {
            node: use
            for node, use in last.items()
            if node not in self._free
            and (node not in self._inputs or self._is_entry(node) or node in self._homes)
        }

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
                views = [n.name for n in members[root] if self._stage.get(n, 0) < now <= self._last_use[n]]
                if len(views) > 1:
                    raise CannotCut(
                        f"{self.stages[now]} changes in place ('{mutator.name}') what an earlier one "
                        f"computed and hands on in {len(views)} views ({', '.join(views)})"
                    )

    # -- cutting ---------------------------------------------------------------------------

    def crossing(self, boundary: int) -> list[fx.Node]:
        """Values that enter ministage `boundary`, in the order in which they were computed."""
        if boundary == 0:
            return [node for node in self._inputs if self._is_entry(node)]
        nodes = [n for n, last in self._last_use.items() if self._stage.get(n, 0) < boundary <= last]
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
        builder = Builder(self._program.graph_module, device, changed)
        for node, has_rows in zip(entering, layout[index], strict=True):
            if has_rows and node.meta["val"].shape[0] != self.rows:
                raise CannotCut(
                    f"'{node.name}', which enters {self.stages[index]}, lacks rows for {self.rows}"
                )
            is_changed = any(self._stage[m] == index for m in self._mutators.get(self._root[node], ()))
            builder.enter(node, has_rows=has_rows, is_changed=is_changed)
        body = self._body(index, leaving)
        used = {source for node in body for source in node.all_input_nodes} | set(leaving)
        fixed = [n for n in self._inputs if n in used and not self._is_entry(n) and n not in entering]
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
