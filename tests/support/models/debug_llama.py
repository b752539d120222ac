"""The model of the debug recipes, and what runs of the training program inherit from the test's process."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from zorselike.models import Decoder, build_model
from zorselike.train.config.file import parse_command_line

RECIPES = Path(__file__).parents[3] / "recipes"


def build_on_meta() -> Decoder:
    with torch.device("meta"):
        return build_model("llama", "debug")


@functools.cache
def warm_up() -> None:
    """What every rank would import or make by itself, once for all of them."""
    import torch.utils.tensorboard  # noqa: F401

    import zorselike.elastic.meeting.environment  # noqa: F401  Of who ends with an error.
    from zorselike.train import trainer  # noqa: F401

    parse_command_line(["--config", str(RECIPES / "debug_cpu.toml")])
    build_on_meta()  # Torch imports half of itself at the first tensor on meta.
