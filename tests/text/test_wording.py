"""How messages name what was meant."""

from __future__ import annotations

import pytest

from zorselike.text.wording import suggest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("us-east-1A", "; did you mean 'us-east-1a'?"),
        ("US-EAST-1B", "; did you mean 'us-east-1b'?"),
        ("us-west-1a", "; did you mean 'us-east-1a'?"),
        ("somewhere", ""),
    ],
)
def test_the_nearest_name_is_meant_but_for_case(name: str, meant: str) -> None:
    assert suggest(name, ["us-east-1b", "us-east-1a"]) == meant


def test_what_is_the_end_of_several_names_may_be_each() -> None:
    valid = ["devices", "device_memory", "host_memory"]
    assert suggest("memory", valid) == "; did you mean 'device_memory' or 'host_memory'?"
    assert suggest("device_memry", valid) == "; did you mean 'device_memory'?"
