"""Options and fixtures that every package's tests share."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import frames
import gpus
import known_shapes
import large_pages
import pool
import pytest
import ranks
import torch
import volume
from counted_time import CountedTime

from zorselike.planner.search import budget
from zorselike.runtime.processes import launcher

SLOTS_ON_THE_GPU = 6
MOST_POOLED = 8
APART = pytest.StashKey[ranks.Apart]()

budget.time = CountedTime()
# A child need not look through all that its parent had made, and must not end a process group that is garbage
# there: it would wait for threads that only the parent has.
os.register_at_fork(after_in_child=gc.freeze)
launcher._HEAD_START_S = 0.2  # No launcher here ends the others meanwhile.
torch.set_num_threads(1)  # a child forked after OpenMP made its threads hangs where it uses them


def pytest_addoption(parser: pytest.Parser) -> None:
    volume.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    volume.configure(config)
    known_shapes.folder()  # Before the processes of `-n` are started, so that they share it.
    gpus.count_gpus()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one more than there are cores, as tests wait a sixth of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("hypothesis"):
        item.add_marker("nightly")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays: no collection of garbage need look through it again."""
    gc.collect()
    gc.freeze()
    large_pages.use_large_pages()
    if gpus.count_gpus():
        session.config.stash[APART] = ranks.Apart()
        gpus.hide_gpus()
    gpus.settle_autograd()


def pytest_unconfigure(config: pytest.Config) -> None:
    if APART in config.stash:
        config.stash[APART].close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"random cases: {volume.describe()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("random cases", f"drawn by {volume.describe()}"))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Those about GPUs are called by who may find some."""
    apart = pyfuncitem.config.stash.get(APART, None)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if apart is None or pyfuncitem.get_closest_marker("gpu") is None:
        frames.in_one_chunk(pyfuncitem.obj, **arguments)
    else:
        apart.call(pyfuncitem.obj, arguments)
    return True


@pytest.fixture(autouse=True)
def one_of_few_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A card holds so many of the tests that run beside each other (`-n`)."""
    with ExitStack() as stack:
        if request.node.get_closest_marker("gpu") is not None:
            stack.enter_context(ranks.take_slot(Path(tempfile.gettempdir()), SLOTS_ON_THE_GPU))
        yield


@pytest.fixture(scope="module")
def forks_inherit() -> Iterator[None]:
    """What ranks of `run_ranks` inherit, for processes that a tool forks by itself."""
    ranks.warm_up()
    with known_shapes.sharing(known_shapes.folder()):
        yield


@pytest.fixture(scope="session")
def _pool() -> Iterator[pool.Pool]:
    ranks_that_stay = pool.Pool(MOST_POOLED)
    yield ranks_that_stay
    ranks_that_stay.close()


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest, _pool: pool.Pool) -> ranks.RunRanks:
    """`run_ranks(fn, world_size, *args, timeout=120)`; see `tests/support/processes/ranks.py`."""
    if request.node.get_closest_marker("pooled") is None:
        return ranks.run_ranks
    _pool.start()  # Not in a test, whose patches would stay.
    return _pool.run
