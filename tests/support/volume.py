"""How many cases of random tests and large grids run: a tenth, which turns with a seed, or all of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

_SHARE = 10
_MAX_EXAMPLES = {False: 20, True: 100}
"""Of hypothesis, of tests that do not say how many themselves; by whether every case runs."""
Case = TypeVar("Case")


class _Volume:
    """What the command line asks for; set before any test is collected."""

    seed = 0
    is_full = False


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("random cases")
    group.addoption("--nightly", action="store_true", help="run every random case, not one tenth of them")
    group.addoption("--volume-seed", type=int, metavar="N", help="draw this tenth (default: the day's)")


def configure(config: pytest.Config) -> None:
    """Before the processes of `-n` are started, so that all of them draw the same tenth."""
    options = config.option
    if options.volume_seed is None:
        options.volume_seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    options.nightly = options.nightly or options.markexpr == "nightly"
    _Volume.seed, _Volume.is_full = options.volume_seed, options.nightly
    options.hypothesis_seed = options.volume_seed
    settings.register_profile(
        "volume", deadline=None, database=None, max_examples=_MAX_EXAMPLES[options.nightly]
    )
    settings.load_profile("volume")


def is_full() -> bool:
    """Whether nothing is spared."""
    return _Volume.is_full


def describe() -> str:
    """How to run the same cases again."""
    return "--nightly" if _Volume.is_full else f"--volume-seed {_Volume.seed}"


def part(cases: Sequence[Case], *, least: int = 1, share: int = _SHARE) -> list[Case]:
    """Every `share`-th of the cases, `least` of them or more; so many seeds in turn draw all."""
    step = 1 if _Volume.is_full else max(1, min(share, len(cases) // least))
    return list(cases[_Volume.seed % step :: step])


def parametrize(
    names: str | Sequence[str],
    cases: Sequence[Any],
    *,
    least: int = 1,
    share: int = _SHARE,
    ids: Callable[[Any], str] | None = None,
) -> Callable[[Any], Any]:
    """`pytest.mark.parametrize` over a part of the cases."""
    some = pytest.mark.parametrize(names, part(cases, least=least, share=share), ids=ids)
    return lambda test: pytest.mark.nightly(some(test))
