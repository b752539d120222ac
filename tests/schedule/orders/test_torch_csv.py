from __future__ import annotations

import csv
import importlib
import io
import random
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import volume
from plans import random_plan
from schedules import Lists

from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule import Kind, ScheduleSpec, build, format_actions, from_torch_csv, to_torch_csv
from zorselike.schedule.errors import ScheduleError


def _single_rank_plan(rng: random.Random, zeros: tuple[int, ...] = (0, 1, 2)) -> Plan:
    """A random plan as torch knows them: one rank a group, the same microbatches everywhere."""
    plan = random_plan(
        rng, max_ranks_per_group=1, max_ministages_per_group=4, max_rows=8, round_robin=rng.random() < 0.5
    )
    rows = [(microbatch.start, microbatch.stop) for microbatch in plan.groups[0].microbatches]
    groups = tuple(
        replace(
            group,
            zero=rng.choice(zeros),
            grad_reduce="once",
            microbatches=tuple(Microbatch(group.flat_ranks[0], start, stop) for start, stop in rows),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups).validate()


def _looped_plan(num_groups: int, ministages: int, microbatches: int, zero: int) -> Plan:
    """Rank `g` is group `g`; groups are visited round-robin; a row a microbatch."""
    groups = tuple(
        Group((g,), tuple(Microbatch(g, row, row + 1) for row in range(microbatches)), zero=zero)
        for g in range(num_groups)
    )
    owners = list(range(num_groups)) * ministages
    stages = tuple(Ministage(g, (f"layers.{i}",)) for i, g in enumerate(owners))
    return Plan(microbatches, groups, stages).validate()


def _computations(lists: Lists) -> str:
    rows = [[a.text for a in own if a.kind in (Kind.F, Kind.B)] for _, own in sorted(lists.items())]
    return "\n".join(",".join(row) for row in rows)


def _schedules() -> ModuleType:
    try:
        return importlib.import_module("torch.distributed.pipelining.schedules")
    except ImportError as error:
        pytest.skip(f"torch.distributed.pipelining cannot be imported: {error}")


@volume.parametrize("seed", range(100))
def test_what_goes_out_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    plan = _single_rank_plan(rng)
    trainable = tuple(rng.random() < 0.7 for _ in plan.ministages)
    trained = [i for i, trains in enumerate(trainable) if trains]
    ties = ((trained[0], trained[-1]),) if len(trained) > 1 and rng.random() < 0.5 else ()
    spec = ScheduleSpec(plan, trainable=trainable, ties=ties, defer_steps=rng.random() < 0.5)
    lists = build(spec)
    text = to_torch_csv(plan, lists)
    assert from_torch_csv(spec, text) == lists


@volume.parametrize("seed", range(100))
def test_computations_alone_get_what_build_puts_around_them(seed: int) -> None:
    rng = random.Random(seed)
    plan = _single_rank_plan(rng, zeros=(0, 1, 2, 3))
    groups = tuple(
        replace(group, grad_reduce="microbatch" if group.zero == 2 and rng.random() < 0.5 else "once")
        for group in plan.groups
    )
    plan = replace(plan, groups=groups).validate()
    spec = ScheduleSpec(plan, forward_only=rng.random() < 0.2)
    lists = build(spec)
    assert from_torch_csv(spec, _computations(lists)) == lists


def test_by_hand() -> None:
    plan = _looped_plan(2, 1, 2, zero=1)
    assert to_torch_csv(plan, build(ScheduleSpec(plan))).split() == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1,0REDUCE_GRAD,0RESHARD",
        "1UNSHARD,1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD",
    ]


# -- torch itself ------------------------------------------------------------------------------


def test_torch_reads_every_cell() -> None:
    action_type = _schedules()._Action
    for seed in range(20):
        plan = _single_rank_plan(random.Random(seed))
        for row in csv.reader(io.StringIO(to_torch_csv(plan, build(ScheduleSpec(plan))))):
            for cell in row:
                assert str(action_type.from_str(cell)) == cell


def _torch_schedule(name: str, num_ranks: int, stages_per_rank: int, microbatches: int) -> SimpleNamespace:
    """One of torch's schedules, which are made without a process group if the stages are stand-ins."""
    stages = [
        SimpleNamespace(
            stage_index=index * num_ranks,
            num_stages=num_ranks * stages_per_rank,
            group_size=num_ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=False,
            has_backward=True,
        )
        for index in range(stages_per_rank)
    ]
    return getattr(_schedules(), name)(stages, microbatches)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("size", [(2, 2, 4), (3, 4, 6), (4, 1, 8)])
def test_torchs_looped_bfs(layout: str, zero: int, size: tuple[int, int, int], tmp_path: object) -> None:
    path = f"{tmp_path}/schedule.csv"
    _torch_schedule("ScheduleLoopedBFS", *size)._dump_csv(path, format=layout)
    plan = _looped_plan(*size, zero=zero)
    with open(path, newline="") as file:  # noqa: PTH123
        lists = from_torch_csv(ScheduleSpec(plan), file.read())
    num_ranks, per_rank, number = size
    for rank, own in enumerate(_computations(lists).split()):
        stages = range(rank, num_ranks * per_rank, num_ranks)
        forward = [f"{stage}F{m}" for stage in stages for m in range(number)]
        backward = [f"{stage}B{m}" for stage in stages[::-1] for m in reversed(range(number))]
        assert own.split(",") == forward + backward
        ours = {a.text for a in build(ScheduleSpec(plan))[rank]}
        assert {a.text for a in lists[rank]} == ours, "all that ours does, in another order"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_torchs_interleaved_1f1b(zero: int, tmp_path: object) -> None:
    path = f"{tmp_path}/schedule.csv"
    _torch_schedule("ScheduleInterleaved1F1B", 4, 2, 8)._dump_csv(path, format="compute_only")
    with open(path, newline="") as file:  # noqa: PTH123
        text = file.read()
    lists = from_torch_csv(ScheduleSpec(_looped_plan(4, 2, 8, zero=zero)), text)
    assert "0B0 0F" not in format_actions(lists[0]) and "STEP" in format_actions(lists[0])
    with pytest.raises(ScheduleError, match="comes back to F of ministage 0: ZeRO 2 gathers"):
        from_torch_csv(ScheduleSpec(_looped_plan(4, 2, 8, zero=2)), text)


# -- refusals ----------------------------------------------------------------------------------


def test_plans_that_torch_cannot_express_are_refused() -> None:
    rows = (Microbatch(0, 0, 1), Microbatch(1, 1, 2))
    several = Plan(2, (Group((0, 1), rows),), (Ministage(0, ("a",)),))
    with pytest.raises(ScheduleError, match="group 0: it has 2 ranks"):
        to_torch_csv(several, build(ScheduleSpec(several)))
    uneven = _looped_plan(2, 1, 2, zero=0)
    other = replace(uneven.groups[1], microbatches=(Microbatch(1, 0, 2),))
    uneven = replace(uneven, groups=(uneven.groups[0], other))
    with pytest.raises(ScheduleError, match="group 1: its microbatches differ"):
        to_torch_csv(uneven, build(ScheduleSpec(uneven)))
    with pytest.raises(ScheduleError, match="group 1: its microbatches differ"):
        from_torch_csv(ScheduleSpec(uneven), "0F0\n1F0")
    often = _looped_plan(2, 1, 2, zero=3)
    with pytest.raises(ScheduleError, match="group 0: it reduces after every microbatch"):
        to_torch_csv(often, build(ScheduleSpec(often)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0", "the file has 1 rows and the plan 2 ranks"),
        ("0F0,0I0,0W0\n1F0,1B0", r"row 0, cell 1: '0I0' is no action"),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n1F0,1B0", "row 0, cell 1"),
        ("1F0,1B0\n0F0,0B0", r"row 0, cell 0: '1F0' does not fit the plan: rank 0 owns ministages \[0\]"),
        ("0F0,,0F1\n1F0,1B0", r"row 0, cell 2: '0F1' does not fit the plan: microbatches are 0..0"),
        ("0F0,0STEP\n1F0,1B0", "torch's CSV has no such action"),
        ("0F0,0RECV_F0\n1F0,1B0", "nothing comes before the first ministage"),
        ("0F0,0B0\n1F0", "rank 0, action 2, 0B0: it needs rows"),
        ("0B0,0F0\n1F0,1B0", "0F0 must come first"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0", "SEND_B0|the source lists nothing more"),
    ],
)
def test_bad_files_are_refused(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        from_torch_csv(ScheduleSpec(_looped_plan(2, 1, 1, zero=0)), text)
