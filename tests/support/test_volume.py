"""Ten seeds in turn, or as many as a share says, draw every random case."""

from __future__ import annotations

from collections import Counter

import pytest
import volume


@pytest.mark.parametrize(
    ("num_cases", "least", "share"),
    [(60, 1, 10), (60, 20, 10), (7, 1, 10), (3, 5, 10), (25, 1, 10), (1, 1, 10), (60, 1, 20), (60, 6, 20)],
)
def test_as_many_seeds_as_the_share_says_draw_every_case(
    num_cases: int, least: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: Counter[int] = Counter()
    monkeypatch.setattr(volume._Volume, "is_full", False)
    for seed in range(1000, 1000 + share):
        monkeypatch.setattr(volume._Volume, "seed", seed)
        some = volume.part(range(num_cases), least=least, share=share)
        assert len(some) >= min(num_cases, least)
        assert len(some) <= max(least * 2, 2 * num_cases / share, 1)
        drawn.update(some)
    assert {*drawn} == {*range(num_cases)}


def test_nightly_draws_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume._Volume, "is_full", True)
    assert volume.part("abcdefghijklmn") == [*"abcdefghijklmn"]
