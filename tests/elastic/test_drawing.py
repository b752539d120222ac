"""Plans that are drawn ahead, in threads."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from tiny import Decoder, module_names
from torch import nn

from zorselike.elastic import drawing
from zorselike.elastic.drawing import Drawings, Options
from zorselike.elastic.pipeline import ElasticPipeline
from zorselike.errors import ConfigError
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


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:2", 2), (None, 1)])
def test_the_gpu_of_an_elastic_process_has_a_number(
    device: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one a thread could not take it, and plans were refused."""
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, tuple(module_names(1))),))
    made_current: list[torch.device] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(drawing, "find_memory", lambda device: 2**34)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    pipe = ElasticPipeline(lambda: Decoder(1), plan, meeting=mock.Mock(), device=device)
    assert [pipe.device] == made_current == [torch.device("cuda", index)]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU here"):
        drawing.find_memory(torch.device("cuda"))


def test_the_end_waits_for_what_is_being_drawn_and_nothing_more_is() -> None:
    """Python's end stops threads wherever they are: one inside torch aborted a job that had ended well."""
    begun, may_go_on = threading.Event(), threading.Event()
    built: list[str] = []

    def build() -> nn.Module:
        begun.set()
        may_go_on.wait()
        built.append("model")
        with torch.device("meta"):
            return Decoder(1)

    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, tuple(module_names(1))),))
    drawings = Drawings(build, Options(), torch.device("cpu"))
    threads = [threading.Thread(target=drawings.draw_ahead, args=(plan,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    closing = threading.Thread(target=drawings.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    may_go_on.set()
    for thread in (closing, *threads):
        thread.join()
    drawings.draw_ahead(plan)
    assert built == ["model"]
