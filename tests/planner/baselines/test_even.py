"""Even shares, the comparison that every report makes: what frameworks do with the same devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import searched
from handmade import GIB
from hypothesis import given
from hypothesis import strategies as st
from searched import LAYERS

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import LayerTimes, Overheads, Profile, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.planner.baselines.even import compare_even, find_even, make_data_parallel_plan
from zorselike.simulator.inputs import SimulationInputs
from zorselike.simulator.report.speeds import measure_speeds
from zorselike.simulator.simulated_plan import SimulatedPlan

SOURCE = Source("given")
KIND = replace(searched.WORKLOAD.kinds["layer"], num_parameters=10**6)
WORKLOAD = replace(searched.WORKLOAD, kinds={"layer": KIND})
FAST, SLOW = (
    Node(name="fast", devices=("A100-40",)),
    Node(name="slow", devices=("T4", "T4"), fabric=Link(1e15)),
)
CLUSTER = Cluster(nodes=(FAST, SLOW), default_link=Link(1e15))
SECONDS_PER_ROW = {"A100-40": 0.1, "T4": 0.4}
"""Forward of one layer; its backward takes twice as long."""


def make_times(device: str, *, max_rows: int | None = None, recompute: bool = False) -> LayerTimes:
    rows, each = (1, 2, 64), SECONDS_PER_ROW[device]
    return LayerTimes(
        kind="layer",
        device=device,
        dtype="float32",
        sequence_length=100,
        recompute="layer" if recompute else "none",
        rows=rows,
        forward_s=tuple(each * n for n in rows),
        backward_s=tuple((2 + recompute) * each * n for n in rows),
        max_rows=max_rows,
        source=SOURCE,
    )


def make_setting(
    *, cluster: Cluster = CLUSTER, max_rows: int | None = None, context_bytes: int = 0
) -> SimulationInputs:
    layers = tuple(
        make_times(device, max_rows=max_rows, recompute=recompute)
        for device in SECONDS_PER_ROW
        for recompute in (False, True)
    )
    profile = Profile(model="chain", layers=layers, overheads=Overheads(context_bytes=context_bytes))
    return SimulationInputs(workload=WORKLOAD, cluster=cluster, profile=profile)


def make_plan(rows: tuple[int, int, int]) -> Plan:
    """One group, every rank with so many rows in one microbatch."""
    starts = (0, rows[0], rows[0] + rows[1])
    microbatches = tuple(Microbatch(r, start, start + rows[r]) for r, start in enumerate(starts))
    group = Group(ranks=(0, 1, 2), microbatches=microbatches)
    return Plan(global_batch=sum(rows), groups=(group,), ministages=(Ministage(0, LAYERS),))


def simulate(plan: Plan, setting: SimulationInputs) -> tuple[SimulatedPlan, tuple[float, ...]]:
    clock = LayerTimeModel(setting.profile, setting.workload)
    return setting.simulate(plan), measure_speeds(plan, setting.workload, setting.cluster, clock)


def shrink_memory(num_bytes: int, *, of: int = 2) -> Cluster:
    """The cluster with this much memory on all T4s (and, with `of=3`, on the A100)."""
    slow = replace(SLOW, memory_bytes=(num_bytes,) * 2)
    fast = replace(FAST, memory_bytes=(num_bytes,)) if of == 3 else FAST
    return replace(CLUSTER, nodes=(fast, slow))


# -- plans -------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any),
    zero=st.integers(0, 3),
    num_microbatches=st.integers(1, 8),
)
def test_data_parallel_plans_are_valid_and_as_asked(
    rows: list[int], zero: int, num_microbatches: int
) -> None:
    cluster = Cluster(nodes=(Node(name="a", devices=("T4",) * len(rows), fabric=Link(1e9)),))
    plan = make_data_parallel_plan(
        WORKLOAD, cluster, cluster.places, rows, zero=zero, num_microbatches=num_microbatches
    ).validate()
    own = [[m.num_rows for m in plan.microbatches_of_rank(rank)] for rank in range(plan.num_ranks)]
    assert [sum(each) for each in own] == rows
    assert [len(each) for each in own] == [min(number, num_microbatches) for number in rows]
    assert all(max(each) - min(each) <= 1 for each in own if each)
    assert (len(plan.groups), plan.groups[0].zero, plan.num_ministages) == (1, zero, 1)
    assert plan.ministages[0].modules == LAYERS
    assert cluster.place_ranks(plan) == cluster.places


def test_with_fewer_rows_than_devices_only_as_many_are_used() -> None:
    even = find_even("even shares", make_setting(), CLUSTER.places, 2)
    assert even.simulated is not None
    assert even.simulated.device_types == ("A100-40", "T4")


# -- the ideal -----------------------------------------------------------------------------------


def test_speeds_are_those_of_the_best_microbatch_without_recomputation() -> None:
    times = LayerTimes(
        kind="layer",
        device="T4",
        dtype="float32",
        sequence_length=100,
        rows=(1, 2, 4, 8),
        forward_s=(1.0, 1.0, 1.5, 4.0),
        backward_s=(1.0, 1.0, 1.5, 4.0),
        source=SOURCE,
    )
    cluster = Cluster(nodes=(replace(SLOW, devices=("T4",) * 3),))
    plan = make_plan((8, 8, 8))
    plan = replace(plan, groups=(replace(plan.groups[0], recompute="layer"),))

    def speeds(times: LayerTimes) -> tuple[float, ...]:
        clock = LayerTimeModel(Profile(model="chain", layers=(times,)), WORKLOAD)
        return measure_speeds(plan, WORKLOAD, cluster, clock)

    assert speeds(times) == pytest.approx([4 / (4 * 3.0)] * 3)
    # The plan's own microbatches count, whatever was found to fit.
    assert speeds(replace(times, max_rows=2)) == pytest.approx([max(2 / (4 * 2.0), 8 / (4 * 8.0))] * 3)


# -- what is compared --------------------------------------------------------------------------


def test_even_shares_wait_for_the_slowest() -> None:
    setting = make_setting()
    case, speeds = simulate(make_plan((16, 4, 4)), setting)
    assert speeds == pytest.approx([1 / 1.2, 1 / 4.8, 1 / 4.8])
    alone, even = compare_even(case, setting, speeds)
    assert (alone.name, even.name) == ("1 x A100-40 alone", "even shares")
    assert alone.simulated is not None and even.simulated is not None
    seconds = [each.simulation.iteration_s for each in (case, alone.simulated, even.simulated)]
    # Updates, which no profile times here, add some microseconds.
    assert seconds == pytest.approx([16 * 1.2, 24 * 1.2, 8 * 4.8], rel=1e-3)
    assert even.simulated.plan.global_batch == alone.simulated.plan.global_batch == 24
    assert alone.simulated.device_types == ("A100-40",)
    assert even.simulated.device_types == ("A100-40", "T4", "T4")


def test_devices_of_one_type_are_compared_with_even_shares_only() -> None:
    cluster = Cluster(nodes=(replace(SLOW, devices=("T4",) * 3),))
    setting = make_setting(cluster=cluster)
    case, speeds = simulate(make_plan((16, 4, 4)), setting)
    (even,) = compare_even(case, setting, speeds)
    assert even.name == "even shares"
    assert even.simulated is not None
    assert even.simulated.simulation.iteration_s == pytest.approx(8 * 4.8, rel=1e-3)


def test_the_best_stage_that_fits_is_taken_with_the_largest_microbatch() -> None:
    # Links so slow that a stage with fewer bytes wins clearly: ZeRO 0 moves least, 3 most.
    cluster = replace(CLUSTER, default_link=Link(1e7))
    setting = make_setting(cluster=cluster)
    case, speeds = simulate(make_plan((8, 8, 8)), setting)
    even = compare_even(case, setting, speeds)[-1]
    assert even.simulated is not None
    candidates = [
        setting.simulate(
            make_data_parallel_plan(
                WORKLOAD, cluster, cluster.places, (8, 8, 8), zero=zero, num_microbatches=1
            ),
            schedule="1f1b",
        )
        for zero in range(4)
    ]
    times = [candidate.simulation.iteration_s for candidate in candidates]
    assert even.simulated.simulation.iteration_s == pytest.approx(min(times))
    assert max(times) > 1.02 * min(times)
    assert even.how == f"3 ranks, ZeRO {times.index(min(times))}, 8 rows at once"


def test_microbatches_shrink_until_they_fit() -> None:
    setting = make_setting()
    case, speeds = simulate(make_plan((8, 8, 8)), setting)
    roomy = compare_even(case, setting, speeds)[-1].simulated
    assert roomy is not None
    most = max(roomy.peak_bytes)
    tight = replace(setting, cluster=shrink_memory(most - 1))
    case, speeds = simulate(make_plan((8, 8, 8)), tight)
    even = compare_even(case, tight, speeds)[-1].simulated
    assert even is not None
    assert not any(even.is_overfull(rank) for rank in range(3))
    assert max(even.peak_bytes) < most


def test_devices_that_keep_more_of_a_row_are_looked_at_by_themselves() -> None:
    setting = make_setting(cluster=shrink_memory(GIB))
    layers = tuple(
        replace(t, memory_bytes_per_row=6e7) if t.device == "T4" else t for t in setting.profile.layers
    )
    setting = replace(setting, profile=replace(setting.profile, layers=layers))
    case, speeds = simulate(make_plan((8, 8, 8)), setting)
    even = compare_even(case, setting, speeds)[-1].simulated
    assert even is not None  # 8 rows through 4 layers are 1.9 GB on a T4.
    assert not any(even.is_overfull(rank) for rank in range(3))


def test_rows_beyond_what_was_found_to_fit_are_not_tried() -> None:
    setting = make_setting(max_rows=2)
    case, speeds = simulate(replace(make_plan((2, 2, 2))), setting)
    even = compare_even(case, setting, speeds)[-1]
    assert even.how.endswith("2 rows at once")
    case, speeds = simulate(
        replace(
            make_plan((2, 2, 2)),
            global_batch=12,
            groups=(Group((0, 1, 2), tuple(Microbatch(i % 3, 2 * i, 2 * i + 2) for i in range(6))),),
        ),
        setting,
    )
    assert compare_even(case, setting, speeds)[-1].how.endswith("2 rows at once")


def test_where_nothing_fits_it_says_which_device_and_by_how_much() -> None:
    setting = make_setting(cluster=shrink_memory(GIB // 64, of=3))
    case, speeds = simulate(make_plan((8, 8, 8)), setting)
    alone, even = compare_even(case, setting, speeds)
    for each in (alone, even):
        assert each.simulated is None
        assert each.reason.startswith("OUT OF MEMORY: ")
        assert each.reason.endswith("of 16.0 MiB")
    assert "A100-40 of node fast" in alone.reason


def test_layers_are_recomputed_where_nothing_fits_else() -> None:
    setting = make_setting()
    case, speeds = simulate(make_plan((8, 8, 8)), setting)
    needs = {}
    for recompute in ("none", "layer"):
        for zero in range(4):
            plan = make_data_parallel_plan(
                WORKLOAD,
                CLUSTER,
                CLUSTER.places,
                (8, 8, 8),
                zero=zero,
                recompute=recompute,
                num_microbatches=8,
            )
            needs[recompute, zero] = max(setting.simulate(plan, schedule="1f1b").peak_bytes)
    least = min(needs["none", zero] for zero in range(4))
    assert min(needs["layer", zero] for zero in range(4)) < least
    tight = replace(setting, cluster=shrink_memory(least - 1))
    case, speeds = simulate(make_plan((8, 8, 8)), tight)
    even = compare_even(case, tight, speeds)[-1]
    assert even.how.endswith("layers recomputed")


def test_the_context_and_the_allocator_take_their_part() -> None:
    cluster = shrink_memory(4 * GIB)
    setting = make_setting(cluster=cluster, context_bytes=4 * GIB)
    case, speeds = simulate(make_plan((8, 8, 8)), setting)
    alone, even = compare_even(case, setting, speeds)
    assert alone.simulated is not None and even.simulated is None
