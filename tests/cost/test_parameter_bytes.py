"""What a parameter takes in memory, by dtype and ZeRO stage."""

from __future__ import annotations

import pytest

from zorselike.cost.parameter_bytes import ParameterBytes, count_shards, largest_shard


@pytest.mark.parametrize(
    ("weight", "gradient", "state", "masters"), [(2, 4, 12, True), (4, 4, 8, False), (8, 8, 16, False)]
)
def test_half_precision_keeps_fp32_gradients_moments_and_masters(
    weight: int, gradient: int, state: int, masters: bool
) -> None:
    each = ParameterBytes(weight, num_moments=2)
    assert (each.gradient, each.state, each.masters) == (gradient, state, masters)


def test_all_stages_but_zero_share_and_the_largest_share_counts() -> None:
    assert [count_shards(zero, 3) for zero in range(4)] == [1, 3, 3, 3]
    assert [largest_shard(number, 3) for number in (0, 1, 3, 4)] == [0, 1, 1, 2]
