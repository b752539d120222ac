"""Sizes, bandwidths and times with their units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.errors import FileError
from zorselike.text.units import (
    parse_size,
    read_memory,
    read_rate,
    read_size,
    read_time,
    show_rate,
    show_size,
    show_time,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GiB", 24 * 2**30), ("80 gb", 80e9), ("512MB", 512e6), ("1.5TiB", 1.5 * 2**40), ("7B", 7)],
)
def test_sizes(text: str, num_bytes: float) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25Gb/s", 3.125e9),
        ("25GB/s", 25e9),
        ("25 Gbps", 3.125e9),
        ("25Gbit/s", 3.125e9),
        ("1GiB/s", 2**30),
        ("800kb/s", 1e5),
    ],
)
def test_bits_and_bytes_are_told_apart(text: str, bytes_per_s: float) -> None:
    assert read_rate(text, "x") == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"), [("10us", 1e-5), ("10µs", 1e-5), ("0.6ms", 6e-4), ("3s", 3), ("5 ns", 5e-9)]
)
def test_times(text: str, seconds: float) -> None:
    assert read_time(text, "x") == seconds


@pytest.mark.parametrize(
    "value", [25, 25e9, "25", "25G", "25gb/s", "GB/s", "25GB", "1e400GB/s", "fast", True, None]
)
def test_a_bandwidth_without_a_clear_unit_is_refused(value: object) -> None:
    with pytest.raises(FileError, match=r'nic is .*"25Gb/s" for bits or "3GB/s" for bytes'):
        read_rate(value, "nic")


@pytest.mark.parametrize("value", [256, "256", "256Gb", "1e400GB", "-", "256GB/s"])
def test_a_size_without_a_clear_unit_is_refused(value: object) -> None:
    with pytest.raises(FileError, match=r'host_memory is .* "256GiB"'):
        read_memory(value, "host_memory")


@pytest.mark.parametrize("value", [10, "10", "10m", "10 minutes"])
def test_a_time_without_a_clear_unit_is_refused(value: object) -> None:
    with pytest.raises(FileError, match=r'latency is .* "10us"'):
        read_time(value, "latency")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_size(256 * 2**30), "256GiB"),
        (show_size(80e9), "80GB"),
        (show_rate(3.125e9), "3.125GB/s"),
        (show_time(1e-5), "10us"),
        (show_time(6e-4), "600us"),
        (show_time(0), "0s"),
    ],
)
def test_numbers_are_shown_in_round_units(shown: str, text: str) -> None:
    assert shown == text


POSITIVE = st.floats(0, 1e15, allow_subnormal=False)


@given(POSITIVE)
def test_what_is_shown_is_read_back_equal(value: float) -> None:
    assert read_size(show_size(value), "x") == value
    assert read_rate(show_rate(value), "x") == value
    assert read_time(show_time(value), "x") == value
