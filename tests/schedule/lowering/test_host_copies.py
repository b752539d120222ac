"""Copies between device and host stand where Zorse 4.1.3 and 5.4 want them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.schedule import Action, Kind, ScheduleError, ScheduleSpec, build, format_actions, parse_actions
from zorselike.schedule.actions import HOST_COPIES
from zorselike.schedule.checker.check import check


def one_rank(zero: int = 2, offload: tuple[str, ...] = OFFLOAD_KINDS, *, ministages: int = 3) -> Plan:
    """Rank 0 with two microbatches, and one after the other ministages of one layer."""
    group = Group((0,), (Microbatch(0, 0, 1), Microbatch(0, 1, 2)), zero=zero, offload=offload)
    return Plan(2, (group,), tuple(Ministage(0, (f"layers.{i}",)) for i in range(ministages)))


def listed(plan: Plan, *, masters: bool = True, defer_steps: bool = False) -> str:
    spec = ScheduleSpec(plan, masters=masters, defer_steps=defer_steps)
    lists = build(spec)
    check(spec, lists)
    return format_actions(lists[0])


def test_everything_offloaded_with_master_weights() -> None:
    """Shards come for each gather and leave after it. State comes for the backward and leaves after the
    update; the first ministage's shards never leave. Of the last ministage, which goes forward and at once
    backward, no activations leave."""
    assert listed(one_rank()) == (
        "0UNSHARD 1LOAD 1UNSHARD 1OFFLOAD 0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RESHARD "
        "2LOAD 2UNSHARD 2OFFLOAD 1F0 1OFFLOAD0 1F1 1OFFLOAD1 1RESHARD "
        "1LOAD 1UNSHARD 1OFFLOAD 2F0 2LOAD_STATE 2B0 2F1 1LOAD1 2B1 2REDUCE_GRAD 2RESHARD "
        "2STEP 2OFFLOAD 2OFFLOAD_STATE "
        "0UNSHARD 1LOAD_STATE 1LOAD0 1B1 0LOAD1 1B0 1REDUCE_GRAD 1RESHARD 1STEP 1OFFLOAD 1OFFLOAD_STATE "
        "0LOAD_STATE 0LOAD0 0B1 0B0 0REDUCE_GRAD 0RESHARD 0STEP 0OFFLOAD_STATE"
    )


def test_an_update_in_place_loads_the_shards_that_it_changes() -> None:
    text = listed(one_rank(offload=("params",), ministages=2), masters=False)
    assert text == (
        "0UNSHARD 1LOAD 1UNSHARD 1OFFLOAD 0F0 0F1 0RESHARD "
        "0UNSHARD 1F0 1LOAD 1B0 1F1 1B1 1REDUCE_GRAD 1RESHARD 1STEP 1OFFLOAD "
        "0B1 0B0 0REDUCE_GRAD 0RESHARD 0STEP"
    )


def test_deferred_updates_load_one_ministage_ahead_and_keep_gradients_on_the_host() -> None:
    text = listed(one_rank(offload=("optimizer",), ministages=2), defer_steps=True)
    assert text.endswith(
        "1B0 1F1 1B1 1REDUCE_GRAD 1OFFLOAD_GRAD 1RESHARD 0B1 0B0 0REDUCE_GRAD 0OFFLOAD_GRAD 0RESHARD "
        "1LOAD_STATE 1LOAD_GRAD NORM 0LOAD_STATE 0LOAD_GRAD 1STEP 1OFFLOAD_STATE 0STEP 0OFFLOAD_STATE"
    )


def test_with_zero_3_shards_stay_for_a_phase() -> None:
    text = listed(one_rank(3, ("params",)), masters=False)
    assert text == (
        "1LOAD 0F0 0F1 2LOAD 1F0 1F1 2F0 2B0 2F1 2B1 2STEP 2OFFLOAD 1B1 1B0 1STEP 1OFFLOAD 0B1 0B0 0STEP"
    )


def test_an_evaluation_moves_shards_only() -> None:
    plan = one_rank()
    spec = ScheduleSpec(plan, forward_only=True)
    lists = build(spec)
    check(spec, lists)
    copies = [action.text for action in lists[0] if action.kind in HOST_COPIES]
    assert copies == ["1LOAD", "1OFFLOAD", "2LOAD", "2OFFLOAD"]


def test_without_offload_nothing_moves() -> None:
    plan = one_rank(offload=())
    assert not any(action.kind in HOST_COPIES for action in build(ScheduleSpec(plan))[0])


@pytest.mark.parametrize(
    ("wrong", "right", "reason"),
    [
        ("1LOAD 1UNSHARD", "1UNSHARD 1LOAD", "parameter shards of ministage 1 are on the host"),
        ("2LOAD_STATE 2B0", "2B0", "2LOAD_STATE must come first"),
        ("1LOAD1 2B1", "2B1", "1LOAD1 must come first"),
        ("0OFFLOAD_STATE", "", "0OFFLOAD_STATE is missing"),
        ("0LOAD_STATE", "0LOAD_STATE 0LOAD", "stay on the device"),
        ("1STEP 1OFFLOAD", "1OFFLOAD 1STEP", "host already"),
        ("2F1 1LOAD1 2B1", "2F1 2OFFLOAD1 1LOAD1 2B1", "2LOAD1 must come first"),
    ],
)
def test_a_wrong_place_is_refused_by_name(wrong: str, right: str, reason: str) -> None:
    plan = one_rank()
    text = listed(plan)
    assert wrong in text
    with pytest.raises(ScheduleError, match=reason):
        check(ScheduleSpec(plan, masters=True), {0: parse_actions(text.replace(wrong, right, 1))})


def test_a_group_that_does_not_offload_has_no_copies() -> None:
    plan = one_rank(offload=("params",))
    lists = build(ScheduleSpec(plan))
    other = replace(plan, groups=(replace(plan.groups[0], offload=()),))
    with pytest.raises(ScheduleError, match="does not name 'params'"):
        check(ScheduleSpec(other), lists)


def test_the_text_form_of_new_actions_is_read_back() -> None:
    actions = [Action(kind, 3) for kind in sorted(HOST_COPIES)] + [Action(Kind.LOAD, 3, 12)]
    assert parse_actions(format_actions(actions)) == actions
