"""Each pass of the lowering by itself: what it puts around a few computations."""

from __future__ import annotations

import pytest

from zorselike.plan.plan import GradReduce, Group, Microbatch, Ministage, Plan
from zorselike.schedule import Action, ScheduleError, ScheduleSpec, format_actions, parse_actions
from zorselike.schedule.lowering.collectives import add_collectives
from zorselike.schedule.lowering.host_copies import add_host_copies
from zorselike.schedule.lowering.lower import lower
from zorselike.schedule.lowering.transfers import place_transfers
from zorselike.schedule.orders.order import Around, Order, find_around
from zorselike.schedule.orders.ours import ours


def one_group(*, zero: int, grad_reduce: GradReduce = "once", offload: tuple[str, ...] = ()) -> Plan:
    """One rank with two microbatches and two ministages."""
    group = Group((0,), (Microbatch(0, 0, 1), Microbatch(0, 1, 2)), zero, grad_reduce, offload=offload)
    return Plan(2, (group,), (Ministage(0, ("a",)), Ministage(0, ("b",)))).validate()


def two_groups() -> Plan:
    """Four rows; rank 0 computes them in pairs, ranks 1 and 2 one by one."""
    first = Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 4)), zero=0)
    second = Group((1, 2), tuple(Microbatch(1 + row // 2, row, row + 1) for row in range(4)), zero=0)
    return Plan(4, (first, second), (Ministage(0, ("a",)), Ministage(1, ("b",)))).validate()


def actions(text: str) -> tuple[Action, ...]:
    return tuple(parse_actions(text))


BREADTH_FIRST = "0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"


@pytest.mark.parametrize(
    ("zero", "keeps_gathered", "expected"),
    [
        (0, False, "0F0 0F1 1F0 1F1 1B1 1B0 1REDUCE_GRAD 1STEP 0B1 0B0 0REDUCE_GRAD 0STEP"),
        (
            1,
            False,
            "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B1 1B0 1REDUCE_GRAD 1RESHARD 1STEP "
            "0B1 0B0 0REDUCE_GRAD 0RESHARD 0STEP",
        ),
        (
            2,
            False,
            "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 1F0 1F1 1RESHARD 1UNSHARD 0UNSHARD 1B1 1B0 1REDUCE_GRAD "
            "1RESHARD 1STEP 0B1 0B0 0REDUCE_GRAD 0RESHARD 0STEP",
        ),
        (
            2,
            True,
            "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B1 1B0 1REDUCE_GRAD 1RESHARD 1STEP "
            "0B1 0B0 0REDUCE_GRAD 0RESHARD 0STEP",
        ),
        (3, False, "0F0 0F1 1F0 1F1 1B1 1B0 1STEP 0B1 0B0 0STEP"),
    ],
)
def test_collectives_and_updates(zero: int, keeps_gathered: bool, expected: str) -> None:
    spec = ScheduleSpec(one_group(zero=zero))
    found = add_collectives(spec, 0, actions(BREADTH_FIRST), keeps_gathered=keeps_gathered)
    assert format_actions(found) == expected


def test_collectives_of_frozen_and_tied_ministages_and_deferred_updates() -> None:
    plan = one_group(zero=2, grad_reduce="microbatch")
    frozen = ScheduleSpec(plan, trainable=(False, True))
    found = add_collectives(frozen, 0, actions("0F0 0F1 1F0 1F1 1B1 1B0"), keeps_gathered=False)
    assert format_actions(found) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 1F0 1F1 1RESHARD 1UNSHARD 1B1 1REDUCE_GRAD1 1B0 1REDUCE_GRAD0 "
        "1RESHARD 1STEP"
    )
    tied = ScheduleSpec(one_group(zero=0), ties=((0, 1),), defer_steps=True)
    found = add_collectives(tied, 0, actions(BREADTH_FIRST), keeps_gathered=False)
    assert format_actions(found) == (
        "0F0 0F1 1F0 1F1 1B1 1B0 1REDUCE_GRAD 1TIE_GRAD 0B1 0B0 0REDUCE_GRAD 0TIE_GRAD "
        "NORM 1STEP 0STEP 0TIE_VALUE 1TIE_FETCH"
    )


def test_zero_2_takes_no_order_that_comes_back_to_a_ministage() -> None:
    torn = actions("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    with pytest.raises(ScheduleError, match="group 0 comes back to F of ministage 0"):
        add_collectives(ScheduleSpec(one_group(zero=2)), 0, torn, keeps_gathered=False)
    found = add_collectives(ScheduleSpec(one_group(zero=2)), 0, torn, keeps_gathered=True)
    assert format_actions(found).count("UNSHARD") == 2


def test_transfers_follow_their_computation_and_are_received_two_computations_ahead() -> None:
    """But no gradients before all forwards that rank 1 and 2 wait for."""
    order = Order((actions("0F0 0F1 0B1 0B0"), actions("1F0 1F1 1B1 1B0")))
    found = place_transfers(ScheduleSpec(two_groups()), order)
    assert [[format_actions(own) for own in around] for around in found[0]] == [
        ["", "0SEND_F0@1[0:1] 0SEND_F0@1[1:2]"],
        ["", "0SEND_F1@2[2:3] 0SEND_F1@2[3:4]"],
        ["0RECV_B1@2[3:4] 0RECV_B1@2[2:3] 0RECV_B0@1[1:2] 0RECV_B0@1[0:1]", ""],
        ["", ""],
    ]
    assert [[format_actions(own) for own in around] for around in found[2]] == [
        ["1RECV_F0@0[2:3] 1RECV_F1@0[3:4]", ""],
        ["", ""],
        ["", "1SEND_B1@0[3:4]"],
        ["", "1SEND_B0@0[2:3]"],
    ]


def test_receives_of_an_alternating_order_are_counted_by_kind() -> None:
    """What a backward needs is posted right after its forward, however far ahead that is."""
    group = Group((0,), tuple(Microbatch(0, row, row + 1) for row in range(5)), zero=0)
    other = Group((1,), tuple(Microbatch(1, row, row + 1) for row in range(5)), zero=0)
    plan = Plan(5, (group, other), (Ministage(0, ("a",)), Ministage(1, ("b",)))).validate()
    first = "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4"
    second = "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4"
    order = Order((actions(first), actions(second)), alternating=frozenset((0, 1)))
    found = place_transfers(ScheduleSpec(plan), order)
    assert [len(around.before) for around in found[0]] == [0, 1, 1, 1, 1, 0, 1, 0, 0, 0]
    assert [len(around.before) for around in found[1]] == [3, 0, 1, 0, 1, 0, 0, 0, 0, 0]


def test_gradients_of_the_last_ministages_are_received_after_their_forward() -> None:
    """They come while the one before the last still goes forward."""
    group = Group((0,), tuple(Microbatch(0, row, row + 1) for row in range(5)), zero=0)
    other = Group((1,), tuple(Microbatch(1, row, row + 1) for row in range(5)), zero=0)
    stages = (Ministage(1, ("a",)), Ministage(0, ("b",)), Ministage(1, ("c",)))
    spec = ScheduleSpec(Plan(5, (group, other), stages).validate())
    order = ours(spec)
    assert format_actions(order.computations[1]).endswith(
        "0F4 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 0B0 0B1 0B2 0B3 0B4"
    )
    found = place_transfers(spec, order)
    first, second = ([format_actions(own.before) for own in found[rank]] for rank in (0, 1))
    assert first[:6] == [
        "1RECV_F0@1[0:1] 1RECV_F1@1[1:2] 1RECV_F2@1[2:3]",
        *(f"1RECV_B{m}@1[{m}:{m + 1}] 1RECV_F{m + 3}@1[{m + 3}:{m + 4}]" for m in (0, 1)),
        *(f"1RECV_B{m}@1[{m}:{m + 1}]" for m in (2, 3, 4)),
    ]
    assert first[6:] == [""] * 4
    # 0F0 to 0F4, then 2F0 2B0 2F1 2B1 ...: two forwards ahead, and at the end two backwards.
    assert second[:10] == [
        *("", "", "", "2RECV_F0@0[0:1]", ""),
        *("2RECV_F1@0[1:2] 2RECV_F2@0[2:3]", "", "2RECV_F3@0[3:4]", "", "2RECV_F4@0[4:5]"),
    ]
    assert second[10:] == ["", "", "", *(f"0RECV_B{m}@0[{m}:{m + 1}]" for m in range(5)), "", ""]


def test_transfers_that_an_order_places_itself_stay_where_they_are() -> None:
    listed = "0F0 0SEND_F0@1[0:1] 0RECV_B0@1[0:1] 0F1 0RECV_B1@1[1:2] 0SEND_F1@1[1:2] 0B0 0B1"
    around = find_around(actions(listed))
    assert around == [
        Around([], list(actions("0SEND_F0@1[0:1]"))),
        Around(list(actions("0RECV_B0@1[0:1]")), list(actions("0RECV_B1@1[1:2] 0SEND_F1@1[1:2]"))),
        Around([], []),
        Around([], []),
    ]


def test_host_copies() -> None:
    spec = ScheduleSpec(one_group(zero=0, offload=("optimizer",)))
    collectives = add_collectives(spec, 0, actions(BREADTH_FIRST), keeps_gathered=False)
    assert format_actions(add_host_copies(spec, 0, collectives)) == (
        "0F0 0F1 1F0 1F1 1LOAD_STATE 1B1 1B0 1REDUCE_GRAD 1STEP 1OFFLOAD_STATE "
        "0LOAD_STATE 0B1 0B0 0REDUCE_GRAD 0STEP 0OFFLOAD_STATE"
    )
    without = ScheduleSpec(one_group(zero=0))
    assert add_host_copies(without, 0, collectives) == collectives


def test_a_rank_leaves_out_microbatches_that_it_does_not_have_and_joins_every_collective() -> None:
    rows = (Microbatch(0, 0, 1), Microbatch(1, 1, 2), Microbatch(0, 2, 3))
    order = Order((actions("0F0 0B0 0F1 0B1"),), keeps_gathered=True)
    for zero, computed in ((2, "0F0 0B0"), (3, "0F0 0B0 0F1 0B1")):
        group = Group((0, 1), rows, zero, "microbatch")
        lists = lower(ScheduleSpec(Plan(3, (group,), (Ministage(0, ("a",)),)).validate()), order)
        collectives = [
            [a for a in own if a.text.endswith(("SHARD", "GRAD0", "GRAD1"))] for own in lists.values()
        ]
        assert collectives[0] == collectives[1]
        assert format_actions(a for a in lists[1] if a.kind in ("F", "B")) == computed
