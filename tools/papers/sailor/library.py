"""Where Sailor's files lie beside each other, and which profile belongs to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zorselike.cost.profile import Profile
from zorselike.errors import ProfileError
from zorselike.plan.workload import Workload

from ..json_files import read_object
from .links import MACHINES_FILE, MachineLinks
from .profiles import Shapes, read_profile, read_shapes, read_workload

SIZES_FILE = "llm_info.json"


@dataclass(frozen=True)
class Library:
    """The folder that holds `llm_info.json`, `profiles/` and `providers/`."""

    root: Path

    @cached_property
    def links(self) -> MachineLinks:
        return MachineLinks(self.root / "providers" / MACHINES_FILE)

    @cached_property
    def shapes(self) -> dict[str, Shapes]:
        """Of every model."""
        path = self.root / SIZES_FILE
        return {model: read_shapes(path, model) for model in read_object(path)}

    def guess_model(self, num_layers: int) -> str:
        """The model that has so many pseudo-layers; raises `ProfileError` if not exactly one has."""
        found = [
            model for model, shapes in self.shapes.items() if num_layers in {len(s) for s in shapes.values()}
        ]
        if len(found) != 1:
            known = ", ".join(f"{model} {len(next(iter(s.values())))}" for model, s in self.shapes.items())
            raise ProfileError(f"{num_layers} layers are of {len(found)} models; say which (known: {known})")
        return found[0]

    def profile(self, model: str, gpus: Sequence[str]) -> Profile:
        """The times of one model on all those types of GPUs; raises `ProfileError` for what is missing."""
        parts = [
            read_profile(self.root / "profiles" / model / gpu / "profile.json", model, gpu, self._of(model))
            for gpu in gpus
        ]
        return Profile(
            model=model,
            layers=tuple(times for part in parts for times in part.layers),
            updates=tuple(times for part in parts for times in part.updates),
        )

    def workload(self, model: str, tensor_parallel: int) -> Workload:
        """What one GPU has of a model; raises `ProfileError` for what is missing."""
        return read_workload(self.root / SIZES_FILE, model, tensor_parallel)

    def _of(self, model: str) -> Shapes:
        if model not in self.shapes:
            raise ProfileError(f"{self.root / SIZES_FILE}: no model {model}; it has {', '.join(self.shapes)}")
        return self.shapes[model]


def find_library(folder: Path) -> Library:
    """The library in a folder, in its `sailor/`, or in one above it; `ProfileError` if there is none."""
    for above in (folder, *folder.resolve().parents):
        for root in (above, above / "sailor"):
            if (root / SIZES_FILE).is_file() and (root / "profiles").is_dir():
                return Library(root)
    raise ProfileError(
        f"{folder}: no {SIZES_FILE} beside profiles/ in it or above it; give --data Sailor's folder"
    )
