"""Weights from a folder as `transformers` writes it, without a model in memory on any rank.

Every rank reads the bytes of the rows that it holds, one tensor at a time, out of one safetensors file or of
several with an index.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zorselike.checkpoint.safetensors_file import SafetensorsFile, fingerprint_weights, open_folder
from zorselike.checkpoint.slices import Slice
from zorselike.errors import CheckpointError, OtherCheckpointError
from zorselike.plan.holdings import VALUE, Box
from zorselike.runtime.state.dtypes import bytes_of, named_dtype
from zorselike.runtime.state.pipeline_state import PipelineState
from zorselike.runtime.state.together import do_together, gather_by_rank
from zorselike.text.wording import list_few


class PretrainedWeights:
    """A folder's weights on their way into one pipeline."""

    def __init__(
        self,
        state: PipelineState,
        folder: Path,
        *,
        name_of: Callable[[str], str],
        ignored: Sequence[str],
        kept: Collection[str] = (),
    ) -> None:
        """Opens the folder and compares it with the model; collective.

        Args:
            state: of the pipeline.
            folder: with safetensors files.
            name_of: what the model calls what the files call so.
            ignored: patterns of names in the files that the model need not have.
            kept: names in the model that keep the values that they have.

        Raises:
            CheckpointError: On every rank alike: there are no such files here, they are damaged, or of
                another model.
        """
        self._state, self._folder, self._kept = state, folder, kept
        self._places: dict[str, tuple[SafetensorsFile, Slice]] = {}
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

    def _open(self, name_of: Callable[[str], str], ignored: Sequence[str]) -> None:
        for file in open_folder(self._folder):
            self._places |= {name_of(one.box.name): (file, one) for one in file.slices}
        tensors, aliases = self._state.inventory.all_tensors, self._state.inventory.aliases
        facts = {name: known for name, known in tensors.items() if name not in self._kept}
        for alias, name in aliases.items():  # Of a tied weight a file has one name, whichever.
            if alias in self._places:
                self._places.setdefault(name, self._places[alias])
        where = f"{self._folder}: is of another model: "
        if missing := [name for name in facts if name not in self._places]:
            raise OtherCheckpointError(f"{where}it holds no {list_few(missing)}")
        others = [name for name in self._places if name not in facts and name not in aliases]
        if unknown := [name for name in others if not any(re.search(p, name) for p in ignored)]:
            raise OtherCheckpointError(f"{where}this one has no {list_few(unknown)}")
        for name, known in facts.items():
            shape = self._places[name][1].shape
            if shape != known.shape:
                raise OtherCheckpointError(f"{where}{name} is {shape} there, {known.shape} here")

    def _read(self, box: Box) -> Tensor:
        file, one = self._places[box.name]
        values = torch.empty(box.shape, dtype=named_dtype(one.dtype))
        start, stop = (box.starts[0], box.stops[0]) if box.starts else (0, 1)
        file.read_rows(one, start, stop, bytes_of(values))
        self.num_bytes_read += values.nbytes
        return values


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
