"""One step's rows on one rank, cut into that rank's microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zorselike.errors import ConfigError
from zorselike.plan.plan import Microbatch, Plan
from zorselike.runtime.memory.pinned import copy_to_device
from zorselike.runtime.model.nested import map_tensors, tensors_in
from zorselike.runtime.model.signature import Broadcast, refuse_tensors_inside
from zorselike.text.wording import count

Tensors = tuple[Tensor, ...]


class RowIndex:
    """A rank's rows of the global batch in ascending order, and where its microbatches lie in them."""

    def __init__(self, microbatches: Sequence[Microbatch]) -> None:
        order = sorted(range(len(microbatches)), key=lambda number: microbatches[number].start)
        ends = list(accumulate(microbatches[number].num_rows for number in order))
        self._slices = {
            number: slice(end - microbatches[number].num_rows, end)
            for number, end in zip(order, ends, strict=True)
        }
        self.rows = [
            row for number in order for row in range(microbatches[number].start, microbatches[number].stop)
        ]

    def slice(self, number: int) -> slice:
        """Positions of a microbatch's rows within `rows`."""
        return self._slices[number]


class RankRows:
    """Which rows of the global batch a rank computes, feeds and compares with, ascending."""

    def __init__(self, plan: Plan, rank: int) -> None:
        own = plan.ministages_of_rank(rank)
        self.rank = rank
        self.global_batch = plan.global_batch
        self.index = RowIndex(plan.microbatches_of_rank(rank))
        self.rows = self.index.rows
        self.inputs = self.rows if 0 in own else []
        self.targets = self.rows if plan.num_ministages - 1 in own else []

    def check(self, feeds: Tensors | None, targets: Any, kwargs: Mapping[str, Any], *, train: bool) -> None:
        """Raises `ConfigError` for what is given for a step and is not of this rank's rows, or would not be
        trained."""
        check_rows(feeds, self.inputs, "inputs", f"pipe.input_rows of rank {self.rank}")
        if self.targets and targets is None:
            raise ConfigError(f"targets is None, but rank {self.rank} compares with {len(self.targets)} rows")
        if self.targets:
            if not tensors_in(targets):
                raise ConfigError(f"targets: a {type(targets).__name__} is not a tensor and has none")
            check_rows(targets, self.targets, "targets", f"pipe.target_rows of rank {self.rank}")
        for name, value in kwargs.items():
            refuse_tensors_inside(name, value)
            if isinstance(value, Tensor):
                check_rows(value, self.rows, f"{name}=", f"pipe.rows of rank {self.rank}")
            if train:
                for tensor in tensors_in(value.value if isinstance(value, Broadcast) else value):
                    _refuse_gradient(tensor, f"{name}=")

    def select(self, inputs: Any, targets: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """This rank's rows of a whole global batch."""
        rows = {f"{name}=": value for name, value in kwargs.items() if isinstance(value, Tensor)}
        for what, value in {"inputs": inputs, "targets": targets, **rows}.items():
            check_rows(value, range(self.global_batch), what, "the plan's global batch")
        selected = {
            name: take_rows(value, self.rows) if isinstance(value, Tensor) else value
            for name, value in kwargs.items()
        }
        return select_rows(inputs, self.inputs), select_rows(targets, self.targets), selected


class Batch:
    """One step's inputs, targets and keyword arguments for this rank's rows."""

    def __init__(
        self,
        index: RowIndex,
        device: torch.device,
        *,
        inputs: Tensors | None,
        targets: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        self._index = index
        self._inputs = None if inputs is None else tuple(copy_to_device(t, device) for t in inputs)
        self._targets = map_tensors(targets, lambda t: copy_to_device(t, device))
        self._kwargs = {name: _to_device(value, device) for name, value in kwargs.items()}
        self._given = kwargs
        self._told: dict[int, tuple[bool | None, bool | None]] = {}

    def inputs(self, number: int) -> Tensors:
        """Inputs of the first ministage, `[rows, ...]` each."""
        assert self._inputs is not None
        rows = self._index.slice(number)
        return tuple(tensor[rows] for tensor in self._inputs)

    def targets(self, number: int) -> Any:
        """Targets of a microbatch."""
        rows = self._index.slice(number)
        return map_tensors(self._targets, lambda t: t[rows])

    def kwargs(self, number: int, names: Collection[str]) -> dict[str, Any]:
        """A microbatch's keyword arguments among `names`."""
        rows = self._index.slice(number)
        return {name: _cut(value, rows) for name, value in self._kwargs.items() if name in names}

    def tell_of_rows(self, number: int) -> tuple[bool | None, bool | None]:
        """Whether a microbatch has several documents in a row, by its position ids, and whether its attention
        mask leaves tokens out; None where only a device knows. Looked at once, for all ministages."""
        if number not in self._told:
            positions, mask = self._known(number, "position_ids"), self._known(number, "attention_mask")
            documents = None if positions is None else bool((positions.diff(dim=-1) != 1).any())
            if self._given.get("position_ids") is None:
                documents = False
            self._told[number] = documents, None if mask is None else bool((mask == 0).any())
        return self._told[number]

    def _known(self, number: int, name: str) -> Tensor | None:
        """A microbatch's part of an argument `[rows, sequence]`, where it is in the host's memory."""
        value = _cut(self._given.get(name), self._index.slice(number))
        is_known = isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 2
        return value if is_known else None


def as_tensors(value: Any, what: str, *, train: bool = False) -> Tensors:
    """A tensor or a tuple or list of tensors as a tuple; raises `ConfigError` for anything else, and where a
    step trains for those whose gradient the caller would wait for."""
    tensors = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not tensors:
        raise ConfigError(f"{what}: an empty {type(value).__name__}; pass a tensor or a tuple of tensors")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{what}: a {type(tensor).__name__} is not a tensor; pass a tensor or a tuple of tensors"
            )
        if train:
            _refuse_gradient(tensor, what)
    return tensors


def _refuse_gradient(tensor: Tensor, what: str) -> None:
    if tensor.requires_grad:
        raise ConfigError(
            f"{what} require a gradient, which a step does not give back: what computes them would not "
            "be trained; make it the model's first module, or detach() them"
        )


def check_rows(value: Any, rows: Sequence[int], what: str, where: str) -> None:
    """Refuses tensors whose first dimension is not the number of rows the plan asks for."""
    for tensor in tensors_in(value):
        if not tensor.dim():
            raise ConfigError(
                f"{what} is a tensor without rows: dimension 0 must be rows, or, of a keyword argument that "
                "every row has alike, pass Broadcast(value)"
            )
        num_rows = tensor.shape[0]
        if num_rows != len(rows):
            listed = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
            raise ConfigError(
                f"{what} has {count(num_rows, 'row')}, but {where} is {count(len(rows), 'row')} of the "
                f"global batch; pass exactly the rows [{listed}] (or the whole batch to step_global)"
            )


def select_rows(value: Any, rows: Sequence[int]) -> Any:
    """Rows of a whole batch (tensor or tuple of tensors); None if there are none to select."""
    return None if value is None or not rows else take_rows(value, rows)


def take_rows(value: Any, rows: Sequence[int]) -> Any:
    """Rows of a whole batch, where it is."""
    index = torch.as_tensor(rows, dtype=torch.int64, device="cpu")
    with torch.inference_mode(False):  # A caller's is no part of a step, which may save these.
        return map_tensors(value, lambda t: t[copy_to_device(index, t.device)])


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Broadcast):
        return Broadcast(map_tensors(value.value, lambda t: copy_to_device(t, device)))
    return copy_to_device(value, device) if isinstance(value, Tensor) else value


def _cut(value: Any, rows: slice) -> Any:
    if isinstance(value, Broadcast):
        return value.value
    return value[rows] if isinstance(value, Tensor) else value
