"""The memory walk: exact on lists that a person can follow, and its promises over random plans."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
from schedules import random_spec

from zorselike.cost import MemoryWalk, MinistageBytes, Purpose, walk_memory
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.schedule import Action, Kind, ScheduleSpec, build, parse_actions

SIZES = MinistageBytes(
    gathered_bytes=20,
    shard_bytes=20,
    gradient_bytes=40,
    gradient_shard_bytes=40,
    state_bytes=120,
    masters=True,
    activation_bytes_per_row=3,
    working_bytes_per_row=7,
    boundary_bytes_per_row=1,
    largest_unit_bytes=10,
    largest_unit_gradient_bytes=20,
)


def make_plan(
    num_ministages: int, *, rows: int = 1, ranks: tuple[int, ...] = (0,), **settings: object
) -> Plan:
    """One group; each rank has that many microbatches of one row."""
    microbatches = [Microbatch(rank, 0, 1) for rank in ranks for _ in range(rows)]
    microbatches = [Microbatch(m.rank, i, i + 1) for i, m in enumerate(microbatches)]
    group = replace(Group(ranks=ranks, microbatches=tuple(microbatches)), **settings)  # type: ignore[arg-type]
    ministages = tuple(Ministage(0, (f"layers.{i}",)) for i in range(num_ministages))
    return Plan(global_batch=len(microbatches), groups=(group,), ministages=ministages).validate()


def walk(plan: Plan, text: str, sizes: MinistageBytes = SIZES, **options: int) -> MemoryWalk:
    own = dict.fromkeys(range(plan.num_ministages), sizes)
    return walk_memory(plan, 0, parse_actions(text), own, **options)


def nonzero(held: dict[Purpose, int]) -> dict[Purpose, int]:
    return {purpose: held[purpose] for purpose in Purpose if held[purpose]}


def test_everything_on_the_device() -> None:
    text = "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1RESHARD 1UNSHARD 0UNSHARD 1B0 1REDUCE_GRAD 1RESHARD 1STEP"
    text += " 0B0 0REDUCE_GRAD 0RESHARD 0STEP"
    found = walk(make_plan(2), text, context_bytes=1000)
    kept = 2 * 20 + 2 * 120
    expected = [
        kept + 20,
        kept + 40,
        kept + 40 + 3 + 1 + 7,  # activations, what 1F0 gets, a layer's internals
        kept + 40 + 4,
        kept + 20 + 4 + 3 + 7,  # until 1F0 is over, its input counts apart from its activations
        kept + 20 + 6,
        kept + 20 + 6,
        kept + 40 + 6,
        kept + 40 + 6 + 1 + 40 + 7 + 10,  # gradients: handed on, whole, and of a unit not yet added
        kept + 40 + 4 + 40 + 2 * 20 + 20,  # two buffers of a unit, rounded shards
        kept + 40 + 4 + 40,
        kept + 20 + 4 + 40,
        kept + 20 + 4 + 40 + 40 + 7 + 10,  # the gradients that 1STEP used up are still there
        kept + 20 + 40 + 2 * 20 + 20,
        kept + 20 + 40,
        kept + 40,
    ]
    assert list(found.device_bytes) == [1000 + num_bytes for num_bytes in expected]
    assert found.device_peak_bytes == 1000 + max(expected)
    assert found.peak_position == expected.index(max(expected))
    assert found.peak_action == parse_actions(text)[found.peak_position]
    assert nonzero(found.at_peak) == {
        "gathered parameters": 40,
        "parameter shards": 40,
        "gradients": 40,
        "optimizer state": 240,
        "activations": 4,
        "working set": 60,
    }
    assert sum(found.at_peak.values()) == max(expected)
    assert found.holders["gathered parameters"] == found.holders["optimizer state"] == (0, 1)
    assert found.holders["gradients"] == (1,)
    assert nonzero(found.between_steps) == {"parameter shards": 40, "optimizer state": 240}
    assert found.host_peak_bytes == 0


def test_offloaded_state_and_shards_leave_one_ministage_late() -> None:
    plan = make_plan(3, offload=("params", "optimizer"))
    found = walk(plan, "2LOAD_STATE 2STEP 2OFFLOAD 2OFFLOAD_STATE 1LOAD_STATE 1STEP 1OFFLOAD 1OFFLOAD_STATE")
    first = 20  # the shards of the first ministage
    assert list(found.device_bytes) == [
        first + 120,
        first + 120 + 20,  # a step writes shards that are not there
        first + 120 + 20,
        first + 120 + 20,
        first + 120 + 20 + 120,
        first + 120 + 20 + 120 + 20,
        first + 120 + 20 + 120 + 20,  # now the shards of ministage 2 are gone
        first + 120 + 20 + 120,
    ]
    assert found.device["optimizer state"] == 240 and found.device["parameter shards"] == 60
    assert nonzero(found.host) == {"parameter shards": 40, "optimizer state": 360}
    assert nonzero(found.between_steps) == {"parameter shards": 20}


def test_shards_that_did_not_change_leave_at_once() -> None:
    plan = make_plan(2, offload=("params",))
    found = walk(plan, "1LOAD 1UNSHARD 1OFFLOAD 1RESHARD", replace(SIZES, state_bytes=0))
    assert list(found.device_bytes) == [40, 60, 60, 40]
    assert found.device_bytes[-1] == 20 + 20  # gathered, until it is freed


def test_tied_weights_stay() -> None:
    plan = make_plan(2, offload=("params",))
    found = walk(plan, "1LOAD 1OFFLOAD", replace(SIZES, state_bytes=0, kept_shard_bytes=8))
    assert list(found.device_bytes) == [20 + 20, 20 + 20]
    assert found.between_steps["parameter shards"] == 20 + 8
    assert found.host["parameter shards"] == 12


def test_deferred_gradients_wait_on_the_host() -> None:
    plan = make_plan(2, offload=("optimizer",))
    text = "1B0 1REDUCE_GRAD 1OFFLOAD_GRAD 0B0 0REDUCE_GRAD 0OFFLOAD_GRAD"
    text += " 1LOAD_GRAD NORM 0LOAD_GRAD 1STEP 0STEP"
    bare = replace(SIZES, state_bytes=0, shard_bytes=0, working_bytes_per_row=0, boundary_bytes_per_row=0)
    found = walk(
        plan,
        text,
        replace(bare, masters=False, largest_unit_bytes=0, largest_unit_gradient_bytes=0),
    )
    # The offloaded gradients of ministage 1 are gone when those of 0 are reduced.
    assert list(found.device_bytes) == [40, 40, 40, 80, 40, 40, 40, 40, 80, 80, 80]
    assert found.host["gradient shards"] == 80 and found.device["gradient shards"] == 80


def test_activations_leave_late_and_come_back_as_copies() -> None:
    plan = make_plan(1, rows=4, offload=("activations",))
    bare = MinistageBytes(
        gathered_bytes=0,
        shard_bytes=0,
        gradient_bytes=0,
        gradient_shard_bytes=0,
        state_bytes=0,
        activation_bytes_per_row=10,
    )
    text = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0B3 0LOAD2 0B2 0LOAD1 0B1 0LOAD0 0B0"
    found = walk(plan, text, bare)
    assert list(found.device_bytes) == [10, 10, 20, 20, 30, 30, 30, 20, 10, 10, 10, 10, 10, 10]
    assert found.host["activations"] == 30
    assert found.between_steps["activations"] == 0


def test_zero_3_gathers_two_units_and_reduces_in_each_backward() -> None:
    bare = replace(SIZES, state_bytes=0, working_bytes_per_row=0, activation_bytes_per_row=0)
    found = walk(make_plan(1, rows=2, zero=3), "0F0 0F1 0B1 0B0 0STEP", bare)
    first = 20 + 20 + 20 + 10 + 2 * 20 + 20  # shards, gathered, a unit's gradients, buffers, rounded shards
    assert list(found.device_bytes) == [40, 40, first, first + 40 + 40, 60]
    assert found.device["gathered parameters"] == 20 and found.device["gradients"] == 20


def test_zero_0_keeps_what_it_gathered_until_the_reduction() -> None:
    bare = replace(SIZES, state_bytes=0, working_bytes_per_row=0, activation_bytes_per_row=0)
    found = walk(make_plan(2, zero=0), "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD", bare)
    assert found.device["gathered parameters"] == 40
    assert found.between_steps["gathered parameters"] == 0
    frozen = replace(bare, gradient_bytes=0, gradient_shard_bytes=0, largest_unit_gradient_bytes=0)
    # Without a reduction nothing frees it, so the next step begins with it.
    assert walk(make_plan(1, zero=0), "0F0", frozen).between_steps["gathered parameters"] == 20


@pytest.mark.parametrize(
    ("ranks", "zero", "overlap", "on_gpu", "most"),
    [
        ((0, 1), 2, True, True, 80),
        ((0, 1), 2, False, True, 40),
        ((0, 1), 2, True, False, 40),
        ((0,), 2, True, True, 40),
        ((0, 1), 3, True, True, 20),
    ],
    ids=["several on GPUs", "that wait for it", "several on CPUs", "alone", "ZeRO 3"],
)
def test_whole_gradients_count_until_the_next_reduction_where_that_runs_beside(
    ranks: tuple[int, ...], zero: int, overlap: bool, on_gpu: bool, most: int
) -> None:
    plan = make_plan(3, ranks=ranks, zero=zero)
    plan = replace(plan, groups=(replace(plan.groups[0], overlap_grad_reduce=overlap),))
    own = dict.fromkeys(range(3), SIZES)
    found = walk_memory(plan, 0, build(ScheduleSpec(plan))[0], own, on_gpu=on_gpu)
    assert found.device[Purpose.GRADIENTS] == most  # Of two ministages, of one, or of a unit.
    assert Purpose.GRADIENTS not in nonzero(found.between_steps)  # type: ignore[arg-type]


def test_transfers_between_groups() -> None:
    groups = tuple(Group(ranks=(rank,), microbatches=(Microbatch(rank, 0, 2),)) for rank in (0, 1))
    plan = Plan(2, groups, tuple(Ministage(i % 2, (f"layers.{i}",)) for i in range(3)))
    bare = MinistageBytes(
        gathered_bytes=0,
        shard_bytes=0,
        gradient_bytes=0,
        gradient_shard_bytes=0,
        state_bytes=0,
        activation_bytes_per_row=3,
        boundary_bytes_per_row=1,
    )
    sizes = {0: bare, 2: replace(bare, boundary_bytes_per_row=2)}
    text = "0F0 0SEND_F0@1[0:2] 2RECV_F0@1[0:1] 2RECV_F0@1[1:2] 2F0 2B0 2SEND_B0@1[0:2] 0RECV_B0@1[0:2] 0B0"
    found = walk_memory(plan, 0, parse_actions(text), sizes)
    sent, received = 2, 4  # By the first ministage; by the last, which joins the pieces that came.
    assert list(found.device_bytes) == [
        6 + sent,
        6 + sent,
        6 + sent + received / 2,
        6 + sent + received,
        6 + sent + received + 6 + received,
        6 + sent + 6 + 4,
        6 + sent + 4,  # What was sent is kept until the step ends.
        6 + sent + 4 + 2,
        6 + sent + 4 + 2,
    ]
    assert found.between_steps["activations"] == 0
    one = walk_memory(plan, 0, parse_actions(text), sizes, num_sends_kept=1)
    assert one.device_bytes[:5] == found.device_bytes[:5]
    assert list(one.device_bytes[5:]) == [n - sent for n in found.device_bytes[5:]]  # 2B0 sends more.
    assert not found.host[Purpose.COMMUNICATION] and not found.device[Purpose.COMMUNICATION]
    # Ministage 2 follows 1: what it receives and the gradients that it sends go over host memory.
    on_gpu = walk_memory(plan, 0, parse_actions(text), sizes, on_gpu=True, communicator_bytes=1000)
    pieces, gradient = 2 + 2, 4
    assert on_gpu.host[Purpose.COMMUNICATION] == max(pieces, gradient)
    assert on_gpu.host_peak_bytes == max(pieces, gradient)
    assert on_gpu.device[Purpose.COMMUNICATION] == 2 * 1000  # To rank 1 forward, from it backward.
    assert [n - 2000 for n in on_gpu.device_bytes] == list(found.device_bytes)
    rows = {0: bare, 2: replace(bare, boundary_bytes_per_row=3)}
    edges = {(0, 1, "F"), (1, 0, "B"), (1, 0, "F"), (0, 1, "B")}
    all_by_host = walk_memory(
        plan, 0, parse_actions(text), rows, on_gpu=True, by_host=edges, communicator_bytes=1000
    )
    assert all_by_host.host[Purpose.COMMUNICATION] == 2 + 8 + 2  # Powers of two; all is held to the end.
    assert not all_by_host.device[Purpose.COMMUNICATION]


def test_a_rank_without_actions_holds_what_is_its_own() -> None:
    found = walk(make_plan(1), "", context_bytes=7)
    assert found.device_peak_bytes == 7 + 20 + 120
    assert found.peak_position is None and found.peak_action is None


# -- over random plans -----------------------------------------------------------------------

SEEDS = range(150)


def random_sizes(rng: random.Random, *, trains: bool, masters: bool) -> MinistageBytes:
    """Sizes as ZeRO has them: shards are parts, and a unit is a part."""
    gathered = rng.randint(1, 1000)
    shard, unit = rng.randint(0, gathered), rng.randint(1, gathered)
    widening = 2 if masters else 1
    return MinistageBytes(
        gathered_bytes=gathered,
        shard_bytes=shard,
        kept_shard_bytes=rng.randint(0, shard) if rng.random() < 0.3 else 0,
        gradient_bytes=gathered * widening * trains,
        gradient_shard_bytes=shard * widening * trains,
        state_bytes=3 * shard * widening * trains,
        masters=masters,
        activation_bytes_per_row=rng.randint(0, 500),
        working_bytes_per_row=rng.randint(0, 500),
        boundary_bytes_per_row=rng.randint(0, 100),
        largest_unit_bytes=unit,
        largest_unit_gradient_bytes=unit * widening * trains,
    )


def random_walks(seed: int) -> tuple[ScheduleSpec, dict[int, list[Action]], dict[int, MinistageBytes]]:
    rng = random.Random(f"memory/{seed}")
    spec = replace(random_spec(rng, small=True), ties=())
    trainable = spec.trainable or (True,) * spec.plan.num_ministages
    sizes = {i: random_sizes(rng, trains=trains, masters=spec.masters) for i, trains in enumerate(trainable)}
    return spec, build(spec), sizes


def with_offload(plan: Plan, offload: tuple[str, ...]) -> Plan:
    return replace(plan, groups=tuple(replace(group, offload=offload) for group in plan.groups))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_every_walk_promises(seed: int) -> None:
    spec, lists, sizes = random_walks(seed)
    plan = spec.plan
    for rank, actions in lists.items():
        group = plan.groups[plan.group_of_rank[rank]]
        own = plan.ministages_of_rank(rank)
        found = walk_memory(plan, rank, actions, sizes, context_bytes=11)
        for held in (found.device, found.host, found.at_peak, found.between_steps):
            assert min(held.values()) >= 0
        assert len(found.device_bytes) == len(actions)
        assert min(found.device_bytes, default=11) >= 11
        if actions:
            assert found.peak_position is not None
            assert found.device_bytes[found.peak_position] == found.device_peak_bytes
            assert sum(found.at_peak.values()) + 11 == found.device_peak_bytes
        assert all(found.at_peak[purpose] <= found.device[purpose] for purpose in Purpose)

        # A step gives back all that it took; what trains in no way stays gathered with ZeRO 0.
        state = 0 if "optimizer" in group.offload else sum(sizes[i].state_bytes for i in own)
        away = own[1:] if "params" in group.offload else ()
        shards = sum(sizes[i].kept_shard_bytes if i in away else sizes[i].shard_bytes for i in own)
        gathered = found.between_steps["gathered parameters"]
        assert gathered == 0 or group.zero == 0
        expected = {"parameter shards": shards, "optimizer state": state, "gathered parameters": gathered}
        assert nonzero(found.between_steps) == {purpose: n for purpose, n in expected.items() if n}

        hosted = {"params": "parameter shards", "optimizer": "optimizer state", "activations": "activations"}
        for kind, purpose in hosted.items():
            assert kind in group.offload or found.host[purpose] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_gathered_parameters_and_state_are_those_of_a_plain_count(seed: int) -> None:
    spec, lists, sizes = random_walks(seed)
    plan = spec.plan
    for rank, actions in lists.items():
        group = plan.groups[plan.group_of_rank[rank]]
        found = walk_memory(plan, rank, actions, sizes)
        own = plan.ministages_of_rank(rank)
        if group.zero in (1, 2):
            changes = {Kind.UNSHARD: 1, Kind.RESHARD: -1}
            deltas = [changes.get(a.kind, 0) * sizes[a.ministage or 0].gathered_bytes for a in actions]
            assert found.device["gathered parameters"] == max(accumulate(deltas), default=0)
        if group.zero == 2:
            most = sorted((sizes[i].gathered_bytes for i in own), reverse=True)[:2]
            assert found.device["gathered parameters"] <= sum(most)
        if "optimizer" in group.offload:
            # Two at a time, and one more on its way to the host where updates are deferred.
            most = sorted((sizes[i].state_bytes for i in own), reverse=True)[:3]
            assert found.device["optimizer state"] <= sum(most)


@pytest.mark.parametrize("seed", SEEDS)
def test_offloading_never_raises_what_it_offloads(seed: int) -> None:
    spec, _, sizes = random_walks(seed)
    plan = spec.plan
    purposes: dict[str, tuple[Purpose, ...]] = {
        "params": ("parameter shards",),
        "optimizer": ("optimizer state", "gradient shards"),
        "activations": ("activations",),
    }
    offload: tuple[str, ...] = ()
    lists = build(replace(spec, plan=with_offload(plan, offload)))
    before = {rank: walk_memory(with_offload(plan, offload), rank, own, sizes) for rank, own in lists.items()}
    for kind in random.Random(seed).sample(list(purposes), 3):
        offload = (*offload, kind)
        changed = with_offload(plan, offload)
        after = {
            rank: walk_memory(changed, rank, own, sizes)
            for rank, own in build(replace(spec, plan=changed)).items()
        }
        for rank in after:
            for purpose in purposes[kind]:
                # Two microbatches may be on their way to the host while they are loaded again.
                slack = leaving_bytes(plan, rank, sizes) if purpose == "activations" else 0
                assert after[rank].device[purpose] <= before[rank].device[purpose] + slack
                assert after[rank].host[purpose] >= before[rank].host[purpose]
        before = after


def leaving_bytes(plan: Plan, rank: int, sizes: dict[int, MinistageBytes]) -> int:
    """The two largest microbatches."""
    rows = [microbatch.num_rows for microbatch in plan.microbatches_of_rank(rank)]
    all_bytes = [
        sizes[i].activation_bytes_per_row * number for i in plan.ministages_of_rank(rank) for number in rows
    ]
    return sum(sorted(all_bytes, reverse=True)[:2])


def test_random_plans_reach_every_kind() -> None:
    kinds: Counter[Kind] = Counter()
    for seed in SEEDS:
        kinds.update(action.kind for own in random_walks(seed)[1].values() for action in own)
    assert set(kinds) >= set(Kind) - {Kind.TIE_GRAD, Kind.TIE_VALUE, Kind.TIE_FETCH}
