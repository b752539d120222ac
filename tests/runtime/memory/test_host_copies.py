"""What arrived through host memory is not copied there again."""

from __future__ import annotations

import pytest
import torch
from ranks import RunRanks
from tiny import DIM, SEQUENCE, Case, adamw, module_names

from zorselike import HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.memory.memory import HostPool

pytestmark = pytest.mark.pooled

NAMES = module_names(5)
ROWS = (Microbatch(1, 0, 2), Microbatch(1, 2, 4), Microbatch(1, 4, 6))


def plan(first: tuple[Microbatch, ...]) -> Plan:
    """Rank 0 feeds rank 1, whose ministage of three layers offloads activations."""
    groups = (Group((0,), first), Group((1,), ROWS, recompute="layer", offload=("activations",)))
    owners = ((0, NAMES[:2]), (1, NAMES[2:5]), (0, NAMES[5:]))
    return Plan(6, groups, tuple(Ministage(group, tuple(names)) for group, names in owners))


def count_copies(rank: int, world_size: int, plan: Plan) -> list[int]:
    """Bytes of each buffer that the rank's activations took on the host in one step."""
    case = Case(plan, 5)
    pipe = HeteroPipeline(case.model(), plan, optimizer=adamw)
    pipe.step_global(*case.batch(0))
    taken: list[int] = []
    original = HostPool.take

    def take(self: HostPool, purpose: str, num_bytes: int) -> torch.Tensor:
        if purpose == "activations":
            taken.append(num_bytes)
        return original(self, purpose, num_bytes)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:  # This rank stays for the next test.
        patch.setattr(HostPool, "take", take)
        pipe.step_global(*case.batch(1))
    pipe.close()
    return taken


LAYER_INPUT_BYTES = 2 * SEQUENCE * DIM * 8
"""Of a microbatch of two rows in fp64."""


def test_a_received_input_is_on_the_host_already(run_ranks: RunRanks) -> None:
    """Of three layers' inputs the first came from rank 0; the oldest two microbatches stay."""
    first = tuple(Microbatch(0, m.start, m.stop) for m in ROWS)
    none, taken = run_ranks(count_copies, 2, plan(first))
    assert none == []
    assert taken == [LAYER_INPUT_BYTES] * 2


def test_an_input_joined_from_pieces_is_copied(run_ranks: RunRanks) -> None:
    first = (Microbatch(0, 0, 3), Microbatch(0, 3, 5), Microbatch(0, 5, 6))
    _, taken = run_ranks(count_copies, 2, plan(first))
    assert taken == [LAYER_INPUT_BYTES] * 3
