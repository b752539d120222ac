"""Ten seeds in turn draw every random case."""

from __future__ import annotations

from collections import Counter

import pytest
import volume


@pytest.mark.parametrize(("num_cases", "least"), [(60, 1), (60, 20), (7, 1), (3, 5), (25, 1), (1, 1)])
def test_ten_seeds_draw_every_case(num_cases: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[int] = Counter()
    monkeypatch.setattr(volume._Volume, "is_full", False)
    for seed in range(1000, 1010):
        monkeypatch.setattr(volume._Volume, "seed", seed)
        some = volume.part(range(num_cases), least=least)
        assert len(some) >= min(num_cases, least)
        assert len(some) <= max(least * 2, num_cases / 5, 1)
        drawn.update(some)
    assert {*drawn} == {*range(num_cases)}


def test_nightly_draws_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume._Volume, "is_full", True)
    assert volume.part("abcdefghijklmn") == [*"abcdefghijklmn"]
