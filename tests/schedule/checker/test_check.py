from __future__ import annotations

import pytest
from schedules import Lists

from zorselike.plan.plan import GradReduce, Group, Microbatch, Ministage, Plan
from zorselike.schedule import Action, Kind, ScheduleSpec, build, format_actions, parse_actions
from zorselike.schedule.checker.check import check
from zorselike.schedule.errors import ScheduleError


def _plan(
    *sizes: int, ministages: int = 2, rows: int = 8, zero: int = 2, grad_reduce: GradReduce = "once"
) -> Plan:
    """Groups of these sizes, one row a microbatch, dealt to the ranks in turn; round robin."""
    groups = []
    for g, size in enumerate(sizes):
        ranks = tuple(range(sum(sizes[:g]), sum(sizes[: g + 1])))
        microbatches = tuple(Microbatch(ranks[row % size], row, row + 1) for row in range(rows))
        groups.append(Group(ranks, microbatches, zero=zero, grad_reduce=grad_reduce))
    owners = list(range(len(sizes))) * ministages
    stages = tuple(Ministage(g, (f"layers.{i}",)) for i, g in enumerate(owners))
    return Plan(rows, tuple(groups), stages).validate()


def _message(plan: Plan, lists: Lists, **options: bool) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(ScheduleSpec(plan, **options), lists)  # type: ignore[arg-type]
    return str(caught.value)


# -- where sends must buffer -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (2, 1, 3), (1,) * 7])
@pytest.mark.parametrize("ministages", [2, 4])
def test_several_groups_and_ministages_buffer_on_wrap_around_edges(
    sizes: tuple[int, ...], ministages: int
) -> None:
    plan = _plan(*sizes, ministages=ministages, rows=24)
    report = check(ScheduleSpec(plan), build(ScheduleSpec(plan)))
    first, last = plan.groups[0].ranks, plan.groups[-1].ranks
    wrapping = {(b, a, "F") for a in first for b in last} | {(a, b, "B") for a in first for b in last}
    assert report.buffered_edges and report.buffered_edges <= wrapping
    assert {direction for _, _, direction in report.buffered_edges} == {"F", "B"}


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1), (2, 3, 1)])
def test_without_wrap_around_no_edge_buffers(sizes: tuple[int, ...]) -> None:
    plan = _plan(*sizes, ministages=1, rows=24)
    assert check(ScheduleSpec(plan), build(ScheduleSpec(plan))).buffered_edges == frozenset()
    four = ScheduleSpec(_plan(4, ministages=4))
    assert check(four, build(four)).cycles == ()


def test_a_cycle_is_told_rank_by_rank() -> None:
    plan = _plan(1, 1)
    report = check(ScheduleSpec(plan), build(ScheduleSpec(plan)))
    assert report.buffered_edges == {(1, 0, "F"), (0, 1, "B")}
    assert report.cycles[0].splitlines() == [
        "rank 1 at 1SEND_F0@0[0:1] waits for 2RECV_F0@1[0:1] of rank 0, which is at 0SEND_F3@1[3:4]",
        "rank 0 at 0SEND_F3@1[3:4] waits for 1RECV_F3@0[3:4] of rank 1, which is at 1SEND_F0@0[0:1]",
    ]


def test_a_cycle_without_wrap_around_buffers_all_its_edges() -> None:
    plan = _plan(1, 1, ministages=1, rows=2, zero=0)
    # Each rank sends before it posts what the other one sends, as 1F1B does in its steady state.
    lists = {
        0: "0F0 0SEND_F0@1[0:1] 0F1 0SEND_F1@1[1:2] 0RECV_B0@1[0:1] 0B0 0RECV_B1@1[1:2] 0B1",
        1: "1RECV_F0@0[0:1] 1F0 1B0 1SEND_B0@0[0:1] 1RECV_F1@0[1:2] 1F1 1B1 1SEND_B1@0[1:2]",
    }
    actions = {rank: parse_actions(f"{text} {rank}REDUCE_GRAD {rank}STEP") for rank, text in lists.items()}
    report = check(ScheduleSpec(plan), actions)
    assert report.buffered_edges == {(0, 1, "F"), (1, 0, "B")}
    assert len(report.cycles) == 1


def test_edges_buffer_whose_receives_stand_before_what_their_senders_wait_for() -> None:
    """A GPU that waits for rows may keep its host from computing what these are made of."""
    plan = _plan(1, 1, ministages=1, rows=2, zero=0)
    second = "1RECV_F0@0[0:1] 1RECV_F1@0[1:2] 1F0 1B0 1SEND_B0@0[0:1] 1F1 1B1 1SEND_B1@0[1:2]"
    for first, early in (
        ("0F0 0SEND_F0@1[0:1] 0RECV_B0@1[0:1] 0F1 0SEND_F1@1[1:2] 0RECV_B1@1[1:2] 0B0 0B1", ()),
        (
            "0F0 0RECV_B0@1[0:1] 0RECV_B1@1[1:2] 0SEND_F0@1[0:1] 0F1 0SEND_F1@1[1:2] 0B0 0B1",
            ("rank 0 posts 0RECV_B0@1[0:1] before 0SEND_F0@1[0:1], for which rank 1 waits before it sends",),
        ),
        (
            "0F0 0SEND_F0@1[0:1] 0RECV_B0@1[0:1] 0RECV_B1@1[1:2] 0F1 0SEND_F1@1[1:2] 0B0 0B1",
            ("rank 0 posts 0RECV_B1@1[1:2] before 0SEND_F1@1[1:2], for which rank 1 waits before it sends",),
        ),
    ):
        lists = [f"{text} {rank}REDUCE_GRAD {rank}STEP" for rank, text in enumerate((first, second))]
        report = check(ScheduleSpec(plan), {rank: parse_actions(text) for rank, text in enumerate(lists)})
        assert report.early == early
        assert report.buffered_edges == ({(1, 0, "B")} if early else frozenset())


# -- faults ------------------------------------------------------------------------------------


def test_the_place_of_a_fault_is_drawn() -> None:
    plan = _plan(2, 1, ministages=1, rows=4)
    lists = build(ScheduleSpec(plan))
    position = next(i for i, action in enumerate(lists[2]) if action.text == "1F1")
    lists[2].insert(position, Action(Kind.STEP, 1))
    assert _message(plan, lists).splitlines() == [
        f"rank 2, action {position}, 1STEP: ministage 1 must be reduced first",
        "rank 2",
        *(f"   {i}: {lists[2][i]}" for i in range(position - 3, position)),
        f">> {position}: 1STEP <<",
        *(f"   {i}: {lists[2][i]}" for i in range(position + 1, position + 4)),
    ]


def test_a_deadlock_that_buffering_cannot_help_is_refused() -> None:
    plan = _plan(1, 1, rows=1, zero=0)
    lists = build(ScheduleSpec(plan))
    ahead = {0: parse_actions("2RECV_F0@1[0:1] 2F0 2SEND_F0@1[0:1]"), 1: parse_actions("3RECV_F0@0[0:1]")}
    lists = {r: ahead[r] + [action for action in own if action not in ahead[r]] for r, own in lists.items()}
    message = _message(plan, lists)
    assert "ranks [0, 1] wait for each other forever, even if sends buffer" in message
    assert "rank 0 at 2F0 waits for 1SEND_F0@0[0:1] of rank 1, which is at 1F0" in message
    assert ">> 1: 2F0 <<" in message


def test_collectives_in_opposite_order_are_shown_side_by_side() -> None:
    plan = _plan(2, ministages=2, rows=2, zero=1)
    lists = build(ScheduleSpec(plan))
    lists[1][0], lists[1][1] = lists[1][1], lists[1][0]
    message = _message(plan, lists)
    assert message.startswith("group 0, collective 0: rank 1 issues 1UNSHARD where rank 0 issues 0UNSHARD")
    assert any(">> 0: 1UNSHARD <<" in line and line.endswith("0: 0UNSHARD") for line in message.splitlines())


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_with_fewer_microbatches_joins_every_reduction(zero: int) -> None:
    rows = (Microbatch(0, 0, 1), Microbatch(0, 1, 2), Microbatch(1, 2, 3))
    plan = Plan(3, (Group((0, 1, 2), rows, zero=zero, grad_reduce="microbatch"),), (Ministage(0, ("a",)),))
    lists = build(ScheduleSpec(plan.validate()))
    kind = Kind.REDUCE_GRAD if zero == 2 else Kind.B
    assert all(sum(action.kind is kind for action in own) == 2 for own in lists.values())
    check(ScheduleSpec(plan), lists)
    for rank in (1, 2):
        fewer = [action for action in lists[rank] if action != Action(kind, 0, 1)]
        assert "ministage 0 must be reduced first" in _message(plan, {**lists, rank: fewer})


def test_zero_2_holds_two_ministages_at_most() -> None:
    plan = _plan(1, ministages=3, rows=1)
    lists = build(ScheduleSpec(plan))
    third = lists[0].index(Action(Kind.UNSHARD, 2))
    lists[0].insert(2, lists[0].pop(third))
    assert "ministages [0, 1] are gathered, and ZeRO 2 allows 2" in _message(plan, lists)


def test_zero_2_gathers_the_next_ministage_before_the_first_backward() -> None:
    plan = _plan(1, ministages=2, rows=2)
    lists = build(ScheduleSpec(plan))
    own = lists[0]
    late = len(own) - 1 - own[::-1].index(Action(Kind.UNSHARD, 0))
    own.insert(own.index(Action(Kind.B, 1, 1)), own.pop(late))
    assert "0UNSHARD must come before the first backward of ministage 1" in _message(plan, lists)


def test_zero_2_reduces_a_ministage_before_the_next_one_has_gradients() -> None:
    plan = _plan(1, ministages=2, rows=1)
    lists = build(ScheduleSpec(plan))
    text = format_actions(lists[0])
    assert "1B0 1REDUCE_GRAD 1RESHARD 1STEP 0B0" in text
    lists[0] = parse_actions(
        text.replace("1REDUCE_GRAD 1RESHARD 1STEP 0B0", "0B0 1REDUCE_GRAD 1RESHARD 1STEP")
    )
    assert "ministage 1 must be reduced first" in _message(plan, lists)


def test_zero_1_gathers_once() -> None:
    plan = _plan(1, ministages=1, rows=1, zero=1)
    lists = build(ScheduleSpec(plan))
    position = lists[0].index(Action(Kind.B, 0, 0))
    lists[0][position:position] = parse_actions("0RESHARD 0UNSHARD")
    assert "ZeRO 1 gathers ministage 0 once a step" in _message(plan, lists)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0", "owns ministages [0]"),
        ("7F0", "owns ministages [0]"),
        ("0F", "needs the number of a microbatch"),
        ("0STEP1", "takes no microbatch"),
        ("0UNSHARD@1[0:1]", "has no peer and no rows"),
        ("0SEND_F0", "needs a peer and its rows"),
        ("0SEND_F0@9[0:1]", "the plan has no rank 9"),
        ("0SEND_F0@1[1:1]", "are none"),
        ("0NORM", "NORM stands alone"),
        ("0F5", "computes 2 microbatches"),
        ("0RECV_F0@1[0:1]", "no other group owns ministage -1"),
        ("0REDUCE_GRAD1", "the plan reduces once"),
        ("0TIE_GRAD", "has no tied weight"),
        ("NORM", "no update waits for a norm"),
        ("0UNSHARD", "ZeRO 0 gathers no ministage"),
    ],
)
def test_a_wrong_action_is_named(text: str, said: str) -> None:
    plan = _plan(1, 1, ministages=1, rows=2, zero=0)
    lists = build(ScheduleSpec(plan))
    lists[0] = [*parse_actions(text), *lists[0]]
    message = _message(plan, lists)
    assert message.startswith(f"rank 0, action 0, {text}: ") and said in message


def test_a_send_without_receive_and_a_receive_without_send() -> None:
    plan = _plan(1, 1, ministages=1, rows=2, zero=0)
    lists = build(ScheduleSpec(plan))
    without = {**lists, 0: [action for action in lists[0] if action.text != "0SEND_F1@1[1:2]"]}
    assert "the source lists nothing more where the target lists 1RECV_F1@0[1:2]" in _message(plan, without)


def test_lists_and_ranks_must_agree() -> None:
    plan = _plan(2, ministages=1)
    lists = build(ScheduleSpec(plan))
    assert "lacks ranks [1] and has ranks [4]" in _message(plan, {0: lists[0], 4: lists[1]})


def test_options_that_contradict_each_other() -> None:
    plan = _plan(1, ministages=2)
    with pytest.raises(ScheduleError, match="trainable has 1 entries for 2 ministages"):
        ScheduleSpec(plan, trainable=(True,))
    with pytest.raises(ScheduleError, match=r"tie \(1, 0\)"):
        ScheduleSpec(plan, ties=((1, 0),))
    with pytest.raises(ScheduleError, match=r"tie \(0, 1\) has a frozen end"):
        ScheduleSpec(plan, trainable=(True, False), ties=((0, 1),))


def test_a_schedule_for_other_options_is_refused() -> None:
    plan = _plan(1, 1)
    assert "ZeRO 2 gathers ministage 2 once a step" in _message(
        plan, build(ScheduleSpec(plan)), forward_only=True
    )
    assert "B0 is missing" in _message(plan, build(ScheduleSpec(plan, forward_only=True)))
    assert "updates wait for NORM" in _message(plan, build(ScheduleSpec(plan)), defer_steps=True)
    whole = _plan(1, 1, ministages=1, rows=1, zero=0)
    assert "ministage 0 runs no backward" in _message(whole, build(ScheduleSpec(whole)), forward_only=True)


def test_size() -> None:
    """Linear in the number of actions; this one has sixty thousand."""
    plan = _plan(8, 4, 6, 8, 4, 6, ministages=8, rows=200)
    report = check(ScheduleSpec(plan), build(ScheduleSpec(plan)))
    assert report.num_actions > 50_000
