"""A caller's default device (`torch.set_default_device`, `with torch.device`) moves nothing of ours, nor
does the current one of a caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from offloaded import DEFERRED, IN_PLACE, Setting
from ranks import RunRanks

from zorselike import HeteroPipeline
from zorselike.runtime import pipeline
from zorselike.runtime.memory.pinned import make_host_buffer
from zorselike.runtime.processes.device import as_current

pytestmark = pytest.mark.pooled


AROUND = ((), ("construction",), ("calls",), ("construction", "calls"))


def train_each(
    rank: int, world_size: int, setting: Setting, offload: tuple[str, ...], folder: Path
) -> list[list[float]]:
    return [train(setting, offload, folder / "-".join(("around", *around)), around) for around in AROUND]


def train(setting: Setting, offload: tuple[str, ...], folder: Path, around: tuple[str, ...]) -> list[float]:
    """Losses, with the meta device as the default `around` the construction, or the calls."""
    batches = [setting.case(offload).batch(step) for step in range(3)]
    with torch.device("meta") if "construction" in around else nullcontext():
        pipe = setting.build(offload)
    with torch.device("meta") if "calls" in around else nullcontext():
        losses = [pipe.step_global(*batch).loss for batch in batches]
        pipe.save(folder)
        pipe.load(folder)
        losses += [pipe.evaluate_global(*batches[0]).loss, pipe.step_global(*batches[0]).loss]
        with pipe.loaded():
            pass
        assert not any(tensor.is_meta for tensor in pipe.full_state_dict().values())
        pipe.close()
    return losses


@pytest.mark.parametrize(
    ("setting", "offload"),
    [(IN_PLACE, ()), (IN_PLACE, ("params", "optimizer", "activations")), (DEFERRED, ("params", "optimizer"))],
)
def test_it_changes_nothing(
    setting: Setting, offload: tuple[str, ...], run_ranks: RunRanks, tmp_path: Path
) -> None:
    ((expected, *found),) = run_ranks(train_each, 1, setting, offload, tmp_path)
    assert found == [expected] * (len(AROUND) - 1)


def test_host_memory_is_on_the_host() -> None:
    with torch.device("meta"):
        assert make_host_buffer((2, 3), torch.float32, torch.device("cpu")).device.type == "cpu"


def read(pipe: HeteroPipeline) -> None:
    with pipe.loaded():
        pass


def call_all(rank: int, world_size: int, folder: Path) -> list[str]:
    """Calls that did not make the rank's GPU the current one, if it had one."""
    batch = IN_PLACE.case(("params",)).batch(0)
    made: list[torch.device] = []

    @contextmanager
    def make(device: torch.device) -> Iterator[None]:
        made.append(device)
        yield

    missed = []
    with mock.patch.object(pipeline, "as_current", make):
        pipe = IN_PLACE.build(("params",))
        calls: dict[str, Callable[[], object]] = {
            "step": lambda: pipe.step_global(*batch),
            "evaluate": lambda: pipe.evaluate_global(*batch),
            "save": lambda: pipe.save(folder),
            "load": lambda: pipe.load(folder),
            "full_state_dict": pipe.full_state_dict,
            "loaded": lambda: read(pipe),
            "close": pipe.close,
        }
        for name, call in calls.items():
            made.clear()
            call()
            if made != [pipe.device]:
                missed.append(name)
    return missed


def test_every_call_makes_the_ranks_gpu_the_current_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Or a thread of the caller's would have the first one."""
    assert run_ranks(call_all, 1, tmp_path) == [[]]


def test_a_gpu_is_the_current_one_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(device))
    with as_current(torch.device("cuda", 1)) as entered:
        assert entered == torch.device("cuda", 1)
    with as_current(torch.device("cpu")) as entered:
        assert entered is None
