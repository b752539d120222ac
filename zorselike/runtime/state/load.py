"""Loads a checkpoint into a pipeline of any plan.

Every rank reads its own boxes, each byte against its checksum, one ministage at a time. Where a rank does not
see all files (nodes without a shared disk), those that see them read and send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zorselike.checkpoint.coverage import refuse_gaps
from zorselike.checkpoint.layout import MANIFEST
from zorselike.checkpoint.manifest import Manifest
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.errors import CheckpointError, OtherCheckpointError
from zorselike.plan.holdings import VALUE, Box, Copy, copies
from zorselike.runtime.state.dtypes import bytes_of, named_dtype
from zorselike.runtime.state.exchange import GroupChannel, collect
from zorselike.runtime.state.pipeline_state import PipelineState
from zorselike.runtime.state.save import read_optimizers
from zorselike.runtime.state.together import do_together, gather_by_rank
from zorselike.text.wording import list_few


class Loader:
    """One checkpoint on its way into one pipeline; collective to make."""

    def __init__(self, state: PipelineState, path: Path, *, model_only: bool) -> None:
        """Reads the manifest, of whichever rank sees one, and compares it with the model.

        Raises:
            CheckpointError: On every rank alike: it is incomplete, damaged, or of another model.
        """
        self._state, self._path = state, path
        self._rank = state.ranks.rank
        self.manifest = self._under_own_names(self._agree_on_manifest())
        if not model_only and self.manifest.optimizer is None:
            raise CheckpointError(
                f"{path}: holds the model alone, without the optimizer; load it with model_only=True, to "
                "begin a new run from it"
            )
        self.model_only = model_only
        self._refuse_other_base()
        self._kept = state.left_out if self.manifest.base is not None else frozenset()
        """What has its values from where the checkpoint says that they are."""
        self._refuse_other_model()
        self._kinds = {
            name: self.manifest.kinds_of(name) if not self.model_only else (VALUE,)
            for name in self.manifest.tensors
        }
        self._facts = None if self.model_only else read_optimizers(self.manifest.optimizer or {})
        self._refuse_other_optimizer()
        self.num_bytes_read = 0

    def load(self) -> None:
        """Fills all ministages; collective.

        Raises:
            CheckpointError: On every rank alike: what was read is damaged. The state is then a mixture.
        """
        with closing(SlicesReader(self._path, self.manifest)) as reader:
            seen = self._gather([file.file for file in self.manifest.files if reader.sees(file.file)])
            self._refuse_unseen(seen)
            self._together(lambda: reader.check_files(seen[self._rank]))
            for i in range(self._state.plan.num_ministages):
                wanted = self._list_wanted(i)
                if all(len(own) == len(self.manifest.files) for own in seen):
                    read = self._read_directly(reader)
                    self._together(lambda: self._fill(i, read))  # noqa: B023
                else:
                    self._fill_by_exchange(i, reader, wanted, seen)
            self.num_bytes_read = reader.num_bytes_read

    def load_options(self) -> None:
        """Gives the optimizers the options that they had: learning rates and the like."""
        if self._facts is not None:
            for named in self._state.ministages.values():
                named.fill_options(self._facts)

    # --------------------------------------------------------------------------------------

    def _fill(self, ministage: int, read: Callable[[Box], Tensor]) -> None:
        named = self._state.ministages.get(ministage)
        if named is not None:
            named.fill(read, lambda name: self._kinds.get(name, (VALUE,)), self._facts, kept=self._kept)

    def _list_wanted(self, ministage: int) -> dict[int, list[Box]]:
        """By rank."""
        wanted = self._state.inventory.wanted(
            self._state.plan, ministage, self._kinds, process_of=self._state.ranks.process_of
        )
        return {rank: [box for box in own if box.name not in self._kept] for rank, own in wanted.items()}

    def _read_directly(self, reader: SlicesReader) -> Callable[[Box], Tensor]:
        def read(box: Box) -> Tensor:
            values = torch.empty(box.shape, dtype=self._dtype_of(box), device="cpu")
            reader.read_box(box, bytes_of(values))
            return values

        return read

    def _fill_by_exchange(
        self,
        ministage: int,
        reader: SlicesReader,
        wanted: Mapping[int, Sequence[Box]],
        seen: Sequence[Sequence[str]],
    ) -> None:
        """Whoever sees a slice gives what others want of it."""
        names = {box.name for boxes in wanted.values() for box in boxes}
        held = {
            rank: [
                record.box
                for file in self.manifest.files
                if file.file in own
                for record in file.slices
                if record.box.name in names
            ]
            for rank, own in enumerate(seen)
        }
        due = list(copies(held, wanted))
        read = self._read_directly(reader)
        contents: dict[Copy, Tensor] = {}

        def read_own() -> None:
            for copy in due:
                if copy.source == self._rank:
                    contents[copy] = read(copy.box)

        self._together(read_own)  # Before anything is sent: a damaged file must not leave others waiting.
        sources = iter([copy for copy in due if copy.source == self._rank])

        found = collect(
            due,
            wanted.get(self._rank, ()),
            GroupChannel(self._state.ranks, self._state.control),
            read=lambda box: contents.pop(next(sources)),
            dtype_of=self._dtype_of,
        )
        self._together(lambda: self._fill(ministage, found.__getitem__))

    def _dtype_of(self, box: Box) -> torch.dtype:
        places = self.manifest.slices_of(box.name, box.kind)
        name = places[0][1].dtype if places else self.manifest.tensors[box.name].dtype
        return named_dtype(name)

    # -- agreement -------------------------------------------------------------------------

    def _agree_on_manifest(self) -> Manifest:
        own, error = None, None
        try:
            own = read_manifest(self._path)
            refuse_gaps(own)  # Now: others would wait for what nobody has.
        except CheckpointError as found:
            own, error = None, str(found) if own is None else f"{self._path / MANIFEST}: {found}"
        text = "" if own is None else own.to_text()
        said = self._gather((error, hashlib.sha256(text.encode()).hexdigest()))
        seers = [rank for rank, (error, _) in enumerate(said) if error is None]
        if not seers:
            raise CheckpointError(error or "")
        if len({said[rank][1] for rank in seers}) > 1:
            raise CheckpointError(
                f"{self._path}: nodes have different checkpoints under this name; keep one of them"
            )
        if len(seers) < len(said):
            box = [own]
            first = self._state.ranks.process_of[seers[0]]
            dist.broadcast_object_list(box, first, self._state.control, device=torch.device("cpu"))
            own = box[0]
        assert own is not None
        return own

    def _under_own_names(self, manifest: Manifest) -> Manifest:
        """Which of its names a tied weight is saved under depends on the plan."""
        here = self._state.inventory.all_tensors
        missing = {name: manifest.aliases.get(name) for name in here if name not in manifest.tensors}
        return manifest.renamed({old: new for new, old in missing.items() if old and old not in here})

    def _refuse_unseen(self, seen: Sequence[Sequence[str]]) -> None:
        missing = [f.file for f in self.manifest.files if not any(f.file in own for own in seen)]
        if missing:
            raise CheckpointError(
                f"{self._path}: no rank sees {list_few(missing)}; start the job on the nodes that saved "
                "them too, or copy them here"
            )

    def _refuse_other_model(self) -> None:
        """Raises `CheckpointError` where names or shapes differ from the model's."""
        saved = self.manifest.tensors
        known = self._state.inventory.all_tensors
        here = {name: facts for name, facts in known.items() if name not in self._kept}
        where = f"{self._path}: is of another model: "
        missing = [name for name in here if name not in saved]
        if missing:
            raise OtherCheckpointError(f"{where}it holds no {list_few(missing)}")
        unknown = [name for name in saved if name not in here]
        if unknown:
            raise OtherCheckpointError(f"{where}this one has no {list_few(unknown)}")
        for name, facts in here.items():
            if saved[name].shape != facts.shape:
                raise OtherCheckpointError(f"{where}{name} is {saved[name].shape} there, {facts.shape} here")

    def _refuse_other_base(self) -> None:
        """Raises `CheckpointError` where the frozen weights are not here, or others."""
        there, here = self.manifest.base, self._state.base
        if there is None:
            return
        if here is None:
            raise OtherCheckpointError(
                f"{self._path}: holds adapters, without the model of {there.folder} beside which they were "
                "trained: load it into that folder's model with adapters ([lora] enable = true in a recipe, "
                "or zorselike.hf.pipeline(DIR, plan, lora=...))"
            )
        if here.fingerprint != there.fingerprint:
            begin_with = f"{self._path}: its adapters were trained beside other weights"
            if there.folder == here.folder:
                raise OtherCheckpointError(
                    f"{begin_with} than {here.folder} has now: bring those back, or train into another folder"
                )
            raise OtherCheckpointError(
                f"{begin_with} ({there.folder}) than those of {here.folder}; name that folder"
            )
        was, now = (tuple(base.adapter.get(key) for key in ("r", "lora_alpha")) for base in (there, here))
        if was != now:
            raise OtherCheckpointError(
                f"{self._path}: its adapters have rank {was[0]} and alpha {was[1]}, and these have {now[0]} "
                f"and {now[1]}; set rank and alpha as they were"
            )

    def _refuse_other_optimizer(self) -> None:
        kinds = {
            type(named.optimizer).__name__
            for named in self._state.ministages.values()
            if named.optimizer is not None
        }
        own = None
        if self._facts is not None and self._facts.kind and kinds - {self._facts.kind}:
            own = (
                f"{self._path}: was saved with the optimizer {self._facts.kind}, and this job has "
                f"{', '.join(sorted(kinds))}: use that one, or begin anew with its model (load with "
                "model_only=True; in a recipe, initial_load_path and another [checkpoint] folder)"
            )
        for error in self._gather(own):
            if error is not None:
                raise OtherCheckpointError(error)

    def _together(self, work: Callable[[], object]) -> None:
        """Does it on every rank; a rank's `CheckpointError` is everybody's. Collective."""
        do_together(self._state, self._path, work)

    def _gather(self, value: Any) -> list[Any]:
        return gather_by_rank(self._state, value)
