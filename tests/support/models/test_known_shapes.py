"""What ranks take over from each other is what they would have found, and only for equal models."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from known_shapes import _describe, share
from ranks import RunRanks
from tiny import Decoder, Layer, module_names

from zorselike.errors import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime import crossing
from zorselike.runtime.model.boundaries import StepInputs, trace_boundaries
from zorselike.runtime.model.partition import partition
from zorselike.runtime.model.signature import Signature, TensorSpec

NAMES = module_names(2)
PLAN = Plan(
    2,
    (Group((0,), (Microbatch(0, 0, 2),)),),
    (Ministage(0, tuple(NAMES[:2])), Ministage(0, tuple(NAMES[2:]))),
)
TOKENS = Signature((TensorSpec((4,), torch.int64),))


def trace_twice(rank: int, world_size: int, folder: Path) -> tuple[bool, list[int]]:
    """Whether what is looked up equals what is found, and how many entries there are after each model."""
    model = Decoder(2)
    parts = partition(model, PLAN)
    found = trace_boundaries(parts, PLAN, TOKENS, {}, trainable=(True, True))
    share(folder)
    counts, traces = [], []
    for each in (model, model, Decoder(2, tied=True), Decoder(2).double()):
        parts = partition(each, PLAN)
        traces.append(crossing.trace_step(parts, PLAN, StepInputs(TOKENS, {}), trainable=(True, True)))
        counts.append(len([path for path in folder.iterdir() if not path.suffix]))
    return traces[0] == traces[1] == found != traces[3], counts


def test_what_is_looked_up_is_what_is_found(run_ranks: RunRanks, tmp_path: Path) -> None:
    ((is_same, counts),) = run_ranks(trace_twice, 1, tmp_path)
    assert is_same
    assert counts == [2, 2, 4, 6]


def refuse_twice(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """How often it is looked whether layers mix positions: in three steps that are alike and one that is not,
    and where a mistake is met twice."""
    crossing.refuse_mixed_positions = look = mock.Mock(return_value=None)
    share(folder)
    steps = [StepInputs(TOKENS, {})] * 3 + [StepInputs(TOKENS, {}, torch.bfloat16)]
    for step in steps:
        crossing.refuse_mixed_positions(partition(Decoder(2), PLAN), {"layers.0": ()}, step)
    num_looks = look.call_count
    look.side_effect = ConfigError("mixed")
    for _ in range(2):
        with pytest.raises(ConfigError):
            crossing.refuse_mixed_positions(partition(Decoder(2), PLAN), {"layers.1": ()}, steps[0])
    return num_looks, look.call_count - num_looks


def test_who_mixes_positions_is_looked_for_once(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(refuse_twice, 1, tmp_path) == [(2, 2)]


def test_a_model_with_something_of_its_own_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _describe(Decoder(2)) == _describe(Decoder(2)) is not None
    hooked, changed = Decoder(2), Decoder(2)
    hooked.norm.register_forward_hook(lambda *_: None)
    changed.output.forward = lambda h: h  # type: ignore[method-assign]
    assert _describe(hooked) is _describe(changed) is None
    monkeypatch.setattr(Layer, "forward", lambda layer, x: x)
    assert _describe(Decoder(2)) is None
