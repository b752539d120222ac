"""What makes ranks cheaper changes nothing that they see, and does what it says."""

from __future__ import annotations

import mmap
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import frames
import large_pages
import pytest

DEPTHS = range(200)
NUM_CALLS = 300


def call() -> None:
    pass


def call_call() -> None:
    call()


def call_often() -> int:
    """How many pages had to be given meanwhile."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(NUM_CALLS):
        call_call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int, fn: Callable[[], int]) -> int:
    return at_depth(depth - 1, fn) if depth else fn()


def worst_depth() -> int:
    return max(at_depth(depth, call_often) for depth in DEPTHS)


def test_arguments_values_and_errors_pass() -> None:
    assert frames.in_one_chunk(divmod, 7, 2) == (3, 1)
    assert frames.in_one_chunk(dict, a=1) == {"a": 1}
    with pytest.raises(ZeroDivisionError):
        frames.in_one_chunk(divmod, 1, 0)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="about CPython's frames")
def test_no_depth_maps_memory_at_each_call() -> None:
    assert frames.in_one_chunk(worst_depth) < NUM_CALLS / 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is in large pages")
def test_memory_is_in_large_pages_and_keeps_what_is_in_it() -> None:
    content = bytes(range(256)) * 2**16
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, len(content), flags=private) as probe:
        probe.write(content)
        try:
            probe.madvise(large_pages._MADV_COLLAPSE)
        except OSError:
            pytest.skip("this system gives none")
    memory = mmap.mmap(-1, len(content), flags=private)
    memory.write(content)
    before = count_large()
    large_pages.use_large_pages()
    assert count_large() - before >= len(content) // 2
    assert memory[:] == content


def count_large() -> int:
    """Bytes of this process that are in large pages."""
    said = Path("/proc/self/smaps_rollup").read_text()
    return int(said.split("AnonHugePages:")[1].split()[0]) * 2**10
