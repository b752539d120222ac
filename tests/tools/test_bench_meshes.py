"""The search over torch's rectangular meshes."""

from __future__ import annotations

from collections import Counter

import pytest

from second_simulator.meshes import (
    SCHEDULES,
    Cluster,
    Mesh,
    candidates,
    loop_layers,
    lower_bound_s,
    order_of,
    search,
    simulate_mesh,
    split_layers,
    stage_layouts,
)
from second_simulator.operations import Links

NODES = ((0, 1), (2, 3, 4), (5,))
SPEEDS = (4.0, 4.0, 2.0, 2.0, 2.0, 1.0)


def cluster(layer_bytes: float = 0.0) -> Cluster:
    links = Links((0, 0, 1, 1, 1, 2), latency_s=0.01, bytes_per_s=1.0)
    return Cluster(tuple(1 / speed for speed in SPEEDS), links, layer_bytes / 64, layer_bytes)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loops", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 3, 4])
def test_an_order_computes_everything_once(schedule: str, loops: int, pp: int) -> None:
    mesh = Mesh(tuple((rank,) for rank in range(pp)), (1,) * (pp * loops), 12, 2, schedule)
    done = Counter(item for stage in range(pp) for item in order_of(mesh, stage))
    assert set(done.values()) == {1}
    assert len(done) == 2 * pp * loops * 12


def test_interleaved_order_as_torch_gives_it() -> None:
    mesh = Mesh(((0,), (1,)), (1,) * 4, 4, 2, "Interleaved1F1B")
    order = [f"{virtual}{kind}{microbatch}" for kind, virtual, microbatch in order_of(mesh, 1)]
    # Of `ScheduleInterleaved1F1B` in torch 2.13 for two ranks, four stages, four microbatches.
    assert order == [
        *("1F0", "1F1", "3F0", "3B0", "3F1", "3B1", "1F2", "1B0", "1F3", "1B1"),
        *("3F2", "3B2", "3F3", "3B3", "1B2", "1B3"),
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_take_what_the_pipeline_formula_says(schedule: str) -> None:
    mesh = Mesh(tuple((rank,) for rank in range(4)), (3,) * 8, 8, 2, schedule)
    seconds = simulate_mesh(mesh, Cluster((1.0,) * 4)).makespan_s
    assert seconds == pytest.approx(3 * 3 * 2 * (2 * 8 + 3))


def test_splits_use_all_layers_and_stay_within_the_slack() -> None:
    splits = list(split_layers(24, (12.0, 10.0, 4.0), 1, 1.0))
    assert (11, 9, 4) in splits and (12, 9, 3) in splits
    assert all(sum(split) == 24 for split in splits)
    assert max(max(n / s for n, s in zip(x, (12, 10, 4), strict=True)) for x in splits) == 1.0
    assert set(splits) < set(split_layers(24, (12.0, 10.0, 4.0), 1, 1.3))


def test_loops_cut_every_stage_evenly() -> None:
    assert loop_layers((4, 2), 2) == (2, 1, 2, 1)
    assert loop_layers((5, 2), 2) == (2, 1, 3, 1)


def test_layouts_lay_the_nodes_in_every_order() -> None:
    layouts = list(stage_layouts(NODES, 2))
    assert ((0, 1), (2, 3), (4, 5)) in layouts
    assert all(sorted(rank for stage in layout for rank in stage) == list(range(6)) for layout in layouts)
    assert len(set(layouts)) == len(layouts)


def test_a_lower_bound_is_one() -> None:
    weighty = cluster(layer_bytes=0.5)
    for mesh in candidates(NODES, weighty, num_layers=12, num_rows=12, slack=1.2, max_loops=3):
        assert lower_bound_s(mesh, weighty) <= simulate_mesh(mesh, weighty).makespan_s * (1 + 1e-9)


def test_the_search_finds_the_best_of_each_shape() -> None:
    weighty = cluster(layer_bytes=0.5)
    meshes = list(candidates(NODES, weighty, num_layers=12, num_rows=12, max_loops=2))
    found = search(meshes, weighty)
    assert set(found) == {(1, 6), (2, 3), (3, 2), (6, 1)}
    for shape, (seconds, _) in found.items():
        same = (mesh for mesh in meshes if (mesh.dp, mesh.pp) == shape)
        assert seconds == min(simulate_mesh(mesh, weighty).makespan_s for mesh in same)
