"""Profiles: what is written is read back equal, and what is wrong is an error that says where."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorselike.cost.profile import (
    CollectiveTimes,
    HostLinkRates,
    LargestBatch,
    LayerTimes,
    LinkTimes,
    Overheads,
    Profile,
    Source,
    UpdateTime,
    find_key,
)
from zorselike.errors import ProfileError
from zorselike.plan.workload import LayerKind, Workload

MEASURED = Source("measured", "2026-11-21", "two CPUs")
LAYER = LayerTimes(
    kind="layer",
    device="T4",
    dtype="float16",
    sequence_length=512,
    rows=(1, 2, 4),
    forward_s=(1e-3, 2e-3, 3e-3),
    backward_s=(2e-3, 4e-3, 6e-3),
    max_rows=9,
    memory_bytes_per_row=1e6,
    source=MEASURED,
)
PROFILE = Profile(
    model="llama 7b",
    layers=(LAYER, replace(LAYER, recompute="layer")),
    updates=(UpdateTime(device="T4", dtype="float16", seconds_per_parameter=1e-10, source=MEASURED),),
    host_links=(HostLinkRates(device="T4", to_device=1e10, to_host=9e9, both=1.2e10, source=MEASURED),),
    collectives=(
        CollectiveTimes(
            op="all_gather",
            devices=("A100-40", "T4"),
            num_nodes=2,
            num_bytes=(1000, 10**6),
            seconds=(1e-4, 2e-3),
            source=MEASURED,
        ),
    ),
    links=(LinkTimes(between=("a", "b"), num_bytes=(1, 10**6), seconds=(1e-4, 1e-3), source=MEASURED),),
    largest_batches=(
        LargestBatch(
            device="T4",
            zero=2,
            num_ranks=3,
            recompute="layer",
            max_rows=5,
            refused_rows=6,
            limit_bytes=10**9,
            source=MEASURED,
        ),
    ),
    overheads=Overheads(
        action_s=(("F", 6e-4),),
        unit_s=(("STEP", 1e-4),),
        shared_unit_s=(("UNSHARD", 2e-4),),
        step_s=1e-3,
        overlap_slowdown=1.1,
        context_bytes=5,
        source=MEASURED,
    ),
)


# -- files ---------------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=5)
TIMES = st.floats(0, 1e6, allow_subnormal=False) | st.integers(0, 10)
SOURCES = st.builds(
    Source,
    st.sampled_from(["measured", "interpolated", "catalogue", "given"]),
    st.dates().map(str) | st.just(""),
    st.text(max_size=8),
)
SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=4, unique=True).map(lambda s: tuple(sorted(s)))


@st.composite
def layer_times(draw: st.DrawFn) -> LayerTimes:
    rows = draw(SIZES)
    times = st.tuples(*[TIMES] * len(rows))
    return LayerTimes(
        kind=draw(NAMES),
        device=draw(NAMES),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        sequence_length=draw(st.integers(1, 4096)),
        recompute=draw(st.sampled_from(["none", "layer"])),
        tensor_parallel=draw(st.integers(1, 4)),
        rows=rows,
        forward_s=draw(times),
        backward_s=draw(times),
        max_rows=draw(st.none() | st.integers(rows[-1], 10**13)),
        memory_bytes_per_row=draw(st.none() | TIMES),
        source=draw(SOURCES),
    )


@st.composite
def collective_times(draw: st.DrawFn) -> CollectiveTimes:
    devices = tuple(sorted(draw(st.lists(NAMES, min_size=2, max_size=4))))
    num_bytes = draw(SIZES)
    return CollectiveTimes(
        op=draw(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"])),
        devices=devices,
        num_nodes=draw(st.integers(1, len(devices))),
        num_bytes=num_bytes,
        seconds=draw(st.tuples(*[TIMES] * len(num_bytes))),
        source=draw(SOURCES),
    )


def lists_of(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(entries, max_size=3, unique_by=find_key).map(tuple)


ACTION_TIMES = st.dictionaries(st.sampled_from(["F", "B", "SEND_F"]), TIMES).map(lambda d: tuple(d.items()))

PROFILES = st.builds(
    Profile,
    model=NAMES,
    workload_fingerprint=st.text(max_size=5),
    layers=lists_of(layer_times()),
    collectives=lists_of(collective_times()),
    updates=lists_of(
        st.builds(
            UpdateTime,
            device=NAMES,
            dtype=st.just("float32"),
            seconds_per_parameter=TIMES,
            seconds_per_call=TIMES,
            source=SOURCES,
        )
    ),
    overheads=st.builds(
        Overheads,
        action_s=ACTION_TIMES,
        unit_s=ACTION_TIMES,
        shared_unit_s=ACTION_TIMES,
        step_s=TIMES,
        overlap_slowdown=st.floats(1, 3),
        context_bytes=st.integers(0, 2**40),
        allocator_share=st.floats(0, 1),
        source=SOURCES,
    ),
)


@settings(max_examples=60)
@given(PROFILES)
def test_what_is_written_is_read_back_equal(profile: Profile) -> None:
    assert Profile.parse(profile.format()) == profile


def test_every_kind_of_entry_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t4.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["t4.json"]
    assert {type(entry) for _, entry in PROFILE.list_entries()} == {
        LayerTimes,
        UpdateTime,
        HostLinkRates,
        CollectiveTimes,
        LinkTimes,
        LargestBatch,
    }
    # An entry a line, so that files can be compared.
    assert sum('"kind": "layer"' in line for line in path.read_text().splitlines()) == 2


def test_a_profile_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t4.json"
    PROFILE.save(path)
    wrong = replace(PROFILE, layers=(replace(LAYER, forward_s=(-1.0, 2e-3, 3e-3)),))
    with pytest.raises(ProfileError, match=r"t4\.json: layers\[0\]\.forward_s\[0\] is -1\.0"):
        wrong.save(path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ProfileError, match="cannot be written"):
        replace(PROFILE, model="other").save(path)
    monkeypatch.undo()
    assert Profile.load(path) == PROFILE
    assert len(list(tmp_path.iterdir())) == 1


def edit(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(PROFILE.format())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["layers"][1]["backward_s"].__setitem__(2, -1),
            r"layers\[1\]\.backward_s\[2\] is -1.*again",
        ),
        (lambda c: c["layers"][0].update(rows=[1, 4, 2]), r"layers\[0\]\.rows\[2\] is 2 after 4; sort"),
        (lambda c: c["layers"][0].update(rows=[1, 1, 2]), r"rows\[1\] is 1 after 1"),
        (lambda c: c["layers"][0].update(rows=[0, 1, 2]), r"rows\[0\] is 0; give 1 or more"),
        (lambda c: c["layers"][0].update(rows=[], forward_s=[], backward_s=[]), "rows is empty"),
        (lambda c: c["layers"][0].update(forward_s=[1]), r"forward_s has 1 times for 3 rows"),
        (lambda c: c["layers"][0].update(max_rows=3), "max_rows is 3, yet 4 rows were measured"),
        (lambda c: c["layers"][0].update(dtype="fp16"), "dtype is 'fp16'; give one of 'float32'"),
        (lambda c: c["layers"][0].update(recompute="all"), "recompute is 'all'"),
        (lambda c: c["layers"][0].update(sequence_length=0), "sequence_length is 0"),
        (lambda c: c["layers"][0].update(memory_bytes_per_row=-1), "memory_bytes_per_row is -1"),
        (lambda c: c["layers"][0].update(kind=""), r"layers\[0\]\.kind is empty"),
        (lambda c: c["layers"][1].update(recompute="none"), r"layers\[0\] and layers\[1\] are of the same"),
        (lambda c: c["layers"][0].update(foward_s=[]), r"foward_s is not a key.*'forward_s'"),
        (lambda c: c["layers"][0].pop("source"), r"layers\[0\]\.source is missing"),
        (lambda c: c["layers"][0].update(rows="1"), r"layers\[0\]\.rows is '1'; it must be a list"),
        (lambda c: c["layers"][0]["source"].update(kind="guess"), r"source\.kind is 'guess'"),
        (
            lambda c: c["layers"][0]["source"].update(date="21.11."),
            r"source\.date is '21\.11\.'; write it as",
        ),
        (
            lambda c: c.update(version=1),
            "version is 1; this zorselike reads version 2: make the profile anew with it",
        ),
        (lambda c: c.pop("version"), 'version is missing; begin with "version": 2'),
        (lambda c: c.update(model=""), "model is empty"),
        (lambda c: c.update(modle="x"), "modle is not a key; did you mean 'model'"),
        (lambda c: c.update(layers={}), "layers is {}; it must be a list"),
        (lambda c: c["host_links"][0].update(to_device=1e14), r"to_device is 100000000000000\.0; .*10 TB/s"),
        (lambda c: c["host_links"][0].update(both=0), r"both is 0.0; give 1 or more"),
        # Sums and products of such numbers are none, and ended in tracebacks.
        (lambda c: c["layers"][0].update(forward_s=[1e-3, 2e-3, 1e308]), r"forward_s\[2\] is 1e\+308; .*1e9"),
        (
            lambda c: c["layers"][0].update(forward_s=[1e-3, 2e-3, 10**400]),
            r"forward_s.* is inf; it must",
        ),
        (
            lambda c: c["layers"][0].update(memory_bytes_per_row=1e308),
            r"per_row is 1e\+308; give 1e18",
        ),
        (
            lambda c: c["updates"][0].update(seconds_per_call=1e300),
            r"per_call is 1e\+300; a time is 0",
        ),
        (lambda c: c["host_links"][0].update(both=5e-324), r"both is 5e-324; give 1 or more"),
        (lambda c: c["links"][0].update(num_bytes=[1, 10**19]), r"num_bytes\[1\] is 10*; give 1e18 or less"),
        (lambda c: c["overheads"].update(step_s=1e308), r"step_s is 1e\+308"),
        (lambda c: c["overheads"].update(overlap_slowdown=1e308), r"it is a factor, 1 to 1e6"),
        (lambda c: c["overheads"].update(allocator_share=1e308), r"it is a share, 0 to 1e6"),
        (lambda c: c["overheads"].update(context_bytes=10**400), r"context_bytes is 10*.*1e18 or less"),
        (lambda c: c["collectives"][0].update(op="gather"), "op is 'gather'"),
        (lambda c: c["collectives"][0].update(devices=["T4", "A100-40"]), "devices is .*sorted"),
        (lambda c: c["collectives"][0].update(num_nodes=3), "num_nodes is 3; 2 devices are on 1 to 2"),
        (lambda c: c["links"][0].update(between=["b", "a"]), "between is .*sorted"),
        (lambda c: c["links"][0].update(between=["a"]), r"between is \['a'\]; it must be two node names"),
        (lambda c: c["links"][0].update(seconds=[0, 1e-9]), r"links\[0\]\.seconds\[0\] is 0 for 1 bytes"),
        (lambda c: c["updates"][0].update(seconds_per_parameter=-1), "seconds_per_parameter is -1"),
        (lambda c: c["largest_batches"][0].update(zero=4), "zero is 4"),
        (lambda c: c["largest_batches"][0].update(num_ranks=0), "num_ranks is 0; give 1 or more"),
        (lambda c: c["largest_batches"][0].update(max_rows=-1), "max_rows is -1; give 0 or more"),
        (lambda c: c["largest_batches"][0].update(refused_rows=5), "refused_rows is 5, yet 5 fitted"),
        (lambda c: c["largest_batches"][0].update(recompute="all"), "recompute is 'all'"),
        (lambda c: c["overheads"].update(overlap_slowdown=0.5), "overlap_slowdown is 0.5"),
        (lambda c: c["overheads"]["action_s"].update(FORWARD=1), "'FORWARD', which is no kind of action"),
        (lambda c: c["overheads"].update(unit_s={"F": -1}), r"overheads\.unit_s\.F is -1"),
        (
            lambda c: c["overheads"].update(shared_unit_s={"BACK": 1}),
            "shared_unit_s has 'BACK', which is no kind",
        ),
        (lambda c: c["overheads"].update(step_s=-1), r"overheads\.step_s is -1"),
        (lambda c: c["overheads"].update(context_bytes=-1), "context_bytes is -1"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profile.parse(edit(change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", r"the file is \[\]; it must be a table"),
        ("5", "the file is 5; it must be a table"),
        ("{'a': 1}", "is not JSON"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=f"{re.escape(str(path))}: {message}"):
        Profile.load(path)
    with pytest.raises(ProfileError, match="there is no such file"):
        Profile.load(tmp_path / "q.json")


def test_no_number_is_refused() -> None:
    text = PROFILE.format().replace("0.001", "NaN")
    with pytest.raises(ProfileError, match=r"layers\[0\]\.forward_s\[0\] is nan; a time is"):
        Profile.parse(text)


# -- what it is for ------------------------------------------------------------------------


def make_workload(**changes: object) -> Workload:
    kind = LayerKind(name="layer", num_parameters=10, forward_flops_per_row=1e9)
    workload = Workload(
        model="llama 7b",
        sequence_length=512,
        dtype="float16",
        layers=(("layers.0", "layer"),),
        kinds={"layer": kind},
    )
    return replace(workload, **changes)  # type: ignore[arg-type]


def test_a_profile_is_for_one_model_length_and_dtype() -> None:
    PROFILE.check_workload(make_workload())
    PROFILE.check_workload(make_workload(model="Llama 7B"))
    with pytest.raises(ProfileError, match="is of 'llama 7b', the workload is 'llama 13b'"):
        PROFILE.check_workload(make_workload(model="llama 13b"))
    with pytest.raises(ProfileError, match="no times for float16 at 1024 tokens, only for float16 at 512"):
        PROFILE.check_workload(make_workload(sequence_length=1024))
    with pytest.raises(ProfileError, match="no times for float32 at 512 tokens"):
        PROFILE.check_workload(make_workload(dtype="float32"))
    # The dtype is in the fingerprint too, and is what differs.
    marked = replace(PROFILE, workload_fingerprint=make_workload().fingerprint)
    with pytest.raises(ProfileError, match="no times for float32 at 512 tokens"):
        marked.check_workload(make_workload(dtype="float32"))
    only_links = replace(PROFILE, layers=())
    only_links.check_workload(make_workload(dtype="float32"))


# -- merging -------------------------------------------------------------------------------


def test_later_measurements_replace_earlier_ones() -> None:
    faster = replace(LAYER, forward_s=(1e-4, 2e-4, 3e-4))
    elsewhere = replace(LAYER, device="A100-40")
    merged = PROFILE.merge(Profile(model="llama 7b", layers=(elsewhere, faster)))
    assert merged.layers == (faster, PROFILE.layers[1], elsewhere)
    assert merged.links == PROFILE.links
    assert merged.overheads == PROFILE.overheads
    assert merged.merge(PROFILE).layers == (LAYER, PROFILE.layers[1], elsewhere)
    assert PROFILE.merge(PROFILE) == PROFILE


@settings(max_examples=40)
@given(PROFILES, PROFILES)
def test_merging_is_total_and_keeps_everything(first: Profile, second: Profile) -> None:
    second = replace(second, model=first.model, workload_fingerprint=first.workload_fingerprint)
    merged = first.merge(second)
    merged.format()  # Consistent.
    keys = {(type(e), find_key(e)) for p in (first, second) for _, e in p.list_entries()}
    found = {(type(e), find_key(e)): e for _, e in merged.list_entries()}
    assert found.keys() == keys
    assert all(found[type(e), find_key(e)] == e for _, e in second.list_entries())


def test_profiles_of_different_things_are_not_merged() -> None:
    with pytest.raises(ProfileError, match="profiles of 'llama 7b' and of 'gpt' cannot be merged"):
        PROFILE.merge(Profile(model="gpt"))
    first, second = (replace(PROFILE, workload_fingerprint=text) for text in ("aa", "bb"))
    with pytest.raises(ProfileError, match="workloads aa and bb"):
        first.merge(second)
    assert first.merge(PROFILE).workload_fingerprint == "aa"


def test_a_file_from_before_the_program_was_measured_is_read() -> None:
    def forget(content: dict[str, Any]) -> None:
        for key in ("unit_s", "shared_unit_s", "step_s"):
            del content["overheads"][key]

    overheads = Profile.parse(edit(forget)).overheads
    assert overheads == replace(PROFILE.overheads, unit_s=(), shared_unit_s=(), step_s=0.0)


def test_overheads_that_were_measured_apart_are_merged() -> None:
    program = Overheads(action_s=(("F", 1.0),), step_s=2.0, source=MEASURED)
    device = Overheads(context_bytes=3, allocator_share=0.5, source=Source("measured", "2026-11-22"))
    merged = replace(PROFILE, overheads=program).merge(replace(PROFILE, overheads=device)).overheads
    assert merged == replace(device, action_s=(("F", 1.0),), step_s=2.0)
    assert PROFILE.merge(replace(PROFILE, overheads=Overheads())).overheads == PROFILE.overheads
    again = PROFILE.merge(replace(PROFILE, overheads=program)).overheads
    assert again == replace(
        PROFILE.overheads,
        action_s=(("F", 1.0),),
        unit_s=(),
        shared_unit_s=(),
        step_s=2.0,
        overlap_slowdown=1.0,
    )
