"""Which checkpoints a job has made, for one that may do a step again which it has saved."""

from __future__ import annotations

from pathlib import Path

from zorselike.checkpoint.folder import Checkpoint, check_files_here, examine
from zorselike.checkpoint.layout import step_folder
from zorselike.runtime.state.save import Save


class SaveHistory:
    """One process's; it outlasts pipelines."""

    def __init__(self) -> None:
        self._begun: dict[tuple[Path, bool], Save] = {}

    def note(self, save: Save, *, model_only: bool) -> None:
        """One has begun."""
        self._begun[save.folder / step_folder(save.step), model_only] = save

    def has(self, path: Path, *, model_only: bool) -> bool:
        """Whether the checkpoint of this absolute path is there, and one of these."""
        save = self._begun.get((path, model_only))
        may_be = save is not None and (save.path is not None or save.is_interrupted)
        return may_be and isinstance(examine(path, check_files_here), Checkpoint)
