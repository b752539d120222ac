"""Weights from a folder as `transformers` writes it, without a model in memory on any rank.

Every rank reads the bytes of the rows that it holds, one tensor at a time, out of one safetensors file or of
several with an index.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zorselike.checkpoint.safetensors_file import (
    SafetensorsFile,
    fingerprint_weights,
    may_be,
    open_folder,
)
from zorselike.checkpoint.slices import Slice
from zorselike.errors import CheckpointError, OtherCheckpointError
from zorselike.plan.holdings import VALUE, Box, subtract
from zorselike.runtime.state.dtypes import bytes_of, named_dtype
from zorselike.runtime.state.exchange import part_of
from zorselike.runtime.state.inventory import TensorFacts
from zorselike.runtime.state.pipeline_state import PipelineState
from zorselike.runtime.state.together import do_together, gather_by_rank
from zorselike.text.wording import list_few

NameOf = Callable[[str], str | Box]
"""What a model calls what its files call so; a box of its values where that is a part of a tensor."""

_HALF_BYTES = 2
"""Of one number in half precision; smaller ones have no smallest and largest."""


class PretrainedWeights:
    """A folder's weights on their way into one pipeline."""

    def __init__(
        self,
        state: PipelineState,
        folder: Path,
        *,
        name_of: NameOf,
        ignored: Sequence[str],
        kept: Collection[str] = (),
    ) -> None:
        """Opens the folder and compares it with the model; collective.

        Args:
            state: of the pipeline.
            folder: with safetensors files.
            name_of: what the model calls what the files call so, or which part of it that is.
            ignored: patterns of names in the files that the model need not have.
            kept: names in the model that keep the values that they have.

        Raises:
            CheckpointError: On every rank alike: there are no such files here, they are damaged, or of
                another model.
        """
        self._state, self._folder, self._kept = state, folder, kept
        self._places: dict[str, list[_Place]] = {}
        """Of a tensor of the model, in parts that are apart from each other."""
        self._again: dict[str, list[list[_Place]]] = {}
        """The same of a tied weight, where files have it under more of its names."""
        self.num_bytes_read = 0
        do_together(state, folder, lambda: self._open(name_of, ignored))

    def load(self) -> None:
        """Fills all ministages; collective.

        Raises:
            CheckpointError: On every rank alike: a file cannot be read. The state is then a mixture.
        """
        do_together(self._state, self._folder, self._fill)

    def _fill(self) -> None:
        for named in self._state.ministages.values():
            named.fill(self._read, lambda _: (VALUE,), None, kept=self._kept)

    def _open(self, name_of: NameOf, ignored: Sequence[str]) -> None:
        for file in open_folder(self._folder):
            for one in file.slices:
                found = name_of(one.box.name)
                box = Box.whole(found, VALUE, one.shape) if isinstance(found, str) else found
                self._places.setdefault(box.name, []).append(_Place(box, file, one))
        tensors, aliases = self._state.inventory.all_tensors, self._state.inventory.aliases
        facts = {name: known for name, known in tensors.items() if name not in self._kept}
        for alias, name in aliases.items():  # Of a tied weight a file has one name, whichever, or several.
            if alias in self._places:
                of_alias = [
                    replace(place, box=replace(place.box, name=name)) for place in self._places[alias]
                ]
                if name in self._places:
                    self._again.setdefault(name, []).append(of_alias)
                else:
                    self._places[name] = of_alias
        where = f"{self._folder}: is of another model: "
        if missing := [name for name in facts if name not in self._places]:
            raise OtherCheckpointError(f"{where}it holds no {list_few(missing)}")
        others = [name for name in self._places if name not in facts and name not in aliases]
        if unknown := [name for name in others if not any(re.search(p, name) for p in ignored)]:
            in_files = [place.one.box.name for name in unknown for place in self._places[name]]
            raise OtherCheckpointError(f"{where}this one has no {list_few(in_files)}")
        for name, known in facts.items():
            for places in (self._places[name], *self._again.get(name, ())):
                if wrong := _find_fault(places, name, known):
                    raise OtherCheckpointError(f"{where}{wrong}")

    def _read(self, box: Box) -> Tensor:
        places = self._places[box.name]
        values = self._read_from(places, box)
        for others in self._again.get(box.name, ()):
            if not _are_equal(values, self._read_from(others, box)):
                names = f"{places[0].one.box.name} and {others[0].one.box.name}"
                raise OtherCheckpointError(
                    f"{self._folder}: is of another model: {names} differ there, and are one weight here; "
                    "where both were trained, its config.json should have tie_word_embeddings = false"
                )
        return values

    def _read_from(self, places: Sequence[_Place], box: Box) -> Tensor:
        values = torch.empty(box.shape, dtype=named_dtype(places[0].one.dtype), device="cpu")
        for place in places:
            common = place.box.intersect(box) if box.starts else box
            if common is not None:
                read = place.around(common)
                # A place of its own where the part is not all that is read.
                is_all = read == box
                part = values if is_all else torch.empty(read.shape, dtype=values.dtype, device="cpu")
                place.file.read_rows(place.one, *place.rows_of(read), bytes_of(part))
                if self._state.inventory.all_tensors[box.name].is_parameter:
                    _refuse_nonfinite(part, place)
                self.num_bytes_read += part.nbytes
                if not is_all:
                    part_of(common, box, values).copy_(part_of(common, read, part))
        return values


@dataclass(frozen=True)
class _Place:
    """Where a part of a tensor of the model is."""

    box: Box
    file: SafetensorsFile
    one: Slice
    """Of the same shape, or without the first dimension, of which the part has one entry."""

    def around(self, part: Box) -> Box:
        """The least that can be read with a part of it: whole rows."""
        rows = slice(1 if len(self.one.shape) == len(self.box.shape) else 0)
        starts = (*part.starts[rows], *self.box.starts[len(part.starts[rows]) :])
        stops = (*part.stops[rows], *self.box.stops[len(part.stops[rows]) :])
        return replace(part, starts=starts, stops=stops)

    def rows_of(self, part: Box) -> tuple[int, int]:
        """The rows there of some rows of the part."""
        if len(self.one.shape) < len(self.box.shape):
            return 0, self.one.shape[0]
        first = self.box.starts[0] if self.box.starts else 0
        return (part.starts[0] - first, part.stops[0] - first) if part.starts else (0, 1)


def _refuse_nonfinite(values: Tensor, place: _Place) -> None:
    """Raises `CheckpointError` where a file has NaN or infinity for a weight; a bias may have -inf, by
    which the outputs of a padded vocabulary are masked."""
    dtype = values.dtype
    if not values.numel() or not dtype.is_floating_point or dtype.itemsize < _HALF_BYTES:
        return
    if place.one.box.name.endswith("bias"):
        values = values.masked_fill(values == -math.inf, 0)
    if not all(math.isfinite(end) for end in values.aminmax()):
        raise CheckpointError(
            f"{place.file.path}: {place.one.box.name} holds NaN or infinite values, with which every loss "
            "would be NaN; take weights of a run that was sound"
        )


def _are_equal(values: Tensor, others: Tensor) -> bool:
    """Whether two names have one weight; of NaNs too."""
    if values.dtype != others.dtype:
        values, others = values.double(), others.double()
    return torch.allclose(values, others, rtol=0, atol=0, equal_nan=True)


def _find_fault(places: Sequence[_Place], name: str, known: TensorFacts) -> str | None:
    """What is wrong with the parts of a tensor."""
    whole = Box.whole(name, VALUE, known.shape)
    is_float = known.is_parameter and known.model_dtype.is_floating_point
    left = [whole]
    for place in places:
        if not may_be(place.one, place.box, whole):
            return f"{place.one.box.name} is {place.one.shape} there, and {name} {whole.shape} here"
        if is_float and not named_dtype(place.one.dtype).is_floating_point:
            return (
                f"{place.one.box.name} has integers there ({place.one.dtype}, as in quantized models), "
                f"and {name} is of {known.model_dtype} here"
            )
        if place.one.dtype != places[0].one.dtype:
            names = f"{places[0].one.box.name} and {place.one.box.name}"
            return f"{names} are of different dtypes, and one tensor here"
        left = [rest for box in left for rest in subtract(box, place.box)]
    return f"it holds a part of {name} alone" if left and whole.num_elements else None


def find_fingerprint(state: PipelineState, folder: Path) -> str:
    """Of a folder's weights; collective.

    Raises:
        CheckpointError: On every rank alike: a node has none there, or others.
    """
    own: list[str] = []
    do_together(state, folder, lambda: own.append(fingerprint_weights(folder)))
    everyone = gather_by_rank(state, own[0])
    if len(set(everyone)) > 1:
        raise CheckpointError(f"{folder}: nodes have different weights under this name; copy one to all")
    return own[0]
