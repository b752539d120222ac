"""Seconds of layers: as measured, and what takes its place is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zorselike.cost.catalogue import find_device
from zorselike.cost.curves import CurveWarning
from zorselike.cost.layer_times import (
    REACHED_OF_MEMORY,
    REACHED_OF_PEAK,
    REACHED_OF_WHOLE,
    LayerTimeModel,
    find_implausible,
)
from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.errors import ProfileError
from zorselike.plan.workload import LayerKind, Workload

SOURCE = Source("measured", "2026-11-21")
WORKLOAD = Workload(
    model="llama 7b",
    sequence_length=512,
    dtype="float16",
    layers=(("tok_embeddings", "embedding"), ("layers.0", "layer"), ("output", "head")),
    kinds={
        "embedding": LayerKind(name="embedding", num_parameters=9, forward_flops_per_row=0.0),
        "layer": LayerKind(name="layer", num_parameters=9, forward_flops_per_row=1e9),
        "head": LayerKind(
            name="head", num_parameters=9, forward_flops_per_row=3e9, backward_flops_per_row=5e9
        ),
    },
)
LAYER = LayerTimes(
    kind="layer",
    device="T4",
    dtype="float16",
    sequence_length=512,
    rows=(1, 2, 4),
    forward_s=(1.0, 2.0, 4.0),
    backward_s=(2.0, 4.0, 8.0),
    max_rows=9,
    source=SOURCE,
)


def clock_of(*layers: LayerTimes, workload: Workload = WORKLOAD, updates: Any = ()) -> LayerTimeModel:
    return LayerTimeModel(Profile(model="llama 7b", layers=layers, updates=updates), workload)


def test_measured_times_are_interpolated_and_nothing_is_assumed() -> None:
    clock = clock_of(LAYER)
    assert clock.forward_s("layer", "T4", 2, "none") == 2.0
    assert clock.forward_s("layer", "T4", 3, "none") == pytest.approx(3.0)
    assert clock.backward_s("layer", "T4", 4, "none") == pytest.approx(8.0)
    assert clock.assumptions == ()
    assert clock.max_rows("layer", "T4", "none") == 9
    assert clock.max_rows("layer", "T4", "layer") is None


def test_beyond_what_was_measured_it_goes_straight_on() -> None:
    clock = clock_of(LAYER)
    assert clock.backward_s("layer", "T4", 8, "none") == pytest.approx(16.0)
    assert clock.assumptions == (
        "layer on T4: more than the 4 rows that were measured; straight on from there",
    )


def test_recomputation_that_was_not_measured_is_a_second_forward() -> None:
    clock = clock_of(LAYER)
    assert clock.forward_s("layer", "T4", 2, "layer") == 2.0
    assert clock.assumptions == ()  # A forward is the same either way.
    assert clock.backward_s("layer", "T4", 2, "layer") == 2.0 + 4.0
    assert clock.assumptions == (
        "layer on T4: recomputation was not measured; backward and a second forward",
    )
    clock.backward_s("layer", "T4", 4, "layer")
    assert len(clock.assumptions) == 1


def test_what_has_no_backward_is_not_computed_again() -> None:
    frozen = replace(WORKLOAD.kinds["layer"], backward_flops_per_row=0.0)
    workload = replace(WORKLOAD, kinds={**WORKLOAD.kinds, "layer": frozen})
    measured = clock_of(replace(LAYER, backward_s=(0.0, 0.0, 0.0)), workload=workload)
    for clock in (measured, clock_of(workload=workload)):
        assert clock.forward_s("layer", "T4", 2, "layer") > 0
        assert clock.backward_s("layer", "T4", 2, "none") == 0
        assert clock.backward_s("layer", "T4", 2, "layer") == 0


def test_recomputation_that_was_measured_is_taken() -> None:
    recomputed = replace(LAYER, recompute="layer", backward_s=(2.5, 5.0, 10.0), max_rows=20)
    clock = clock_of(LAYER, recomputed)
    assert clock.backward_s("layer", "T4", 2, "layer") == 5.0
    assert clock.backward_s("layer", "T4", 2, "none") == 4.0
    assert clock.max_rows("layer", "T4", "layer") == 20
    assert clock.assumptions == ()


def test_without_recomputation_its_forward_is_taken_off() -> None:
    clock = clock_of(replace(LAYER, recompute="layer"))
    assert clock.backward_s("layer", "T4", 2, "none") == 4.0 - 2.0
    assert clock.assumptions == (
        "layer on T4: measured with recomputation only; backward without its forward",
    )


def test_other_kinds_take_their_flops_at_the_layers_speed() -> None:
    clock = clock_of(LAYER)
    assert clock.forward_s("head", "T4", 2, "none") == pytest.approx(3 * 2.0)
    assert clock.backward_s("head", "T4", 2, "none") == pytest.approx(2.5 * 4.0)
    assert clock.forward_s("embedding", "T4", 2, "none") == 0.0
    assert clock.assumptions == ("head on T4: not measured; its FLOPs at the speed of layer",)


def test_a_kind_recomputed_by_flops_computes_its_forward_again() -> None:
    clock = clock_of(LAYER)
    assert clock.backward_s("head", "T4", 2, "layer") == pytest.approx((5 + 3) / 2 * 4.0)


def test_where_no_layer_was_measured_the_kind_with_most_flops_sets_the_speed() -> None:
    clock = clock_of(replace(LAYER, kind="head"))
    assert clock.forward_s("layer", "T4", 2, "none") == pytest.approx(2.0 / 3)
    assert clock.assumptions == ("layer on T4: not measured; its FLOPs at the speed of head",)


def test_a_device_without_measurements_is_taken_from_the_catalogue() -> None:
    clock = clock_of(LAYER)
    peak = find_device("A100-40").peak_flops["float16"]
    assert clock.forward_s("layer", "A100-40", 2, "none") == pytest.approx(2e9 / (REACHED_OF_PEAK * peak))
    assert clock.backward_s("layer", "A100-40", 2, "layer") == pytest.approx(
        2 * 3e9 / (REACHED_OF_PEAK * peak)
    )
    assert clock.assumptions == ("A100-40: nothing was measured on it; FLOPs at 45% of 312 TFLOP/s",)


def test_a_device_that_nobody_knows_is_an_error() -> None:
    clock = clock_of(LAYER)
    with pytest.raises(ProfileError, match=r"no times of layer on T5, .* \(known here: T4\)"):
        clock.forward_s("layer", "T5", 1, "none")
    with pytest.raises(ProfileError, match="no peak of it for bfloat16"):
        bf16 = replace(WORKLOAD, dtype="bfloat16")
        clock_of(replace(LAYER, device="A100-40", dtype="bfloat16"), workload=bf16).forward_s(
            "layer", "T4", 1, "none"
        )
    with pytest.raises(ProfileError, match="no layers of kind 'lyer'"):
        clock.forward_s("lyer", "T4", 1, "none")


def test_tensor_parallel_degrees_are_kept_apart() -> None:
    four = replace(LAYER, tensor_parallel=4, forward_s=(0.5, 1.0, 2.0))
    clock = clock_of(LAYER, four)
    assert clock.forward_s("layer", "T4", 2, "none", 4) == 1.0
    assert clock.forward_s("layer", "T4", 2, "none") == 2.0
    assert clock.forward_s("head", "T4", 2, "none", 4) == pytest.approx(3.0)
    assert clock.forward_s("layer", "T4", 2, "none", 2) == pytest.approx(1.0 / REACHED_OF_WHOLE)
    assert clock.assumptions[-1] == (
        "layer on T4: not measured at tensor parallelism 2; 1/2 of its time on one device at 95% of the speed"
    )
    assert clock.forward_s("layer", "T4", 2, "none", 8) == pytest.approx(0.5 / REACHED_OF_WHOLE)
    assert clock.assumptions[-1] == (
        "layer on T4: not measured at tensor parallelism 8; 1/2 of its time at 4 at 95% of the speed"
    )
    # What is measured nowhere else is cut from what it takes whole.
    assert clock.forward_s("head", "T4", 2, "none", 2) == pytest.approx(3.0 / REACHED_OF_WHOLE)
    with pytest.raises(ProfileError, match="T4 at tensor parallelism 2, only at 4"):
        clock_of(four).forward_s("layer", "T4", 2, "none", 2)


def test_other_dtypes_and_lengths_are_not_mixed_in() -> None:
    longer = replace(LAYER, sequence_length=1024, forward_s=(9.0, 9.0, 9.0), device="T4")
    full = replace(LAYER, dtype="float32", forward_s=(7.0, 7.0, 7.0))
    clock = clock_of(LAYER, longer, full)
    assert clock.forward_s("layer", "T4", 2, "none") == 2.0
    assert clock_of(longer, full, workload=replace(WORKLOAD, dtype="float32")).forward_s(
        "layer", "T4", 2, "none"
    ) == pytest.approx(7.0)
    with pytest.raises(ProfileError, match="no times for float16 at 2048"):
        clock_of(LAYER, workload=replace(WORKLOAD, sequence_length=2048))


def test_falling_times_are_repaired_and_named() -> None:
    clock = clock_of(replace(LAYER, forward_s=(1.0, 5.0, 4.0)))
    with pytest.warns(CurveWarning, match=r"forward of layer on T4 \(float16, 512 tokens\)"):
        assert clock.forward_s("layer", "T4", 2, "none") == 4.0


def test_measured_memory_is_told_by_kind_device_and_recomputation() -> None:
    recomputed = replace(LAYER, recompute="layer", memory_bytes_per_row=10.0)
    parallel = replace(LAYER, tensor_parallel=2, memory_bytes_per_row=50.0)
    clock = clock_of(
        replace(LAYER, memory_bytes_per_row=99.5), recomputed, parallel, replace(LAYER, kind="x")
    )
    assert clock.kept_bytes == {("layer", "T4", "none"): 99.5, ("layer", "T4", "layer"): 10.0}


def test_updates() -> None:
    times = UpdateTime(
        device="T4", dtype="float16", seconds_per_parameter=2.0, seconds_per_call=5.0, source=SOURCE
    )
    clock = clock_of(LAYER, updates=(times,))
    assert clock.update_s("T4", 10) == 25.0
    assert clock.update_s("T4", 0) == 0.0
    assert clock.assumptions == ()
    bandwidth = find_device("A100-40").memory_bandwidth_bytes_per_s
    # Gradient, master and two moments are read, master, moments and the half-precision shard written.
    assert clock.update_s("A100-40", 100) == pytest.approx(
        100 * (4 * 4 + 3 * 4 + 2) / (REACHED_OF_MEMORY * bandwidth)
    )
    assert clock.update_s("T5", 100) == 0.0
    assert [line.split(":")[0] for line in clock.assumptions] == ["A100-40", "T5"]


@pytest.mark.parametrize(
    ("factor", "share"),
    [(1e3, "0.0003 times the peak of the card; are its times in seconds?"), (1, None), (1e-3, "300 times")],
)
def test_times_of_another_unit_are_told(factor: float, share: str | None) -> None:
    """A layer at 30 % of a T4's peak, and its milliseconds as seconds, and the other way."""
    each_s = 1e11 / (0.3 * find_device("T4").peak_flops["float16"])
    heavy = replace(WORKLOAD.kinds["layer"], forward_flops_per_row=1e11)
    workload = replace(WORKLOAD, kinds=WORKLOAD.kinds | {"layer": heavy})
    times = replace(LAYER, forward_s=tuple(factor * rows * each_s for rows in LAYER.rows))
    told = find_implausible(Profile(model="llama 7b", layers=(times,)), workload)
    assert told is None if share is None else share in str(told)
    small = replace(workload, kinds=workload.kinds | {"layer": WORKLOAD.kinds["embedding"]})
    assert find_implausible(Profile(model="llama 7b", layers=(times,)), small) is None
