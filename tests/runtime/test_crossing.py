"""Shapes of inputs that change, or must not."""

from __future__ import annotations

import logging

import pytest
import torch
from ranks import RunRanks
from tiny import Case, Decoder, adamw, module_names

from zorselike import HeteroPipeline
from zorselike.plan import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.model.partition import Split

NAMES = module_names(2)
GROUPS = (Group((0,), (Microbatch(0, 0, 1), Microbatch(0, 1, 3))), Group((1,), (Microbatch(1, 0, 3),)))
PLAN = Plan(3, GROUPS, (Ministage(0, tuple(NAMES[:2])), Ministage(1, tuple(NAMES[2:]))))


def refuse(rank: int, world_size: int) -> tuple[str, list[str]]:
    """Why, and what a pipeline logs that is not refused."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zorselike").addHandler(handler)
    HeteroPipeline(Decoder(2), PLAN, split="export").close()
    with pytest.raises(ConfigError) as caught:
        HeteroPipeline(Decoder(2), PLAN, split="export", dynamic_shapes=True)
    return str(caught.value), logged


def test_what_export_costs_is_said_once_and_shapes_are_fixed(run_ranks: RunRanks) -> None:
    found = run_ranks(refuse, 2)
    for said, _ in found:
        assert "dynamic_shapes=True needs ministages that take any shape, and those that torch.export" in said
    (logged,) = found[0][1]
    assert logged.startswith("Decoder is cut by torch.export: each ministage is one FSDP unit, which ZeRO 3")
    assert found[1][1] == []


@pytest.mark.parametrize(
    ("split", "mend"), [(None, "dynamic_shapes=True"), ("export", "split= and dynamic_shapes=True")]
)
def test_another_shape_names_the_option(run_ranks: RunRanks, split: Split | None, mend: str) -> None:
    def fail(rank: int, world_size: int) -> str:
        alone = Plan(3, (Group((0,), GROUPS[0].microbatches),), (Ministage(0, tuple(NAMES)),))
        inputs, targets = Case(alone, 2).batch(0)
        with HeteroPipeline(Decoder(2), alone, optimizer=adamw, split=split) as pipe:
            pipe.step(inputs, targets)
            with pytest.raises(ConfigError) as caught:
                pipe.step(inputs[:, :3], targets[:, :3])
            assert torch.isfinite(torch.tensor(pipe.step(inputs, targets).loss))
            return str(caught.value)

    (said,) = run_ranks(fail, 1)
    assert said.endswith("built for int64 [rows, 4]; pad to one shape, or pass " + mend)
