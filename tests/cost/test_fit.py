"""The largest model that fits: its sizes are those of the real one, and it is the largest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zorselike.cli.show import make_flavor
from zorselike.cost.fit import (
    MAX_DEPTH,
    MIN_DEPTH,
    SETTINGS,
    Batch,
    Flavor,
    Room,
    Setting,
    find_largest,
    walk_in_each_way,
    walk_model,
)
from zorselike.models import build_model, flavors

GIB = 2**30
BATCH = Batch(num_rows=8, rows_per_microbatch=1, num_ministages=8)
WHOLE = replace(BATCH, num_ministages=1)
ROOM = Room(device_bytes=40 * GIB, context_bytes=GIB, host_bytes=200 * GIB)
RESIDENT, EVERYTHING = SETTINGS[0], SETTINGS[-1]


def make(family: str, name: str, dtype: str = "bfloat16") -> Flavor:
    return make_flavor(family, name, 2048, dtype)


def make_all(family: str) -> list[Flavor]:
    return [make(family, name) for name in flavors(family) if name != "debug"]


def count_real_parameters(flavor: str) -> int:
    with torch.device("meta"):
        model = build_model("llama", flavor)
    return sum(parameter.numel() for parameter in model.parameters())


def test_bytes_are_those_of_the_real_model() -> None:
    flavor = make("llama", "debug")
    number = count_real_parameters("debug")
    assert flavor.workload.num_parameters == number
    resident = walk_model(flavor.workload, BATCH, RESIDENT)
    assert resident.between_steps["parameter shards"] == 2 * number
    assert resident.between_steps["optimizer state"] == 3 * 4 * number
    assert resident.host_peak_bytes == 0
    whole = walk_model(flavor.workload, WHOLE, EVERYTHING)
    assert whole.device["gathered parameters"] == 2 * number
    assert whole.device["gradients"] == whole.device["gradient shards"] == 4 * number
    assert whole.host["optimizer state"] == 12 * number
    assert whole.host["parameter shards"] == 0  # Those of the first ministage stay.
    full = walk_model(make("llama", "debug", "float32").workload, BATCH, RESIDENT)
    assert full.between_steps["parameter shards"] == 4 * number
    assert full.between_steps["optimizer state"] == 2 * 4 * number


def test_a_borrowed_embedding_is_held_twice_and_updated_once() -> None:
    flavor = make("llama", "1b")
    number = count_real_parameters("1b")
    resident = walk_model(flavor.workload, BATCH, RESIDENT)
    assert resident.between_steps["parameter shards"] == 2 * (number + 128_256 * 2048)
    assert resident.between_steps["optimizer state"] == 12 * number
    alone = walk_model(flavor.workload, WHOLE, RESIDENT)
    assert alone.between_steps["parameter shards"] == 2 * number


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_what_is_found_fits_and_one_layer_more_does_not(family: str, setting: object) -> None:
    candidates = make_all(family)
    found = find_largest(candidates, BATCH, setting, ROOM)  # type: ignore[arg-type]
    assert found.walk is not None and ROOM.holds(found.walk)
    more = walk_in_each_way(found.base.with_layers(found.num_layers + 1), BATCH, found.setting, GIB)
    assert not any(map(ROOM.holds, more))
    assert found.limit.startswith("device: ")
    if found.flavor is not None:
        assert any(map(ROOM.holds, walk_in_each_way(found.flavor.workload, BATCH, found.setting, GIB)))


@pytest.mark.parametrize("setting", [RESIDENT, EVERYTHING], ids=lambda setting: setting.name)
def test_where_more_ministages_may_be_no_less_fits(setting: Setting) -> None:
    limits = (replace(BATCH, num_ministages=most) for most in (1, 3, 4, 8))
    fits = [find_largest(make_all("llama"), batch, setting, ROOM) for batch in limits]
    sizes = [fit.base.with_layers(fit.num_layers).num_parameters for fit in fits]
    assert sizes == sorted(sizes)


def test_each_setting_takes_less_of_the_device() -> None:
    flavor = make("llama", "7b")
    walks = [walk_model(flavor.workload, BATCH, setting) for setting in SETTINGS]
    peaks = [walk.device_peak_bytes for walk in walks]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.45 * peaks[0]
    hosts = [walk.host_peak_bytes for walk in walks]
    assert hosts == sorted(hosts)


def test_models_keep_the_familys_proportions_where_one_can() -> None:
    found = find_largest(make_all("llama"), BATCH, EVERYTHING, ROOM)
    assert MIN_DEPTH <= found.num_layers / found.base.num_layers <= MAX_DEPTH
    huge = replace(ROOM, device_bytes=300 * GIB)
    found = find_largest(make_all("gpt"), BATCH, RESIDENT, huge)
    assert found.flavor is found.base and found.base.name == "2.7b"
    assert found.num_layers > MAX_DEPTH * found.base.num_layers


def test_the_limit_says_what_is_full() -> None:
    small_host = replace(ROOM, host_bytes=30 * GIB)
    found = find_largest(make_all("llama"), BATCH, EVERYTHING, small_host)
    assert found.limit.startswith("host RAM: optimizer state")
    nothing = find_largest(make_all("llama"), BATCH, RESIDENT, replace(ROOM, device_bytes=2 * GIB))
    assert nothing.num_layers == 0 and nothing.walk is None and nothing.flavor is None
    assert nothing.limit.startswith("device: ")


@pytest.mark.parametrize("num_layers", [1, 2, 7, 32, 50])
@pytest.mark.parametrize("num_ministages", [1, 3, 8])
def test_any_depth_is_laid_out(num_layers: int, num_ministages: int) -> None:
    workload = make("llama", "8b").with_layers(num_layers)
    walk = walk_model(workload, replace(BATCH, num_ministages=num_ministages), RESIDENT)
    assert walk.between_steps["parameter shards"] == 2 * workload.num_parameters
