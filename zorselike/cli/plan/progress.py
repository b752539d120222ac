"""A progress bar of the search with its best plan so far."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from zorselike.planner.answer import OnProgress, Progress

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"


@contextmanager
def show_progress(budget_s: float, what: str) -> Iterator[OnProgress]:
    """A bar on standard error during a search, if that is a terminal; removed afterwards."""
    with tqdm(
        total=budget_s,
        desc=what,
        bar_format=_FORMAT,
        file=sys.stderr,
        disable=None,
        leave=False,
        dynamic_ncols=True,
    ) as bar:
        shown_s: float | None = None

        def show(progress: Progress) -> None:
            nonlocal shown_s
            # A better plan is shown at once, the rest ten times a second.
            bar.set_postfix_str(describe_progress(progress), refresh=progress.best_s != shown_s)
            bar.update(min(progress.elapsed_s, budget_s) - bar.n)
            shown_s = progress.best_s

        yield show


@contextmanager
def show_count(what: str, unit: str) -> Iterator[Callable[[str], None]]:
    """The number and the name of what was begun last, on standard error, if that is a terminal; removed
    afterwards."""
    shape = f"{{desc}}: {unit} {{n_fmt}}, {{elapsed}}{{postfix}}"
    with tqdm(
        desc=what, bar_format=shape, file=sys.stderr, disable=None, leave=False, dynamic_ncols=True
    ) as bar:

        def tell(name: str) -> None:
            bar.n += 1
            bar.set_postfix_str(name)

        yield tell


def describe_progress(progress: Progress) -> str:
    """`best 2.26 s/step, 8 % above the bound, 120 simulated`."""
    if progress.best_s is None:
        return f"nothing fits yet, {progress.num_estimated} estimated"
    gap = progress.best_s / progress.bound_s - 1
    money = f", {progress.best_cost:.3g} a step" if progress.best_cost else ""
    return (
        f"best {progress.best_s:.4g} s/step{money}, {100 * gap:.0f} % above the bound, "
        f"{progress.num_simulated} simulated"
    )
