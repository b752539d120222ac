"""Sailor's files, and which profile belongs to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zorselike.cost.profile import Profile
from zorselike.errors import ProfileError
from zorselike.plan.workload import Workload

from ..data import SAILOR, read_object
from .links import MACHINES_FILE, MachineLinks
from .profiles import Shapes, read_profile, read_shapes, read_workload

SIZES_FILE = "llm_info.json"
TABLE_FILE = "simulator_profiles.json"
"""Times of all models on all GPUs, smoothed by hand in places, which Sailor's own simulator reads."""


@dataclass(frozen=True)
class Library:
    """Sailor's repository, or copies of its files, under a folder."""

    data: Path

    def find(self, name: str, below: str = "") -> Path:
        return SAILOR.find(self.data, name, below)

    def find_profile(self, model: str, gpu: str) -> Path:
        return self.find("profiles", f"{model}/{gpu}/profile.json")

    @cached_property
    def links(self) -> MachineLinks:
        return MachineLinks(self.find(f"providers/{MACHINES_FILE}"))

    @cached_property
    def shapes(self) -> dict[str, Shapes]:
        """Layer shapes of every model."""
        path = self.find(SIZES_FILE)
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

    def find_model(self, name: str) -> str:
        """The model of that name, or the only one whose name begins so; raises `ProfileError`."""
        found = [model for model in self.shapes if model.startswith(name)]
        if name not in self.shapes and len(found) != 1:
            raise ProfileError(f"{name} names {len(found)} models; known are {', '.join(self.shapes)}")
        return name if name in self.shapes else found[0]

    def profile(self, model: str, gpus: Sequence[str]) -> Profile:
        """The times of one model on all those types of GPUs; raises `ProfileError` for what is missing."""
        try:
            table: Path | None = self.find(TABLE_FILE)
        except ProfileError:  # A copy of some of their files.
            table = None
        shapes = self._of(model)
        parts = [read_profile(self.find_profile(model, gpu), model, gpu, shapes, table) for gpu in gpus]
        return Profile(
            model=model,
            layers=tuple(times for part in parts for times in part.layers),
            updates=tuple(times for part in parts for times in part.updates),
        )

    def workload(self, model: str, tensor_parallel: int) -> Workload:
        """What one GPU has of a model; raises `ProfileError` for what is missing."""
        return read_workload(self.find(SIZES_FILE), model, tensor_parallel)

    def _of(self, model: str) -> Shapes:
        if model not in self.shapes:
            raise ProfileError(f"{self.find(SIZES_FILE)}: no model {model}; it has {', '.join(self.shapes)}")
        return self.shapes[model]
