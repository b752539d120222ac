"""The workload: what a model's layers cost to hold and to compute, with no model at hand.

Plain data, immutable and free of torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from zorselike.errors import FileError, ProfileError
from zorselike.text.annotations import Must, Natural, OneOf, Positive, Quantity
from zorselike.text.dataclass_tables import check_dataclass, read_dataclass, read_value, write_dataclass
from zorselike.text.document import Document
from zorselike.text.files import hash_content
from zorselike.text.wording import list_few, suggest

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of an element of each dtype that layers compute in."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are alike. Per row means: of one sample of the workload's sequence length."""

    name: str
    """`embedding`, `layer`, `norm`, `head`, or a module's class."""
    num_parameters: Natural
    num_trainable: Natural | None = None
    """Parameters that train; None: all."""
    num_borrowed: Natural = 0
    """Parameters shared with the owner of a tie; not in `num_parameters`."""
    num_borrowed_trainable: Natural | None = None
    """Of these, parameters that train; None: all."""
    forward_flops_per_row: Quantity
    backward_flops_per_row: Quantity | None = None
    """FLOPs without recomputation; None: twice the forward."""
    input_elements_per_row: Natural = 0
    """Elements that enter, in the compute dtype: what crosses a boundary before this layer."""
    gradient_elements_per_row: Natural | None = None
    """Of these, elements whose gradients go back over that boundary; None: all."""
    output_elements_per_row: Natural = 0
    activation_bytes_per_row: Natural = 0
    """What autograd keeps from the forward until the backward, without recomputation."""
    working_bytes_per_row: Natural = 0
    """Temporary memory while it computes."""

    @property
    def trainable(self) -> int:
        """Number of parameters that train."""
        return self.num_parameters if self.num_trainable is None else self.num_trainable

    @property
    def borrowed_trainable(self) -> int:
        """Number of borrowed parameters that train."""
        given = self.num_borrowed_trainable
        return self.num_borrowed if given is None else given

    @property
    def trains(self) -> bool:
        """Whether it has weights that train, borrowed ones included."""
        return bool(self.trainable or self.borrowed_trainable)

    @property
    def gradient_elements(self) -> int:
        """Elements of a row whose gradients go back over a boundary before it."""
        given = self.gradient_elements_per_row
        return self.input_elements_per_row if given is None else given

    @property
    def backward_flops(self) -> float:
        """FLOPs of the backward of one row."""
        given = self.backward_flops_per_row
        return 2 * self.forward_flops_per_row if given is None else given


@dataclass(frozen=True, kw_only=True)
class Workload(Document):
    """The layers of a model in model order, at one sequence length and compute dtype.

    `Workload.load(path)` and `workload.save(path)` read and write JSON; what is wrong is a `ProfileError`.
    """

    noun = "workload"
    error = ProfileError
    syntax = "JSON"

    model: str
    """For people and for matching with plans and profiles: `llama 7b`."""
    sequence_length: Positive
    dtype: Annotated[str, OneOf(tuple(ITEMSIZES))]
    """What layers compute in, one of `ITEMSIZES`."""
    layers: Annotated[
        tuple[Annotated[tuple[str, str], "[module, kind]"], ...],
        Must(bool, "list the model's modules with their kinds"),
    ]
    """`(module, kind)`: global module names as plans list them; each is one FSDP unit."""
    kinds: Mapping[str, LayerKind]
    ties: tuple[Annotated[tuple[str, str], "[owner, borrower]"], ...] = ()
    """Modules that share a weight: `(owner, borrower)`, in model order."""
    num_moments: Natural = 2
    """Averages that the optimizer keeps of each parameter, in fp32 (AdamW: 2)."""
    max_tensor_parallel: Positive = 1
    """The most ranks among which tensor parallelism can cut every layer: whole heads of keys and values; 1
    where it cannot. It says what may be run and not what it costs, so the fingerprint does not have it."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype."""
        return ITEMSIZES[self.dtype]

    @property
    def masters(self) -> bool:
        """Whether the optimizer updates fp32 master weights beside shards in the compute dtype."""
        return self.itemsize < 4

    @cached_property
    def kind_of(self) -> dict[str, LayerKind]:
        """The kind of each module."""
        return {module: self.kinds[kind] for module, kind in self.layers}

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once: a borrower's kind does not count them."""
        return sum(self.kinds[kind].num_parameters for _, kind in self.layers)

    @property
    def num_trainable(self) -> int:
        """Of these, parameters that train."""
        return sum(self.kinds[kind].trainable for _, kind in self.layers)

    def describe_frozen(self) -> str:
        """`4,194,304 of 1,104,242,688 parameters train`; empty if all do."""
        if self.num_trainable == self.num_parameters:
            return ""
        return f"{self.num_trainable:,} of {self.num_parameters:,} parameters train"

    def flops_per_row(self, *, recompute: bool = False) -> float:
        """Forward and backward of the whole model; with `recompute` the forwards of `layer` twice."""
        total = 0.0
        for _, name in self.layers:
            kind = self.kinds[name]
            again = recompute and name == "layer"
            total += kind.forward_flops_per_row * (1 + again) + kind.backward_flops
        return total

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Workload:
        return read_dataclass(cls, table, readers={Mapping[str, LayerKind]: _read_kinds})

    def to_text(self) -> str:
        lines = []
        for key, value in self._describe().items():
            text = json.dumps(value, indent=2).replace("\n", "\n  ")
            if key in ("layers", "ties") and value:
                text = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
            lines.append(f"  {json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def _describe(self) -> dict[str, Any]:
        """The file's table; equal workloads give equal ones."""
        table = write_dataclass(self)
        lists = {key: table.pop(key) for key in ("kinds", "layers", "ties")}
        lists["kinds"] = [kind for _, kind in lists["kinds"]]
        return {"version": self.version, **table, **lists}

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with anything that costs depend on."""
        table = self._describe()
        del table["max_tensor_parallel"]
        return hash_content(table)

    def validate(self) -> Workload:
        """Returns the workload itself if it is consistent; raises `ProfileError` otherwise."""
        with self.errors():
            check_dataclass(self)
            for name, kind in self.kinds.items():
                if name != kind.name:
                    raise ProfileError(f"kinds has {kind.name!r} under the name {name!r}; give it one name")
                check_dataclass(kind, f"kind {name}: ")
                for part, whole in (
                    ("num_trainable", "num_parameters"),
                    ("num_borrowed_trainable", "num_borrowed"),
                    ("gradient_elements_per_row", "input_elements_per_row"),
                ):
                    given, most = getattr(kind, part), getattr(kind, whole)
                    if given is not None and given > most:
                        raise ProfileError(
                            f"kind {name}: {part} is {given} of {whole} = {most}; it cannot be more"
                        )
        self._validate_layers()
        return self

    def _validate_layers(self) -> None:
        position = {module: i for i, (module, _) in enumerate(self.layers)}
        twice = [module for module, times in Counter(m for m, _ in self.layers).items() if times > 1]
        if twice:
            raise ProfileError(f"layers has {list_few(twice, 'module')} more than once; list each once")
        for module, name in self.layers:
            if name not in self.kinds:
                hint = suggest(name, self.kinds) or f"; kinds has {', '.join(self.kinds)}"
                raise ProfileError(f"layers: {module} is of kind {name!r}, which kinds does not have{hint}")
        for owner, borrower in self.ties:
            for module in (owner, borrower):
                if module not in position:
                    raise ProfileError(
                        f"ties names {module!r}, which is not in layers{suggest(module, position)}"
                    )
            if position[owner] >= position[borrower]:
                raise ProfileError(f"ties: the owner {owner!r} must come before {borrower!r} in layers")


def _read_kinds(value: object, where: str) -> dict[str, LayerKind]:
    kinds = read_value(tuple[LayerKind, ...], value, where)
    for name, times in Counter(kind.name for kind in kinds).items():
        if times > 1:
            raise FileError(f"kinds has {name!r} {times} times; give each kind a name of its own")
    return {kind.name: kind for kind in kinds}
