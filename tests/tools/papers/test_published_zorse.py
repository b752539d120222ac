"""The reproduction of Zorse's paper: clusters, plans, a run small enough to work out, and pictures."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_data import DATA, needs_data

from tools.papers.zorse.paper import (
    GBIT,
    TABLE_5,
    PaperCluster,
    keep_types,
    make_cluster,
    make_clusters,
    make_nodes,
)
from tools.papers.zorse.plans import Options, cut_evenly, lay_plan, loop, share_out
from tools.papers.zorse.runs import Setup, compute_bound_tflops, fit_plan, make_setup, run_plan, search
from tools.papers.zorse.study import Cell, mean_error
from tools.papers.zorse.times import find_folder, make_workload
from zorselike.cost.curves import CurveWarning
from zorselike.cost.profile import LayerTimes, Overheads, Profile, Source
from zorselike.plan.cluster.cluster import Place
from zorselike.plan.workload import Workload
from zorselike.schedule import ScheduleSpec, build
from zorselike.schedule.checker.check import check

speeds = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Some of the authors' times fall a little; that is tested with the reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurveWarning)
        yield


# -- shares --------------------------------------------------------------------------------


@given(st.integers(0, 300), speeds)
def test_shares_add_up_and_moving_one_helps_nobody(total: int, speeds: list[float]) -> None:
    given_numbers = share_out(total, speeds)
    assert given_numbers is not None
    assert sum(given_numbers) == total
    last = max(n / s for n, s in zip(given_numbers, speeds, strict=True))
    assert all((n + 1) / s >= last * (1 - 1e-12) for n, s in zip(given_numbers, speeds, strict=True)), (
        "the last to be done could have given one away"
    )


@given(st.integers(0, 60), speeds, st.integers(0, 12))
def test_caps_hold_or_there_is_no_room(total: int, speeds: list[float], cap: int) -> None:
    caps = dict.fromkeys(range(len(speeds)), cap)
    given_numbers = share_out(total, speeds, caps=caps)
    if total > cap * len(speeds):
        assert given_numbers is None
    else:
        assert given_numbers is not None
        assert max(given_numbers) <= cap
        assert sum(given_numbers) == total


def test_what_one_has_already_counts() -> None:
    assert share_out(10, [1.0, 1.0], taken=[0.0, 4.0]) == [7, 3]


@given(st.integers(0, 100), st.integers(1, 12))
def test_pieces_are_even(total: int, pieces: int) -> None:
    cuts = cut_evenly(total, pieces)
    assert sum(cuts) == total
    assert len(cuts) == min(total, pieces)
    assert not cuts or max(cuts) - min(cuts) <= 1


def test_groups_take_turns() -> None:
    assert loop([4, 3, 1], 2) == [(0, 2), (1, 2), (2, 1), (0, 2), (1, 1)]


# -- plans ---------------------------------------------------------------------------------

NUM_LAYERS = 12
WORKLOAD = make_workload(
    "llama tiny",
    hidden=64,
    num_layers=NUM_LAYERS,
    num_parameters=50_000,
    sequence_length=128,
    dtype="float16",
)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([("params", "activations"), ()]),
    st.data(),
)
def test_plans_are_valid_and_their_schedules_complete(
    sizes: list[int], ministages: int, rows: int, offload: tuple[str, ...], data: st.DataObject
) -> None:
    numbers = iter(range(sum(sizes)))
    groups = [[next(numbers) for _ in range(size)] for size in sizes]
    rank_speeds = data.draw(st.lists(st.floats(0.5, 4.0), min_size=sum(sizes), max_size=sum(sizes)))
    layers = share_out(NUM_LAYERS - len(sizes), [sum(rank_speeds[r] for r in group) for group in groups])
    assert layers is not None
    plan = lay_plan(
        WORKLOAD,
        groups,
        rank_speeds,
        [n + 1 for n in layers],
        16,
        Options(ministages, rows, offload=offload),
    ).validate()
    assert [name for stage in plan.ministages for name in stage.modules] == [n for n, _ in WORKLOAD.layers]
    spec = ScheduleSpec(plan, masters=True)
    check(spec, build(spec))


# -- the paper's clusters ------------------------------------------------------------------


def test_peaks_are_those_that_the_papers_hfu_is_a_share_of() -> None:
    clusters = make_clusters()
    assert {name: cluster.peak_tflops for name, cluster in clusters.items()} == {
        "A": 8332,
        "B": 7848,
        "C": 10032,
    }
    for (name, _), result in TABLE_5.items():
        assert result.tflops / clusters[name].peak_tflops == pytest.approx(result.hfu, abs=1e-4)


def test_clusters_and_groups_are_table_4s() -> None:
    clusters = make_clusters()
    assert {name: c.cluster.num_devices for name, c in clusters.items()} == {"A": 20, "B": 64, "C": 128}
    assert {name: c.global_batch for name, c in clusters.items()} == {"A": 256, "B": 1024, "C": 2048}
    for paper in clusters.values():
        assert sorted(node for group in paper.groups for node in group) == list(
            range(len(paper.cluster.nodes))
        )
        for group in paper.groups:
            assert len({paper.cluster.nodes[node].region for node in group}) == 1, "no group over two regions"
    sizes = [sum(len(clusters["C"].cluster.nodes[n].devices) for n in g) for g in clusters["C"].groups]
    assert sizes == [16, 8, 8, 24, 24, 24, 24]


def test_links_are_what_is_assumed() -> None:
    clusters = make_clusters()
    a, c = clusters["A"].cluster, clusters["C"].cluster
    assert a.link(Place(0, 0), Place(3, 0)).bandwidth_bytes_per_s == 50 * GBIT
    assert a.link(Place(2, 0), Place(2, 7)).bandwidth_bytes_per_s == 200e9
    assert c.link(Place(0, 0), Place(1, 0)).bandwidth_bytes_per_s == 25 * GBIT
    assert c.link(Place(0, 0), Place(8, 0)).bandwidth_bytes_per_s == 5 * GBIT


def test_a_part_of_a_cluster_keeps_its_groups() -> None:
    part = keep_types(make_clusters()["C"], {"T4"})
    assert (part.types, part.cluster.num_devices, part.peak_tflops) == (("T4",), 96, 96 * 65)
    assert part.groups == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))


# -- runs ----------------------------------------------------------------------------------

FORWARD, BACKWARD = 0.010, 0.020
"""Seconds of a layer and a row on a T4; an A10G takes half."""


def tiny_setup(*, memory_bytes: int = 2**40) -> Setup:
    """A node of two T4s and one of two A10Gs, over links that take no time to speak of."""
    nodes = make_nodes(1, "A10G", 2, nic=1e15) + make_nodes(1, "T4", 2, nic=1e15)
    nodes = [replace(node, memory_bytes=(memory_bytes,) * 2) for node in nodes]
    cluster = make_cluster("tiny", nodes, nic=1e15)
    rows = (1, 2, 4)
    layers = tuple(
        LayerTimes(
            kind="layer",
            device=device,
            dtype="float16",
            sequence_length=128,
            rows=rows,
            forward_s=tuple(FORWARD * factor * n for n in rows),
            backward_s=tuple(BACKWARD * factor * n for n in rows),
            source=Source("measured"),
        )
        for device, factor in (("T4", 1.0), ("A10G", 0.5))
    )
    return Setup(
        cluster=cluster,
        workload=WORKLOAD,
        profile=Profile(model="llama tiny", layers=layers, overheads=Overheads(context_bytes=1000)),
        groups=((Place(0, 0), Place(0, 1)), (Place(1, 0), Place(1, 1))),
        global_batch=64,
    )


def test_layers_go_by_speed_with_the_head_counted() -> None:
    """An A10G is twice as fast; the head is more than all of these small layers together."""
    setup = tiny_setup()
    layer, head = WORKLOAD.kinds["layer"], WORKLOAD.kinds["head"]
    assert head.forward_flops_per_row * 3 / (layer.forward_flops_per_row * 4) > NUM_LAYERS
    light = replace(setup, workload=with_light_head())
    plan = fit_plan(light, Options(1, 2, offload=()))
    assert plan is not None
    assert [len(stage.modules) for stage in plan.ministages] == [1 + 8, 4 + 2]
    assert fit_plan(setup, Options(1, 2, offload=())) is None, "the T4s would have no layer at all"


def with_light_head() -> Workload:
    kinds = dict(WORKLOAD.kinds)
    kinds["head"] = replace(kinds["head"], forward_flops_per_row=1.0, working_bytes_per_row=0)
    return replace(WORKLOAD, kinds=kinds)


def test_a_run_comes_near_its_compute_bound_and_never_above() -> None:
    setup = replace(tiny_setup(), workload=with_light_head())
    plan = fit_plan(setup, Options(2, 1, offload=()))
    assert plan is not None
    outcome = run_plan(setup, Options(2, 1, offload=()), plan)
    bound = compute_bound_tflops(setup)
    # Rows over all layers on all cards, by hand: 2 A10G and 2 T4.
    rows_per_s = 2 * (1 / 0.02) + 2 * (1 / 0.04)
    layer = WORKLOAD.kinds["layer"]
    assert bound == pytest.approx(rows_per_s * 4 * layer.forward_flops_per_row / 1e12)
    assert 0.8 * bound < outcome.tflops < bound
    by_type = outcome.tflops_of("T4") + outcome.tflops_of("A10G")
    assert by_type == pytest.approx(outcome.tflops)
    assert outcome.layers == [8, 4]
    assert outcome.fits


def test_layers_move_where_there_is_no_room_and_at_last_nothing_fits() -> None:
    setup = replace(tiny_setup(), workload=with_light_head())
    options = Options(1, 1, offload=())
    roomy = run_plan(setup, options, fit_plan(setup, options) or pytest.fail("there is room"))
    assert roomy.layers == [8, 4]
    needed = roomy.peak_bytes
    tight_node = replace(setup.cluster.nodes[0], memory_bytes=(needed[0] - 1,) * 2)
    tight = replace(setup, cluster=replace(setup.cluster, nodes=(tight_node, setup.cluster.nodes[1])))
    found = search(tight, [options])
    assert found is not None and found.fits
    assert found.layers[0] < 8
    nowhere = replace(setup, cluster=tiny_setup(memory_bytes=10_000).cluster)
    assert search(nowhere, [options]) is None
    unbounded = search(nowhere, [options], bounded=False)
    assert unbounded is not None and not unbounded.fits


@needs_data
@pytest.mark.parametrize(
    ("cluster", "model", "share"),
    [("A", "7b", 0.95), ("A", "13b", 1.05), ("B", "7b", 0.87), ("B", "33b", 0.62), ("C", "33b", 0.35)],
)
def test_the_papers_share_of_the_compute_bound(cluster: str, model: str, share: float) -> None:
    """On A the paper measured as much as the authors' own layer times allow, or more."""
    setup = make_setup(find_folder(DATA), model, make_clusters()[cluster])
    bound = compute_bound_tflops(setup)
    assert TABLE_5[cluster, model].tflops / bound == pytest.approx(share, abs=0.015)


@needs_data
def test_a_cell_of_the_paper_is_simulated() -> None:
    setup = make_setup(find_folder(DATA), "7b", make_clusters()["A"])
    outcome = search(setup, [Options(1, 2)])
    assert outcome is not None and outcome.fits
    assert 0.5 * compute_bound_tflops(setup) < outcome.tflops < compute_bound_tflops(setup)
    cell = Cell("A", "7b", outcome, 1.0, 8332)
    assert mean_error([cell]) == pytest.approx(abs(outcome.tflops / 4370.56 - 1))


def test_a_cluster_of_ones_own_has_its_peaks_summed() -> None:
    nodes = make_nodes(2, "A10G", 8, nic=25 * GBIT)
    cluster = make_cluster("x", nodes, nic=25 * GBIT)
    paper = PaperCluster("x", cluster, 1024, ((0,), (1,)))
    assert (paper.peak_tflops, paper.types) == (16 * 125, ("A10G",))


def test_the_tool_says_what_it_lacks(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "tools" / "papers" / "reproduce_zorse.py"
    done = subprocess.run(
        [sys.executable, str(script), "--data", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no data/model_stats.json of github.com/benson-guo/zorse" in done.stderr
