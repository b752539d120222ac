"""Plans that are drawn ahead, in threads."""

from __future__ import annotations

import threading
from unittest import mock

import torch
from tiny import Decoder, module_names
from torch import nn

from zorselike.elastic import drawing
from zorselike.elastic.drawing import Drawings, Options
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan


def test_a_thread_that_draws_has_the_device_before_the_model_is_made() -> None:
    """Else whatever the factory has on its GPU would open a context on the first card."""
    calls: list[tuple[str, int]] = []

    def build() -> nn.Module:
        calls.append(("build", threading.get_ident()))
        with torch.device("meta"):
            return Decoder(1)

    def choose(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        calls.append(("choose", threading.get_ident()))

    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, tuple(module_names(1))),))
    with (
        mock.patch.object(torch.cuda, "set_device", choose),
        mock.patch.object(drawing, "find_memory", lambda device: 2**34),
    ):
        drawings = Drawings(build, Options(), torch.device("cuda", 1))
        thread = threading.Thread(target=drawings.draw, args=(plan, 0))
        thread.start()
        thread.join()
    assert [what for what, _ in calls] == ["choose", "build"]
    assert len({ident for _, ident in calls}) == 1 and calls[0][1] != threading.get_ident()
