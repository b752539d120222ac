"""Readers of other people's data, on tiny files of their form and on the real ones where they are at hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from paper_data import DATA, needs_data

from tools.papers.data import SAILOR
from tools.papers.sailor.library import Library
from tools.papers.sailor.links import (
    LARGEST_BYTES,
    MachineLinks,
    Place,
    divide,
    make_link,
    read_egress_prices,
)
from tools.papers.sailor.profiles import read_profile as read_sailor_profile
from tools.papers.sailor.profiles import read_shapes
from tools.papers.sailor.profiles import read_workload as read_sailor_workload
from tools.papers.sailor.runs import read_run, to_cluster, to_plan
from tools.papers.zorse.times import find_folder, read_profile, read_workload
from zorselike.cost.curves import CurveWarning
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.errors import ClusterError, PlanError, ProfileError

GIGA = 1e9


def write(path: Path, found: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


# -- where files are ------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["clones", "clone", "copies", "copy"])
def test_files_are_found_in_clones_and_in_copies(tmp_path: Path, given: str) -> None:
    name = "providers/communication_cost.json"
    inside = SAILOR.files[name] if given.startswith("clone") else name
    root = tmp_path / "sailor" if given in ("clones", "copies") else tmp_path
    path = write(root / inside, {})
    assert SAILOR.find(tmp_path, name) == path


def test_what_is_missing_is_named_with_its_repository(tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as raised:
        Library(tmp_path).find_profile("OPT-350", "T4")
    path = "sailor/Planner/sailor_planner/profiles/OPT-350/T4/profile.json"
    assert f"no {path} of github.com/eth-easl/sailor; git clone https://github.com/" in str(raised.value)


# -- Zorse's layer times -------------------------------------------------------------------

FITS = [[1.0, -0.5], [2.0, 0.5]]


def latencies(entry: object, *, gpu: str = "t4", sequence: int = 512, model: str = "7b") -> dict[str, Any]:
    return {f"deepspeedllama_{model}": {gpu: {str(sequence): {"float16": entry}}}}


def test_lists_are_read_as_seconds(tmp_path: Path) -> None:
    write(tmp_path / "model_latencies.json", latencies([*FITS, [1.0, 2.5], [3.0, 5.5]]))
    (times,) = read_profile(tmp_path, "7b", 512).layers
    assert (times.kind, times.device, times.rows, times.source.kind) == ("layer", "T4", (1, 2), "measured")
    assert times.forward_s == (0.001, 0.0025)
    assert times.backward_s == (0.003, 0.0055)


def test_an_entry_of_fits_is_taken_where_they_are_positive(tmp_path: Path) -> None:
    write(tmp_path / "model_latencies.json", latencies([[1.0, -6.0], [2.0, 0.0]]))
    (times,) = read_profile(tmp_path, "7b", 512).layers
    assert times.rows == (8, 16)
    assert times.forward_s == (0.002, 0.010)
    assert times.source.kind == "interpolated"


@pytest.mark.parametrize("entry", [12.5, [1.0, 2.0], [[1.0, 2.0]], "fast"])
def test_what_says_too_little_is_left_out(tmp_path: Path, entry: object) -> None:
    found = latencies([*FITS, [1.0], [3.0]])
    found["deepspeedllama_7b"]["a10g"] = {"512": {"float16": entry}}
    found["deepspeedllama_7b"]["l4"] = 3.0
    write(tmp_path / "model_latencies.json", found)
    assert [times.device for times in read_profile(tmp_path, "7b", 512).layers] == ["T4"]


@pytest.mark.parametrize(("forward", "rows"), [(8.0, (1, 3)), (8.1, (1, 2, 3))])
def test_a_value_typed_in_by_hand_is_interpolated_over(
    tmp_path: Path, forward: float, rows: tuple[int, ...]
) -> None:
    entry = [*FITS, [6.0, forward, 18.0], [12.0, 19.0, 36.0]]
    write(tmp_path / "model_latencies.json", latencies(entry, gpu="h100-nvl", sequence=4096))
    (times,) = read_profile(tmp_path, "7b", 4096).layers
    assert times.rows == rows


def test_a_model_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model_latencies.json", latencies([*FITS, [1.0], [3.0]]))
    with pytest.raises(ProfileError, match=r"deepspeedllama_9b; it has 7b"):
        read_profile(tmp_path, "9b", 512)
    with pytest.raises(ProfileError, match="no float16 times of deepspeedllama_7b at 77 tokens"):
        read_profile(tmp_path, "7b", 77)


def test_a_workload_counts_what_the_authors_count(tmp_path: Path) -> None:
    stats = {"hidden_size": 64, "num_layers": 3, "parameters_per_layer": 1000}
    write(tmp_path / "model_stats.json", {"deepspeedllama_7b": stats})
    workload = read_workload(tmp_path, "7b", 128)
    assert workload.num_parameters == 3 * 1000 + 2 * 49152 * 64 + 64
    layer = workload.kinds["layer"]
    assert layer.forward_flops_per_row == 2 * 1000 * 128 + 4 * 128**2 * 64
    assert [name for name, _ in workload.layers] == [
        "embedding", "layers.0", "layers.1", "layers.2", "norm", "head"
    ]  # fmt: skip


@needs_data
def test_totals_of_the_real_models_agree() -> None:
    folder = find_folder(DATA)
    stats = json.loads((folder / "model_stats.json").read_text())
    for model in ("7b", "13b", "33b", "65b"):
        assert read_workload(folder, model, 512).num_parameters == pytest.approx(
            stats[f"deepspeedllama_{model}"]["total_parameters"], rel=1e-6
        )


@needs_data
@pytest.mark.parametrize("model", ["7b", "13b", "33b", "65b"])
def test_real_times_without_the_suspect_ones_rise(model: str) -> None:
    for times in read_profile(find_folder(DATA), model, 4096).layers:
        if times.device in ("H100-NVL", "A100-80"):
            is_left_out = times.device == "H100-NVL" or model != "13b"
            assert (2 not in times.rows) == is_left_out
            ratios = [b / a for a, b in zip(times.forward_s, times.forward_s[1:], strict=False)]
            assert min(ratios) > 0.9, f"{times.device}: {ratios}"


# -- Sailor's profiles ---------------------------------------------------------------------

NUM_LAYERS = 5
"""Embedding, three blocks, head."""


def sizes(degrees: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    def of(parameters: int, elements: int) -> dict[str, int]:
        return {
            "params_floats": parameters,
            "act_input_floats": elements,
            "act_output_floats": elements,
            "act_mem_bytes": 16 * elements,
        }

    return {
        "Tiny": {
            str(d): {str(i): of((800 if i in (0, 4) else 400) // d, 2048 * 4) for i in range(NUM_LAYERS)}
            for d in degrees
        }
    }


def profile(forward: dict[int, float], *, update: dict[int, float] | None = None) -> dict[str, Any]:
    """Seconds of a block's forward by rows; the backward takes twice as long, embedding and head half."""
    updates = update or {1: 2.6e-3, 2: 1.4e-3}
    return {
        str(rows): {
            str(degree): {
                str(i): [seconds / degree * (0.5 if i in (0, 4) else 1.0)] * 1
                + [2 * seconds / degree * (0.5 if i in (0, 4) else 1.0), updates[degree]]
                for i in range(NUM_LAYERS)
            }
            for degree in updates
        }
        for rows, seconds in forward.items()
    }


def test_a_profile_has_a_kind_for_each_sort_of_layer_and_degree(tmp_path: Path) -> None:
    shapes = read_shapes(write(tmp_path / "llm_info.json", sizes()), "Tiny")
    path = write(tmp_path / "profile.json", profile({1: 1.0, 4: 4.0, 2: 2.0}))
    found = read_sailor_profile(path, "Tiny", "GH-96", shapes)
    assert {(t.kind, t.tensor_parallel) for t in found.layers} == {
        (kind, degree) for kind in ("embedding", "first layer", "layer", "head") for degree in (1, 2)
    }
    (times,) = [t for t in found.layers if t.kind == "layer" and t.tensor_parallel == 2]
    assert (times.rows, times.forward_s, times.device) == ((1, 2, 4), (0.5, 1.0, 2.0), "GH200")


def test_the_update_of_the_small_model_is_put_in_proportion(tmp_path: Path) -> None:
    """Embedding, two blocks and head were updated: 2400 parameters whole, 1200 at degree 2."""
    shapes = read_shapes(write(tmp_path / "llm_info.json", sizes()), "Tiny")
    path = write(tmp_path / "profile.json", profile({1: 1.0}))
    (update,) = read_sailor_profile(path, "Tiny", "GH-96", shapes).updates
    assert update.seconds_per_parameter == pytest.approx(1e-6)
    assert update.seconds_per_call == pytest.approx(2e-4)


def test_times_that_fall_are_repaired_with_a_warning(tmp_path: Path) -> None:
    info = write(tmp_path / "llm_info.json", sizes())
    path = write(tmp_path / "profile.json", profile({1: 3.0, 2: 2.0, 4: 4.0}))
    found = read_sailor_profile(path, "Tiny", "GH-96", read_shapes(info, "Tiny"))
    clock = LayerTimeModel(found, read_sailor_workload(info, "Tiny", 1))
    with pytest.warns(CurveWarning) as caught:
        assert clock.forward_s("layer", "GH200", 1, "none") == pytest.approx(2.0)
    assert any("forward of layer on GH200" in str(warning.message) for warning in caught)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    shapes = read_shapes(write(tmp_path / "llm_info.json", sizes()), "Tiny")
    found = profile({1: 1.0})
    del found["1"]["1"]["4"]
    with pytest.raises(
        ProfileError, match=r"4 layers at 1 rows.*the model has 5: a profile of another model"
    ):
        read_sailor_profile(write(tmp_path / "profile.json", found), "Tiny", "GH-96", shapes)
    with pytest.raises(ProfileError, match="GPU B1000 is not known"):
        read_sailor_profile(tmp_path / "profile.json", "Tiny", "B1000", shapes)


def test_where_a_profile_is_of_another_model_the_simulators_table_is_read(tmp_path: Path) -> None:
    """As of GPT-Neo-2.7 on GH-96."""
    wrong = profile({1: 1.0})
    del wrong["1"]["1"]["4"]
    write(tmp_path / "llm_info.json", sizes())
    write(tmp_path / "profiles" / "Tiny" / "GH-96" / "profile.json", wrong)
    with pytest.raises(ProfileError, match="a profile of another model"):
        Library(tmp_path).profile("Tiny", ["GH-96"])
    write(tmp_path / "simulator_profiles.json", {"Tiny": {"GH-96": profile({1: 7.0})}})
    found = Library(tmp_path).profile("Tiny", ["GH-96"])
    assert {times.forward_s for times in found.layers if times.kind == "layer"} == {(7.0,), (3.5,)}
    write(tmp_path / "profiles" / "Tiny" / "GH-96" / "profile.json", profile({1: 1.0}))
    found = Library(tmp_path).profile("Tiny", ["GH-96"])
    assert {times.forward_s for times in found.layers if times.kind == "layer"} == {(1.0,), (0.5,)}


def test_a_model_is_found_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    write(tmp_path / "llm_info.json", {"Tiny-2": sizes()["Tiny"], "Tiny": sizes()["Tiny"], "Other": {}})
    library = Library(tmp_path)
    assert [library.find_model(name) for name in ("Tiny", "Tiny-", "O")] == ["Tiny", "Tiny-2", "Other"]
    with pytest.raises(ProfileError, match="Ti names 2 models; known are Tiny-2, Tiny, Other"):
        library.find_model("Ti")


@needs_data
def test_real_updates_lie_on_a_line_through_the_degrees() -> None:
    """That they are of a model of two blocks is what makes seconds proportional to parameters."""
    library = Library(DATA)
    shapes = library.shapes["OPT-350"]
    path = library.find_profile("OPT-350", "GH-96")
    (update,) = read_sailor_profile(path, "OPT-350", "GH-96", shapes).updates
    measured = json.loads(path.read_text())["8"]
    for degree, own in shapes.items():
        if str(degree) in measured:
            parameters = sum(own[i].num_parameters for i in (0, 1, 2, 25))
            expected = measured[str(degree)]["0"][2]
            said = update.seconds_per_call + parameters * update.seconds_per_parameter
            assert said == pytest.approx(expected, rel=0.05)


# -- links ---------------------------------------------------------------------------------

FIT = [[-0.1, 2.0, 10.0], 15 * GIGA]


def test_a_fit_is_a_link_that_is_constant_outside_what_was_measured() -> None:
    link = make_link(FIT)
    assert link.rate(1e6) == pytest.approx(10 * GIGA, rel=0.01)
    assert link.rate(4e6) == pytest.approx(13.6 * GIGA, rel=0.01)
    assert link.rate(2**29) == 15 * GIGA
    assert link.rate(1e12) == link.rate(LARGEST_BYTES)
    # It is below 0 at 2^16 bytes, where it was fitted, and at 1 byte of course.
    assert 0 < link.rate(1.0) < link.rate(1e6)
    assert divide(link, 4).rate(4e6) == pytest.approx(link.rate(4e6) / 4)


def machines(tmp_path: Path) -> MachineLinks:
    found = {
        "z": {
            "GH-96": {
                "1": {"z": {"GH-96": {"1": [[0.0, 0.0, 10.0], 10 * GIGA]}}},
                "4": {"z": {"GH-96": {"4": [[0.0, 0.0, 36.0], 36 * GIGA]}}},
            },
            "RTX-3090": {"2": {"z": {"GH-96": {"2": [[0.0, 0.0, 1.0], GIGA]}}}},
        }
    }
    return MachineLinks(write(tmp_path / "links.json", found))


def test_a_gpu_has_its_share_of_what_all_reach_together(tmp_path: Path) -> None:
    links = machines(tmp_path)
    four = Place("GH-96", "z", 4)
    assert links.together(four, four).bandwidth_bytes_per_s == 36 * GIGA
    assert links.share(four, four).bandwidth_bytes_per_s == 9 * GIGA
    # Measured one way only, and only between two of each.
    assert links.share(four, Place("RTX-3090", "z", 2)).bandwidth_bytes_per_s == GIGA / 2
    assert links.share(Place("RTX-3090", "z", 2), four).bandwidth_bytes_per_s == GIGA / 2
    with pytest.raises(ClusterError, match="nothing between 2 RTX-3090 in z and 2 V100-16 in z"):
        links.share(Place("RTX-3090", "z", 2), Place("V100-16", "z", 2))


def test_prices_of_egress(tmp_path: Path) -> None:
    prices = write(tmp_path / "prices.json", {"a": {"a": 0.0, "b": 0.01}, "b": {"a": 0.02, "b": 0.0}})
    assert read_egress_prices(prices) == {("a", "b"): 0.01, ("b", "a"): 0.02}


# -- runs ----------------------------------------------------------------------------------


def run_file(
    path: Path, layers: list[list[int]], replicas: list[list[tuple[str, int]]], **numbers: Any
) -> Path:
    """A run: of each stage its layers and replicas `(GPU, tensor-parallel degree)`."""
    pipeline = {
        "num_stages": len(layers),
        "layers_per_stage": layers,
        "tmp_per_stage": [[[[[gpu, 4, "z"]], degree] for gpu, degree in stage] for stage in replicas],
        "dp": [len(stage) for stage in replicas],
    }
    measured = {"mbs": 2, "gbs": 16, "real": 1.0, "red_grads": 0.1, "max_mem": 10, "N": 4} | numbers
    return write(path, {"zone": "z", "pipeline_list": [pipeline], **measured})


TWO_STAGES = [[0, 1], [2, 3, 4]]
GH = ("GH-96", 4)


def test_a_run_is_a_plan_with_a_rank_a_replica(tmp_path: Path) -> None:
    run = read_run(run_file(tmp_path / "a.json", TWO_STAGES, [[GH, GH], [GH, GH]]))
    plan = to_plan(run).validate()
    assert [group.ranks for group in plan.groups] == [(0, 1), (2, 3)]
    assert [stage.modules for stage in plan.ministages] == [
        ("embedding", "layers.0"),
        ("layers.1", "layers.2", "head"),
    ]
    assert [(m.rank, m.start) for m in plan.groups[1].microbatches] == [
        (2, 0), (3, 2), (2, 4), (3, 6), (2, 8), (3, 10), (2, 12), (3, 14)
    ]  # fmt: skip
    assert (run.num_gpus, run.doubts) == (16, ())
    cluster = to_cluster(run, machines(tmp_path))
    assert cluster.link(*cluster.places[:2]).bandwidth_bytes_per_s == 9 * GIGA


def test_what_looks_wrong_in_a_run_is_said(tmp_path: Path) -> None:
    run = read_run(run_file(tmp_path / "a.json", [[0, 1], [2, 13, 4]], [[GH], [GH]], red_grads=0.9))
    assert len(run.doubts) == 2
    assert "layer 13 is out of order" in run.doubts[0]
    assert to_plan(run).validate().ministages[1].modules[1] == "layers.2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gbs": 15}, "15 rows are not whole microbatches of 2 on 2 replicas"),
        ({"real": 0.0}, "mbs and real must be above 0"),
        ({"pipeline_list": []}, "0 pipelines; only runs of one"),
        ({"mbs": None}, "not a run of Sailor's"),
    ],
)
def test_a_run_that_cannot_be_read_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = run_file(tmp_path / "a.json", TWO_STAGES, [[GH, GH], [GH, GH]], **change)
    with pytest.raises(PlanError, match=message):
        read_run(path)


@needs_data
def test_all_real_runs_are_read() -> None:
    library = Library(DATA)
    root = library.find("measured/OPT-350-GH200")
    runs = [read_run(path, root) for path in sorted(root.rglob("*.json"))]
    assert len(runs) == 15
    assert {library.guess_model(run.num_layers) for run in runs} == {"OPT-350"}
    assert [run.name for run in runs if run.doubts] == ["N4/plan_config_N4_D4"]
    for run in runs:
        assert to_plan(run).validate().num_ranks * 4 == run.num_gpus
        if run.num_nodes > 1:
            cluster = to_cluster(run, library.links)
            # One of four network cards of 200 Gb/s.
            rate = cluster.link(*cluster.places[:2]).rate(64e6)
            assert math.isclose(rate, 22.6 * GIGA, rel_tol=0.02)
