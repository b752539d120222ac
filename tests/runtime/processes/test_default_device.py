"""A caller's default device (`torch.set_default_device`, `with torch.device`) moves nothing of ours."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from offloaded import DEFERRED, IN_PLACE, Setting
from ranks import RunRanks

from zorselike.runtime.memory.pinned import make_host_buffer

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
