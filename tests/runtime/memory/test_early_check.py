"""What cannot fit is refused on every rank before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import RunRanks
from tiny import Case, Decoder, adamw, module_names

from zorselike import HeteroPipeline
from zorselike.plan import ConfigError, PlanError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.shares import expand_shares
from zorselike.runtime.assembly import compile_plan
from zorselike.runtime.memory.host_room import HostRoom
from zorselike.runtime.processes import world

pytestmark = pytest.mark.pooled

NAMES = module_names(2)


def plan(offload: tuple[str, ...]) -> Plan:
    group = Group((0, 1), (Microbatch(0, 0, 2), Microbatch(1, 2, 4)), offload=offload)
    return Plan(4, (group,), (Ministage(0, tuple(NAMES[:2])), Ministage(0, tuple(NAMES[2:]))))


def build_with_room(rank: int, world_size: int, offload: tuple[str, ...], num_bytes: int) -> str:
    with pytest.MonkeyPatch.context() as patch:  # This rank stays for the next test.
        patch.setattr(world, "find_host_room", lambda: HostRoom(num_bytes + rank, "test"))
        try:
            HeteroPipeline(Case(plan(offload), 2).model(), plan(offload), optimizer=adamw).close()
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("offload", [(), ("params",), ("params", "optimizer", "activations")])
def test_too_little_host_memory_names_node_ranks_and_mend(
    offload: tuple[str, ...], run_ranks: RunRanks
) -> None:
    for message in run_ranks(build_with_room, 2, offload, 1000):
        assert "the plan puts at least" in message
        assert "rank 0: " in message and "rank 1: " in message
        assert ("offload less" in message) == bool(offload) and "(test; ZORSELIKE_HOST_MEMORY" in message


def test_enough_is_enough(run_ranks: RunRanks) -> None:
    assert run_ranks(build_with_room, 2, ("params",), 10**7) == ["", ""]


def step_while_loaded(rank: int, world_size: int) -> list[str]:
    case = Case(plan(("params", "optimizer")), 2)
    pipe = HeteroPipeline(case.model(), case.plan, optimizer=adamw)
    pipe.step_global(*case.batch(0))
    messages = []
    with pipe.loaded():
        for call in (lambda: pipe.step_global(*case.batch(1)), pipe.full_state_dict):
            try:
                call()
            except ConfigError as error:
                messages.append(str(error))
    pipe.step_global(*case.batch(1))
    pipe.close()
    return messages


def test_nothing_runs_while_everything_is_loaded(run_ranks: RunRanks) -> None:
    for messages in run_ranks(step_while_loaded, 2):
        assert len(messages) == 2
        assert all("leave the block first" in message for message in messages)


def test_a_shared_weight_in_one_ministage_wants_even_microbatches_with_zero_3() -> None:
    """On uneven ranks FSDP2 would reduce in different orders, and the process would be aborted."""
    group = Group(ranks=(0, 1), microbatches=expand_shares([(0, 3, 1), (1, 1, 1)], 4), zero=3)
    uneven = Plan(4, (group,), (Ministage(0, tuple(NAMES)),))
    with torch.device("meta"):
        model = Decoder(2, tied=True)
    with pytest.raises(PlanError, match=r"groups\[0\].zero is 3, .* which are one weight; use zero = 2"):
        compile_plan(model, uneven)
    even = replace(group, microbatches=expand_shares([(0, 2, 1), (1, 2, 1)], 4))
    for allowed in (replace(group, zero=2), even):
        compile_plan(model, replace(uneven, groups=(allowed,)))
