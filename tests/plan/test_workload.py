"""Workload files: what is refused, and that what is written is read back equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.errors import ProfileError
from zorselike.plan.workload import ITEMSIZES, LayerKind, Workload

EMBEDDING = LayerKind(
    name="embedding", num_parameters=100, forward_flops_per_row=0, output_elements_per_row=40
)
LAYER = LayerKind(
    name="layer",
    num_parameters=60,
    forward_flops_per_row=1200.5,
    input_elements_per_row=40,
    output_elements_per_row=40,
    activation_bytes_per_row=320,
    working_bytes_per_row=64,
)
HEAD = LayerKind(
    name="head",
    num_parameters=0,
    num_borrowed=100,
    forward_flops_per_row=800,
    backward_flops_per_row=1500,
    input_elements_per_row=40,
)
WORKLOAD = Workload(
    model="tiny",
    sequence_length=8,
    dtype="bfloat16",
    layers=(("embed", "embedding"), ("layers.0", "layer"), ("layers.1", "layer"), ("out", "head")),
    kinds={kind.name: kind for kind in (EMBEDDING, LAYER, HEAD)},
    ties=(("embed", "out"),),
)


def test_sums_over_the_layers() -> None:
    assert WORKLOAD.num_parameters == 100 + 2 * 60
    assert WORKLOAD.flops_per_row() == 2 * 3 * 1200.5 + 800 + 1500
    assert WORKLOAD.flops_per_row(recompute=True) == WORKLOAD.flops_per_row() + 2 * 1200.5
    assert WORKLOAD.kind_of["layers.1"] is LAYER
    assert (WORKLOAD.itemsize, WORKLOAD.masters) == (2, True)
    assert not replace(WORKLOAD, dtype="float32").masters


def test_a_file_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    WORKLOAD.save(path)
    assert Workload.load(path) == WORKLOAD
    assert Workload.load(path).fingerprint == WORKLOAD.fingerprint
    assert len(path.read_text().splitlines()) < 60


KINDS = st.builds(
    LayerKind,
    name=st.text(min_size=1, max_size=4),
    num_parameters=st.integers(0, 10**12),
    num_trainable=st.one_of(st.none(), st.just(0)),
    num_borrowed=st.integers(0, 10**9),
    num_borrowed_trainable=st.one_of(st.none(), st.just(0)),
    forward_flops_per_row=st.floats(0, 1e20),
    backward_flops_per_row=st.one_of(st.none(), st.floats(0, 1e20), st.integers(0, 10**15)),
    input_elements_per_row=st.integers(0, 10**12),
    output_elements_per_row=st.integers(0, 10**12),
    activation_bytes_per_row=st.integers(0, 10**12),
    working_bytes_per_row=st.integers(0, 10**12),
)


@st.composite
def make_workloads(draw: st.DrawFn) -> Workload:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3, unique_by=lambda kind: kind.name))
    modules = draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
    return Workload(
        model=draw(st.text(max_size=8)),
        sequence_length=draw(st.integers(1, 10**6)),
        dtype=draw(st.sampled_from(sorted(ITEMSIZES))),
        layers=tuple((module, draw(st.sampled_from(kinds)).name) for module in modules),
        kinds={kind.name: kind for kind in kinds},
        ties=((modules[0], modules[-1]),) if len(modules) > 1 and draw(st.booleans()) else (),
        num_moments=draw(st.integers(0, 3)),
    )


@settings(max_examples=60)
@given(make_workloads())
def test_any_workload_is_read_back_equal(workload: Workload) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        workload.save(Path(folder) / "x.json")
        read_back = Workload.load(Path(folder) / "x.json")
    assert read_back == workload
    assert read_back.fingerprint == workload.fingerprint


def test_into_how_many_parts_layers_can_be_cut_is_kept_and_changes_no_fingerprint(tmp_path: Path) -> None:
    cut = replace(WORKLOAD, max_tensor_parallel=4)
    cut.save(tmp_path / "cut.json")
    assert Workload.load(tmp_path / "cut.json").max_tensor_parallel == 4
    assert cut.fingerprint == WORKLOAD.fingerprint


def test_the_fingerprint_changes_with_everything_else() -> None:
    others = [
        replace(WORKLOAD, model="other"),
        replace(WORKLOAD, sequence_length=9),
        replace(WORKLOAD, dtype="float16"),
        replace(WORKLOAD, layers=WORKLOAD.layers[:3], ties=()),
        replace(WORKLOAD, kinds={**WORKLOAD.kinds, "layer": replace(LAYER, working_bytes_per_row=65)}),
        replace(WORKLOAD, ties=()),
        replace(WORKLOAD, num_moments=1),
    ]
    assert len({WORKLOAD.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
    reordered = replace(WORKLOAD, kinds=dict(reversed(WORKLOAD.kinds.items())))
    assert reordered.fingerprint == WORKLOAD.fingerprint


# -- what is refused -------------------------------------------------------------------------


def content(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "version": 1,
        "model": "tiny",
        "sequence_length": 8,
        "dtype": "float32",
        "kinds": [{"name": "layer", "num_parameters": 6, "forward_flops_per_row": 12.5}],
        "layers": [["layers.0", "layer"], ["layers.1", "layer"]],
    }
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def kind(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "layer", "num_parameters": 6, "forward_flops_per_row": 12.5, **changes}]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": None}, 'version is missing; begin with "version": 1'),
        ({"version": 2}, "version is 2; this zorselike reads version 1"),
        ({"modell": "x"}, "modell is not a key; did you mean 'model'?"),
        ({"sequence_length": 8.5}, "sequence_length is 8.5; it must be an integer"),
        ({"sequence_length": 0}, "sequence_length is 0; give 1 or more"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; give one of 'float32', 'bfloat16'"),
        ({"num_moments": -1}, "num_moments is -1"),
        ({"layers": None}, "layers is missing; add it"),
        ({"layers": []}, "layers is empty; list the model's modules with their kinds"),
        ({"layers": [["a"]]}, "layers[0] is ['a']; it must be [module, kind]"),
        ({"layers": [["a", "layer"], ["a", "layer"]]}, "layers has module a more than once"),
        (
            {"layers": [["a", "layr"]]},
            "a is of kind 'layr', which kinds does not have; did you mean 'layer'?",
        ),
        ({"ties": [["layers.0", "layers.2"]]}, "ties names 'layers.2', which is not in layers; did you mean"),
        ({"ties": [["layers.1", "layers.0"]]}, "the owner 'layers.1' must come before 'layers.0'"),
        ({"kinds": {}}, "kinds is {}; it must be a list of tables"),
        ({"kinds": kind() * 2}, "kinds has 'layer' 2 times"),
        ({"kinds": kind(flops=1)}, "kinds[0].flops is not a key"),
        ({"kinds": kind(num_trainable=7)}, "kind layer: num_trainable is 7 of num_parameters = 6"),
        ({"kinds": kind(num_borrowed_trainable=1)}, "num_borrowed_trainable is 1 of num_borrowed = 0"),
        ({"kinds": kind(num_parameters="6")}, "kinds[0].num_parameters is '6'; it must be an integer"),
        (
            {"kinds": kind(forward_flops_per_row=-1)},
            "kind layer: forward_flops_per_row is -1.0; give a finite",
        ),
        ({"kinds": kind(forward_flops_per_row=float("nan"))}, "forward_flops_per_row is nan"),
        ({"kinds": kind(working_bytes_per_row=-1)}, "kind layer: working_bytes_per_row is -1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    Workload.parse(json.dumps(content()))
    path = tmp_path / "w.json"
    path.write_text(json.dumps(content(**changes)))
    with pytest.raises(ProfileError) as caught:
        Workload.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"), [("{", "is not JSON"), ("[]", "the file is []; it must be a table")]
)
def test_files_that_are_none_are_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(ProfileError) as caught:
        Workload.load(tmp_path / "w.json")
    assert told in str(caught.value)
    with pytest.raises(ProfileError, match="there is no such file; check the path of the workload"):
        Workload.load(tmp_path / "none.json")


def test_a_workload_made_in_python_is_judged_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="kinds has 'layer' under the name 'block'"):
        replace(WORKLOAD, kinds={**WORKLOAD.kinds, "block": LAYER}).save(tmp_path / "x.json")
